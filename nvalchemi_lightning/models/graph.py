"""What a model reads from a batch: atoms, edges and the structures they belong to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nvalchemi_lightning.data.edge_cutoff import check_reach
from nvalchemi_lightning.errors import DataError
from nvalchemi_lightning.models.differentiation import savable
from nvalchemi_lightning.neighbors import edge_vectors, neighbor_list

__all__ = ["AtomGraph", "structure_of_atoms"]


def structure_of_atoms(data: Any) -> Tensor:
    """Return the structure of each atom, int64, shape (V,); all belong to the first where there is no ``batch_idx``."""
    index = getattr(data, "batch_idx", None)
    if index is None:
        return torch.zeros(data.positions.shape[0], dtype=torch.int64, device=data.positions.device)
    return savable(index.long())


@dataclass(frozen=True)
class AtomGraph:
    """A batch as a graph.

    Attributes
    ----------
    numbers : Tensor
        Atomic numbers, int64, shape (V,).
    structure : Tensor
        Structure of each atom, int64, shape (V,).
    source, target : Tensor
        Atoms that each edge joins, int64, shape (E,).
    vectors : Tensor
        From source to target, shape (E, 3) [A].
    cell, pbc : Tensor or None
        Lattice vectors, shape (B, 3, 3) [A], and periodicity, shape (B, 3), where the batch has both.
    num_structures : int
        Number of structures B.
    """

    numbers: Tensor
    structure: Tensor
    source: Tensor
    target: Tensor
    vectors: Tensor
    cell: Tensor | None
    pbc: Tensor | None
    num_structures: int

    @classmethod
    def of(cls, data: Any, cutoff: float) -> AtomGraph:
        """Read a batch or a structure; neighbors are searched for if it brings none.

        Parameters
        ----------
        data : Batch or AtomicData
            The structures. It is not changed.
        cutoff : float
            Largest distance of that search [A].

        Raises
        ------
        DataError
            If a periodic batch brings edges without their lattice images, or edges that are known to be too short.
        """
        edges, shifts = getattr(data, "neighbor_list", None), getattr(data, "neighbor_list_shifts", None)
        cell, pbc = getattr(data, "cell", None), getattr(data, "pbc", None)
        if edges is None:
            edges, shifts = neighbor_list(data, cutoff)
        else:
            check_reach(data, cutoff)
            _check_shifts(shifts, pbc)
        structure = structure_of_atoms(data)
        edges = savable(edges.long())
        source, target = edges.t().contiguous().unbind(0)
        return cls(
            numbers=savable(data.atomic_numbers.long()),
            structure=structure,
            source=source,
            target=target,
            vectors=edge_vectors(data, edges, shifts, structure),
            cell=None if cell is None else savable(cell),
            pbc=None if pbc is None else savable(pbc),
            num_structures=int(data.num_graphs),
        )

    def sum_over_structures(self, values: Tensor) -> Tensor:
        """Add up values of atoms, shape (V, ...), for each structure: shape (B, ...)."""
        return values.new_zeros(self.num_structures, *values.shape[1:]).index_add(0, self.structure, values)


def _check_shifts(shifts: Tensor | None, pbc: Tensor | None) -> None:
    if shifts is None and pbc is not None and bool(pbc.any()):
        raise DataError("the batch is periodic and has neighbor_list but no neighbor_list_shifts; give both")
