"""Writing structures to a Zarr store."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np
import zarr
from numpy.typing import NDArray
from torch import Tensor

from nvalchemi_lightning.data.atomic_data import AtomicData
from nvalchemi_lightning.data.batch import Batch
from nvalchemi_lightning.data.indices import IndexLike, resolve_indices
from nvalchemi_lightning.data.zarr_append import Appender
from nvalchemi_lightning.data.zarr_arrays import array_of, create_array, create_store
from nvalchemi_lightning.data.zarr_layout import (
    LEVEL_NAMES,
    StoredField,
    ZarrArrayConfig,
    ZarrStoreLike,
    ZarrWriteConfig,
    committed_samples,
    declared_levels,
    last_pointer,
    local_path,
    open_store,
    store_name,
    stored_array,
    stored_fields,
)
from nvalchemi_lightning.errors import ConfigurationError, ConfigurationTypeError, DataError, UnknownNameError, nearest

__all__ = ["AtomicDataZarrWriter", "Structures", "ZarrArrayConfig", "ZarrWriteConfig"]

Structures: TypeAlias = "AtomicData | Batch | Iterable[AtomicData | Batch]"


class AtomicDataZarrWriter:
    """Writes structures to a store, adds to it and deletes from it.

    Parameters
    ----------
    store : str, PathLike, zarr Store, StorePath or dict
        Where to.
    config : ZarrWriteConfig, optional
        Chunks and codecs of new arrays; default: Zstandard and chunks of about 64 kB, which suit random reads of
        small structures.

    Notes
    -----
    All fields of the structures are stored except ``info`` and neighbor matrices, whose atom numbers have a meaning
    in one batch only. ``neighbor_list`` is stored with atom numbers that count through the store.

    A field that only some structures have is NaN for the others where it is a label, and its documented default
    otherwise. A field whose type has no such value (an integer field of your own, edge fields) must be given for all
    structures or none.

    One writer at a time. Readers see what was there when they opened the store.
    """

    def __init__(self, store: ZarrStoreLike, config: ZarrWriteConfig | None = None) -> None:
        self._store = store
        self._config = config if config is not None else ZarrWriteConfig()

    @property
    def name(self) -> str:
        """What messages call the store: its path where it has one."""
        return store_name(self._store)

    def write(self, structures: Structures) -> None:
        """Make a new store.

        Parameters
        ----------
        structures : AtomicData, Batch, or iterable of either
            At least one structure. An iterator is drawn in blocks, so it may be larger than the memory.

        Raises
        ------
        FileExistsError
            If there is something at the path.
        DataError
            If there are no structures, or they do not fit together.
        ConfigurationTypeError
            If something else than structures is given.

        Notes
        -----
        A store in the file system is written beside its place under a hidden name and renamed at the end, so it is
        there as a whole or not at all.
        """
        path = local_path(self._store)
        if path is None:
            self._fill(create_store(self._store, self._config), structures)
            return
        if path.exists():
            raise FileExistsError(f"{path} exists; append to it, remove it, or choose another path")
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
        try:
            self._fill(create_store(partial, self._config), structures)
            partial.rename(path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def append(self, structures: Structures) -> None:
        """Add structures behind those that the store has.

        Parameters
        ----------
        structures : AtomicData, Batch, or iterable of either
            At least one structure.

        Raises
        ------
        FileNotFoundError
            If there is no store.
        DataError
            If there are no structures, or they do not fit the store: a dtype that would lose digits, another shape,
            or a field without a value that means "missing". The store then is what it was.
        ConfigurationTypeError
            If something else than structures is given.
        StoreError
            If the store is damaged.

        Notes
        -----
        All or nothing: the number of structures is written last, and rows beyond it do not count.
        """
        self._fill(open_store(self._store, "r+"), structures)

    def _fill(self, group: zarr.Group, structures: Structures) -> None:
        appender = Appender(group, self.name, self._config)
        empty = True
        for block in _blocks(structures, self._config.block_size):
            appender.add(block)
            empty = False
        if empty:
            raise DataError(f"there are no structures to write to {self.name}")
        appender.commit()

    def add_custom(self, key: str, values: Tensor, level: str) -> None:
        """Add a field for the structures that the store has, deleted ones included.

        Parameters
        ----------
        key : str
            Name of the field.
        values : Tensor
            One row for every stored atom, edge or structure.
        level : {"atom", "edge", "system"}
            What a row belongs to.

        Raises
        ------
        FileNotFoundError
            If there is no store.
        ConfigurationError
            If the name is taken or cannot be a name.
        UnknownNameError
            If the level does not exist.
        DataError
            If the number of rows is wrong.
        """
        if level not in LEVEL_NAMES:
            raise UnknownNameError(
                f"level must be one of {', '.join(LEVEL_NAMES)}, got {level!r}{nearest(level, LEVEL_NAMES)}"
            )
        if not key.isidentifier():
            raise ConfigurationError(f"a field must be named like a Python variable, got {key!r}")
        group = open_store(self._store, "r+")
        fields = stored_fields(group, self.name)
        if key in fields:
            raise ConfigurationError(f"{self.name} has a field {key!r} already")
        expected = self._level_rows(group)[level]
        rows = array_of(values, key)
        if not rows.ndim or len(rows) != expected:
            raise DataError(f"{key!r} must have {expected} rows, one per stored {level}, got shape {rows.shape}")
        create_array(group, f"custom/{key}", rows, self._config)
        # What a store declares beside the two groups, for levels of its own, stays.
        declared: Any = group.attrs.get("fields", {})
        new = declared_levels({**fields, key: StoredField(key, "custom", LEVEL_NAMES[level])})
        group.attrs["fields"] = {**declared, **new}

    def _level_rows(self, group: zarr.Group) -> dict[str, int]:
        samples = committed_samples(group, self.name)
        return {
            "atom": last_pointer(group, "atoms", samples, self.name),
            "edge": last_pointer(group, "edges", samples, self.name),
            "system": samples,
        }

    def delete(self, indices: IndexLike) -> None:
        """Delete structures: readers skip them and their rows become zeros.

        Parameters
        ----------
        indices : int, slice, sequence of int, array, tensor or boolean mask
            Positions among all stored structures, deleted ones included (``physical_index``). Deleting one twice has
            no effect.

        Raises
        ------
        FileNotFoundError
            If there is no store.
        IndexError
            If there is no such structure.
        """
        group = open_store(self._store, "r+")
        samples = np.unique(resolve_indices(indices, committed_samples(group, self.name), self.name))
        if not len(samples):
            return
        # The mask first: what readers go by is then right even if the rest is interrupted.
        _fill_rows(stored_array(group, "meta/samples_mask", self.name), _runs(samples, samples + 1))
        runs = {"system": _runs(samples, samples + 1)}
        for level, kind in (("node", "atoms"), ("edge", "edges")):
            ptr = np.asarray(stored_array(group, f"meta/{kind}_ptr", self.name)[:])
            runs[level] = _runs(ptr[samples], ptr[samples + 1])
            _fill_rows(stored_array(group, f"meta/{kind}_mask", self.name), runs[level])
        for field in stored_fields(group, self.name).values():
            _fill_rows(stored_array(group, field.path, self.name), runs[field.level])


def _blocks(structures: Structures, size: int) -> Iterator[Batch]:
    """Collate structures in blocks of ``size``; batches pass as they are."""
    if isinstance(structures, (AtomicData, Batch)):
        structures = [structures]
    if not isinstance(structures, Iterable):
        raise ConfigurationTypeError(f"structures must be AtomicData or a Batch, or several; got {_kind(structures)}")
    pending: list[AtomicData] = []
    for position, structure in enumerate(structures):
        if isinstance(structure, AtomicData):
            pending.append(structure)
        elif not isinstance(structure, Batch):
            raise ConfigurationTypeError(f"structure {position} is {_kind(structure)}, not AtomicData or a Batch")
        if pending and (len(pending) == size or isinstance(structure, Batch)):
            yield Batch.from_data_list(pending)
            pending = []
        if isinstance(structure, Batch):
            yield structure
    if pending:
        yield Batch.from_data_list(pending)


def _kind(value: object) -> str:
    return type(value).__name__


def _runs(starts: NDArray[np.int64], stops: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Merge ascending ranges that touch."""
    first = np.concatenate(([True], starts[1:] != stops[:-1]))
    last = np.concatenate((first[1:], [True]))
    return list(zip(starts[first].tolist(), stops[last].tolist(), strict=True))


def _fill_rows(array: zarr.Array[Any], runs: list[tuple[int, int]]) -> None:
    for start, stop in runs:
        if stop > start:
            array[start:stop] = 0
