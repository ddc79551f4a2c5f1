"""Looking for everything that may be wrong with an open store."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from nvalchemi_lightning.data.fields import FIELDS
from nvalchemi_lightning.data.store.chunks import ChunkCache
from nvalchemi_lightning.data.store.layout import StoredField, declared_fields, own_levels, stored_array
from nvalchemi_lightning.data.store.neighbors import Extent, NumberShifts, find_shifts
from nvalchemi_lightning.data.store.opened import Segments, StoreIndex
from nvalchemi_lightning.data.store.rows import Ranges, StoredRows
from nvalchemi_lightning.errors import StoreError

__all__ = ["StoreProblem", "find_problems"]

Fix = Callable[[zarr.Group], None]

_BLOCK = 2**18
"""Rows to look at a time."""


@dataclass(frozen=True)
class StoreProblem:
    """Something that is wrong with a store.

    Attributes
    ----------
    where : str
        Array, attribute or folder.
    what : str
        What is wrong with it.
    remedy : str
        What ``repair_store`` does about it, or what to do.
    is_repairable : bool
        Whether it does something.
    """

    where: str
    what: str
    remedy: str
    is_repairable: bool = True
    fix: Fix | None = field(default=None, repr=False, compare=False)
    changes_rows: bool = field(default=False, repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.remedy}"


def find_problems(group: zarr.Group, name: str, fill_short: bool = False) -> Iterator[StoreProblem]:
    """Yield what is wrong with a store; all of it is read, in blocks.

    Parameters
    ----------
    group : zarr.Group
        The store.
    name : str
        Named in messages.
    fill_short : bool, default False
        Whether rows that an array lacks are to be taken as missing at the end.
    """
    try:
        found = list(_marker(group, name))
        yield from found
        if not found:
            yield from _Checker(group, name, fill_short).problems()
    except StoreError as error:
        yield StoreProblem(name, str(error).removeprefix(f"{name}: "), "restore it from a copy", is_repairable=False)


def _marker(group: zarr.Group, name: str) -> Iterator[StoreProblem]:
    lengths = {path: stored_array(group, path, name).shape[0] - extra for path, extra in _COUNTERS.items()}
    available = min(lengths.values())
    count = group.attrs.get("num_samples")
    if isinstance(count, int) and 0 <= count <= available:
        return
    if isinstance(count, int) and count > available:
        short = min(lengths, key=lambda path: lengths[path])
        what = f"says {count} but {short} has only {available} samples"
        yield StoreProblem("num_samples", what, "restore the store from a copy", is_repairable=False)
        return
    what = "is missing" if count is None else f"is {count!r}, which is not a count"
    yield StoreProblem("num_samples", what, f"set to {available}", fix=lambda group: _set_count(group, available))


_COUNTERS = {"meta/samples_mask": 0, "meta/atoms_ptr": 1, "meta/edges_ptr": 1}


def _set_count(group: zarr.Group, count: int) -> None:
    group.update_attributes({"num_samples": count})


class _Checker:
    """Looks at a store whose number of structures is known."""

    def __init__(self, group: zarr.Group, name: str, fill_short: bool) -> None:
        self._group = group
        self._name = name
        self._fill_short = fill_short
        self._fields = declared_fields(group, name)
        self._index = StoreIndex.read(group, name)
        self._samples = len(self._index.atoms.ptr) - 1
        self._rows = {"node": self._index.atoms.total, "edge": self._index.edges.total, "system": self._samples}

    def problems(self) -> Iterator[StoreProblem]:
        expected = self._expected_rows()
        lengths = {path: stored_array(self._group, path, self._name).shape[0] for path in expected}
        for path, rows in expected.items():
            if lengths[path] > rows:
                yield self._tail(path, lengths[path], rows)
        yield from self._masks()
        for place in self._fields.values():
            if lengths[place.path] < expected[place.path]:
                yield self._short(place, lengths[place.path])
            else:
                yield from self._content(place)

    def _expected_rows(self) -> dict[str, int]:
        rows = {"meta/samples_mask": self._samples}
        for kind, level in (("atoms", "node"), ("edges", "edge")):
            rows[f"meta/{kind}_ptr"] = self._samples + 1
            if f"meta/{kind}_mask" in self._group:
                rows[f"meta/{kind}_mask"] = self._rows[level]
        for place in self._fields.values():
            rows[place.path] = self._rows[place.level]
        return rows | self._rows_of_own_levels()

    def _rows_of_own_levels(self) -> dict[str, int]:
        rows = {}
        for level in own_levels(self._group):
            path = f"meta/level_ptrs/{level}"
            if path in self._group:
                rows[path] = self._samples + 1
        return rows

    def _tail(self, path: str, length: int, rows: int) -> StoreProblem:
        return StoreProblem(
            path,
            f"has {length} rows but the {self._samples} samples that count need {rows}: an append did not finish",
            "the rest is cut off",
            fix=lambda group: _resize(group, path, rows),
        )

    def _masks(self) -> Iterator[StoreProblem]:
        active = np.zeros(self._samples, dtype=np.bool_)
        active[self._index.active] = True
        for kind, segments in (("atoms", self._index.atoms), ("edges", self._index.edges)):
            path = f"meta/{kind}_mask"
            wanted = np.repeat(active, np.diff(segments.ptr))
            if path not in self._group:
                what = "is missing"
            elif not np.array_equal(_first(self._group, path, len(wanted)), wanted):
                what = "does not agree with meta/samples_mask: a deletion did not finish"
            else:
                continue
            yield StoreProblem(path, what, "written anew", fix=_mask_writer(path, wanted))

    def _short(self, place: StoredField, length: int) -> StoreProblem:
        rows = self._rows[place.level]
        covered = self._covered(place, length)
        what = f"has {length} rows but {self._samples} samples need {rows}: structures were appended without it"
        missing = _missing_value(place, stored_array(self._group, place.path, self._name).dtype)
        if covered is None:
            return StoreProblem(place.path, f"{what}, and the rows are not those of whole structures", _COPY, False)
        if missing is None:
            return StoreProblem(place.path, what, "no value of it means 'missing'; " + _COPY, False)
        if not self._fill_short:
            remedy = (
                f"if no later append had {place.name} again, the rows are those of the first {covered} samples: "
                "repair_store(..., fill_short=True) then fills in the rest as missing"
            )
            return StoreProblem(place.path, what, remedy, False)
        remedy = f"the rows are taken as those of the first {covered} samples, the rest becomes {missing}"
        fix = _filler(place.path, length, rows, missing)
        return StoreProblem(place.path, what, remedy, fix=fix, changes_rows=True)

    def _covered(self, place: StoredField, length: int) -> int | None:
        """Return how many whole structures the rows belong to."""
        if place.level == "system":
            return length
        ptr = (self._index.atoms if place.level == "node" else self._index.edges).ptr
        sample = int(np.searchsorted(ptr, length))
        return sample if ptr[sample] == length else None

    def _content(self, place: StoredField) -> Iterator[StoreProblem]:
        rows = StoredRows(stored_array(self._group, place.path, self._name), self._name, ChunkCache(0))
        try:
            if place.name == "neighbor_list":
                yield from self._neighbors(rows, place)
            elif place.name == "atomic_numbers":
                yield from self._numbers(rows, place)
            else:
                for begin in range(0, self._rows[place.level], _BLOCK):
                    rows.read(_range(begin, min(begin + _BLOCK, self._rows[place.level])))
        except StoreError as error:
            what = str(error).removeprefix(f"{self._name}: ").split(";", maxsplit=1)[0]
            yield StoreProblem(place.path, what, _COPY, False)

    def _numbers(self, rows: StoredRows, place: StoredField) -> Iterator[StoreProblem]:
        wrong = []
        for samples in _blocks(self._index.active, self._index.atoms):
            numbers = rows.read(_ranges(self._index.atoms, samples))
            owners = np.repeat(samples, self._index.atoms.sizes(samples))
            wrong += np.unique(owners[numbers < 1]).tolist()
        if wrong:
            what = f"samples {_some(wrong)} have atomic numbers below 1: a chunk is missing or overwritten"
            yield StoreProblem(place.path, what, _COPY, False)

    def _neighbors(self, rows: StoredRows, place: StoredField) -> Iterator[StoreProblem]:
        extent = _extent(rows, self._index)
        found = find_shifts(extent, self._index.atoms.ptr)
        if found is None:
            return
        wrong = np.union1d(extent.samples[found.shifts != 0], found.unknown)
        what = f"atom numbers of samples {_some(wrong.tolist())} are not those of their atoms"
        if len(found.unknown):
            remedy = (
                f"for samples {_some(found.unknown.tolist())} it cannot be told what they were; delete those and "
                "repair again, or read without the edge fields and build neighbor lists anew"
            )
            yield StoreProblem(place.path, what, remedy, False)
            return
        fix = _renumberer(place.path, extent, found, self._index.edges)
        yield StoreProblem(place.path, what, "renumbered", fix=fix, changes_rows=True)


_COPY = "restore it from a copy, or leave it out of what is read"


def _some(samples: list[int]) -> str:
    shown = ", ".join(map(str, samples[:5]))
    return shown if len(samples) <= 5 else f"{shown} and {len(samples) - 5} more"


def _range(start: int, stop: int) -> Ranges:
    return Ranges(np.array([start]), np.array([stop]))


def _ranges(segments: Segments, samples: NDArray[np.int64]) -> Ranges:
    return Ranges(segments.starts(samples), segments.starts(samples) + segments.sizes(samples))


def _blocks(samples: NDArray[np.int64], segments: Segments) -> Iterator[NDArray[np.int64]]:
    """Cut structures into blocks of about as many rows each."""
    done = np.cumsum(segments.sizes(samples))
    begin = 0
    while begin < len(samples):
        reached = done[begin - 1] if begin else 0
        end = max(begin + 1, int(np.searchsorted(done, reached + _BLOCK)))
        yield samples[begin:end]
        begin = end


def _first(group: zarr.Group, path: str, count: int) -> NDArray[Any]:
    return np.asarray(stored_array(group, path, path)[:count])


def _extent(rows: StoredRows, index: StoreIndex) -> Extent:
    samples = index.active[index.edges.sizes(index.active) > 0]
    low, high = np.empty_like(samples), np.empty_like(samples)
    done = 0
    for block in _blocks(samples, index.edges):
        pairs = rows.read(_ranges(index.edges, block)).astype(np.int64)
        sizes = index.edges.sizes(block)
        starts = np.cumsum(sizes) - sizes
        low[done : done + len(block)] = np.minimum.reduceat(pairs.min(axis=1), starts)
        high[done : done + len(block)] = np.maximum.reduceat(pairs.max(axis=1), starts)
        done += len(block)
    return Extent(samples, low, high)


def _missing_value(place: StoredField, dtype: np.dtype[Any]) -> float | None:
    field_ = FIELDS.get(place.name)
    missing = ("nan" if dtype.kind == "f" else "refuse") if field_ is None else field_.missing
    return {"nan": math.nan, "zero": 0.0}.get(missing)


# What repairs ---------------------------------------------------------------------------------------------------


def _resize(group: zarr.Group, path: str, rows: int) -> None:
    array = stored_array(group, path, path)
    array.resize((rows, *array.shape[1:]))


def _mask_writer(path: str, wanted: NDArray[np.bool_]) -> Fix:
    def fix(group: zarr.Group) -> None:
        if path in group:
            _resize(group, path, len(wanted))
        else:
            group.create_array(path, shape=wanted.shape, dtype=np.bool_)
        if len(wanted):
            stored_array(group, path, path)[:] = wanted

    return fix


def _filler(path: str, length: int, rows: int, value: float) -> Fix:
    def fix(group: zarr.Group) -> None:
        _resize(group, path, rows)
        array = stored_array(group, path, path)
        for begin in range(length, rows, _BLOCK):
            array[begin : min(begin + _BLOCK, rows)] = value

    return fix


def _renumberer(path: str, extent: Extent, found: NumberShifts, edges: Segments) -> Fix:
    def fix(group: zarr.Group) -> None:
        array = stored_array(group, path, path)
        shifts = np.zeros(len(edges.ptr) - 1, dtype=np.int64)
        shifts[extent.samples] = found.shifts
        changed = np.flatnonzero(shifts)
        for samples in _blocks(np.arange(changed[0], changed[-1] + 1), edges):
            begin, end = int(edges.ptr[samples[0]]), int(edges.ptr[samples[-1] + 1])
            if shifts[samples].any():
                moved = np.asarray(array[begin:end]) + np.repeat(shifts[samples], edges.sizes(samples))[:, None]
                array[begin:end] = moved.astype(array.dtype)

    return fix
