"""Writing structures to a Zarr store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np
import zarr
from torch import Tensor

from nvalchemi_lightning.data.atomic_data import AtomicData
from nvalchemi_lightning.data.batch import Batch
from nvalchemi_lightning.data.indices import IndexLike, resolve_indices
from nvalchemi_lightning.data.store.append import Appender
from nvalchemi_lightning.data.store.arrays import array_of, create_array, create_store
from nvalchemi_lightning.data.store.defragment import copy_active, verify_copy
from nvalchemi_lightning.data.store.delete import delete_samples
from nvalchemi_lightning.data.store.layout import (
    LEVEL_NAMES,
    ZarrArrayConfig,
    ZarrStoreLike,
    ZarrWriteConfig,
    committed_samples,
    last_pointer,
    local_path,
    open_store,
    pin_attributes,
    store_name,
    stored_fields,
)
from nvalchemi_lightning.data.store.swap import built_beside, place_store, replace_store, writing
from nvalchemi_lightning.errors import ConfigurationError, ConfigurationTypeError, DataError, UnknownNameError, nearest

__all__ = ["AtomicDataZarrWriter", "Structures", "ZarrArrayConfig", "ZarrWriteConfig"]

_NOTHING = "there is no store"
_UNFINISHED = "what is there holds no structures, and the next write replaces it"
_COPY = "write what AtomicDataZarrReader reads from it to another place"

Structures: TypeAlias = "AtomicData | Batch | Iterable[AtomicData | Batch]"


class AtomicDataZarrWriter:
    """Writes structures to a store, adds to it, deletes from it and rewrites it.

    Parameters
    ----------
    store : str, PathLike, zarr Store, StorePath or dict
        Where to.
    config : ZarrWriteConfig, optional
        Chunks and codecs of new arrays; the defaults suit random reads of small structures.

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
        StoreWriteError
            If the file system refuses; there is then no store.

        Notes
        -----
        A store in the file system is written beside its place under a hidden name and renamed at the end, so it is
        there as a whole or not at all.
        """
        path = local_path(self._store)
        if path is None:
            self._fill(create_store(self._store, self._config), structures, _UNFINISHED)
            return
        if path.exists():
            raise FileExistsError(f"{path} exists; append to it, remove it, or choose another path")
        with built_beside(path) as partial:
            with writing(self.name, _NOTHING):
                path.parent.mkdir(parents=True, exist_ok=True)
                group = create_store(partial, self._config)
            self._fill(group, structures, _NOTHING)
            with writing(self.name, _NOTHING):
                place_store(partial, path)

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
        StoreWriteError
            If the file system refuses; the store then is what it was.

        Notes
        -----
        All or nothing: the number of structures is written last, and rows beyond it do not count.
        """
        self._fill(open_store(self._store, "r+"), structures, "the store holds what it did before")

    def _fill(self, group: zarr.Group, structures: Structures, state: str) -> None:
        appender = Appender(group, self.name, self._config)
        empty = True
        # Outside of writing(): what goes wrong while structures are drawn is theirs.
        for block in _blocks(structures, self._config.block_size):
            with writing(self.name, state):
                appender.add(block)
            empty = False
        if empty:
            raise DataError(f"there are no structures to write to {self.name}")
        with writing(self.name, state):
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
        StoreWriteError
            If the file system refuses; the store then is what it was.
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
        with writing(self.name, "the store holds what it did before"):
            pin_attributes(group, self.name)
            create_array(group, f"custom/{key}", rows, self._config)
            # The field counts once it is declared.
            declared: Any = group.attrs["fields"]
            group.attrs["fields"] = {**declared, "custom": {**declared.get("custom", {}), key: level}}

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
        StoreWriteError
            If the file system refuses; some of the structures may be deleted then, so delete them again.
        """
        group = open_store(self._store, "r+")
        samples = np.unique(resolve_indices(indices, committed_samples(group, self.name), self.name))
        if len(samples):
            with writing(self.name, "each of the structures is deleted or not; call delete again"):
                delete_samples(group, samples, self.name)

    def defragment(self, config: ZarrWriteConfig | None = None) -> None:
        """Rewrite the store without deleted structures and the remains of unfinished writes.

        Parameters
        ----------
        config : ZarrWriteConfig, optional
            New chunks and codecs; default: those that the arrays have.

        Raises
        ------
        FileNotFoundError
            If there is no store.
        ConfigurationError
            If the store is not a local folder.
        StoreError
            If the store is damaged; it is then untouched.
        StoreWriteError
            If the file system refuses, as when there is no space for a second copy; the store is then untouched.

        Notes
        -----
        Physical numbers change, and readers that are open have to be refreshed; they notice. The new store is written
        beside the old one, compared with it bit by bit, and takes its place by renaming, so an interruption at any
        moment loses nothing: at worst the store lies under a hidden name, from which ``repair_store`` fetches it.

        Arrays that the attribute ``fields`` does not declare are not copied: an unfinished ``append`` or
        ``add_custom`` may have left them.
        """
        path = local_path(self._store)
        if path is None:
            raise ConfigurationError(f"{self.name} is not a local folder, so it cannot be rewritten in place; {_COPY}")
        open_store(self._store, "r")
        # A link to a store stays a link.
        path = path.resolve()
        with writing(self.name, "the store is what it was"), built_beside(path) as partial:
            copy_active(path, partial, config)
            verify_copy(path, partial, self._config.block_size)
            replace_store(partial, path)


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
