"""Reading scattered rows of a Zarr array: every chunk is decoded at most once per request and kept for the next.

Zarr answers each request through an event loop in another thread, which takes 0.3 to 0.8 ms however small the request
is. A batch of small structures needs a few hundred chunks, so chunks of arrays in plain local folders are read and
decoded here, in 0.1 ms; arrays with any other storage or codec go through Zarr.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import zarr
from numcodecs import GZip, Zstd  # type: ignore[import-untyped]
from numpy.typing import NDArray
from zarr.storage import LocalStore

from nvalchemi_lightning.errors import StoreError

__all__ = ["ChunkCache", "StoredRows"]

Decoder: TypeAlias = Callable[[bytes], bytes]

_DECODERS: dict[str, Decoder] = {"zstd": Zstd().decode, "gzip": GZip().decode}


class ChunkCache:
    """Decoded chunks of several arrays, the least recently used forgotten beyond a size.

    Parameters
    ----------
    limit : int
        Bytes to keep; the chunk that was asked for last is kept whatever its size.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0
        self._chunks: OrderedDict[tuple[str, int], NDArray[Any]] = OrderedDict()

    def get(self, array: str, chunk: int, load: Callable[[int], NDArray[Any]]) -> NDArray[Any]:
        """Return a chunk, from ``load(chunk)`` where it is not held."""
        key = (array, chunk)
        found = self._chunks.get(key)
        if found is not None:
            self._chunks.move_to_end(key)
            return found
        loaded = load(chunk)
        self._chunks[key] = loaded
        self._held += loaded.nbytes
        while self._held > self._limit and len(self._chunks) > 1:
            _, dropped = self._chunks.popitem(last=False)
            self._held -= dropped.nbytes
        return loaded


class StoredRows:
    """The rows of one array, cut along axis 0.

    Parameters
    ----------
    array : zarr.Array
        The array.
    store : str
        Named in messages.
    cache : ChunkCache
        Holds decoded chunks, shared with other arrays.
    """

    def __init__(self, array: zarr.Array[Any], store: str, cache: ChunkCache) -> None:
        self.row_shape = array.shape[1:]
        self.dtype = array.dtype.newbyteorder("=")
        self._path = array.path
        self._cache = cache
        self._rows = array.chunks[0]
        self._load = _chunk_loader(array, store)

    def read(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[Any]:
        """Return the rows of some ranges, one after another.

        Parameters
        ----------
        starts, stops : ndarray of int64, shape (n,)
            Ranges ``[start, stop)`` in any order; they may repeat.

        Raises
        ------
        StoreError
            If a chunk cannot be decoded.
        """
        sizes = stops - starts
        offsets = np.concatenate(([0], np.cumsum(sizes)))
        out = np.empty((int(offsets[-1]), *self.row_shape), dtype=self.dtype)
        if not len(out):
            return out
        # Ascending ranges meet each chunk in one go, so that a small cache decodes it once as well.
        order = np.argsort(starts, kind="stable")
        self._copy(starts[order].tolist(), stops[order].tolist(), offsets[order].tolist(), out)
        return out

    def _copy(self, starts: list[int], stops: list[int], offsets: list[int], out: NDArray[Any]) -> None:
        rows, held, first, block = self._rows, -1, 0, out
        # This loop is most of the time of reading; its body is kept to a few operations.
        for start, stop, offset in zip(starts, stops, offsets, strict=True):
            row = start
            while row < stop:
                chunk = row // rows
                if chunk != held:
                    held, first, block = chunk, chunk * rows, self._cache.get(self._path, chunk, self._load)
                end = stop if stop <= first + rows else first + rows
                place = offset + row - start
                out[place : place + end - row] = block[row - first : end - first]
                row = end


def _chunk_loader(array: zarr.Array[Any], store: str) -> Callable[[int], NDArray[Any]]:
    folder = array.store.root if isinstance(array.store, LocalStore) else None
    decoders = _decoders(array)
    if folder is None or decoders is None or array.chunks[1:] != array.shape[1:]:
        return lambda chunk: _through_zarr(array, store, chunk)
    return lambda chunk: _from_file(array, store, Path(folder), decoders, chunk)


def _decoders(array: zarr.Array[Any]) -> list[Decoder] | None:
    """Return the steps from a chunk's file to its bytes, last encoder first, or None if one is not known here."""
    codecs: Any = array.metadata.to_dict().get("codecs", ({},))
    first, *rest = codecs
    configuration = first.get("configuration", {})
    if first.get("name") != "bytes" or configuration.get("endian", "little") != "little":
        return None
    names = [codec["name"] for codec in reversed(rest)]
    return [_DECODERS[name] for name in names] if all(name in _DECODERS for name in names) else None


def _from_file(array: zarr.Array[Any], store: str, folder: Path, decoders: list[Decoder], chunk: int) -> NDArray[Any]:
    shape = array.chunks
    key = array.metadata.encode_chunk_key((chunk, *(0 for _ in shape[1:])))
    try:
        data = (folder / array.path / key).read_bytes()
    except FileNotFoundError:
        return np.full(shape, array.fill_value, dtype=array.dtype)
    try:
        for decode in decoders:
            data = decode(data)
        return np.frombuffer(data, dtype=array.dtype).reshape(shape)
    except (RuntimeError, ValueError, OSError, EOFError) as error:
        raise _damaged(array, store, chunk) from error


def _through_zarr(array: zarr.Array[Any], store: str, chunk: int) -> NDArray[Any]:
    rows = array.chunks[0]
    try:
        return np.asarray(array[chunk * rows : (chunk + 1) * rows])
    except (RuntimeError, ValueError, OSError, EOFError) as error:
        raise _damaged(array, store, chunk) from error


def _damaged(array: zarr.Array[Any], store: str, chunk: int) -> StoreError:
    rows = array.chunks[0]
    return StoreError(
        f"{store}: rows {chunk * rows} to {min((chunk + 1) * rows, array.shape[0]) - 1} of {array.path} cannot be "
        "decoded; the store is damaged, restore it from a copy"
    )
