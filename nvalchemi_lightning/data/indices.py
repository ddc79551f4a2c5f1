"""Turning what a caller indexes with into checked, non-negative positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from nvalchemi_lightning.errors import ConfigurationTypeError

__all__ = ["IndexLike", "resolve_indices"]

IndexLike: TypeAlias = "int | slice | range | Sequence[int] | NDArray[Any] | torch.Tensor"


def resolve_indices(indices: IndexLike, count: int, owner: str) -> NDArray[np.int64]:
    """Return positions in ``range(count)``, in the order asked for, duplicates kept.

    Parameters
    ----------
    indices : int, slice, range, sequence of int, integer array or tensor, boolean mask
        What to select; negative numbers count from the end.
    count : int
        Number of samples there are.
    owner : str
        Named in the messages, such as a path.

    Returns
    -------
    ndarray of int64, shape (n,)

    Raises
    ------
    IndexError
        If a position is outside, or a mask has the wrong length.
    ConfigurationTypeError
        If ``indices`` are not integers.
    """
    if isinstance(indices, slice):
        return np.arange(*indices.indices(count), dtype=np.int64)
    values = np.atleast_1d(np.asarray(indices))
    if values.size == 0:
        return np.empty(0, dtype=np.int64)
    if values.dtype == np.bool_:
        return _from_mask(values, count, owner)
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
        raise ConfigurationTypeError(f"{owner}: sample indices must be integers, got {indices!r:.80}")
    outside = values[(values < -count) | (values >= count)]
    if outside.size:
        raise IndexError(f"{owner}: sample {int(outside[0])} is out of range for {count} samples")
    values = values.astype(np.int64)
    return np.where(values < 0, values + count, values)


def _from_mask(mask: NDArray[np.bool_], count: int, owner: str) -> NDArray[np.int64]:
    if mask.shape != (count,):
        raise IndexError(f"{owner}: a mask of shape {mask.shape} does not fit {count} samples")
    return np.flatnonzero(mask)
