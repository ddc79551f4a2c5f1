"""Read a checkpoint from its folder, all of it or not at all."""

from __future__ import annotations

import errno
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from nvalchemi_lightning.checkpoint.files import digest
from nvalchemi_lightning.checkpoint.layout import (
    HOOKS,
    KINDS,
    MANIFEST,
    RESUME,
    SCHEMA_VERSION,
    STRATEGY,
    indices,
    locate,
    read_json,
    record_file,
    state_file,
    state_files,
    strategy_file,
)
from nvalchemi_lightning.errors import ConfigurationError, StoreError

__all__ = [
    "Stored",
    "latest_index",
    "load_tensors",
    "read",
    "read_manifest",
    "read_record",
    "recorded_metrics",
]

# What torch.load raises on a file that is cut short, foreign or not safe to load.
_UNSAFE: type[Exception] = torch.serialization.pickle.UnpicklingError  # type: ignore[attr-defined]
_LOAD_ERRORS = (RuntimeError, EOFError, ValueError, KeyError, _UNSAFE)


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
    resume : dict of int to dict
        Random states by rank; empty in a checkpoint of the reference.
    manifest : dict
        What ``manifest.json`` said when this index was the newest; without associations if that is not known.
    """

    root: Path
    index: int
    strategy: dict[str, Any] | None
    states: dict[str, Any]
    hooks: dict[str, Any]
    resume: dict[int, Any]
    manifest: dict[str, Any]


def latest_index(root: Path) -> int:
    """Return the newest index of a folder, -1 if it has none.

    Parameters
    ----------
    root : Path
        The folder. An index that a killed writer did not finish does not count while the manifest is readable.
    """
    try:
        return int(read_manifest(root)["checkpoint_index"])
    except (FileNotFoundError, StoreError):
        return max(indices(root), default=-1)


def read(path: str | Path, index: int = -1) -> Stored:
    """Read a checkpoint; nothing in it is executed.

    Parameters
    ----------
    path : str or Path
        The folder, or a name in it, see `locate`.
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
    for earlier in sorted((index for index in indices(root) if index < last), reverse=True):
        try:
            return _read_index(root, last, manifest)
        except StoreError as error:
            warnings.warn(
                f"checkpoint {last} of {root} is not complete: {error}. Reading checkpoint {earlier} instead; "
                "delete what is damaged if you do not need it",
                stacklevel=5,
            )
            last = earlier
    return _read_index(root, last, manifest)


def _manifest_or_warning(root: Path) -> dict[str, Any] | None:
    try:
        return read_manifest(root)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"No manifest.json found in {root}; give the folder that checkpoints were saved to"
        ) from error
    except StoreError as error:
        warnings.warn(f"{error}. Going by the files in {root} instead", stacklevel=5)
        return None


def read_manifest(root: Path) -> dict[str, Any]:
    """Return what ``manifest.json`` says.

    Raises
    ------
    FileNotFoundError
        If there is none.
    StoreError
        If it is damaged.
    ConfigurationError
        If it was written by a newer version.
    """
    path = root / MANIFEST
    manifest = _read_object(path)
    index, version = manifest.get("checkpoint_index"), manifest.get("schema_version", 0)
    if not isinstance(index, int) or not isinstance(version, int):
        raise StoreError(f"{path} is damaged: checkpoint_index is {index!r}, schema_version {version!r}")
    if version > SCHEMA_VERSION:
        raise ConfigurationError(
            f"Checkpoint schema version {version} is newer than supported ({SCHEMA_VERSION}): {path}; "
            "update nvalchemi-lightning"
        )
    return manifest


def _read_index(root: Path, index: int, manifest: Mapping[str, Any] | None) -> Stored:
    record = read_record(root, index)
    names = state_files(root, index) if record is None else record["files"]
    described = manifest if manifest is not None and manifest["checkpoint_index"] == index else None
    if record is not None:
        _verify(root, record["files"])
        described = record["manifest"]
    elif described is not None:
        _require_listed(root, index, described)
    states: dict[str, Any] = {_component(name): load_tensors(root / name) for name in names if name.endswith(".pt")}
    if not states:
        raise StoreError(f"{root} holds nothing of checkpoint {index}; load another checkpoint_index")
    hooks, resume = states.pop(HOOKS, {}), states.pop(RESUME, {})
    strategy = _read_object(root / strategy_file(index)) if strategy_file(index) in names else None
    if strategy is None and record is None and (root / STRATEGY).exists():
        raise StoreError(f"{root / strategy_file(index)} is missing; load another checkpoint_index")
    return Stored(root, index, strategy, states, hooks, resume, dict(described or {"checkpoint_index": index}))


def read_record(root: Path, index: int) -> dict[str, Any] | None:
    """Return what this package noted of an index: files with their SHA-256, weights, metrics, provenance.

    Returns
    -------
    dict or None
        None where the reference wrote the index.

    Raises
    ------
    StoreError
        If it is damaged.
    """
    path = root / record_file(index)
    if not path.exists():  # the reference writes none
        return None
    record = _read_object(path)
    files = record.get("files")
    if not isinstance(files, dict) or not isinstance(record.get("manifest"), dict):
        raise StoreError(f"{path} is damaged: it lists no files")
    if any(PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts for name in files):
        raise StoreError(f"{path} is damaged: it lists files outside {root}")
    return record


def recorded_metrics(root: Path, index: int) -> dict[str, float]:
    """Return the numbers of the validation that a checkpoint was saved with; empty where there was none.

    Parameters
    ----------
    root : Path
        The folder of checkpoints.
    index : int
        Which one; one that is damaged has none.
    """
    try:
        record = read_record(root, index) or {}
    except StoreError:
        return {}
    metrics = record.get("metrics", {})
    return {name: value for name, value in metrics.items() if isinstance(value, int | float)}


def _read_object(path: Path) -> dict[str, Any]:
    content = read_json(path)
    if not isinstance(content, dict):
        raise StoreError(f"{path} is damaged: it holds no object but {content!r:.80}")
    return content


def _verify(root: Path, hashes: Mapping[str, str]) -> None:
    for name, expected in hashes.items():
        path = root / name
        if not path.is_file():
            raise StoreError(f"{path} is missing")
        if digest(path) != expected:
            raise StoreError(f"{path} is damaged: its SHA-256 is not the recorded one")


def _require_listed(root: Path, index: int, manifest: Mapping[str, Any]) -> None:
    for kind in KINDS:
        for name in manifest.get(kind, ()):
            path = root / state_file(f"{kind}/{name}", index)
            if not path.is_file():
                raise StoreError(f"{path} is missing, but the manifest lists it")


def _component(name: str) -> str:
    return name.rpartition("/checkpoints/")[0]


def load_tensors(path: Path) -> dict[str, Any]:
    """Return the state that a file holds, on the CPU; nothing in it is executed.

    Raises
    ------
    StoreError
        If it is damaged, or holds something else.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        if error.errno != errno.EINVAL:  # torch seeks before the beginning of a file that is cut short
            raise
        raise StoreError(f"{path} is damaged: it is cut short") from error
    except _LOAD_ERRORS as error:
        raise StoreError(f"{path} is damaged or not safe to load: {error}") from error
    if not isinstance(state, dict):
        raise StoreError(f"{path} is damaged: it holds a {type(state).__name__}, not a state")
    return state
