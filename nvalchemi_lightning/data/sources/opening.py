"""Opening files and stores as sources of structures, and reading them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, TypeVar

import torch

from nvalchemi_lightning.data.atomic_data import AtomicData
from nvalchemi_lightning.data.sources.dialect import Dialect
from nvalchemi_lightning.data.sources.files import FileSource
from nvalchemi_lightning.data.sources.source import Frame, Source
from nvalchemi_lightning.data.sources.stores import StoreSource
from nvalchemi_lightning.errors import DataError

__all__ = ["Frame", "OnError", "Skip", "Source", "SourceLike", "attempts", "open_source", "read_structures", "readable"]

OnError: TypeAlias = Literal["raise", "skip"]
Result = TypeVar("Result")
SourceLike: TypeAlias = "Source | str | os.PathLike[str]"


class Skip(NamedTuple):
    """A frame that was left out, and why."""

    number: int
    reason: DataError


def open_source(
    path: str | os.PathLike[str],
    dialect: Dialect | None = None,
    *,
    format: str | None = None,  # noqa: A002  ASE's name for it
    dtype: torch.dtype = torch.float64,
) -> Source:
    """Open a file or store without reading its structures.

    Parameters
    ----------
    path : str or PathLike
        Extended XYZ (plain or compressed), another file that ASE reads, an ASE database, or a Zarr store.
    dialect : Dialect, optional
        What labels are called and their units; default: ASE's names and units.
    format : str, optional
        ASE's name of the format; default: ASE finds out.
    dtype : torch.dtype, default torch.float64
        Floating dtype of the structures; energies are float64 in any case.

    Raises
    ------
    FileNotFoundError
        If there is nothing at the path.
    DataError
        If the format is not recognised, or a folder is not a store.
    UnknownNameError
        If ``format`` is not one of ASE's.
    ConfigurationError
        If ASE cannot read the format, or a dialect is given for a store, whose names and units are fixed.
    ImportError
        If it is not a store and ASE is not installed.
    """
    path = Path(path)
    dialect = Dialect() if dialect is None else dialect
    if not path.exists():
        raise FileNotFoundError(f"there is no file or store at {path}")
    if path.is_dir():
        return StoreSource(path, dialect, dtype)
    return FileSource(path, dialect, format, dtype)


def read_structures(
    source: SourceLike,
    dialect: Dialect | None = None,
    *,
    on_error: OnError = "raise",
    on_skip: Callable[[Skip], object] | None = None,
) -> Iterator[tuple[int, AtomicData]]:
    """Yield number and structure of the frames of a source, and check at the end that it had what it should.

    Parameters
    ----------
    source : Source, str or PathLike
        An open source, or what :func:`open_source` opens.
    dialect : Dialect, optional
        What labels are called and their units, for a path.
    on_error : {"raise", "skip"}, default "raise"
        Whether a frame that cannot be read ends the reading, or is left out.
    on_skip : callable, optional
        Called for every frame that is left out.

    Raises
    ------
    DataError
        If a frame cannot be read, if there are none, or if the source has no energy, forces or stress but something
        that looks like it; names the source and the frame.
    """
    opened = source if isinstance(source, Source) else open_source(source, dialect)
    yield from readable(opened, 0, on_error, on_skip)
    opened.findings.check_labels(opened.dialect, opened.name)


def readable(
    source: Source, start: int, on_error: OnError, on_skip: Callable[[Skip], object] | None
) -> Iterator[tuple[int, AtomicData]]:
    """Yield number and structure of the frames from ``start`` on; see :func:`read_structures`.

    Raises
    ------
    DataError
        If a frame cannot be read, or there are none at all.
    """
    for number, found in attempts(source, start, lambda frame: frame.read()):
        if not isinstance(found, DataError):
            yield number, found
        elif on_error == "raise":
            raise found
        elif on_skip is not None:
            on_skip(Skip(number, found))


def attempts(source: Source, start: int, read: Callable[[Frame], Result]) -> Iterator[tuple[int, Result | DataError]]:
    """Yield number of the frames from ``start`` on and what ``read`` returns for each, or why it could not.

    Raises
    ------
    DataError
        If there are none at all.
    """
    frames, number = source.frames(start), start - 1
    while True:
        number += 1
        found: Result | DataError
        try:
            frame = next(frames, None)
            if frame is None:
                break
            number = frame.number
            found = read(frame)
        except DataError as error:
            found = error
        yield number, found
    if not number:
        raise DataError(f"{source.name} holds no structures")
