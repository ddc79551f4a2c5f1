"""Reading rows of arrays without compression straight from their files: no chunk is decoded or kept."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr
from numpy.typing import NDArray

from nvalchemi_lightning.data.store.chunks import chunk_file, damaged, local_decoders

if TYPE_CHECKING:
    from nvalchemi_lightning.data.store.rows import Ranges

__all__ = ["PlainRows", "is_plain"]


def is_plain(array: zarr.Array[Any]) -> bool:
    """Say whether the files of an array hold its rows as they are in memory."""
    return hasattr(os, "preadv") and local_decoders(array) == [] and array.dtype.isnative


class PlainRows:
    """The rows of an array without compression.

    Parameters
    ----------
    array : zarr.Array
        The array.
    store : str
        Named in messages.
    """

    def __init__(self, array: zarr.Array[Any], store: str) -> None:
        self._array = array
        self._store = store
        self._rows = array.chunks[0]
        self._row_bytes = array.dtype.itemsize * int(np.prod(array.shape[1:], dtype=np.int64))
        self._paths: dict[int, str] = {}

    def read(self, ranges: Ranges, out: NDArray[Any]) -> None:
        """Read the rows of some ranges into ``out``.

        Raises
        ------
        StoreError
            If a file is shorter or longer than its chunk.
        """
        target = out.reshape(-1).view(np.uint8).data
        rows, size = self._rows, self._row_bytes
        held, descriptor = -1, -1
        try:
            for start, stop, place in ranges.runs:
                row = start
                while row < stop:
                    chunk = row // rows
                    if chunk != held:
                        _close(descriptor)
                        held, descriptor = chunk, self._open(chunk)
                    end = min(stop, (chunk + 1) * rows)
                    part = target[(place + row - start) * size : (place + end - start) * size]
                    self._fill(descriptor, (row - chunk * rows) * size, part, chunk)
                    row = end
        finally:
            _close(descriptor)

    def _open(self, chunk: int) -> int:
        path = self._paths.get(chunk)
        if path is None:
            path = self._paths[chunk] = str(chunk_file(self._array, chunk))
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return -1
        if os.fstat(descriptor).st_size != self._rows * self._row_bytes:
            os.close(descriptor)
            raise damaged(self._array, self._store, chunk)
        return descriptor

    def _fill(self, descriptor: int, offset: int, part: memoryview, chunk: int) -> None:
        if descriptor < 0:
            # Never written.
            np.frombuffer(part, dtype=self._array.dtype)[:] = self._array.fill_value
        elif os.preadv(descriptor, [part], offset) != len(part):
            raise damaged(self._array, self._store, chunk)


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)
