"""Counting what structures hold: elements, sizes, periodicity, and which labels are there."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nvalchemi_lightning.data.batch import Batch
from nvalchemi_lightning.data.fields import FIELDS, Level
from nvalchemi_lightning.data.inspection.compositions import TABLE, compositions

__all__ = ["Block", "Tally", "is_label"]


def is_label(name: str, dtype: np.dtype[Any]) -> bool:
    """Say whether NaN in a field means that it is missing."""
    return dtype.kind == "f" and (name not in FIELDS or FIELDS[name].missing == "nan")


@dataclass(frozen=True)
class Block:
    """What is counted of some structures.

    Attributes
    ----------
    sizes, edges : ndarray of int64, shape (B,)
        Atoms and edges of each structure.
    numbers : ndarray of int, shape (V,)
        Atomic numbers.
    pbc : ndarray of bool, shape (B, 3), or None
        Periodic directions.
    labels : mapping of str to ndarray
        Rows of the fields in which NaN means missing.
    levels : mapping of str to {"node", "edge", "system"}
        What a row of each label belongs to.
    """

    sizes: NDArray[np.int64]
    edges: NDArray[np.int64]
    numbers: NDArray[Any]
    pbc: NDArray[np.bool_] | None
    labels: Mapping[str, NDArray[Any]]
    levels: Mapping[str, Level]

    @classmethod
    def of(cls, batch: Batch) -> Block:
        """Take a block from a batch."""
        # NumPy has no bfloat16.
        fields = {name: value.float() if value.dtype.itemsize == 2 else value for name, value in batch}
        values = {name: value.detach().cpu().numpy() for name, value in fields.items()}
        return cls(
            sizes=batch.num_nodes_per_graph.cpu().numpy(),
            edges=batch.num_edges_per_graph.cpu().numpy(),
            numbers=values["atomic_numbers"],
            pbc=values.get("pbc"),
            labels={name: rows for name, rows in values.items() if is_label(name, rows.dtype)},
            levels=batch.field_levels,
        )

    def rows(self, level: Level) -> NDArray[np.int64]:
        """Return how many rows of a level each structure has."""
        return {"node": self.sizes, "edge": self.edges, "system": np.ones_like(self.sizes)}[level]


class Tally:
    """Counts over all blocks.

    Attributes
    ----------
    sizes : Counter
        Number of atoms to number of structures.
    edges : int
        Edges of all structures.
    atoms, structures : ndarray of int64, shape (119,)
        Atoms of each element, and structures that have it.
    periodic : Counter
        Number of periodic directions to number of structures.
    complete, partial : Counter
        Label to number of structures that have all of it, and that have some of it.
    """

    def __init__(self) -> None:
        self.sizes: Counter[int] = Counter()
        self.edges = 0
        self.atoms, self.structures = np.zeros(TABLE, dtype=np.int64), np.zeros(TABLE, dtype=np.int64)
        self.periodic: Counter[int] = Counter()
        self.complete: Counter[str] = Counter()
        self.partial: Counter[str] = Counter()

    def add(self, block: Block) -> None:
        """Count the structures of a block.

        Raises
        ------
        DataError
            If an atomic number is that of no element.
        """
        counts = compositions(block.numbers, block.sizes)
        self.sizes.update(block.sizes.tolist())
        self.edges += int(block.edges.sum())
        self.atoms += counts.sum(axis=0)
        self.structures += (counts > 0).sum(axis=0)
        directions = np.zeros_like(block.sizes) if block.pbc is None else block.pbc.reshape(-1, 3).sum(axis=1)
        self.periodic.update(directions.tolist())
        for name, rows in block.labels.items():
            self._add_label(name, rows, block.rows(block.levels[name]))

    def _add_label(self, name: str, rows: NDArray[Any], sizes: NDArray[np.int64]) -> None:
        known = ~np.isnan(rows).reshape(len(rows), math.prod(rows.shape[1:]))
        structure = np.repeat(np.arange(len(sizes)), sizes)
        found = np.bincount(structure, weights=known.sum(axis=1), minlength=len(sizes))
        full = (found == sizes * known.shape[1]) & (sizes > 0)
        self.complete[name] += int(full.sum())
        self.partial[name] += int(((found > 0) & ~full).sum())
