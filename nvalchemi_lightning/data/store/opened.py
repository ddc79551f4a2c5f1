"""An open store: which structures there are, where their rows lie, and reading those rows with checks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import zarr
from numpy.typing import NDArray

from nvalchemi_lightning.data.fields import CORE_FIELDS, LEVELS, Level
from nvalchemi_lightning.data.indices import IndexLike, resolve_indices
from nvalchemi_lightning.data.store.chunks import ChunkCache
from nvalchemi_lightning.data.store.layout import (
    REPAIR_HINT,
    StoredField,
    ZarrStoreLike,
    committed_samples,
    edges_reach,
    local_path,
    open_store,
    store_name,
    stored_array,
    stored_fields,
)
from nvalchemi_lightning.data.store.rows import Ranges, StoredRows
from nvalchemi_lightning.errors import StoreError, UnknownNameError, nearest

__all__ = ["OpenedStore", "Segments", "StoreIndex", "StoreVersion"]

LevelRows: TypeAlias = "dict[Level, dict[str, NDArray[Any]]]"


class Segments:
    """Where the rows of each stored structure begin and how many there are.

    Parameters
    ----------
    ptr : ndarray of int64, shape (N + 1,)
        First row of every structure, and the number of rows.
    """

    def __init__(self, ptr: NDArray[np.int64]) -> None:
        self.ptr = ptr
        self.total = int(ptr[-1])

    def starts(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first row of some structures."""
        return self.ptr[samples]

    def sizes(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of rows of some structures."""
        sizes: NDArray[np.int64] = self.ptr[samples + 1] - self.ptr[samples]
        return sizes


@dataclass(frozen=True)
class StoreIndex:
    """Which structures there are and where.

    Attributes
    ----------
    active : ndarray of int64, shape (n,)
        Physical numbers of the structures that are not deleted.
    atoms, edges : Segments
        Their rows, deleted ones included.
    """

    active: NDArray[np.int64]
    atoms: Segments
    edges: Segments

    @classmethod
    def read(cls, group: zarr.Group, name: str) -> StoreIndex:
        """Read the index of a store.

        Raises
        ------
        StoreError
            If pointers do not ascend, or are shorter than the number of structures says.
        """
        count = committed_samples(group, name)
        mask = _first_rows(group, "meta/samples_mask", count, name)
        return cls(np.flatnonzero(mask), _pointers(group, "atoms", count, name), _pointers(group, "edges", count, name))


def _first_rows(group: zarr.Group, path: str, count: int, name: str) -> NDArray[Any]:
    # Many small chunks: decoding them here takes a fifth of what Zarr needs.
    rows = StoredRows(stored_array(group, path, name), name, ChunkCache(0))
    return rows.read(Ranges(np.zeros(1, dtype=np.int64), np.array([count])))


def _pointers(group: zarr.Group, kind: str, count: int, name: str) -> Segments:
    path = f"meta/{kind}_ptr"
    if stored_array(group, path, name).shape[0] <= count:
        raise StoreError(f"{name}: {path} is shorter than {count} samples need; {REPAIR_HINT}")
    ptr = _first_rows(group, path, count + 1, name).astype(np.int64, copy=False)
    if ptr[0] != 0 or (ptr[1:] < ptr[:-1]).any():
        raise StoreError(f"{name}: {path} does not ascend from 0 over {count} samples; the store is damaged")
    return Segments(ptr)


class StoreVersion(NamedTuple):
    """What tells whether positions still mean the same structures.

    Attributes
    ----------
    folder : int or None
        Which folder it is.
    samples, active : int
        Number of structures, and of those that are not deleted.
    """

    folder: int | None
    samples: int
    active: int


_CHANGED = (
    "was changed since it was opened: structures were deleted, or it was rewritten by defragment or repair_store. Call "
    "refresh(), and make loaders anew"
)


class OpenedStore:
    """What a reader holds: fields, and on first use index and arrays. Belongs to the process that made it.

    Parameters
    ----------
    store : str, PathLike, zarr Store, StorePath or dict
        The store.
    only : tuple of str or None
        Fields to read beside the core ones; None means all of them.
    cache_bytes : int
        Memory for decoded chunks.
    """

    def __init__(self, store: ZarrStoreLike, only: tuple[str, ...] | None, cache_bytes: int) -> None:
        self.pid = os.getpid()
        self._path = local_path(store)
        self.group = open_store(store, "r")
        self._folder = self._folder_now()
        self.name = store_name(store)
        self.fields = _chosen(stored_fields(self.group, self.name), only, self.name)
        self.edges_reach = edges_reach(self.group)
        self._cache = ChunkCache(cache_bytes)
        self._arrays: dict[str, StoredRows] = {}

    @cached_property
    def index(self) -> StoreIndex:
        """Which structures there are and where."""
        return StoreIndex.read(self.group, self.name)

    def _folder_now(self) -> int | None:
        return None if self._path is None or not self._path.exists() else self._path.stat().st_ino

    @property
    def version(self) -> StoreVersion | None:
        """What another process compares with; None before the index was read."""
        if "index" not in self.__dict__:
            return None
        return StoreVersion(self._folder, self.samples, len(self.index.active))

    def check_continues(self, version: StoreVersion) -> None:
        """Refuse a store in which positions mean other structures than when it was opened first.

        Raises
        ------
        StoreError
            If structures were deleted since, or the store was replaced.
        """
        same = np.searchsorted(self.index.active, version.samples) == version.active
        if self._folder != version.folder or self.samples < version.samples or not same:
            raise StoreError(f"{self.name} {_CHANGED}")

    @property
    def samples(self) -> int:
        """Number of stored structures, deleted ones included."""
        return len(self.index.atoms.ptr) - 1

    def physical(self, indices: IndexLike) -> NDArray[np.int64]:
        """Return the physical numbers of structures that are not deleted."""
        active = self.index.active
        return active[resolve_indices(indices, len(active), self.name)]

    def sizes(self, level: Level, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many rows each structure has on a level."""
        return np.ones_like(samples) if level == "system" else self._segments(level).sizes(samples)

    def ranges(self, level: Level, samples: NDArray[np.int64]) -> Ranges:
        """Return the rows of structures on a level."""
        starts = samples if level == "system" else self._segments(level).starts(samples)
        return Ranges(starts, starts + self.sizes(level, samples))

    def _segments(self, level: Level) -> Segments:
        return self.index.atoms if level == "node" else self.index.edges

    def rows(self, level: Level) -> int:
        """Return how many rows all stored structures have on a level."""
        return self.samples if level == "system" else self._segments(level).total

    def levels(self, samples: NDArray[np.int64], offsets: NDArray[np.int64]) -> LevelRows:
        """Return the rows of all fields; ``offsets`` are subtracted from each structure's atom numbers.

        Raises
        ------
        StoreError
            If the store is damaged there.
        """
        found: LevelRows = {level: {} for level in LEVELS}
        for level in LEVELS:
            fields = [field for field in self.fields.values() if field.level == level]
            ranges = self.ranges(level, samples) if fields else None
            for field in fields:
                found[level][field.name] = self.array(field).read(ranges)  # type: ignore[arg-type]
        # Afterwards: what was read before the store was replaced is right.
        if self._folder_now() != self._folder:
            raise StoreError(f"{self.name} {_CHANGED}")
        self._check_numbers(found["node"]["atomic_numbers"], samples)
        if "neighbor_list" in found["edge"]:
            found["edge"]["neighbor_list"] = self._rebased(found["edge"]["neighbor_list"], samples, offsets)
        return found

    def array(self, field: StoredField) -> StoredRows:
        """Return the rows of a field.

        Raises
        ------
        StoreError
            If it has fewer than the structures need.
        """
        if field.name not in self._arrays:
            array = stored_array(self.group, field.path, self.name)
            self._check_length(array, field)
            self._arrays[field.name] = StoredRows(array, self.name, self._cache)
        return self._arrays[field.name]

    def _check_length(self, array: zarr.Array[Any], field: StoredField) -> None:
        rows = self.rows(field.level)
        if array.shape[0] < rows:
            raise StoreError(
                f"{self.name}: {field.path} has {array.shape[0]} rows but {self.samples} samples need {rows}; samples "
                f"were appended without it. {REPAIR_HINT}"
            )

    def _check_numbers(self, numbers: NDArray[Any], samples: NDArray[np.int64]) -> None:
        bad = numbers < 1
        if bad.any():
            sample = np.repeat(samples, self.sizes("node", samples))[bad][0]
            raise StoreError(
                f"{self.name}: sample {sample} has an atomic number of {numbers[bad][0]} in core/atomic_numbers; it "
                "was deleted after the store was opened (call refresh()), or a chunk is missing or overwritten"
            )

    def _rebased(self, neighbors: NDArray[Any], samples: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[Any]:
        """Return the neighbor list with the offset of each structure subtracted from its atom numbers."""
        edges = self.sizes("edge", samples)
        first = np.repeat(self.index.atoms.starts(samples), edges)[:, None]
        size = np.repeat(self.sizes("node", samples), edges)[:, None]
        bad = ((neighbors < first) | (neighbors >= first + size)).any(axis=1)
        if bad.any():
            sample = int(np.repeat(samples, edges)[bad][0])
            pair = (neighbors[bad][0] - first[bad][0]).tolist()
            raise StoreError(
                f"{self.name}: core/neighbor_list of sample {sample} has the pair {pair} but its atoms are 0 to "
                f"{size[bad][0, 0] - 1}; the list was stored without counting earlier samples, or is damaged. "
                f"{REPAIR_HINT}, or read without the edge fields (fields=...) and build neighbor lists anew"
            )
        shifts = np.repeat(offsets, edges)[:, None]
        rebased: NDArray[Any] = np.subtract(neighbors, shifts, dtype=neighbors.dtype, casting="unsafe")
        return rebased


def _chosen(fields: dict[str, StoredField], only: tuple[str, ...] | None, name: str) -> dict[str, StoredField]:
    if only is None:
        return fields
    for wanted in only:
        if wanted not in fields:
            raise UnknownNameError(
                f"{name} has no field {wanted!r}{nearest(wanted, fields)}; its fields are {', '.join(fields)}"
            )
    return {field: place for field, place in fields.items() if field in {*only, *CORE_FIELDS}}
