"""Put a snapshot into a folder of checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nvalchemi_lightning.checkpoint.files import clear_staging, publish, stage_file, staging
from nvalchemi_lightning.checkpoint.layout import (
    HOOKS,
    MANIFEST,
    RESUME,
    STRATEGY,
    check_index,
    manifest_of,
    read_json,
    record_file,
    spec_file,
    state_file,
    state_files,
    strategy_file,
)
from nvalchemi_lightning.checkpoint.lock import sole_writer
from nvalchemi_lightning.checkpoint.migrations import versioned
from nvalchemi_lightning.checkpoint.places import require_no_links
from nvalchemi_lightning.checkpoint.reading import latest_index
from nvalchemi_lightning.checkpoint.snapshot import Snapshot
from nvalchemi_lightning.errors import StoreError
from nvalchemi_lightning.specs import without_timestamps

__all__ = ["write"]


def write(root: str | Path, snapshot: Snapshot, index: int = -1) -> int:
    """Write a snapshot.

    Parameters
    ----------
    root : str or Path
        The folder; made if absent. While another process writes to it, this one waits.
    snapshot : Snapshot
        What to write.
    index : int
        A slot to fill or to overwrite; -1 is the one after the newest.

    Returns
    -------
    int
        The index.

    Raises
    ------
    ConfigurationError
        If the index is below -1.
    OSError
        If the disk is full or not writable; earlier checkpoints are untouched then.
    StoreError
        If a folder inside ``root`` is a link.

    Notes
    -----
    Everything is written to a temporary folder inside ``root``, flushed to the disk and moved into place; the
    manifest comes last. Filling an older slot does not change which index is the newest.
    """
    root, index = Path(root), check_index(index)
    try:
        with sole_writer(root) as alone:
            if alone:
                clear_staging(root)
            return _write(root, snapshot, index)
    except OSError as error:
        error.add_note(f"the checkpoint was not written to {root}; the earlier ones there are untouched")
        raise


def _write(root: Path, snapshot: Snapshot, index: int) -> int:
    newest = latest_index(root)
    index = newest + 1 if index == -1 else index
    own = _own_files(snapshot, index)
    manifest = manifest_of(index, list(snapshot.states), snapshot.associations)
    shared = {**_changed_recipes(root, snapshot), MANIFEST: manifest} if index >= newest else {}
    names = [*own, record_file(index), *shared]
    require_no_links(root, names)
    with staging(root, index) as folder:
        hashes = {name: stage_file(folder, name, content) for name, content in own.items()}
        record = {
            "version": version("nvalchemi-lightning"),
            "weights": _weights(snapshot),
            "metrics": snapshot.metrics,
            "provenance": snapshot.provenance,
            "files": hashes,
            "manifest": manifest,
        }
        for name, content in {record_file(index): versioned("record", record), **shared}.items():
            stage_file(folder, name, content)
        _vacate(root, index, keep=own)
        publish(folder, root, names)
    return index


def _vacate(root: Path, index: int, keep: Iterable[str]) -> None:
    """Make an index that is overwritten count as incomplete, so that a crash cannot leave a mixture behind."""
    stale = state_files(root, index).difference(keep)
    for name in (strategy_file(index), record_file(index), *sorted(stale)):
        (root / name).unlink(missing_ok=True)


def _own_files(snapshot: Snapshot, index: int) -> dict[str, Any]:
    files = {state_file(component, index): state for component, state in snapshot.states.items()}
    if snapshot.hooks:
        files[state_file(HOOKS, index)] = snapshot.hooks
    if snapshot.strategy is not None:
        files[state_file(RESUME, index)] = versioned("resume", {"ranks": snapshot.resume})
        files[strategy_file(index)] = snapshot.strategy
    return files


def _weights(snapshot: Snapshot) -> dict[str, list[str]]:
    """Return which weights of each model there are: those that train, and averaged ones among the states of hooks."""
    averages = [state for state in snapshot.hooks.values() if isinstance(state, Mapping) and state.get("num_updates")]
    averaged = {state.get("model_key") for state in averages if "averaged_model_state" in state}
    names = [component.partition("/")[2] for component in snapshot.states if component.startswith("models/")]
    return {name: ["raw", "averaged"] if name in averaged else ["raw"] for name in names}


def _changed_recipes(root: Path, snapshot: Snapshot) -> dict[str, Any]:
    """Return the recipes that the folder does not have yet, or has in another form."""
    specs = {spec_file(component): spec for component, spec in snapshot.specs.items()}
    changed = {name: spec for name, spec in specs.items() if not _has(root / name, spec)}
    return changed if snapshot.strategy is None else {**changed, STRATEGY: snapshot.strategy}


def _has(path: Path, spec: Mapping[str, Any]) -> bool:
    try:
        return bool(without_timestamps(read_json(path)) == without_timestamps(spec))
    except (FileNotFoundError, StoreError):
        return False
