"""Reading scattered rows of one Zarr array, in the way that costs least for it."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Protocol

import numpy as np
import zarr
from numpy.typing import NDArray

from nvalchemi_lightning.data.store.chunks import ChunkCache, chunk_loader
from nvalchemi_lightning.data.store.files import PlainRows, is_plain

__all__ = ["Ranges", "StoredRows"]

_LONG = 32
"""Rows of a range from which on copying it as a slice is faster than gathering its rows."""


class Ranges:
    """Ranges of rows, to be read one after another.

    Parameters
    ----------
    starts, stops : ndarray of int64, shape (n,)
        Ranges ``[start, stop)`` in any order; they may repeat.
    """

    def __init__(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> None:
        self._starts = starts
        self._stops = stops
        self._ends = np.cumsum(stops - starts)
        self.total = int(self._ends[-1]) if len(starts) else 0

    @property
    def are_long(self) -> bool:
        """Whether a range has many rows on average."""
        return self.total > _LONG * len(self._starts)

    @cached_property
    def index(self) -> NDArray[np.int64]:
        """Number of every row."""
        sizes = self._stops - self._starts
        rows: NDArray[np.int64] = np.arange(self.total) + np.repeat(self._starts - (self._ends - sizes), sizes)
        return rows

    @cached_property
    def runs(self) -> list[tuple[int, int, int]]:
        """Start and stop of each range, and where its rows go; ascending, those that continue each other as one."""
        order = np.argsort(self._starts, kind="stable")
        starts, stops = self._starts[order], self._stops[order]
        places = self._ends[order] - (stops - starts)
        fresh = np.ones(len(order), dtype=np.bool_)
        fresh[1:] = (starts[1:] != stops[:-1]) | (places[1:] - places[:-1] != stops[:-1] - starts[:-1])
        last = np.append(fresh[1:], True)
        return list(zip(starts[fresh].tolist(), stops[last].tolist(), places[fresh].tolist(), strict=True))


class _Source(Protocol):
    """One way of reading rows."""

    def read(self, ranges: Ranges, out: NDArray[Any]) -> None: ...


class StoredRows:
    """The rows of one array.

    Parameters
    ----------
    array : zarr.Array
        The array.
    store : str
        Named in messages.
    cache : ChunkCache
        Memory for decoded chunks, shared with other arrays. If the array fits, it is decoded once and kept; if not, and
        it is stored without compression, only the rows asked for are read.
    """

    def __init__(self, array: zarr.Array[Any], store: str, cache: ChunkCache) -> None:
        self.row_shape = array.shape[1:]
        self.dtype = array.dtype.newbyteorder("=")
        self.row_bytes = array.dtype.itemsize * int(np.prod(self.row_shape, dtype=np.int64))
        self._source: _Source
        if cache.reserve(array.nbytes):
            self._source = _WholeArray(array, store)
        elif is_plain(array):
            self._source = PlainRows(array, store)
        else:
            self._source = _CachedChunks(array, store, cache)

    def read(self, ranges: Ranges) -> NDArray[Any]:
        """Return the rows of some ranges, one after another.

        Raises
        ------
        StoreError
            If a chunk cannot be decoded.
        """
        out = np.empty((ranges.total, *self.row_shape), dtype=self.dtype)
        if out.size:
            self._source.read(ranges, out)
        return out


class _WholeArray:
    """An array in memory; its chunks are decoded when they are first needed."""

    def __init__(self, array: zarr.Array[Any], store: str) -> None:
        self._rows = array.chunks[0]
        self._load = chunk_loader(array, store)
        # Memory that was never written to is not taken from the system.
        self._values = np.empty(array.shape, dtype=array.dtype.newbyteorder("="))
        self._absent = np.ones(-(-array.shape[0] // self._rows), dtype=np.bool_)
        self._complete = False

    def read(self, ranges: Ranges, out: NDArray[Any]) -> None:
        if not self._complete:
            self._fetch(ranges)
        if ranges.are_long:
            for start, stop, place in ranges.runs:
                out[place : place + stop - start] = self._values[start:stop]
        else:
            np.take(self._values, ranges.index, axis=0, out=out, mode="clip")

    def _fetch(self, ranges: Ranges) -> None:
        wanted = np.zeros_like(self._absent)
        for start, stop, _ in ranges.runs:
            wanted[start // self._rows : (stop - 1) // self._rows + 1] = True
        for chunk in np.flatnonzero(wanted & self._absent).tolist():
            first = chunk * self._rows
            values = self._values[first : first + self._rows]
            values[:] = self._load(chunk)[: len(values)]
            self._absent[chunk] = False
        self._complete = not self._absent.any()


class _CachedChunks:
    """An array that is larger than the cache."""

    def __init__(self, array: zarr.Array[Any], store: str, cache: ChunkCache) -> None:
        self._path = array.path
        self._rows = array.chunks[0]
        self._load = chunk_loader(array, store)
        self._cache = cache

    def read(self, ranges: Ranges, out: NDArray[Any]) -> None:
        rows, held, first, block = self._rows, -1, 0, out
        # Ascending ranges meet each chunk in one go, so that a small cache decodes it once as well. This loop is most
        # of the time of reading; its body is kept to a few operations.
        for start, stop, place in ranges.runs:
            row = start
            while row < stop:
                chunk = row // rows
                if chunk != held:
                    held, first, block = chunk, chunk * rows, self._cache.get(self._path, chunk, self._load)
                end = stop if stop <= first + rows else first + rows
                out[place + row - start : place + end - start] = block[row - first : end - first]
                row = end
