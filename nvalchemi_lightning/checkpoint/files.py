"""Write the files of a checkpoint so that a crash at any moment leaves the folder readable."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

__all__ = ["digest", "publish", "staging", "write_file"]


@contextmanager
def staging(root: Path, index: int) -> Iterator[Path]:
    """Provide a folder inside ``root`` for files that are not visible yet; it is gone afterwards.

    Parameters
    ----------
    root : Path
        The folder of checkpoints; made if absent. What killed writers left there is removed.
    index : int
        The index that is written.
    """
    root.mkdir(parents=True, exist_ok=True)
    for stale in root.glob(".tmp-*"):
        shutil.rmtree(stale, ignore_errors=True)
    folder = root / f".tmp-{index}"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_file(path: Path, content: Any) -> str:
    """Write JSON or, for a ``.pt`` file, tensors; return the SHA-256 of the bytes, which are on the disk then.

    Parameters
    ----------
    path : Path
        Where; folders are made.
    content : Any
        JSON data, or what ``torch.save`` takes.
    """
    data = _tensor_bytes(content) if path.suffix == ".pt" else _json_bytes(content)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(data).hexdigest()


def _tensor_bytes(content: Any) -> memoryview:
    # Through memory: torch's own writer turns a full disk into an error about positions in its archive.
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getbuffer()


def _json_bytes(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, allow_nan=False) + "\n").encode()


def publish(folder: Path, root: Path, names: list[str]) -> None:
    """Move files into their places one by one, in order; each appears whole or not at all.

    Parameters
    ----------
    folder, root : Path
        From where, to where.
    names : list of str
        Paths relative to both. What comes later in the list never reaches the disk before what comes earlier.
    """
    for name in names:
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(folder / name, target)
        _sync_folder(target.parent)


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
