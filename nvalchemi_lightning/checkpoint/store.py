"""A folder of checkpoints: put a snapshot in, get one out."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import nvalchemi_lightning
from nvalchemi_lightning.checkpoint import layout
from nvalchemi_lightning.checkpoint.files import digest, publish, staging, write_file
from nvalchemi_lightning.checkpoint.layout import (
    HOOKS,
    MANIFEST,
    SCHEMA_VERSION,
    STRATEGY,
    indices,
    locate,
    read_json,
    record_file,
    spec_file,
    state_file,
    strategy_file,
)
from nvalchemi_lightning.checkpoint.snapshot import Snapshot
from nvalchemi_lightning.errors import ConfigurationError, StoreError

__all__ = ["Stored", "latest_index", "read", "write"]

_KINDS = ("models", "optimizers", "schedulers")
# What torch.load raises on a file that is cut short, foreign or not safe.
_LOAD_ERRORS = (RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError)


@dataclass(frozen=True)
class Stored:
    """A checkpoint as it was read.

    Attributes
    ----------
    root : Path
        Its folder.
    index : int
        Its index.
    strategy : dict or None
        Recipe and counters; None in a folder of components that no strategy wrote.
    states : dict of str to Any
        By component, such as ``"models/main"``; tensors on the CPU.
    hooks : dict of str to Any
        States of hooks by class path and occurrence.
    manifest : dict
        What ``manifest.json`` said when this index was the newest; without associations if that is not known.
    """

    root: Path
    index: int
    strategy: dict[str, Any] | None
    states: dict[str, Any]
    hooks: dict[str, Any]
    manifest: dict[str, Any]


def write(root: str | Path, snapshot: Snapshot, index: int = -1) -> int:
    """Write a snapshot.

    Parameters
    ----------
    root : str or Path
        The folder; made if absent. One process writes to it at a time.
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

    Notes
    -----
    Everything is written to a temporary folder inside ``root``, flushed to the disk and moved into place; the
    manifest comes last. Filling an older slot does not change which index is the newest.
    """
    root, index = locate(root, index)
    newest = latest_index(root)
    index = newest + 1 if index == -1 else index
    own = _own_files(snapshot, index)
    manifest = layout.manifest(index, list(snapshot.states), snapshot.associations)
    shared = _shared_files(root, snapshot) if index >= newest else {}
    try:
        with staging(root, index) as folder:
            hashes = {name: write_file(folder / name, content) for name, content in own.items()}
            record = {"version": nvalchemi_lightning.__version__, "files": hashes, "manifest": manifest}
            shared = {**shared, MANIFEST: manifest} if index >= newest else {}
            for name, content in {record_file(index): record, **shared}.items():
                write_file(folder / name, content)
            # The record first: until every file is in place it does not fit, and the index counts as incomplete.
            publish(folder, root, [record_file(index), *own, *shared])
    except OSError as error:
        error.add_note(f"checkpoint {index} was not written to {root}; the earlier ones there are untouched")
        raise
    return index


def _own_files(snapshot: Snapshot, index: int) -> dict[str, Any]:
    files = {state_file(component, index): state for component, state in snapshot.states.items()}
    if snapshot.hooks:
        files[state_file(HOOKS, index)] = snapshot.hooks
    return {**files, strategy_file(index): snapshot.strategy}


def _shared_files(root: Path, snapshot: Snapshot) -> dict[str, Any]:
    """Return the recipes that the folder does not have yet, or has in another form."""
    specs = {spec_file(component): spec for component, spec in snapshot.specs.items()}
    return {**{name: spec for name, spec in specs.items() if not _has(root / name, spec)}, STRATEGY: snapshot.strategy}


def _has(path: Path, spec: Mapping[str, Any]) -> bool:
    from nvalchemi_lightning.specs import without_timestamps

    try:
        return bool(without_timestamps(read_json(path)) == without_timestamps(spec))
    except (FileNotFoundError, StoreError):
        return False


def latest_index(root: Path) -> int:
    """Return the newest index of a folder, -1 if it has none.

    Parameters
    ----------
    root : Path
        The folder. An index that a killed writer did not finish does not count while the manifest is readable.
    """
    try:
        return int(_read_manifest(root)["checkpoint_index"])
    except (FileNotFoundError, StoreError):
        return max(indices(root), default=-1)


def read(path: str | Path, index: int = -1) -> Stored:
    """Read a checkpoint; nothing in it is executed.

    Parameters
    ----------
    path : str or Path
        The folder, or a name in it, see `layout.locate`.
    index : int
        Which one; -1 is the newest complete one.

    Raises
    ------
    FileNotFoundError
        If there is no such folder or index.
    StoreError
        If a file of the index that was asked for is damaged; it names the path.
    ConfigurationError
        If it was written by a newer version.
    """
    root, index = locate(path, index)
    if index != -1:
        if index not in indices(root):
            raise FileNotFoundError(f"{root} has no checkpoint {index}; it has {indices(root) or 'none'}")
        return _read_index(root, index, _manifest_or_warning(root))
    return _read_newest(root)


def _read_newest(root: Path) -> Stored:
    manifest = _manifest_or_warning(root)
    last = max(indices(root), default=-1) if manifest is None else manifest["checkpoint_index"]
    candidates = [index for index in reversed(indices(root)) if index <= last]
    if not candidates:
        raise FileNotFoundError(f"{root} has a manifest but no checkpoint")
    for i, index in enumerate(candidates):
        try:
            return _read_index(root, index, manifest)
        except (StoreError, FileNotFoundError) as error:
            if i + 1 == len(candidates):
                raise
            warnings.warn(
                f"checkpoint {index} of {root} is not complete: {error}. Trying {candidates[i + 1]} instead; "
                "delete the damaged files if you do not need them",
                stacklevel=4,
            )
    raise FileNotFoundError(f"{root} has no checkpoint")


def _manifest_or_warning(root: Path) -> dict[str, Any] | None:
    try:
        return _read_manifest(root)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"No manifest.json found in {root}; give the folder that checkpoints were saved to"
        ) from error
    except StoreError as error:
        warnings.warn(f"{error}. Going by the files in {root} instead", stacklevel=5)
        return None


def _read_manifest(root: Path) -> dict[str, Any]:
    path = root / MANIFEST
    manifest = read_json(path)
    index = manifest.get("checkpoint_index") if isinstance(manifest, dict) else None
    if not isinstance(index, int):
        raise StoreError(f"{path} is damaged: checkpoint_index is {index!r}")
    version = manifest.get("schema_version", 0)
    if version > SCHEMA_VERSION:
        raise ConfigurationError(
            f"Checkpoint schema version {version} is newer than supported ({SCHEMA_VERSION}): {path}; "
            "update nvalchemi-lightning"
        )
    return dict(manifest)


def _read_index(root: Path, index: int, manifest: Mapping[str, Any] | None) -> Stored:
    record = _read_record(root, index)
    names = _found_files(root, index) if record is None else list(record["files"])
    described = manifest if manifest is not None and manifest["checkpoint_index"] == index else None
    if record is not None:
        _verify(root, record["files"])
        described = record["manifest"]
    elif described is not None:
        _require_listed(root, index, described)
    states = {_component(name): _load_tensors(root / name) for name in names if name.endswith(".pt")}
    hooks = states.pop(HOOKS, {})
    strategy = read_json(root / strategy_file(index)) if strategy_file(index) in names else None
    if strategy is None and (root / STRATEGY).exists():
        raise StoreError(f"{root / strategy_file(index)} is missing; load another checkpoint_index")
    return Stored(root, index, strategy, states, hooks, dict(described or {"checkpoint_index": index}))


def _read_record(root: Path, index: int) -> dict[str, Any] | None:
    path = root / record_file(index)
    if not path.exists():  # the reference writes none
        return None
    record = read_json(path)
    if not isinstance(record, dict) or not isinstance(record.get("files"), dict):
        raise StoreError(f"{path} is damaged: it lists no files")
    return record


def _verify(root: Path, hashes: Mapping[str, str]) -> None:
    for name, expected in hashes.items():
        path = root / name
        if not path.is_file():
            raise StoreError(f"{path} is missing")
        if digest(path) != expected:
            raise StoreError(f"{path} is damaged: its SHA-256 is not the recorded one")


def _found_files(root: Path, index: int) -> list[str]:
    patterns = [f"{kind}/*/checkpoints/{index}.pt" for kind in _KINDS]
    patterns += [state_file(HOOKS, index), strategy_file(index)]
    return [path.relative_to(root).as_posix() for pattern in patterns for path in sorted(root.glob(pattern))]


def _require_listed(root: Path, index: int, manifest: Mapping[str, Any]) -> None:
    for kind in _KINDS:
        for name in manifest.get(kind, ()):
            path = root / state_file(f"{kind}/{name}", index)
            if not path.is_file():
                raise StoreError(f"{path} is missing, but the manifest lists it")


def _component(name: str) -> str:
    return name.rpartition("/checkpoints/")[0]


def _load_tensors(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except _LOAD_ERRORS as error:
        raise StoreError(f"{path} is damaged or not safe to load: {error}") from error
