"""Writing what counts of a store to another place: structures that are not deleted, and no remains."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zarr
from numpy.typing import NDArray

from nvalchemi_lightning.data.fields import LEVELS, Level
from nvalchemi_lightning.data.store.arrays import empty_array, empty_array_like
from nvalchemi_lightning.data.store.chunks import ChunkCache
from nvalchemi_lightning.data.store.layout import (
    REPAIR_HINT,
    ZarrWriteConfig,
    declared_fields,
    own_levels,
    stored_array,
)
from nvalchemi_lightning.data.store.opened import OpenedStore
from nvalchemi_lightning.data.store.rows import Ranges, StoredRows
from nvalchemi_lightning.errors import StoreError

__all__ = ["copy_active", "verify_copy"]

_STEP = 4 * 2**20
_CACHE = 32 * 2**20
_KNOWN = frozenset({"zarr.json", "meta", "core", "custom", "levels", "origin"})


class _Kept:
    """The rows of one level that stay, in order.

    Parameters
    ----------
    starts, sizes : ndarray of int64, shape (n,)
        Where the rows of each structure that stays are, and how many.
    """

    def __init__(self, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        self.starts = starts
        self.ptr = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(sizes)))
        self.total = int(self.ptr[-1])

    def part(self, begin: int, end: int) -> _Part:
        """Return where the new rows ``begin`` to ``end`` come from."""
        first = int(np.searchsorted(self.ptr, begin, side="right")) - 1
        last = int(np.searchsorted(self.ptr, end, side="left"))
        owners = np.arange(first, last)
        places = self.ptr[first:last]
        starts = self.starts[first:last] + np.maximum(begin - places, 0)
        stops = self.starts[first:last] + np.minimum(end, self.ptr[first + 1 : last + 1]) - places
        return _Part(Ranges(starts, stops), np.repeat(owners, stops - starts))


class _Part(NamedTuple):
    """Rows to read, and the structure, counted among those that stay, of each."""

    ranges: Ranges
    owners: NDArray[np.int64]


class _Copier:
    """Copies the arrays of one store to another."""

    def __init__(self, source: OpenedStore, target: zarr.Group, config: ZarrWriteConfig | None) -> None:
        self._source = source
        self._target = target
        self._config = config
        active, index = source.index.active, source.index
        self._active = active
        self._levels: dict[Level, _Kept] = {
            "node": _Kept(index.atoms.starts(active), index.atoms.sizes(active)),
            "edge": _Kept(index.edges.starts(active), index.edges.sizes(active)),
            "system": _Kept(active, np.ones_like(active)),
        }

    def copy(self) -> None:
        group = self._source.group
        for path in ("meta", "core", "custom"):
            self._target.create_group(path, attributes=group[path].attrs.asdict() if path in group else {})
        self._copy_meta()
        for field in declared_fields(group, self._source.name).values():
            self._copy_rows(field.path, self._levels[field.level])
        for level, fields in own_levels(group).items():
            self._copy_level(level, fields)
        self._copy_origins()
        self._target.attrs.put({**group.attrs.asdict(), "num_samples": len(self._active)})

    def _copy_meta(self) -> None:
        for kind, level in (("atoms", self._levels["node"]), ("edges", self._levels["edge"])):
            self._write(f"meta/{kind}_ptr", level.ptr)
            self._write(f"meta/{kind}_mask", np.ones(level.total, dtype=np.bool_))
        self._write("meta/samples_mask", np.ones(len(self._active), dtype=np.bool_))

    def _copy_origins(self) -> None:
        origins = self._source.group.get("origin")
        for name, array in origins.arrays() if isinstance(origins, zarr.Group) else ():
            # Whoever appends without knowing of origins leaves them short.
            rows = np.full(self._source.samples, array.fill_value, dtype=array.dtype)
            known = np.asarray(array[: len(rows)])
            rows[: len(known)] = known
            self._write(f"origin/{name}", rows[self._active])

    def _write(self, path: str, values: NDArray[Any]) -> None:
        like = self._source.group.get(path)
        if isinstance(like, zarr.Array):
            array = self._empty(path, like, len(values))
            if values.size:
                array[:] = values

    def _empty(self, path: str, like: zarr.Array[Any], rows: int) -> zarr.Array[Any]:
        if self._config is None:
            return empty_array_like(self._target, path, like, rows)
        return empty_array(self._target, path, (rows, *like.shape[1:]), like.dtype, self._config, like.fill_value)

    def _copy_rows(self, path: str, kept: _Kept) -> None:
        source = stored_array(self._source.group, path, self._source.name)
        needed = int((kept.starts + np.diff(kept.ptr)).max(initial=0))
        if source.shape[0] < needed:
            raise StoreError(
                f"{self._source.name}: {path} has {source.shape[0]} rows but needs {needed}; {REPAIR_HINT}"
            )
        target = self._empty(path, source, kept.total)
        rows = StoredRows(source, self._source.name, ChunkCache(_CACHE))
        whole = (target.shards or target.chunks)[0]
        # Whole chunks: each is encoded once, and no more than a few are in memory.
        step = whole * max(1, _STEP // max(1, whole * rows.row_bytes))
        for begin in range(0, kept.total, step):
            end = min(begin + step, kept.total)
            part = kept.part(begin, end)
            values = rows.read(part.ranges)
            if path == "core/neighbor_list":
                values = self._moved(values, part.owners)
            target[begin:end] = values

    def _moved(self, neighbors: NDArray[Any], owners: NDArray[np.int64]) -> NDArray[Any]:
        atoms = self._levels["node"]
        shift = (atoms.ptr[:-1] - atoms.starts)[owners][:, None]
        moved: NDArray[Any] = np.add(neighbors, shift, dtype=neighbors.dtype, casting="unsafe")
        return moved

    def _copy_level(self, level: str, fields: list[str]) -> None:
        """Copy the fields of a level of the store's own."""
        path, active = f"meta/level_ptrs/{level}", self._active
        kept = self._levels["system"]
        if path in self._source.group:
            ptr = np.asarray(stored_array(self._source.group, path, self._source.name)[:])
            kept = _Kept(ptr[active], ptr[active + 1] - ptr[active])
            self._write(path, kept.ptr)
        for field in fields:
            self._copy_rows(f"levels/{level}/{field}", kept)


