"""Reading a whole data set in order, as batches of bounded size."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from nvalchemi_lightning.data.batch import Batch
from nvalchemi_lightning.data.store.reader import AtomicDataZarrReader

__all__ = ["read_blocks"]

_SIZE = 256
_CACHE = 4 * 2**20
_FIELDS = ("energy", "forces", "stress", "cell", "pbc")


def read_blocks(source: str | os.PathLike[str], fields: tuple[str, ...] = _FIELDS) -> Iterator[Batch]:
    """Yield the structures of a store or file in its order, some at a time.

    Parameters
    ----------
    source : str or PathLike
        A Zarr store, or a file that :func:`~nvalchemi_lightning.data.sources.opening.read_structures` reads.
    fields : tuple of str
        Fields that are needed, beside positions and atomic numbers; a store reads no others. Default: the labels of
        potentials, and the cell.

    Raises
    ------
    FileNotFoundError
        If there is nothing at the path.
    DataError
        If a structure cannot be read; names it.
    """
    if not Path(source).is_dir():
        yield from _from_file(source)
        return
    stored = AtomicDataZarrReader(source).field_names
    wanted = [name for name in fields if name in stored]
    with AtomicDataZarrReader(source, fields=wanted, cache_bytes=_CACHE) as reader:
        for first in range(0, len(reader), _SIZE):
            yield reader.read_batch(range(first, min(first + _SIZE, len(reader))))


def _from_file(path: str | os.PathLike[str]) -> Iterator[Batch]:
    from nvalchemi_lightning.data.sources.opening import read_structures

    structures = (data for _, data in read_structures(path))
    while block := list(islice(structures, _SIZE)):
        yield Batch.from_data_list(block)
