"""Looking into a Zarr store without making structures: pointers and labels are read, positions are not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from nvalchemi_lightning.data.conversion.provenance import PROVENANCE
from nvalchemi_lightning.data.fields import Level
from nvalchemi_lightning.data.inspection.report import Inspection, StorageReport, described, summarized
from nvalchemi_lightning.data.inspection.tally import Block, Tally, is_label
from nvalchemi_lightning.data.store.layout import (
    StoredField,
    ZarrStoreLike,
    committed_samples,
    open_store,
    store_name,
    stored_array,
    stored_fields,
)
from nvalchemi_lightning.errors import StoreError

__all__ = ["inspect_store"]
_WINDOW = 2**16
"""Atoms and edges that are looked at together; bounds the memory."""


def inspect_store(store: ZarrStoreLike) -> Inspection:
    """Look into a store.

    Parameters
    ----------
    store : str, PathLike, zarr Store, StorePath or dict
        The store.

    Raises
    ------
    FileNotFoundError
        If there is nothing at the path.
    StoreError
        If it is not a store of structures, or is damaged.
    DataError
        If it holds no structures.
    """
    name = store_name(store)
    group = open_store(store, "r")
    fields = stored_fields(group, name)
    arrays = {field: stored_array(group, place.path, name) for field, place in fields.items()}
    rows = _Rows(group, name)
    rows.check(fields, arrays)
    tally = Tally()
    for block in rows.blocks(fields, arrays):
        tally.add(block)
    found = {
        field: described(tally, field, fields[field].level, str(array.dtype), array.shape[1:], _storage(array))
        for field, array in arrays.items()
    }
    provenance = group.attrs.get(PROVENANCE)
    return summarized(
        tally,
        name,
        found,
        deleted=int((~rows.active).sum()),
        provenance=provenance if isinstance(provenance, dict) else None,
        bytes=sum(array.nbytes_stored() for _, array in group.members(max_depth=None) if isinstance(array, zarr.Array)),
    )


class _Rows:
    """Which rows of the arrays belong to which structure."""

    def __init__(self, group: zarr.Group, name: str) -> None:
        self._name = name
        self._count = committed_samples(group, name)
        self.active: NDArray[np.bool_] = np.asarray(stored_array(group, "meta/samples_mask", name)[: self._count])
        self._ptr = {
            level: np.asarray(stored_array(group, f"meta/{kind}_ptr", name)[: self._count + 1]).astype(np.int64)
            for level, kind in (("node", "atoms"), ("edge", "edges"))
        }
        self._ptr["system"] = np.arange(self._count + 1)
        for level, ptr in self._ptr.items():
            if len(ptr) != self._count + 1 or (np.diff(ptr) < 0).any():
                raise StoreError(f"{name}: the pointers of the {level} level do not ascend over {self._count} samples")

    def check(self, fields: Mapping[str, StoredField], arrays: Mapping[str, zarr.Array[Any]]) -> None:
        """Refuse arrays that are shorter than the pointers say."""
        for name, array in arrays.items():
            expected = int(self._ptr[fields[name].level][-1])
            if array.shape[0] < expected:
                raise StoreError(
                    f"{self._name}: {fields[name].path} has {array.shape[0]} rows but {self._count} samples need "
                    f"{expected}; the store is damaged"
                )

    def blocks(self, fields: Mapping[str, StoredField], arrays: Mapping[str, zarr.Array[Any]]) -> Iterator[Block]:
        """Yield the structures that are not deleted, some at a time."""
        labels = [name for name, array in arrays.items() if is_label(name, array.dtype)]
        levels = {name: fields[name].level for name in labels}
        for window in self._windows():
            read = {
                name: self._rows(window, fields[name].level, arrays[name])
                for name in (*labels, "atomic_numbers", "pbc")
                if name in arrays
            }
            active = self.active[window]
            yield Block(
                sizes=self._sizes("node", window)[active],
                edges=self._sizes("edge", window)[active],
                numbers=read["atomic_numbers"],
                pbc=read.get("pbc"),
                labels={name: read[name] for name in labels},
                levels=levels,
            )

    def _windows(self) -> Iterator[slice]:
        rows = self._ptr["node"] + self._ptr["edge"] + self._ptr["system"]
        start = 0
        while start < self._count:
            stop = int(np.searchsorted(rows, rows[start] + _WINDOW, side="right")) - 1
            stop = max(stop, start + 1)
            yield slice(start, stop)
            start = stop

    def _sizes(self, level: Level, window: slice) -> NDArray[np.int64]:
        return np.diff(self._ptr[level][window.start : window.stop + 1])

    def _rows(self, window: slice, level: Level, array: zarr.Array[Any]) -> NDArray[Any]:
        first, end = self._ptr[level][[window.start, window.stop]].tolist()
        active = np.repeat(self.active[window], self._sizes(level, window))
        rows: NDArray[Any] = np.asarray(array[first:end])[active]
        return rows


def _storage(array: zarr.Array[Any]) -> StorageReport:
    codecs = [type(codec).__name__.removesuffix("Codec").lower() for codec in array.compressors]
    return StorageReport(
        chunk_rows=array.chunks[0], codec=", ".join(codecs) or "none", bytes=int(array.nbytes_stored())
    )
