"""Making the arrays of a store: chunks, codecs and dtypes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import zarr
from numpy.typing import NDArray
from torch import Tensor

from nvalchemi_lightning.data.store.layout import (
    ZarrArrayConfig,
    ZarrStoreLike,
    ZarrWriteConfig,
    local_path,
    store_name,
)
from nvalchemi_lightning.errors import DataError

__all__ = ["array_of", "create_array", "create_store", "empty_array", "empty_array_like"]


def create_store(store: ZarrStoreLike, config: ZarrWriteConfig) -> zarr.Group:
    """Make a store of no structures.

    Raises
    ------
    FileExistsError
        If there is one already.
    """
    try:
        group = zarr.open_group(store, mode="w" if _is_unfinished(store) else "w-")
    except (ValueError, FileExistsError) as error:
        raise FileExistsError(f"{store_name(store)} exists; append to it, or choose another place") from error
    for kind in ("atoms", "edges"):
        create_array(group, f"meta/{kind}_ptr", np.zeros(1, dtype=np.int64), config)
        create_array(group, f"meta/{kind}_mask", np.zeros(0, dtype=np.bool_), config)
    create_array(group, "meta/samples_mask", np.zeros(0, dtype=np.bool_), config)
    group.create_group("core")
    group.create_group("custom")
    group.update_attributes({"num_samples": 0, "fields": {"core": {}, "custom": {}}})
    return group


def _is_unfinished(store: ZarrStoreLike) -> bool:
    """Say whether a store is what an unfinished write leaves where there are no folders to rename."""
    try:
        attributes = zarr.open_group(store, mode="r").attrs
    except (FileNotFoundError, ValueError):
        return False
    return local_path(store) is None and attributes.get("num_samples") == 0


def create_array(
    group: zarr.Group, path: str, rows: NDArray[Any], config: ZarrWriteConfig, fill_value: float = 0
) -> zarr.Array[Any]:
    """Make an array that holds ``rows``, replacing what an unfinished write may have left at its path.

    Parameters
    ----------
    group : zarr.Group
        The store.
    path : str
        Path of the array in it, such as ``"core/forces"``.
    rows : ndarray
        The values.
    config : ZarrWriteConfig
        How it is chunked and encoded.
    fill_value : float, default 0
        What rows read as that are added by resizing and never written.
    """
    array = empty_array(group, path, rows.shape, rows.dtype, config, fill_value)
    if rows.size:
        array[:] = rows
    return array


def empty_array(
    group: zarr.Group, path: str, shape: tuple[int, ...], dtype: np.dtype[Any], config: ZarrWriteConfig, fill_value: Any
) -> zarr.Array[Any]:
    """Make an array of rows that were never written; see :func:`create_array`."""
    options = _options(path, config)
    compressors = options.compressors
    if compressors == "auto" and dtype.kind == "f":
        compressors = None
    inner = tuple(max(1, size) for size in shape[1:])
    chunk_rows = options.chunk_size or max(1, config.chunk_bytes // (dtype.itemsize * math.prod(inner)))
    return group.create_array(
        path,
        shape=shape,
        dtype=dtype,
        chunks=(chunk_rows, *inner),
        shards=None if options.shard_size is None else (options.shard_size, *inner),
        compressors=compressors,
        filters=options.filters,
        serializer=options.serializer,
        fill_value=dtype.type(fill_value),
        config={"write_empty_chunks": options.write_empty_chunks},
        overwrite=True,
    )


def empty_array_like(group: zarr.Group, path: str, like: zarr.Array[Any], rows: int) -> zarr.Array[Any]:
    """Make an array of rows that were never written, chunked and encoded like another."""
    metadata: Any = like.metadata
    serializer: Any = like.serializer
    return group.create_array(
        path,
        shape=(rows, *like.shape[1:]),
        dtype=like.dtype,
        chunks=like.chunks,
        shards=like.shards,
        compressors=like.compressors,
        filters=like.filters,
        serializer=serializer,
        fill_value=like.fill_value,
        attributes=like.attrs.asdict(),
        dimension_names=metadata.dimension_names,
    )


def _options(path: str, config: ZarrWriteConfig) -> ZarrArrayConfig:
    part, _, name = path.partition("/")
    groups = {"meta": config.meta, "custom": config.custom, "origin": config.meta}
    return config.field_overrides.get(name, groups.get(part, config.core))


def array_of(tensor: Tensor, name: str) -> NDArray[Any]:
    """Return the values of a tensor.

    Raises
    ------
    DataError
        If it is bfloat16, for which NumPy has no dtype.
    """
    if tensor.dtype == torch.bfloat16:
        raise DataError(f"{name!r} is bfloat16, which a store cannot hold; convert it with to(dtype=torch.float32)")
    return tensor.detach().cpu().numpy()
