"""Checkpoints: folders that hold everything a run needs to go on."""

from __future__ import annotations

from nvalchemi_lightning._lazy import lazy_exports

# Loaded on first use: a recipe, which some of these need, itself needs parts of this package.
_HOME = {
    "CheckpointManifest": "checkpoint.components",
    "compare_runs": "checkpoint.comparison",
    "export_weights": "checkpoint.exporting",
    "inspect_checkpoint": "checkpoint.inspection",
    "list_checkpoints": "checkpoint.listing",
    "load": "checkpoint.saving",
    "load_checkpoint": "checkpoint.functions",
    "prune_checkpoints": "checkpoint.pruning",
    "restore": "checkpoint.saving",
    "save": "checkpoint.saving",
    "save_checkpoint": "checkpoint.functions",
    "verify_checkpoints": "checkpoint.checking",
}

__all__ = [*_HOME]  # noqa: PLE0604  the keys are the public names

__getattr__, __dir__ = lazy_exports(__name__, _HOME)
