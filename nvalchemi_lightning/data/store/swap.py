"""Putting a store in place as a whole: it is built beside under a hidden name and renamed at the end.

Hidden names are those of the store with a random part: ``.<name>.<random>.partial`` is what is being built or removed
and may be incomplete, ``.<name>.<random>.old`` is a complete store whose replacement was being renamed.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from zarr.core.sync import sync

from nvalchemi_lightning.errors import StoreWriteError

__all__ = ["built_beside", "hidden_siblings", "mirror", "place_store", "remove_store", "replace_store", "writing"]

_FLUSHES = 16


def hidden_siblings(path: Path, kind: str) -> list[Path]:
    """Return what operations on a store left beside it; ``kind`` is "partial" or "old"."""
    if not path.parent.is_dir():
        return []
    prefix, suffix = f".{path.name}.", f".{kind}"
    # Names of stores may hold the special characters of glob patterns.
    found = [entry for entry in path.parent.iterdir() if entry.name.startswith(prefix) and entry.name.endswith(suffix)]
    return sorted(entry for entry in found if len(entry.name) == len(prefix) + 32 + len(suffix))


def _hidden(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.{kind}")


@contextmanager
def writing(name: str, state: str) -> Iterator[None]:
    """Turn a failure of the file system into an error that says in which state the store is.

    Raises
    ------
    StoreWriteError
        In place of OSError.
    """
    try:
        yield
    except OSError as error:
        raise StoreWriteError(f"{name} could not be written: {error}; {state}") from error
    finally:
        sync(_settled())


async def _settled() -> None:
    # Zarr writes chunks side by side. When one fails the others go on, and would meet whatever is done next.
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others)


@contextmanager
def built_beside(path: Path) -> Iterator[Path]:
    """Give a hidden place beside a store to build in; what is still there at the end is removed."""
    partial = _hidden(path, "partial")
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def place_store(partial: Path, path: Path) -> None:
    """Rename a complete store to a place where there is none; it is on the disk before."""
    _flush(partial)
    partial.rename(path)
    _flush_one(path.parent)


def replace_store(partial: Path, path: Path) -> None:
    """Rename a complete store to the place of another, which is restored if that fails, else removed."""
    old = _hidden(path, "old")
    _flush(partial)
    path.rename(old)
    try:
        partial.rename(path)
    except OSError:
        old.rename(path)
        raise
    _flush_one(path.parent)
    remove_store(old, path)


def remove_store(hidden: Path, path: Path) -> None:
    """Remove a hidden sibling of a store; as soon as it is incomplete its name says so."""
    partial = _hidden(path, "partial")
    hidden.rename(partial)
    shutil.rmtree(partial, ignore_errors=True)


def _flush(folder: Path) -> None:
    """Wait until everything in a folder is on the disk."""
    # Together, since a disk takes many requests as fast as one.
    with ThreadPoolExecutor(_FLUSHES) as pool:
        for _ in pool.map(_flush_one, (folder, *folder.rglob("*"))):
            pass


def _flush_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def mirror(path: Path, target: Path, changing: set[str]) -> None:
    """Copy a store; files of arrays that will not change become hard links where the file system has them.

    Parameters
    ----------
    path, target : Path
        From where to where.
    changing : set of str
        Paths of the arrays that will change, such as ``"core/energy"``.
    """
    for parent, _, files in os.walk(path):
        folder = target / Path(parent).relative_to(path)
        folder.mkdir()
        inside = folder.relative_to(target).as_posix()
        changes = any(f"{inside}/".startswith(f"{array}/") for array in changing)
        for name in files:
            _copy(Path(parent, name), folder / name, changes or name == "zarr.json")


def _copy(source: Path, target: Path, is_own: bool) -> None:
    if not is_own:
        try:
            os.link(source, target)
        except OSError:
            is_own = True
    if is_own:
        shutil.copy2(source, target)
