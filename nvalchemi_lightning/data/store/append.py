"""Adding blocks of structures to an open store; nothing counts before the commit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import zarr
from numpy.typing import NDArray
from torch import Tensor

from nvalchemi_lightning.data.batch import Batch
from nvalchemi_lightning.data.collate import fill_rows
from nvalchemi_lightning.data.edge_cutoff import reach_of
from nvalchemi_lightning.data.elements import standard_masses
from nvalchemi_lightning.data.fields import FIELDS, Level
from nvalchemi_lightning.data.store.arrays import array_of, create_array
from nvalchemi_lightning.data.store.layout import (
    DERIVED_FIELDS,
    EDGES_REACH,
    StoredField,
    ZarrWriteConfig,
    committed_samples,
    declared_levels,
    edges_reach,
    last_pointer,
    pin_attributes,
    stored_array,
    stored_fields,
)
from nvalchemi_lightning.errors import DataError, StoreError

__all__ = ["Appender"]


class Appender:
    """Adds blocks of structures behind those that a store has; commits as often as it is told to.

    Blocks write the rows of their fields; pointers, masks and last the attributes, which are what readers believe,
    are written by :meth:`commit`. What an earlier write left behind without a commit is overwritten.

    Parameters
    ----------
    group : zarr.Group
        The store, open for writing.
    name : str
        Named in messages.
    config : ZarrWriteConfig
        How new arrays are chunked.

    Raises
    ------
    StoreError
        If the store lacks arrays, or has levels of its own, which cannot be extended.
    """

    def __init__(self, group: zarr.Group, name: str, config: ZarrWriteConfig) -> None:
        if group.attrs.get("levels"):
            raise StoreError(f"{name} has levels of its own beside atom, edge and system; it cannot be appended to")
        self._group = group
        self._name = name
        self._config = config
        self._fields = stored_fields(group, name)
        self._arrays = {field: stored_array(group, place.path, name) for field, place in self._fields.items()}
        samples = committed_samples(group, name)
        self._rows: dict[Level, int] = {
            "node": last_pointer(group, "atoms", samples, name),
            "edge": last_pointer(group, "edges", samples, name),
            "system": samples,
        }
        self._committed = dict(self._rows)
        self._is_pinned = False
        self._added: dict[Level, list[NDArray[np.int64]]] = {"node": [], "edge": []}
        self._reaches: list[float | None] = [edges_reach(group)] if samples else []

    def add(self, batch: Batch) -> None:
        """Write the structures of a batch; everything is checked before anything is written.

        Raises
        ------
        DataError
            If the batch does not fit the store; names the field.
        """
        given = {name: array_of(value, name) for name, value in batch if name not in DERIVED_FIELDS}
        levels = batch.field_levels
        rows = {name: self._checked(name, given, batch) for name in self._fields}
        new = {name: self._fill_value(name, given[name].dtype) for name in given if name not in rows}
        self._pin()
        for name, fill_value in new.items():
            self._create(name, levels[name], given[name], fill_value)
        for name, values in {**rows, **{name: given[name] for name in new}}.items():
            self._write(name, values)
        self._advance("node", batch.num_nodes_per_graph)
        edges = "edge" in levels.values()
        self._advance("edge", batch.num_edges_per_graph if edges else torch.zeros(batch.num_graphs, dtype=torch.int64))
        self._rows["system"] += batch.num_graphs
        self._reaches.append(reach_of(batch))

    def _pin(self) -> None:
        if not self._is_pinned:
            pin_attributes(self._group, self._name)
            self._is_pinned = True

    def _checked(self, name: str, given: dict[str, NDArray[Any]], batch: Batch) -> NDArray[Any]:
        """Return the rows of a field that the store has, filled in where the batch lacks it."""
        array, level = self._arrays[name], self._fields[name].level
        if name not in given:
            return self._missing(name, batch)
        rows = given[name]
        if batch.field_levels[name] != level:
            raise DataError(f"{name!r} is on the level {batch.field_levels[name]!r} but in {self._name} on {level!r}")
        if rows.shape[1:] != array.shape[1:]:
            raise DataError(
                f"{name!r} has rows of shape {rows.shape[1:]} but in {self._name} they have {array.shape[1:]}"
            )
        if not np.can_cast(rows.dtype, array.dtype, "safe"):
            raise DataError(
                f"{name!r} is {rows.dtype} but {self._name} stores it as {array.dtype}, which would lose digits; "
                "convert it before writing"
            )
        return rows

    def _missing(self, name: str, batch: Batch) -> NDArray[Any]:
        array = self._arrays[name]
        like = torch.from_numpy(np.empty((0, *array.shape[1:]), dtype=array.dtype))
        try:
            return array_of(fill_rows(name, self._fields[name].level, batch, like, 0), name)
        except DataError as error:
            raise DataError(
                f"the structures have no {name!r} but {self._name} has it, and no value of it means 'missing'; give it "
                "to all structures"
            ) from error

    def _fill_value(self, name: str, dtype: np.dtype[Any]) -> float:
        """Return what a new field reads as for the structures that are there already."""
        if self._rows["system"] == 0:
            return 0.0
        field = FIELDS.get(name)
        missing = field.missing if field is not None else ("nan" if dtype.kind == "f" else "refuse")
        if missing == "refuse":
            raise DataError(
                f"{name!r} is new to {self._name}, whose {self._rows['system']} structures have no value for it; leave "
                "it out, add it to them first with add_custom, or make it a floating field"
            )
        return math.nan if missing == "nan" else 0.0

    def _create(self, name: str, level: Level, like: NDArray[Any], fill_value: float) -> None:
        place = StoredField(name, "core", level)
        rows = np.empty((0, *like.shape[1:]), dtype=like.dtype)
        if name in FIELDS and FIELDS[name].missing == "mass":
            numbers = np.asarray(self._arrays["atomic_numbers"][: self._rows["node"]])
            rows = array_of(standard_masses(torch.from_numpy(numbers), torch.from_numpy(rows).dtype), name)
        self._fields[name] = place
        self._arrays[name] = create_array(self._group, place.path, rows, self._config, fill_value)

    def _write(self, name: str, values: NDArray[Any]) -> None:
        array, start = self._arrays[name], self._rows[self._fields[name].level]
        if name == "neighbor_list":
            values = self._store_global(values, array.dtype)
        array.resize((start + len(values), *array.shape[1:]))
        if values.size:
            array[start:] = values

    def _store_global(self, neighbors: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
        shifted: NDArray[Any] = np.add(neighbors, self._rows["node"], dtype=dtype)
        return shifted

    def _advance(self, level: Level, sizes: Tensor) -> None:
        counts = array_of(sizes, f"number of {level} rows").astype(np.int64)
        self._added[level].append(counts)
        self._rows[level] += int(counts.sum())

    def commit(self) -> None:
        """Make the blocks count: pointers and masks, then in one write the number of structures and the fields."""
        samples = self._committed["system"]
        kinds: dict[Level, str] = {"node": "atoms", "edge": "edges"}
        for level, kind in kinds.items():
            sizes = np.concatenate([np.zeros(0, dtype=np.int64), *self._added[level]])
            self._extend(f"meta/{kind}_ptr", samples + 1, self._committed[level] + np.cumsum(sizes))
            self._extend(f"meta/{kind}_mask", self._committed[level], np.ones(int(sizes.sum()), dtype=np.bool_))
        self._extend("meta/samples_mask", samples, np.ones(self._rows["system"] - samples, dtype=np.bool_))
        declared: dict[str, Any] = {"num_samples": self._rows["system"], "fields": declared_levels(self._fields)}
        self._group.update_attributes({**declared, **self._reach()})
        self._committed = dict(self._rows)
        self._added = {"node": [], "edge": []}

    def _reach(self) -> dict[str, float | None]:
        """Return what to note about the cutoff of the stored edges."""
        known = [reach for reach in self._reaches if reach is not None]
        if len(known) == len(self._reaches):
            return {EDGES_REACH: min(known)}
        return {EDGES_REACH: None} if EDGES_REACH in self._group.attrs else {}

    def _extend(self, path: str, start: int, values: NDArray[Any]) -> None:
        array = stored_array(self._group, path, self._name)
        array.resize((start + len(values),))
        if len(values):
            array[start:] = values
