"""Write the files of a checkpoint so that a crash at any moment leaves the folder readable."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote

import torch

__all__ = ["digest", "publish", "stage_file", "staging"]


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
    """
    data = _tensor_bytes(content) if name.endswith(".pt") else _json_bytes(content)
    with _staged(folder, name).open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(data).hexdigest()


def _staged(folder: Path, name: str) -> Path:
    return folder / quote(name, safe="")


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
