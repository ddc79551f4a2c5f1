"""Mending stores: what an interruption left, and what is known to go wrong in stores from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import zarr

from nvalchemi_lightning.data.store.check import StoreProblem, find_problems
from nvalchemi_lightning.data.store.layout import ZarrStoreLike, local_path, open_store, store_name
from nvalchemi_lightning.data.store.swap import (
    built_beside,
    hidden_siblings,
    mirror,
    remove_store,
    replace_store,
    writing,
)
from nvalchemi_lightning.errors import ConfigurationError, StoreError

__all__ = ["RepairReport", "StoreProblem", "repair_store"]


@dataclass(frozen=True)
class RepairReport:
    """What was wrong with a store and what was done.

    Attributes
    ----------
    store : str
        The store.
    repaired : tuple of StoreProblem
        What was put right, or would be in a dry run.
    remaining : tuple of StoreProblem
        What could not be.
    is_dry_run : bool
        Whether nothing was changed.
    """

    store: str
    repaired: tuple[StoreProblem, ...]
    remaining: tuple[StoreProblem, ...]
    is_dry_run: bool

    @property
    def found(self) -> tuple[StoreProblem, ...]:
        """Everything that was wrong."""
        return (*self.repaired, *self.remaining)

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong any more, or nothing was."""
        return not self.remaining and not (self.is_dry_run and self.repaired)

    def __str__(self) -> str:
        """Return a line for each problem."""
        if not self.found:
            return f"{self.store}: nothing is wrong"
        done = "would repair" if self.is_dry_run else "repaired"
        lines = [f"{done}: {problem}" for problem in self.repaired]
        return "\n".join([f"{self.store}:", *lines, *(f"not repaired: {problem}" for problem in self.remaining)])


def repair_store(store: ZarrStoreLike, *, dry_run: bool = False, fill_short: bool = False) -> RepairReport:
    """Look for everything that may be wrong with a store, and mend what can be mended.

    Parameters
    ----------
    store : str, PathLike, LocalStore or StorePath
        The store, a local folder that nothing else writes to.
    dry_run : bool, default False
        Whether to report only.
    fill_short : bool, default False
        Whether an array that lacks rows, because structures were appended without that field, is taken to hold those
        of the first structures, and the others become missing (NaN). Right if no later append had the field again,
        which the store does not record.

    Returns
    -------
    RepairReport
        What was found, repaired, and what could not be.

    Raises
    ------
    ConfigurationError
        If the store is not a local folder.
    FileNotFoundError
        If there is no store, nor remains of one.
    StoreError
        If it is not a store of structures.
    StoreWriteError
        If the file system refuses; what was not repaired then still can be.

    Notes
    -----
    All of the store is read. Rows that count are changed in a copy, which is checked and then takes the place of the
    store by renaming; files that stay as they are are shared by both as hard links. So an interruption leaves a store
    that can be repaired again, and to repair twice is the same as to repair once.
    """
    path = local_path(store)
    if path is None:
        raise ConfigurationError(f"{store_name(store)} is not a local folder; copy the store into one and repair that")
    path = path.resolve()
    remains = tuple(_remains(path))
    if not remains and not path.exists():
        raise FileNotFoundError(f"there is no Zarr store at {path}, nor remains of one")
    if not dry_run:
        with writing(str(path), "repair it again"):
            _clear_remains(path)
    if not _place(path).exists():
        return RepairReport(str(path), remains, (), dry_run)
    if dry_run:
        found = tuple(find_problems(open_store(_place(path), "r"), str(path), fill_short))
        repaired, remaining = _split(found)
        return RepairReport(str(path), (*remains, *repaired), remaining, dry_run)
    with writing(str(path), "repair it again"):
        repaired, remaining = _repair(path, fill_short)
    return RepairReport(str(path), (*remains, *repaired), remaining, dry_run)


# What operations leave beside a store ---------------------------------------------------------------------------


def _place(path: Path) -> Path:
    """Return where the store is, which is a hidden name while it is being replaced."""
    old = hidden_siblings(path, "old")
    return path if path.exists() or not old else old[0]


def _remains(path: Path) -> Iterator[StoreProblem]:
    old = hidden_siblings(path, "old")
    if old and not path.exists():
        yield StoreProblem(old[0].name, "is the store: replacing it was interrupted", "renamed back")
        old = old[1:]
    for folder in old:
        yield StoreProblem(folder.name, "is the store before it was replaced", "removed")
    for folder in hidden_siblings(path, "partial"):
        yield StoreProblem(folder.name, "is what an operation did not finish, or did not finish to remove", "removed")
    files = _unfinished_files(path)
    if files:
        yield StoreProblem(files[0].name, f"and {len(files) - 1} more are files that were not finished", "removed")


def _unfinished_files(path: Path) -> list[Path]:
    # Zarr writes a file under such a name and renames it.
    return [entry for entry in path.rglob(f"*.{'?' * 32}.partial") if entry.is_file()] if path.is_dir() else []


def _clear_remains(path: Path) -> None:
    if not path.exists() and hidden_siblings(path, "old"):
        _place(path).rename(path)
    old = hidden_siblings(path, "old")
    if old:
        # The other copy goes only if this one is a store.
        open_store(path, "r")
    for folder in (*old, *hidden_siblings(path, "partial")):
        remove_store(folder, path)
    for file in _unfinished_files(path):
        file.unlink()


# What is wrong inside -------------------------------------------------------------------------------------------


def _split(problems: tuple[StoreProblem, ...]) -> tuple[tuple[StoreProblem, ...], tuple[StoreProblem, ...]]:
    return (
        tuple(problem for problem in problems if problem.is_repairable),
        tuple(problem for problem in problems if not problem.is_repairable),
    )


def _repair(path: Path, fill_short: bool) -> tuple[tuple[StoreProblem, ...], tuple[StoreProblem, ...]]:
    repaired: list[StoreProblem] = []
    # One thing hides another: the number of samples what lies beyond them, and that the rows that are wrong.
    for _ in range(4):
        group = open_store(path, "r+")
        fixable, remaining = _split(tuple(find_problems(group, str(path), fill_short)))
        if not fixable:
            break
        beyond = [problem for problem in fixable if not problem.changes_rows]
        if beyond:
            _apply(group, beyond)
        else:
            _apply_beside(path, fixable)
        repaired += beyond or fixable
    return tuple(repaired), (*fixable, *remaining)


def _refuse_repetition(path: Path, repaired: Sequence[StoreProblem], found: Iterable[StoreProblem]) -> None:
    places = {problem.where for problem in repaired}
    again = [problem for problem in found if problem.where in places]
    if again:
        raise StoreError(f"{path}: repairing it did not help: {again[0]}")


def _apply(group: zarr.Group, problems: Iterable[StoreProblem]) -> None:
    for problem in problems:
        if problem.fix is not None:
            problem.fix(group)


def _apply_beside(path: Path, problems: tuple[StoreProblem, ...]) -> None:
    with built_beside(path) as partial:
        mirror(path, partial, {problem.where for problem in problems})
        _apply(open_store(partial, "r+"), problems)
        _refuse_repetition(path, problems, find_problems(open_store(partial, "r"), str(path)))
        replace_store(partial, path)
