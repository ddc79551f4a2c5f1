"""Decoding chunks of Zarr arrays, and keeping what was decoded.

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

__all__ = ["ChunkCache", "chunk_file", "chunk_loader", "damaged", "local_decoders"]

Decoder: TypeAlias = Callable[[bytes], bytes]
Loader: TypeAlias = Callable[[int], NDArray[Any]]

_DECODERS: dict[str, Decoder] = {"zstd": Zstd().decode, "gzip": GZip().decode}


class ChunkCache:
    """Memory for decoded chunks: arrays that fit are kept whole, of the others the chunks used last.

    Parameters
    ----------
    limit : int
        Bytes to keep; the chunk that was asked for last is kept whatever its size.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0
        self._chunks: OrderedDict[tuple[str, int], NDArray[Any]] = OrderedDict()

    def reserve(self, size: int) -> bool:
        """Set memory aside for a whole array, if there is that much; first come, first served."""
        if size > self._limit:
            return False
        self._limit -= size
        self._forget()
        return True

    def get(self, array: str, chunk: int, load: Loader) -> NDArray[Any]:
        """Return a chunk, from ``load(chunk)`` where it is not held."""
        key = (array, chunk)
        found = self._chunks.get(key)
        if found is not None:
            self._chunks.move_to_end(key)
            return found
        loaded = load(chunk)
        self._chunks[key] = loaded
        self._held += loaded.nbytes
        self._forget()
        return loaded

    def _forget(self) -> None:
        while self._held > self._limit and len(self._chunks) > 1:
            _, dropped = self._chunks.popitem(last=False)
            self._held -= dropped.nbytes


def chunk_loader(array: zarr.Array[Any], store: str) -> Loader:
    """Return the function that reads and decodes a chunk by its number along axis 0; ``store`` is for messages.

    It raises StoreError where a chunk cannot be decoded. A chunk that was never written is full of the fill value.
    """
    decoders = local_decoders(array)
    if decoders is None:
        return lambda chunk: _through_zarr(array, store, chunk)
    return lambda chunk: _from_file(array, store, decoders, chunk)


def local_decoders(array: zarr.Array[Any]) -> list[Decoder] | None:
    """Return the steps from a chunk's file to its bytes, last encoder first, or None if that is left to Zarr."""
    if not isinstance(array.store, LocalStore) or array.chunks[1:] != array.shape[1:]:
        return None
    codecs: Any = array.metadata.to_dict().get("codecs", ({},))
    first, *rest = codecs
    configuration = first.get("configuration", {})
    if first.get("name") != "bytes" or configuration.get("endian", "little") != "little":
        return None
    names = [codec["name"] for codec in reversed(rest)]
    return [_DECODERS[name] for name in names] if all(name in _DECODERS for name in names) else None


def chunk_file(array: zarr.Array[Any], chunk: int) -> Path:
    """Return where a chunk of an array in a local folder lies."""
    key = array.metadata.encode_chunk_key((chunk, *(0 for _ in array.shape[1:])))
    return Path(array.store.root) / array.path / key  # type: ignore[attr-defined]


def _from_file(array: zarr.Array[Any], store: str, decoders: list[Decoder], chunk: int) -> NDArray[Any]:
    try:
        data = chunk_file(array, chunk).read_bytes()
    except FileNotFoundError:
        return np.full(array.chunks, array.fill_value, dtype=array.dtype)
    try:
        for decode in decoders:
            data = decode(data)
        return np.frombuffer(data, dtype=array.dtype).reshape(array.chunks)
    except (RuntimeError, ValueError, OSError, EOFError) as error:
        raise damaged(array, store, chunk) from error


def _through_zarr(array: zarr.Array[Any], store: str, chunk: int) -> NDArray[Any]:
    rows = array.chunks[0]
    try:
        return np.asarray(array[chunk * rows : (chunk + 1) * rows])
    except (RuntimeError, ValueError, OSError, EOFError) as error:
        raise damaged(array, store, chunk) from error


def damaged(array: zarr.Array[Any], store: str, chunk: int) -> StoreError:
    """Return the error that says which rows cannot be decoded."""
    rows = array.chunks[0]
    return StoreError(
        f"{store}: rows {chunk * rows} to {min((chunk + 1) * rows, array.shape[0]) - 1} of {array.path} cannot be "
        "decoded; the store is damaged, restore it from a copy"
    )
