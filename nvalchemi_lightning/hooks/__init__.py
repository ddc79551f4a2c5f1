"""Hooks: what they are, and the ones that come with the package."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "CheckpointHook": "hooks.checkpoint",
    "CheckpointableHook": "hooks.protocol",
    "Hook": "hooks.protocol",
    "HookContext": "context",
    "NeighborListHook": "hooks.neighbor_list",
    "TrainContext": "context",
}

__all__ = [*_HOME]  # noqa: PLE0604  the keys are the public names


def __getattr__(name: str) -> Any:
    # Loaded on first use: a shipped hook may need what the registry of hooks is imported by.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"nvalchemi_lightning.{_HOME[name]}"), name)
    globals()[name] = value
    return value