def copy_active(path: Path, target: Path, config: ZarrWriteConfig | None) -> None:
    """Write the structures of a store that are not deleted to another place, array by array.

    Parameters
    ----------
    path, target : Path
        From where to where.
    config : ZarrWriteConfig or None
        Chunks and codecs; None keeps those that the arrays have.

    Raises
    ------
    StoreError
        If the store is damaged.
    """
    source = OpenedStore(path, None, _CACHE)
    _Copier(source, zarr.open_group(target, mode="w-"), config).copy()
    # What others put into the folder is theirs.
    for entry in path.iterdir():
        if entry.name not in _KNOWN:
            (shutil.copytree if entry.is_dir() else shutil.copy2)(entry, target / entry.name)


def verify_copy(path: Path, target: Path, block_size: int) -> None:
    """Read two stores structure by structure and compare every bit of every field.

    Raises
    ------
    StoreError
        If they differ, or one is damaged; names structure and field.
    """
    first, second = OpenedStore(path, None, _CACHE), OpenedStore(target, None, _CACHE)
    if second.samples != len(first.index.active) or list(first.fields) != list(second.fields):
        raise StoreError(f"the rewritten {path} has other structures or fields than the original")
    for begin in range(0, second.samples, block_size):
        copies = np.arange(begin, min(begin + block_size, second.samples))
        originals = first.index.active[copies]
        expected = first.levels(originals, first.index.atoms.starts(originals))
        found = second.levels(copies, second.index.atoms.starts(copies))
        for level in LEVELS:
            same = np.array_equal(first.sizes(level, originals), second.sizes(level, copies))
            different = [name for name in expected[level] if not _identical(expected[level][name], found[level][name])]
            if different or not same:
                raise StoreError(
                    f"{path}: rewriting changed {', '.join(different) or level} of samples {begin} to {copies[-1]}; "
                    "the store is untouched"
                )


def _identical(first: NDArray[Any], second: NDArray[Any]) -> bool:
    # Bits, since NaN differs from itself.
    return first.dtype == second.dtype and first.shape == second.shape and first.tobytes() == second.tobytes()
