"""Reading structures from a Zarr store, one or many at a time."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np
import torch
import zarr
from numpy.typing import NDArray
from torch import Tensor

from nvalchemi_lightning.data.batch import Batch
from nvalchemi_lightning.data.edge_cutoff import reaching
from nvalchemi_lightning.data.fields import CORE_FIELDS, LEVELS, Level
from nvalchemi_lightning.data.indices import IndexLike, resolve_indices
from nvalchemi_lightning.data.reader import Reader
from nvalchemi_lightning.data.zarr_chunks import ChunkCache, StoredRows
from nvalchemi_lightning.data.zarr_layout import (
    StoredField,
    ZarrStoreLike,
    committed_samples,
    edges_reach,
    open_store,
    store_name,
    stored_array,
    stored_fields,
)
from nvalchemi_lightning.errors import ConfigurationError, StoreError, UnknownNameError, nearest

__all__ = ["AtomicDataZarrReader", "Reader"]

Levels: TypeAlias = "dict[Level, dict[str, NDArray[Any]]]"


class AtomicDataZarrReader:
    """Random access to the structures of a store; deleted ones are skipped.

    Parameters
    ----------
    store : str, PathLike, zarr Store, StorePath or dict
        The store. With a path the reader pickles to a few hundred bytes.
    fields : iterable of str, optional
        Fields to read; ``positions`` and ``atomic_numbers`` always are. Default: all of them. Leaving out what the
        training does not need, such as ``velocities``, saves time in proportion.
    cache_bytes : int, default 128 MiB
        Memory for decoded chunks, per process. Shuffled reading is fastest when what is read fits.

    Raises
    ------
    FileNotFoundError
        If there is nothing at the path.
    StoreError
        If it is not a store of structures.
    UnknownNameError
        If a name in ``fields`` is not in the store; the message gives the nearest one.
    ConfigurationError
        If ``cache_bytes`` is negative.

    Notes
    -----
    Construction reads metadata alone. Pointers are read on first use and arrays chunk by chunk. What is open belongs
    to one process: a copy that finds itself in another one (a forked or spawned worker) opens the store anew.
    """

    def __init__(
        self, store: ZarrStoreLike, *, fields: Iterable[str] | None = None, cache_bytes: int = 128 * 2**20
    ) -> None:
        if cache_bytes < 0:
            raise ConfigurationError(f"cache_bytes must be 0 or more, got {cache_bytes}")
        self._store = store
        self._only = None if fields is None else tuple(fields)
        self._cache_bytes = cache_bytes
        self._opened: _Opened | None = self._open()

    def _open(self) -> _Opened:
        return _Opened(self._store, self._only, self._cache_bytes)

    @property
    def _here(self) -> _Opened:
        """What is open in this process."""
        # Zarr's event loop and open files do not survive a fork.
        if self._opened is None or self._opened.pid != os.getpid():
            self._opened = self._open()
        return self._opened

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the recipe alone."""
        return {**self.__dict__, "_opened": None}

    def __len__(self) -> int:
        """Return the number of structures that are not deleted."""
        return len(self._here.index.active)

    @property
    def name(self) -> str:
        """What messages call the store: its path where it has one."""
        return store_name(self._store)

    @property
    def field_levels(self) -> dict[str, Level]:
        """Level of every field that is read, by name."""
        return {name: field.level for name, field in self._here.fields.items()}

    @property
    def field_names(self) -> list[str]:
        """Names of the fields that are read."""
        return list(self._here.fields)

    def get_metadata(self, index: int) -> tuple[int, int]:
        """Return the number of atoms and edges of a structure without reading it."""
        opened = self._here
        (sample,) = opened.physical([index])
        return int(opened.index.atoms.sizes[sample]), int(opened.index.edges.sizes[sample])

    def read(self, index: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors of one structure, and where it comes from.

        Parameters
        ----------
        index : int
            Position among the structures that are not deleted; negative counts from the end.

        Returns
        -------
        tuple of dict
            Tensors by field name, system fields with one row, ``neighbor_list`` counting the atoms of this structure;
            and ``{"index", "source_file", "physical_index"}``.

        Raises
        ------
        IndexError
            If there is no such structure.
        StoreError
            If the store is damaged.
        """
        (found,) = self.read_many([index])
        return found

    __getitem__ = read

    def read_many(self, indices: IndexLike) -> list[tuple[dict[str, Tensor], dict[str, Any]]]:
        """Return what :meth:`read` does for several structures, in the order asked for."""
        opened = self._here
        logical = resolve_indices(indices, len(self), self.name)
        samples = opened.index.active[logical]
        levels = opened.levels(samples, opened.index.atoms.starts[samples])
        rows = zip(*(_pieces(levels[level], opened.sizes(level, samples)) for level in LEVELS), strict=True)
        return [
            ({**node, **edge, **system}, self._origin(int(place), int(sample)))
            for (node, edge, system), place, sample in zip(rows, logical, samples, strict=True)
        ]

    def _origin(self, index: int, sample: int) -> dict[str, Any]:
        return {"index": index, "source_file": self.name, "physical_index": str(sample)}

    def read_batch(self, indices: IndexLike) -> Batch:
        """Return several structures as one batch; faster than one by one, since every chunk is decoded once.

        Parameters
        ----------
        indices : int, slice, sequence of int, array, tensor or boolean mask
            Positions among the structures that are not deleted, in any order; duplicates are kept.

        Raises
        ------
        IndexError
            If there is no such structure, or none at all is asked for.
        StoreError
            If the store is damaged.
        """
        opened = self._here
        samples = opened.physical(indices)
        if not len(samples):
            raise IndexError(f"{self.name}: cannot make a batch of no samples")
        atoms = opened.index.atoms
        sizes = atoms.sizes[samples]
        levels = opened.levels(samples, atoms.starts[samples] - (np.cumsum(sizes) - sizes))
        tensors = {level: {name: torch.from_numpy(rows) for name, rows in levels[level].items()} for level in LEVELS}
        batch = Batch.from_levels(
            node=tensors["node"],
            edge=tensors["edge"],
            system=tensors["system"],
            num_nodes_per_graph=torch.from_numpy(sizes),
            num_edges_per_graph=torch.from_numpy(opened.index.edges.sizes[samples]) if tensors["edge"] else None,
        )
        return reaching(batch, opened.edges_reach) if "neighbor_list" in batch else batch

    def refresh(self) -> None:
        """Look at the store anew, after it was appended to."""
        self._opened = self._open()

    def close(self) -> None:
        """Forget decoded chunks; the next use opens the store anew."""
        self._opened = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _pieces(fields: dict[str, NDArray[Any]], sizes: NDArray[np.int64]) -> Iterator[dict[str, Tensor]]:
    """Cut the rows of one level into those of single structures."""
    stops = np.cumsum(sizes).tolist()
    for start, stop in zip([0, *stops[:-1]], stops, strict=True):
        yield {name: torch.from_numpy(rows[start:stop]) for name, rows in fields.items()}


class _Segments:
    """Where the rows of each stored structure begin and how many there are."""

    def __init__(self, ptr: NDArray[np.int64]) -> None:
        self.starts = ptr[:-1]
        self.sizes = np.diff(ptr)
        self.total = int(ptr[-1])


@dataclass(frozen=True)
class _Index:
    """Which structures there are and where."""

    active: NDArray[np.int64]
    atoms: _Segments
    edges: _Segments

    @classmethod
    def read(cls, group: zarr.Group, name: str) -> _Index:
        count = committed_samples(group, name)
        mask = np.asarray(stored_array(group, "meta/samples_mask", name)[:count])
        return cls(np.flatnonzero(mask), _pointers(group, "atoms", count, name), _pointers(group, "edges", count, name))


def _pointers(group: zarr.Group, kind: str, count: int, name: str) -> _Segments:
    path = f"meta/{kind}_ptr"
    ptr = np.asarray(stored_array(group, path, name)[: count + 1]).astype(np.int64)
    if len(ptr) <= count or ptr[0] != 0 or (np.diff(ptr) < 0).any():
        raise StoreError(f"{name}: {path} does not ascend from 0 over {count} samples; the store is damaged")
    return _Segments(ptr)


class _Opened:
    """An open store: its fields, and on first use its pointers and arrays. Belongs to the process that made it."""

    def __init__(self, store: ZarrStoreLike, only: tuple[str, ...] | None, cache_bytes: int) -> None:
        self.pid = os.getpid()
        self._name = store_name(store)
        self._group = open_store(store, "r")
        self.fields = _chosen(stored_fields(self._group, self._name), only, self._name)
        self.edges_reach = edges_reach(self._group)
        self._cache = ChunkCache(cache_bytes)
        self._index: _Index | None = None
        self._arrays: dict[str, StoredRows] = {}

    @property
    def index(self) -> _Index:
        if self._index is None:
            self._index = _Index.read(self._group, self._name)
        return self._index

    def physical(self, indices: IndexLike) -> NDArray[np.int64]:
        active = self.index.active
        return active[resolve_indices(indices, len(active), self._name)]

    def starts(self, level: Level, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        return samples if level == "system" else self._segments(level).starts[samples]

    def sizes(self, level: Level, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.ones_like(samples) if level == "system" else self._segments(level).sizes[samples]

    def _segments(self, level: Level) -> _Segments:
        return self.index.atoms if level == "node" else self.index.edges

    def levels(self, samples: NDArray[np.int64], offsets: NDArray[np.int64]) -> Levels:
        """Return the rows of all fields; ``offsets`` are subtracted from each structure's atom numbers."""
        found: Levels = {level: {} for level in LEVELS}
        for level in LEVELS:
            starts = self.starts(level, samples)
            stops = starts + self.sizes(level, samples)
            for name, field in self.fields.items():
                if field.level == level:
                    found[level][name] = self._rows(field).read(starts, stops)
        self._check_numbers(found["node"]["atomic_numbers"], samples)
        if "neighbor_list" in found["edge"]:
            found["edge"]["neighbor_list"] = self._rebased(found["edge"]["neighbor_list"], samples, offsets)
        return found

    def _rows(self, field: StoredField) -> StoredRows:
        if field.name not in self._arrays:
            array = stored_array(self._group, field.path, self._name)
            self._check_length(array, field)
            self._arrays[field.name] = StoredRows(array, self._name, self._cache)
        return self._arrays[field.name]

    def _check_length(self, array: zarr.Array[Any], field: StoredField) -> None:
        samples = len(self.index.atoms.sizes)
        rows = samples if field.level == "system" else self._segments(field.level).total
        if array.shape[0] < rows:
            raise StoreError(
                f"{self._name}: {field.path} has {array.shape[0]} rows but {samples} samples need {rows}; samples were "
                f"appended without it, so the store is damaged"
            )

    def _check_numbers(self, numbers: NDArray[Any], samples: NDArray[np.int64]) -> None:
        bad = numbers < 1
        if bad.any():
            sample = np.repeat(samples, self.sizes("node", samples))[bad][0]
            raise StoreError(
                f"{self._name}: sample {sample} has an atomic number of {numbers[bad][0]} in core/atomic_numbers; a "
                "chunk of the store is missing or overwritten"
            )

    def _rebased(self, neighbors: NDArray[Any], samples: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[Any]:
        """Return the neighbor list with the offset of each structure subtracted from its atom numbers."""
        edges = self.sizes("edge", samples)
        first = np.repeat(self.index.atoms.starts[samples], edges)[:, None]
        size = np.repeat(self.sizes("node", samples), edges)[:, None]
        bad = ((neighbors < first) | (neighbors >= first + size)).any(axis=1)
        if bad.any():
            sample = int(np.repeat(samples, edges)[bad][0])
            pair = (neighbors[bad][0] - first[bad][0]).tolist()
            raise StoreError(
                f"{self._name}: core/neighbor_list of sample {sample} has the pair {pair} but its atoms are 0 to "
                f"{size[bad][0, 0] - 1}; the list was stored without counting earlier samples, or is damaged. Read "
                "without the edge fields (fields=...) and build neighbor lists anew"
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
