"""What a source of structures is: frames that are read one by one, and whose errors name source and frame."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from nvalchemi_lightning.data.atomic_data import AtomicData
from nvalchemi_lightning.data.sources.dialect import Dialect
from nvalchemi_lightning.data.sources.findings import Findings
from nvalchemi_lightning.data.sources.raw_structure import RawStructure
from nvalchemi_lightning.data.sources.translate import Translator
from nvalchemi_lightning.errors import DataError

__all__ = ["Frame", "Source", "naming"]


class Frame(NamedTuple):
    """One structure of a source, not read yet.

    Attributes
    ----------
    number : int
        Its position in the source, from 0; in a store its physical index.
    read : callable
        Returns the structure, or raises DataError that names source and frame.
    load : callable or None, default None
        Does the first half of that: returns what the file has, for ``Source.translator``; None where there is none.
    """

    number: int
    read: Callable[[], AtomicData]
    load: Callable[[], RawStructure] | None = None


class Source(ABC):
    """Structures of one file or store, in its order; can be iterated many times.

    Attributes
    ----------
    name : str
        What messages call it: its path.
    dialect : Dialect
        How its labels are read.
    findings : Findings
        What the frames that the last iteration has read so far had.
    translator : Translator or None
        Makes structures of what ``Frame.load`` returns; None where frames are structures already.
    """

    name: str
    dialect: Dialect
    findings: Findings
    translator: Translator | None = None

    @abstractmethod
    def frames(self, start: int = 0) -> Iterator[Frame]:
        """Yield the frames from number ``start`` on.

        Raises
        ------
        DataError
            If what follows cannot be divided into frames; names the source and the number of the frame.
        """

    def comments(self) -> Iterator[str] | None:
        """Return what each frame says about its names, read much faster than the frames; None if that is not so."""
        return None

    def __iter__(self) -> Iterator[tuple[int, AtomicData]]:
        """Yield number and structure of every frame."""
        return ((frame.number, frame.read()) for frame in self.frames())


@contextmanager
def naming(name: str, number: int) -> Iterator[None]:
    """Make an error about data one that names source and frame."""
    try:
        yield
    except DataError as error:
        raise type(error)(f"{name}: frame {number}: {error}") from error
