"""Write the files of a checkpoint so that a crash at any moment leaves the folder readable."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote

import torch

from nvalchemi_lightning.checkpoint.hashing import HashedFile

__all__ = ["clear_staging", "digest", "publish", "stage_file", "staging"]

_STAGED = ".tmp-"
_BUFFERED = 1 << 20


@contextmanager
def staging(root: Path, index: int) -> Iterator[Path]:
    """Provide a folder inside ``root`` for files that are not visible yet; it is gone afterwards.

    Parameters
    ----------
    root : Path
        The folder of checkpoints.
    index : int
        The index that is written.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"{_STAGED}{index}-", dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def clear_staging(root: Path) -> None:
    """Remove what killed writers left; nobody else may write to the folder meanwhile.

    Parameters
    ----------
    root : Path
        The folder of checkpoints.
    """
    for stale in root.glob(f"{_STAGED}*"):
        shutil.rmtree(stale, ignore_errors=True)


def stage_file(folder: Path, name: str, content: Any) -> str:
    """Write JSON or, for a ``.pt`` file, tensors; return the SHA-256 of the bytes, which are on the disk then.

    Parameters
    ----------
    folder : Path
        What `staging` provides.
    name : str
        The path that the file will have, relative to the folder of checkpoints.
    content : Any
        JSON data, or what ``torch.save`` takes.

    Raises
    ------
    OSError
        If the bytes cannot be written.
    """
    with _staged(folder, name).open("wb", buffering=_BUFFERED) as raw, HashedFile(raw) as file:
        if name.endswith(".pt"):
            _save_tensors(content, file)
        else:
            file.write(_json_bytes(content))
        file.flush()
        os.fsync(raw.fileno())
        return file.hexdigest()


def _staged(folder: Path, name: str) -> Path:
    return folder / quote(name, safe="")


def _save_tensors(content: Any, file: HashedFile) -> None:
    try:
        torch.save(content, file)  # type: ignore[arg-type]
    except RuntimeError as error:
        if file.failure is not None:  # which torch's writer turned into an error about positions in its archive
            raise file.failure from error
        raise


def _json_bytes(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, allow_nan=False) + "\n").encode()


def publish(folder: Path, root: Path, names: list[str]) -> None:
    """Move files into their places one by one, in order; each appears whole or not at all.

    Parameters
    ----------
    folder, root : Path
        What `staging` provides, and the folder of checkpoints.
    names : list of str
        Paths relative to ``root``, staged before. The last one makes the others count: it never reaches the disk
        before them.
    """
    *first, last = names
    for name in first:
        _move(_staged(folder, name), root / name)
    for changed in sorted({parent for name in first for parent in PurePath(name).parents}):
        _sync_folder(root / changed)
    _move(_staged(folder, last), root / last)
    _sync_folder((root / last).parent)


def _move(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    source.replace(target)


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # Windows cannot open a folder
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
