"""Reading structures from a Zarr store, one or many at a time."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import zarr
from numpy.typing import NDArray
from torch import Tensor

from nvalchemi_lightning.data.batch import Batch
from nvalchemi_lightning.data.edge_cutoff import reaching
from nvalchemi_lightning.data.fields import LEVELS, Level
from nvalchemi_lightning.data.indices import IndexLike, resolve_indices
from nvalchemi_lightning.data.store.check import find_problems
from nvalchemi_lightning.data.store.layout import REPAIR_HINT, ZarrStoreLike, open_store, store_name, stored_array
from nvalchemi_lightning.data.store.notes import fingerprint
from nvalchemi_lightning.data.store.opened import OpenedStore, StoreVersion
from nvalchemi_lightning.errors import ConfigurationError, StoreError, UnknownNameError, nearest

__all__ = ["AtomicDataZarrReader", "FieldSchema"]


class FieldSchema(NamedTuple):
    """What the rows of a stored field are.

    Attributes
    ----------
    level : {"node", "edge", "system"}
        What a row belongs to.
    dtype : numpy.dtype
        Type of its numbers.
    row_shape : tuple of int
        Shape of a row.
    """

    level: Level
    dtype: np.dtype[Any]
    row_shape: tuple[int, ...]


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
        Memory for decoded chunks, per process. Arrays that fit are decoded once. Of others, shuffled reading takes
        only the rows it needs where they are stored without compression, and decodes whole chunks otherwise.

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
    to one process: a copy that finds itself in another one (a forked or spawned worker) opens the store anew, and
    refuses it if positions mean other structures by then.
    """

    def __init__(
        self, store: ZarrStoreLike, *, fields: Iterable[str] | None = None, cache_bytes: int = 128 * 2**20
    ) -> None:
        if cache_bytes < 0:
            raise ConfigurationError(f"cache_bytes must be 0 or more, got {cache_bytes}")
        self._store = store
        self._only = None if fields is None else tuple(fields)
        self._cache_bytes = cache_bytes
        self._version: StoreVersion | None = None
        self._opened: OpenedStore | None = self._open()

    def _open(self) -> OpenedStore:
        return OpenedStore(self._store, self._only, self._cache_bytes)

    @property
    def _here(self) -> OpenedStore:
        """What is open in this process."""
        # Zarr's event loop and open files do not survive a fork.
        if self._opened is None or self._opened.pid != os.getpid():
            opened, version = self._open(), self._seen()
            if version is not None:
                opened.check_continues(version)
            self._opened = opened
        return self._opened

    def _seen(self) -> StoreVersion | None:
        return self._version if self._opened is None else self._opened.version

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the recipe alone, and what the copy has to find."""
        return {**self.__dict__, "_opened": None, "_version": self._seen()}

    def __len__(self) -> int:
        """Return the number of structures that are not deleted."""
        return len(self._here.index.active)

    @property
    def name(self) -> str:
        """What messages call the store: its path where it has one."""
        return store_name(self._store)

    def fingerprint(self) -> str:
        """Return a text that changes when structures are added or deleted, or energies are written anew."""
        return fingerprint(open_store(self._store, "r"), self.name)

    @property
    def num_samples(self) -> int:
        """Number of stored structures, deleted ones included."""
        return self._here.samples

    @property
    def field_levels(self) -> dict[str, Level]:
        """Level of every field that is read, by name."""
        return {name: field.level for name, field in self._here.fields.items()}

    @property
    def field_names(self) -> list[str]:
        """Names of the fields that are read."""
        return list(self._here.fields)

    def schema(self) -> dict[str, FieldSchema]:
        """Return level, dtype and shape of a row of every field that is read, by name."""
        opened = self._here
        arrays = {name: opened.array(field) for name, field in opened.fields.items()}
        return {
            name: FieldSchema(opened.fields[name].level, array.dtype, array.row_shape) for name, array in arrays.items()
        }

    def level_sizes(self) -> dict[Level, int]:
        """Return how many rows are stored on each level, those of deleted structures included."""
        return {level: self._here.rows(level) for level in LEVELS}

    def field_array(self, name: str) -> zarr.Array[Any]:
        """Return the array of a field as Zarr sees it: rows of all structures, deleted ones included.

        Raises
        ------
        UnknownNameError
            If the field is not read; the message gives the nearest one.
        """
        fields = self._here.fields
        if name not in fields:
            raise UnknownNameError(f"{self.name} has no field {name!r}{nearest(name, fields)}")
        return stored_array(self._here.group, fields[name].path, self.name)

    def check_integrity(self) -> None:
        """Read all of the store and compare its parts.

        Raises
        ------
        StoreError
            If something is wrong; names all of it. ``repair_store`` mends what can be mended.
        """
        problems = list(find_problems(open_store(self._store, "r"), self.name))
        if problems:
            lines = "\n".join(f"  {problem.where}: {problem.what}" for problem in problems)
            raise StoreError(f"{self.name} is inconsistent. {REPAIR_HINT}:\n{lines}")

    def get_metadata(self, index: int) -> tuple[int, int]:
        """Return the number of atoms and edges of a structure without reading it."""
        opened = self._here
        sample = opened.physical([index])
        return int(opened.sizes("node", sample)[0]), int(opened.sizes("edge", sample)[0])

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
        levels = opened.levels(samples, opened.index.atoms.starts(samples))
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
        sizes = opened.sizes("node", samples)
        levels = opened.levels(samples, opened.index.atoms.starts(samples) - (np.cumsum(sizes) - sizes))
        tensors = {level: {name: torch.from_numpy(rows) for name, rows in levels[level].items()} for level in LEVELS}
        batch = Batch.from_levels(
            node=tensors["node"],
            edge=tensors["edge"],
            system=tensors["system"],
            num_nodes_per_graph=torch.from_numpy(sizes),
            num_edges_per_graph=torch.from_numpy(opened.sizes("edge", samples)) if tensors["edge"] else None,
        )
        return reaching(batch, opened.edges_reach) if "neighbor_list" in batch else batch

    def refresh(self) -> None:
        """Look at the store anew, after it was appended to."""
        self._opened = self._open()

    def close(self) -> None:
        """Forget decoded chunks; the next use opens the store anew."""
        self._opened = self._version = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _pieces(fields: dict[str, NDArray[Any]], sizes: NDArray[np.int64]) -> Iterator[dict[str, Tensor]]:
    """Cut the rows of one level into those of single structures."""
    stops = np.cumsum(sizes).tolist()
    for start, stop in zip([0, *stops[:-1]], stops, strict=True):
        yield {name: torch.from_numpy(rows[start:stop]) for name, rows in fields.items()}
