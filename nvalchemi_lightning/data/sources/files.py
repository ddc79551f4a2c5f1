"""Files that ASE reads as sources of structures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nvalchemi_lightning.data.ase import raw_structure
from nvalchemi_lightning.data.atomic_data import AtomicData
from nvalchemi_lightning.data.sources.ase_database import DATABASES, database_rows
from nvalchemi_lightning.data.sources.dialect import Dialect
from nvalchemi_lightning.data.sources.extxyz import frame_comments, frame_texts, is_extxyz, parse_frame
from nvalchemi_lightning.data.sources.findings import Findings
from nvalchemi_lightning.data.sources.raw_structure import RawStructure
from nvalchemi_lightning.data.sources.source import Frame, Source, naming
from nvalchemi_lightning.data.sources.translate import Translator
from nvalchemi_lightning.errors import AlchemiError, ConfigurationError, DataError, UnknownNameError, nearest

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["FileSource"]

_SERVERS = ("postgresql", "mysql")
_AS_WRITTEN = ("extxyz", "xyz")
"""Formats whose numbers ASE leaves as they are; it converts those of others to eV and A."""


class FileSource(Source):
    """A file that ASE reads.

    Parameters
    ----------
    path : Path
        The file.
    dialect : Dialect
        How its labels are read.
    format_name : str or None
        ASE's name of the format; None finds out.
    dtype : torch.dtype
        Floating dtype of the structures.

    Raises
    ------
    ImportError
        If ASE is not installed.
    DataError
        If the format is not recognised.
    UnknownNameError
        If ``format_name`` is not one of ASE's.
    ConfigurationError
        If the format cannot be read.
    """

    translator: Translator

    def __init__(self, path: Path, dialect: Dialect, format_name: str | None, dtype: torch.dtype) -> None:
        self.name = str(path)
        self.dialect = dialect
        self._path = path
        self._kind = _kind(path, format_name)
        self._dtype = dtype
        self._begin()

    def frames(self, start: int = 0) -> Iterator[Frame]:
        """Yield the frames from number ``start`` on."""
        self._begin()
        loads = islice(_loads(self._path, self._kind, self.dialect), start, None)
        for number in count(start):
            with naming(self.name, number), _parsing():
                load = next(loads, None)
            if load is None:
                return
            yield Frame(number, partial(self._read, number, load), partial(self._load, number, load))

    def comments(self) -> Iterator[str] | None:
        """Return the comment lines of an extended XYZ file, up to what is damaged."""
        return frame_comments(self._path) if self._kind == "extxyz" else None

    def _begin(self) -> None:
        self.findings = Findings()
        converted_by = None if self._kind in _AS_WRITTEN else self._kind
        self.translator = Translator(self.dialect, self._dtype, self.findings, converted_by)

    def _load(self, number: int, load: Callable[[], RawStructure]) -> RawStructure:
        with naming(self.name, number), _parsing():
            return load()

    def _read(self, number: int, load: Callable[[], RawStructure]) -> AtomicData:
        raw = self._load(number, load)
        with naming(self.name, number):
            return self.translator(raw)


@contextmanager
def _parsing() -> Iterator[None]:
    """Make what a parser raises an error of ours."""
    try:
        yield
    except (AlchemiError, ImportError, MemoryError):
        raise
    except Exception as error:  # A hundred parsers raise anything on a damaged file.
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise DataError(f"it cannot be read ({reason})") from error


def _loads(path: Path, kind: str, dialect: Dialect) -> Iterator[Callable[[], RawStructure]]:
    """Yield a function for each frame that returns what the file has."""
    if kind == "extxyz":
        for text in frame_texts(path):
            yield partial(parse_frame, text, dialect)
        return
    structures = database_rows(path, kind, dialect) if kind in DATABASES else _ase_frames(path, kind)
    for atoms in structures:
        yield partial(raw_structure, atoms)


def _ase_frames(path: Path, kind: str) -> Iterator[Atoms]:
    from ase.io import iread

    return iread(str(path), index=slice(None), format=kind, do_not_split_by_at_sign=True)


def _kind(path: Path, given: str | None) -> str:
    """Return ASE's name of the format of a file."""
    try:
        from ase.io.formats import ioformats
    except ImportError as error:
        raise ImportError(f'{path} needs ASE: pip install "nvalchemi-lightning[ase]"') from error
    if given is not None and given not in ioformats:
        raise UnknownNameError(f"ASE has no format {given!r}{nearest(given, ioformats)}")
    kind = _recognised(path) if given is None else given
    if kind not in ioformats:
        raise DataError(f"{path}: its format is not recognised; name it with format=...")
    if kind in _SERVERS or not ioformats[kind].can_read:
        raise ConfigurationError(f"{path}: files of the format {kind!r} cannot be read")
    return kind


def _recognised(path: Path) -> str:
    from ase.io.formats import UnknownFileTypeError, filetype

    if is_extxyz(path):
        return "extxyz"
    try:
        return filetype(str(path))
    except UnknownFileTypeError as error:
        raise DataError(f"{path}: its format is not recognised ({error}); name it with format=...") from error
