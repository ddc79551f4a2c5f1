"""Whether the files of checkpoints are there and whole."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from nvalchemi_lightning.checkpoint.files import digest
from nvalchemi_lightning.checkpoint.layout import (
    KINDS,
    MANIFEST,
    STRATEGY,
    existing_indices,
    locate,
    read_json,
    record_file,
    state_file,
    state_files,
    strategy_file,
)
from nvalchemi_lightning.checkpoint.reading import latest_index, read_manifest, read_record
from nvalchemi_lightning.checkpoint.tensors import load_tensors
from nvalchemi_lightning.errors import StoreError

__all__ = ["CheckedFile", "quick_problem", "verify_checkpoints"]


@dataclass(frozen=True)
class CheckedFile:
    """What was found about a file.

    Attributes
    ----------
    index : int or None
        The checkpoint that it belongs to; None if it belongs to all.
    file : str
        Its path, relative to the folder.
    problem : str or None
        What is wrong with it; None if nothing is.
    """

    index: int | None
    file: str
    problem: str | None


def quick_problem(root: Path, index: int) -> str | None:
    """Return the first sign that a checkpoint is not complete, without reading tensors; None if there is none.

    Parameters
    ----------
    root : Path
        The folder of checkpoints.
    index : int
        Which one.
    """
    try:
        files = _files(root, index)
    except StoreError as error:
        return f"{record_file(index)} {_without_path(error, root / record_file(index))}"
    for name in sorted(files):
        problem = _missing(root / name) or _unfinished(root / name)
        if problem is not None:
            return f"{name} {problem}"
    return None


def verify_checkpoints(path: str | Path, index: int | None = None) -> list[CheckedFile]:
    """Read every file of checkpoints and say what is damaged.

    Parameters
    ----------
    path : str or Path
        A folder of checkpoints, a name in it (``step_<K>``, ``epoch_<K>``, ``final``), or a file of Lightning's
        ModelCheckpoint.
    index : int, optional
        Only this checkpoint of the folder, and what belongs to all. Default: all of them.

    Returns
    -------
    list of CheckedFile
        One per file.

    Raises
    ------
    FileNotFoundError
        If there is no such file, folder or index.

    Notes
    -----
    A file is compared with the SHA-256 that was recorded when it was written. The reference records none; there, and
    for files of Lightning, the checksums inside the file are compared. Every file is then loaded as training would.
    """
    path = Path(path)
    if path.is_file():
        return [CheckedFile(None, str(path), _damage(path, None))]
    root, named = locate(path, -1 if index is None else index)
    there = existing_indices(root)
    every = index is None and path == root
    chosen = there if every else [latest_index(root) if named == -1 else named]
    if chosen[0] not in there:
        raise FileNotFoundError(f"{root} has no checkpoint {chosen[0]}; it has {there}")
    return [*_shared(root), *(checked for each in chosen for checked in _verified(root, each))]


def _shared(root: Path) -> list[CheckedFile]:
    names = [MANIFEST, *(path.relative_to(root).as_posix() for path in _recipes(root))]
    return [CheckedFile(None, name, _missing(root / name) or _unfinished(root / name)) for name in names]


def _recipes(root: Path) -> Iterable[Path]:
    own = [root / STRATEGY] if (root / STRATEGY).exists() else []
    return own + [path for kind in KINDS for path in sorted((root / kind).glob("*/spec.json"))]


def _verified(root: Path, index: int) -> list[CheckedFile]:
    try:
        files = _files(root, index)
    except StoreError as error:
        return [CheckedFile(index, record_file(index), _without_path(error, root / record_file(index)))]
    return [CheckedFile(index, name, _damage(root / name, expected)) for name, expected in sorted(files.items())]


def _files(root: Path, index: int) -> dict[str, str | None]:
    """Return the files that a checkpoint needs, and their SHA-256 where it was recorded."""
    record = read_record(root, index)
    if record is not None:
        return {record_file(index): None, **record["files"]}
    names = state_files(root, index)
    if (root / STRATEGY).exists():
        names.add(strategy_file(index))
    names.update(_listed(root, index))
    if not any(name.endswith(".pt") for name in names):
        names.add(state_file("models/*", index))
    return dict.fromkeys(names)


def _listed(root: Path, index: int) -> list[str]:
    """Return the files that the manifest wants for its own index."""
    try:
        manifest = read_manifest(root)
    except (FileNotFoundError, StoreError):  # the manifest has an entry of its own
        return []
    if manifest["checkpoint_index"] != index:
        return []
    return [state_file(f"{kind}/{name}", index) for kind in KINDS for name in manifest.get(kind, ())]


def _missing(path: Path) -> str | None:
    return None if path.is_file() else "is missing"


def _unfinished(path: Path) -> str | None:
    if path.suffix == ".json":
        return _unreadable(path)
    return None if zipfile.is_zipfile(path) else "is damaged: it does not end as it should"


def _damage(path: Path, expected: str | None) -> str | None:
    missing = _missing(path)
    if missing is not None:
        return missing
    if expected is not None and digest(path) != expected:
        return "is damaged: its SHA-256 is not the recorded one"
    if path.suffix == ".json":
        return _unreadable(path)
    return (_wrong_sums(path) if expected is None else None) or _unloadable(path)


def _unreadable(path: Path) -> str | None:
    try:
        read_json(path)
    except StoreError as error:
        return _without_path(error, path)
    return None


def _wrong_sums(path: Path) -> str | None:
    try:
        with zipfile.ZipFile(path) as archive:
            wrong = archive.testzip()
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        return f"is damaged: {error}"
    return None if wrong is None else f"is damaged: {wrong} in it has another checksum"


def _unloadable(path: Path) -> str | None:
    try:
        load_tensors(path)
    except StoreError as error:
        return _without_path(error, path)
    return None


def _without_path(error: Exception, path: Path) -> str:
    return str(error).removeprefix(f"{path} ")
