"""How structures lie in a Zarr store: names, levels, options for writing, and opening with checks.

::

    <store>/            attributes: num_samples (the commit marker) and fields {"core"|"custom": {name: level}}
      meta/             atoms_ptr [N+1], edges_ptr [N+1], samples_mask [N], atoms_mask [V], edges_mask [E]
      core/<field>      what the structures were written with
      custom/<field>    arrays added later

N counts the stored structures, deleted ones included; V and E are their atoms and edges. Arrays of level "atom" have
V rows, "edge" E rows, "system" N rows. ``neighbor_list`` holds atom numbers of the whole store. Only the first
``num_samples`` structures count: rows beyond them are the remains of a write that did not finish.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import zarr
import zarr.abc.store
import zarr.storage
from pydantic import ConfigDict, Field, PositiveInt, model_validator

from nvalchemi_lightning.data.fields import FIELDS, Level
from nvalchemi_lightning.data.store.swap import hidden_siblings
from nvalchemi_lightning.errors import ConfigurationError, StoreError
from nvalchemi_lightning.strict_model import StrictModel

__all__ = [
    "DERIVED_FIELDS",
    "EDGES_REACH",
    "LEVEL_NAMES",
    "REPAIR_HINT",
    "REQUIRED_ARRAYS",
    "STORE_LEVELS",
    "StoredField",
    "ZarrArrayConfig",
    "ZarrStoreLike",
    "ZarrWriteConfig",
    "committed_samples",
    "declared_fields",
    "declared_levels",
    "edges_reach",
    "last_pointer",
    "local_path",
    "open_store",
    "own_levels",
    "pin_attributes",
    "store_name",
    "stored_array",
    "stored_fields",
]

ZarrStoreLike: TypeAlias = "str | os.PathLike[str] | dict[str, Any] | zarr.abc.store.Store | zarr.storage.StorePath"

LEVEL_NAMES: dict[str, Level] = {"atom": "node", "edge": "edge", "system": "system"}
"""Level as the store spells it to level of a batch."""

STORE_LEVELS: dict[Level, str] = {level: name for name, level in LEVEL_NAMES.items()}

EDGES_REACH = "neighbor_list_cutoff"
"""Attribute of a store that notes the cutoff of its edges [A]; nvalchemi-toolkit ignores it."""

DERIVED_FIELDS = frozenset({"neighbor_matrix", "neighbor_matrix_shifts", "num_neighbors"})
"""Fields that a store has no place for: their atom numbers have a meaning in one batch only."""

REPAIR_HINT = "repair_store(...) of nvalchemi_lightning.data says what is wrong with the store and mends what it can"

REQUIRED_ARRAYS = ("meta/atoms_ptr", "meta/edges_ptr", "meta/samples_mask", "core/atomic_numbers", "core/positions")


class ZarrArrayConfig(StrictModel):
    """How arrays of one group are chunked and encoded.

    Attributes
    ----------
    compressors : object, default "auto"
        Handed to Zarr, such as ``zarr.codecs.ZstdCodec()``; None stores plain bytes. "auto" is plain bytes for
        floating fields, whose digits hardly compress, and Zstandard for others.
    filters, serializer : object, default "auto"
        Handed to Zarr; "auto" is its default.
    chunk_size : int or None, default None
        Rows of a chunk; None chooses them so that a chunk has about ``ZarrWriteConfig.chunk_bytes``.
    shard_size : int or None, default None
        Rows of a shard, a multiple of ``chunk_size``: fewer files, slower random reads.
    write_empty_chunks : bool, default True
        Whether chunks of zeros are written.
    """

    model_config = ConfigDict(frozen=True)

    compressors: Any = "auto"
    filters: Any = "auto"
    serializer: Any = "auto"
    chunk_size: PositiveInt | None = None
    shard_size: PositiveInt | None = None
    write_empty_chunks: bool = True

    @model_validator(mode="after")
    def _check_shards(self) -> ZarrArrayConfig:
        if self.shard_size is None:
            return self
        if self.chunk_size is None or self.shard_size % self.chunk_size:
            raise ConfigurationError(
                f"shard_size={self.shard_size} must be a multiple of chunk_size, which is {self.chunk_size}"
            )
        return self


class ZarrWriteConfig(StrictModel):
    """Options for writing a store.

    Attributes
    ----------
    meta, core, custom : ZarrArrayConfig
        Options of the arrays in each group.
    field_overrides : dict of str to ZarrArrayConfig
        Options of single fields, by name; they win over those of the group.
    chunk_bytes : int, default 65536
        Size of a chunk, before compression, whose rows are not given. A random read decodes whole compressed chunks, so
        small ones suit shuffled training; of others it reads what it needs, so larger ones only mean fewer files.
    block_size : int, default 1024
        Structures that are collated and written at a time; bounds the memory that writing needs.
    """

    model_config = ConfigDict(frozen=True)

    meta: ZarrArrayConfig = ZarrArrayConfig()
    core: ZarrArrayConfig = ZarrArrayConfig()
    custom: ZarrArrayConfig = ZarrArrayConfig()
    field_overrides: dict[str, ZarrArrayConfig] = Field(default_factory=dict)
    chunk_bytes: PositiveInt = 64 * 1024
    block_size: PositiveInt = 1024


@dataclass(frozen=True)
class StoredField:
    """Where a field lies in a store.

    Attributes
    ----------
    name : str
        Name of the field.
    group : {"core", "custom"}
        Group of its array.
    level : {"node", "edge", "system"}
        Level of its rows.
    """

    name: str
    group: Literal["core", "custom"]
    level: Level

    @property
    def path(self) -> str:
        """Path of the array inside the store."""
        return f"{self.group}/{self.name}"


def local_path(store: ZarrStoreLike) -> Path | None:
    """Return the folder of a store in the file system, or None if it lies elsewhere."""
    if isinstance(store, zarr.storage.StorePath) and isinstance(store.store, zarr.storage.LocalStore):
        return store.store.root / store.path
    if isinstance(store, zarr.storage.LocalStore):
        return store.root
    return Path(store) if isinstance(store, (str, os.PathLike)) and "://" not in str(store) else None


def store_name(store: ZarrStoreLike) -> str:
    """Return what messages call the store."""
    path = local_path(store)
    if path is not None:
        return str(path)
    return str(store) if isinstance(store, (str, os.PathLike)) else f"<{type(store).__name__}>"


def open_store(store: ZarrStoreLike, mode: Literal["r", "r+"]) -> zarr.Group:
    """Open an existing store and check that it has the arrays without which it has no meaning.

    Only metadata is read, never a chunk.

    Raises
    ------
    FileNotFoundError
        If there is nothing at the path.
    StoreError
        If it is not a Zarr group, or a required array is missing.
    """
    path = local_path(store)
    if path is not None and not path.exists():
        raise FileNotFoundError(f"there is no Zarr store at {path}{_renamed(path)}")
    try:
        # A consolidated copy of the metadata is not told when an array grows.
        group = zarr.open_group(store, mode=mode, use_consolidated=False)
    except (FileNotFoundError, ValueError) as error:
        raise StoreError(f"{store_name(store)} is not a Zarr group; give the folder that the writer made") from error
    missing = [name for name in REQUIRED_ARRAYS if name not in group]
    if missing:
        raise StoreError(
            f"{store_name(store)} has no array {', '.join(missing)}; it is not a store of structures, or is damaged"
        )
    return group


def _renamed(path: Path) -> str:
    interrupted = hidden_siblings(path, "old")
    return f", but {interrupted[0].name} beside it: defragment() was interrupted. {REPAIR_HINT}" if interrupted else ""


def stored_fields(group: zarr.Group, name: str) -> dict[str, StoredField]:
    """Return the fields of a store that a batch has a place for: :func:`declared_fields` without the derived ones.

    Raises
    ------
    StoreError
        If a level is unknown.
    """
    fields = declared_fields(group, name)
    return {field: place for field, place in fields.items() if field not in DERIVED_FIELDS}


def declared_fields(group: zarr.Group, name: str) -> dict[str, StoredField]:
    """Return the fields of a store by name.

    Levels come from the attribute ``fields``; a store without it is legal, then the field's name decides. Fields on
    levels of the store's own are left out.

    Raises
    ------
    StoreError
        If a level is unknown.
    """
    declared = group.attrs.get("fields")
    found = {}
    for part in ("core", "custom"):
        levels = declared.get(part, {}) if isinstance(declared, dict) else _levels_by_name(group, part)
        for field, level in levels.items():
            if level not in LEVEL_NAMES:
                raise StoreError(
                    f"{name}: field {part}/{field} has level {level!r}; known are {', '.join(LEVEL_NAMES)}"
                )
            found[field] = StoredField(field, part, LEVEL_NAMES[level])
    return found


def own_levels(group: zarr.Group) -> dict[str, list[str]]:
    """Return the fields on each of the levels that a store has beside atom, edge and system."""
    definitions: Any = group.attrs.get("levels")
    declared: Any = group.attrs.get("fields")
    names = definitions.get("definitions", {}) if isinstance(definitions, dict) else {}
    fields = declared.get("levels", {}) if isinstance(declared, dict) else {}
    return {level: [field for field, home in fields.items() if home == level] for level in names}


def _levels_by_name(group: zarr.Group, part: str) -> dict[str, str]:
    arrays = group.get(part)
    if not isinstance(arrays, zarr.Group):
        return {}
    unknown = "atom" if part == "core" else "system"
    names = sorted(name for name, _ in arrays.arrays())
    return {name: STORE_LEVELS[FIELDS[name].level] if name in FIELDS else unknown for name in names}


def stored_array(group: zarr.Group, path: str, name: str) -> zarr.Array[Any]:
    """Return one array of a store.

    Raises
    ------
    StoreError
        If there is no such array.
    """
    found = group.get(path)
    if not isinstance(found, zarr.Array):
        raise StoreError(f"{name}: the array {path} is missing; the store is damaged")
    return found


def committed_samples(group: zarr.Group, name: str) -> int:
    """Return the number of structures that were written completely.

    Raises
    ------
    StoreError
        If the commit marker is not a count, or the pointers are shorter than it says.
    """
    rows = stored_array(group, "meta/samples_mask", name).shape[0]
    count = group.attrs.get("num_samples", rows)
    if not isinstance(count, int) or count < 0:
        raise StoreError(f"{name}: attribute num_samples is {count!r}, which is not a count")
    if count > rows:
        raise StoreError(f"{name}: num_samples is {count} but meta/samples_mask has only {rows} rows")
    return count


def pin_attributes(group: zarr.Group, name: str) -> None:
    """Write down what a store without attributes says by its arrays, so that unfinished additions do not count."""
    absent = {"num_samples", "fields"} - set(group.attrs)
    if absent:
        implied = {
            "num_samples": committed_samples(group, name),
            "fields": declared_levels(declared_fields(group, name)),
        }
        group.update_attributes({key: implied[key] for key in absent})


def last_pointer(group: zarr.Group, kind: Literal["atoms", "edges"], samples: int, name: str) -> int:
    """Return the number of atoms or edges of the first ``samples`` structures.

    Raises
    ------
    StoreError
        If the pointers are shorter than the number of structures says.
    """
    pointers = stored_array(group, f"meta/{kind}_ptr", name)
    if pointers.shape[0] <= samples:
        raise StoreError(f"{name}: meta/{kind}_ptr has {pointers.shape[0]} rows but {samples} samples need one more")
    return int(np.asarray(pointers[samples]))


def edges_reach(group: zarr.Group) -> float | None:
    """Return the cutoff of the stored edges [A]; None where it is not noted."""
    noted = group.attrs.get(EDGES_REACH)
    return float(noted) if isinstance(noted, (int, float)) else None


def declared_levels(fields: Mapping[str, StoredField]) -> dict[str, dict[str, str]]:
    """Return the attribute ``fields`` that declares these fields."""
    declared: dict[str, dict[str, str]] = {"core": {}, "custom": {}}
    for name, field in fields.items():
        declared[field.group][name] = STORE_LEVELS[field.level]
    return declared
