"""Deleting structures from an open store: readers skip them, and their rows become zeros."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from nvalchemi_lightning.data.fields import Level
from nvalchemi_lightning.data.store.layout import stored_array, stored_fields

__all__ = ["delete_samples"]

Runs = list[tuple[int, int]]


def delete_samples(group: zarr.Group, samples: NDArray[np.int64], name: str) -> None:
    """Delete structures.

    Parameters
    ----------
    group : zarr.Group
        The store, open for writing.
    samples : ndarray of int64, shape (n,)
        Their physical numbers, ascending, without repetition.
    name : str
        Named in messages.
    """
    # The mask first: what readers go by is then right even if the rest is interrupted.
    system = _runs(samples, samples + 1)
    _zero(stored_array(group, "meta/samples_mask", name), system)
    runs: dict[Level, Runs] = {"system": system}
    kinds: tuple[tuple[Level, str], ...] = (("node", "atoms"), ("edge", "edges"))
    for level, kind in kinds:
        ptr = np.asarray(stored_array(group, f"meta/{kind}_ptr", name)[:])
        runs[level] = _runs(ptr[samples], ptr[samples + 1])
        _zero(stored_array(group, f"meta/{kind}_mask", name), runs[level])
    for field in stored_fields(group, name).values():
        _zero(stored_array(group, field.path, name), runs[field.level])


def _runs(starts: NDArray[np.int64], stops: NDArray[np.int64]) -> Runs:
    """Merge ascending ranges that touch."""
    first = np.concatenate(([True], starts[1:] != stops[:-1]))
    last = np.concatenate((first[1:], [True]))
    return list(zip(starts[first].tolist(), stops[last].tolist(), strict=True))


def _zero(array: zarr.Array[Any], runs: Runs) -> None:
    """Write zeros; every chunk is read and written once, however many runs are in it."""
    size = (array.shards or array.chunks)[0]
    parts: defaultdict[int, Runs] = defaultdict(list)
    for start, stop in runs:
        for begin in range(start // size * size, stop, size):
            parts[begin].append((max(start - begin, 0), min(stop - begin, size)))
    for begin, inside in parts.items():
        block = np.array(array[begin : begin + size])
        for start, stop in inside:
            block[start:stop] = 0
        array[begin : begin + len(block)] = block
