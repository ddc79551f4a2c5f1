"""Read a checkpoint from its folder, all of it or not at all."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from nvalchemi_lightning.checkpoint.migrations import upgraded
from nvalchemi_lightning.checkpoint.places import readable
from nvalchemi_lightning.checkpoint.schemas import check_manifest, check_record
from nvalchemi_lightning.checkpoint.tensors import read_states
from nvalchemi_lightning.errors import AlchemiError, ConfigurationError, StoreError

__all__ = [
    "Stored",
    "latest_index",
    "read",
    "read_manifest",
    "read_record",
    "recorded_metrics",
]

# Hashing keeps the processor busy, not the interpreter.
_READERS = 4


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
    if not path.exists():
        raise FileNotFoundError(path)
    manifest = _read_object(root, MANIFEST)
    check_manifest(manifest, path)
    version = manifest.get("schema_version", 0)
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
    if described is not None:
        _require_listed(described, index, names, root)
    states = read_states(root, [name for name in names if name.endswith(".pt")])
    if not states:
        raise StoreError(f"{root} holds nothing of checkpoint {index}; load another checkpoint_index")
    hooks, resume = states.pop(HOOKS, {}), states.pop(RESUME, {})
    strategy = _read_object(root, strategy_file(index)) if strategy_file(index) in names else None
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
    ConfigurationError
        If it was written by a newer version.
    """
    name = record_file(index)
    if not (root / name).exists():  # the reference writes none
        return None
    record = upgraded("record", _read_object(root, name), root / name)
    check_record(record, root / name, index)
    return record


def recorded_metrics(root: Path, index: int) -> dict[str, float]:
    """Return the numbers of the validation that a checkpoint was saved with; empty where there was none.

    Parameters
    ----------
    root : Path
        The folder of checkpoints.
    index : int
        Which one; one that is damaged, or newer than this package, has none.
    """
    try:
        record = read_record(root, index) or {}
    except AlchemiError:
        return {}
    return dict(record.get("metrics", {}))


def _read_object(root: Path, name: str) -> dict[str, Any]:
    path = readable(root, name)
    content = read_json(path)
    if not isinstance(content, dict):
        raise StoreError(f"{path} is damaged: it holds no object but {content!r:.80}")
    return content


def _verify(root: Path, hashes: Mapping[str, str]) -> None:
    paths = [readable(root, name) for name in hashes]
    with ThreadPoolExecutor(max_workers=_READERS) as threads:
        for path, found, expected in zip(paths, threads.map(digest, paths), hashes.values(), strict=True):
            if found != expected:
                raise StoreError(f"{path} is damaged: its SHA-256 is not the recorded one")


def _require_listed(manifest: Mapping[str, Any], index: int, names: Collection[str], root: Path) -> None:
    listed = [state_file(f"{kind}/{name}", index) for kind in KINDS for name in manifest.get(kind, ())]
    missing = [name for name in listed if name not in names]
    if missing:
        raise StoreError(f"{root / missing[0]} is missing, but the manifest lists it")
