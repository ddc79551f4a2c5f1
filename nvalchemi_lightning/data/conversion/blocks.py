"""Reading a source of a conversion: frames one by one, which become structures many at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from nvalchemi_lightning.data.atomic_data import AtomicData
from nvalchemi_lightning.data.batch import Batch
from nvalchemi_lightning.data.sources.opening import Skip, attempts
from nvalchemi_lightning.data.sources.raw_structure import RawStructure
from nvalchemi_lightning.data.sources.source import Frame, Source, naming
from nvalchemi_lightning.data.sources.translate import Translator
from nvalchemi_lightning.errors import DataError

__all__ = ["Block", "read_blocks"]

_AT_ONCE = 256
"""Frames that become structures together."""

Loaded: TypeAlias = "RawStructure | AtomicData | DataError"


class Block(NamedTuple):
    """What became of some frames.

    Attributes
    ----------
    next_frame : int
        Number of the frame that follows them.
    frames : list of int
        Numbers of those that were read.
    infos : list of mapping of str to object
        What the file says about each of them by name.
    data : list of AtomicData or Batch
        Their structures, in this order.
    skips : list of Skip
        Those that could not be read.
    """

    next_frame: int
    frames: list[int]
    infos: list[Mapping[str, Any]]
    data: list[AtomicData | Batch]
    skips: list[Skip]


def read_blocks(source: Source, start: int, room: Callable[[], int]) -> Iterator[Block]:
    """Yield blocks of the frames from ``start`` on, none larger than what ``room`` returns at its beginning.

    Raises
    ------
    DataError
        If there are no frames at all.
    """
    loaded: dict[int, Loaded] = {}
    size = min(_AT_ONCE, room())
    for number, found in attempts(source, start, _load):
        loaded[number] = found
        if len(loaded) == size or isinstance(found, DataError):
            yield _finished(source, loaded)
            loaded, size = {}, min(_AT_ONCE, room())
    if loaded:
        yield _finished(source, loaded)


def _load(frame: Frame) -> RawStructure | AtomicData:
    return frame.read() if frame.load is None else frame.load()


def _finished(source: Source, loaded: dict[int, Loaded]) -> Block:
    raws = {number: found for number, found in loaded.items() if isinstance(found, RawStructure)}
    batch = None
    if raws and source.translator is not None:
        batch = source.translator.block([*raws.values()])
        if batch is None:
            single = partial(_structure, source.name, source.translator)
            loaded = loaded | {number: single(number, raw) for number, raw in raws.items()}
    frames = [number for number, found in loaded.items() if not isinstance(found, DataError)]
    singles: list[AtomicData | Batch] = [found for found in loaded.values() if isinstance(found, AtomicData)]
    return Block(
        next_frame=max(loaded) + 1,
        frames=frames,
        infos=[raws[number].info if number in raws else {} for number in frames],
        data=singles if batch is None else [batch],
        skips=[Skip(number, found) for number, found in loaded.items() if isinstance(found, DataError)],
    )


def _structure(name: str, translate: Translator, number: int, raw: RawStructure) -> AtomicData | DataError:
    try:
        with naming(name, number):
            return translate(raw)
    except DataError as error:
        return error
