"""Making the arrays of a store: chunks, codecs and dtypes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import zarr
from numpy.typing import NDArray
from torch import Tensor

from nvalchemi_lightning.data.zarr_layout import ZarrArrayConfig, ZarrStoreLike, ZarrWriteConfig, store_name
from nvalchemi_lightning.errors import DataError

__all__ = ["array_of", "create_array", "create_store"]


def create_store(store: ZarrStoreLike, config: ZarrWriteConfig) -> zarr.Group:
    """Make a store of no structures.

    Raises
    ------
    FileExistsError
        If there is one already.
    """
    try:
        group = zarr.open_group(store, mode="w-")
    except (ValueError, FileExistsError) as error:
        raise FileExistsError(f"{store_name(store)} exists; append to it, or choose another place") from error
    for kind in ("atoms", "edges"):
        create_array(group, f"meta/{kind}_ptr", np.zeros(1, dtype=np.int64), config)
        create_array(group, f"meta/{kind}_mask", np.zeros(0, dtype=np.bool_), config)
    create_array(group, "meta/samples_mask", np.zeros(0, dtype=np.bool_), config)
    group.create_group("core")
    group.create_group("custom")
    group.attrs.update({"num_samples": 0, "fields": {"core": {}, "custom": {}}})
    return group


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
    options = _options(path, config)
    inner = tuple(max(1, size) for size in rows.shape[1:])
    chunk_rows = options.chunk_size or max(1, config.chunk_bytes // (rows.dtype.itemsize * math.prod(inner)))
    array = group.create_array(
        path,
        shape=rows.shape,
        dtype=rows.dtype,
        chunks=(chunk_rows, *inner),
        shards=None if options.shard_size is None else (options.shard_size, *inner),
        compressors=options.compressors,
        filters=options.filters,
        serializer=options.serializer,
        fill_value=rows.dtype.type(fill_value),
        config={"write_empty_chunks": options.write_empty_chunks},
        overwrite=True,
    )
    if rows.size:
        array[:] = rows
    return array


def _options(path: str, config: ZarrWriteConfig) -> ZarrArrayConfig:
    part, _, name = path.partition("/")
    groups = {"meta": config.meta, "core": config.core, "custom": config.custom, "origin": config.meta}
    return config.field_overrides.get(name, groups[part])


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
