"""Which atoms are near which, under any periodicity.

:func:`neighbor_list` is what the rest of the package calls. How the edges are found is the matter of a backend, a
function with the signature of :data:`Backend`; :func:`vesin_edges` is the one that comes with the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nvalchemi_lightning.errors import ConfigurationError, DataError

__all__ = ["Backend", "Structures", "check_cutoff", "edge_vectors", "neighbor_list", "vesin_edges"]

_MAX_EXTENT = 1e5
"""Atoms farther apart [A] are damage, and overflow the integers of vesin (it then crashes the process)."""

_NO_CELL = np.eye(3)


@dataclass(frozen=True)
class Structures:
    """What decides about neighbors: where the atoms of each structure are, and how it repeats.

    Attributes
    ----------
    positions : Tensor
        Cartesian positions, shape (V, 3) [A].
    first_atoms : tuple of int
        First atom of each structure, then V; B + 1 numbers.
    cell : Tensor
        Lattice vectors as rows, shape (B, 3, 3) [A]; zero where there is none.
    pbc : Tensor
        Periodicity along each lattice vector, bool, shape (B, 3).
    """

    positions: Tensor
    first_atoms: tuple[int, ...]
    cell: Tensor
    pbc: Tensor

    @classmethod
    def of(cls, data: Any) -> Structures:
        """Read a batch or a single structure; without ``cell`` and ``pbc`` nothing is periodic.

        Raises
        ------
        DataError
            If there is a cell but no ``pbc``, or the other way around.
        """
        positions, ptr = data.positions.detach(), getattr(data, "batch_ptr", None)
        first_atoms = (0, positions.shape[0]) if ptr is None else tuple(ptr.tolist())
        count = len(first_atoms) - 1
        cell, pbc = getattr(data, "cell", None), getattr(data, "pbc", None)
        if pbc is None and cell is not None and bool(cell.any()):
            raise DataError(
                "there is a cell but no pbc; give pbc, bool, shape (B, 3), to say which vectors are periodic"
            )
        if cell is None and pbc is not None and bool(pbc.any()):
            raise DataError(f"pbc is {pbc.tolist()} but there is no cell; give cell, shape (B, 3, 3)")
        if cell is None or pbc is None:
            cell, pbc = positions.new_zeros(count, 3, 3), positions.new_zeros(count, 3, dtype=torch.bool)
        return cls(positions, first_atoms, cell.detach().reshape(count, 3, 3), pbc.reshape(count, 3))


Backend: TypeAlias = Callable[[Structures, float], tuple[Tensor, Tensor]]
"""Returns atom pairs, int64, shape (E, 2), sorted by the first, and lattice images, int32, shape (E, 3)."""


def neighbor_list(data: Any, cutoff: float, *, backend: Backend | None = None) -> tuple[Tensor, Tensor]:
    """Find all pairs of atoms closer than a cutoff, each in both directions.

    Parameters
    ----------
    data : Batch or AtomicData
        Anything with ``positions`` (V, 3) [A] and, where periodic, ``cell`` (B, 3, 3) [A] and ``pbc`` (B, 3). Several
        structures are told apart by ``batch_ptr`` (B + 1).
    cutoff : float
        Largest distance [A].
    backend : Backend, optional
        How to find them; :func:`vesin_edges` by default.

    Returns
    -------
    neighbor_list : Tensor
        Pairs (source i, target j), counted through all atoms of the batch, int64, shape (E, 2), sorted by source;
        shape (0, 2) when no two atoms are neighbors.
    neighbor_list_shifts : Tensor
        Lattice image S of each target, int32, shape (E, 3).

    Raises
    ------
    ConfigurationError
        If the cutoff is not a positive, finite number.
    DataError
        If positions are not finite, or a periodic direction lacks its lattice vector.

    Notes
    -----
    The vector of an edge is ``positions[j] - positions[i] + S @ cell``. An atom is a neighbor of its own images, and
    the same two atoms may be neighbors through several images. Lattice vectors of directions that are not periodic
    have no influence, and no cell needs to be larger than the cutoff. The edges are those of
    ``ase.neighborlist.neighbor_list("ijS", atoms, cutoff)``.
    """
    check_cutoff(cutoff)
    return (backend or vesin_edges)(Structures.of(data), float(cutoff))


def check_cutoff(cutoff: float) -> None:
    """Refuse a cutoff that is not a positive, finite number.

    Raises
    ------
    ConfigurationError
        If it is not.
    """
    if not (math.isfinite(cutoff) and cutoff > 0):
        raise ConfigurationError(f"cutoff must be a positive number of Angstrom, got {cutoff!r}")


def edge_vectors(data: Any, edges: Tensor, shifts: Tensor | None, batch_idx: Tensor) -> Tensor:
    """Return the vector of each edge from source to target.

    Parameters
    ----------
    data : Batch or AtomicData
        Its ``positions`` and, with shifts, its ``cell``.
    edges : Tensor
        Pairs (source, target), int64, shape (E, 2).
    shifts : Tensor or None
        Lattice images S of the targets, shape (E, 3); None for no periodicity.
    batch_idx : Tensor
        Structure of each atom, int64, shape (V,).

    Returns
    -------
    Tensor
        ``positions[j] - positions[i] + S @ cell``, shape (E, 3) [A].
    """
    source, target = edges.unbind(1)
    vectors: Tensor = data.positions.index_select(0, target) - data.positions.index_select(0, source)
    cell = getattr(data, "cell", None)
    if shifts is None or cell is None:
        return vectors
    cells = cell.index_select(0, batch_idx.index_select(0, source))
    return vectors.add((shifts.to(vectors.dtype).unsqueeze(2) * cells).sum(1))


def vesin_edges(structures: Structures, cutoff: float) -> tuple[Tensor, Tensor]:
    """Find the edges of one structure after the other on the CPU with `vesin`; see :data:`Backend`.

    Raises
    ------
    DataError
        If positions are not finite or absurdly far apart, or a periodic direction lacks its lattice vector.
    """
    import vesin  # type: ignore[import-untyped]

    # One thread, because the order of the edges, and with it the last bits of every sum, must not depend on luck.
    calculator = vesin.NeighborList(cutoff=cutoff, full_list=True, sorted=True, n_threads=1)
    pairs, shifts = [np.empty((0, 2), np.int64)], [np.empty((0, 3), np.int32)]
    for first, positions, cell, pbc in _on_cpu(structures):
        found = calculator.compute(positions, cell, pbc, "PS", copy=False)
        pairs.append(found[0].astype(np.int64) + first)
        shifts.append(found[1].copy())
    device = structures.positions.device
    return torch.from_numpy(np.concatenate(pairs)).to(device), torch.from_numpy(np.concatenate(shifts)).to(device)


_One: TypeAlias = tuple[int, NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]


def _on_cpu(structures: Structures) -> Iterator[_One]:
    """Yield first atom, positions, complete cell and periodicity of each structure that has atoms."""
    positions = structures.positions.to("cpu", torch.float64).numpy()
    cells = structures.cell.to("cpu", torch.float64).numpy()
    periodic = structures.pbc.cpu().numpy()
    # One look at all atoms clears every structure of a sane batch.
    suspicious = positions.size and not np.ptp(positions, axis=0).max() <= _MAX_EXTENT
    for number, (first, end) in enumerate(pairwise(structures.first_atoms)):
        if end > first:
            own, pbc = positions[first:end], periodic[number]
            if suspicious:
                _check_positions(own, number)
            # Far from the origin the integers of the lattice images would overflow.
            yield first, own - own[0], _complete_cell(cells[number], pbc, number), pbc


def _check_positions(positions: NDArray[np.float64], number: int) -> None:
    extent = np.ptp(positions, axis=0).max()
    if not np.isfinite(extent):
        raise DataError(f"structure {number} of the batch has a position that is not finite; correct or drop it")
    if extent > _MAX_EXTENT:
        raise DataError(
            f"structure {number} of the batch extends over {extent:.3g} A, more than {_MAX_EXTENT:g} A; "
            "atoms that far apart are damaged or in another unit"
        )


def _complete_cell(cell: NDArray[np.float64], pbc: NDArray[np.bool_], number: int) -> NDArray[np.float64]:
    """Replace the vectors of directions that are not periodic by unit vectors perpendicular to the periodic ones."""
    if not pbc.any():
        return _NO_CELL
    # The last right singular vectors span what the periodic lattice vectors leave out.
    _, sizes, directions = np.linalg.svd(np.nan_to_num(cell[pbc], nan=0.0, posinf=0.0, neginf=0.0))
    if sizes[-1] <= 1e-6 * sizes[0]:
        raise DataError(
            f"structure {number} of the batch has pbc {pbc.tolist()}, but the lattice vectors of those directions are "
            f"zero, not finite or linearly dependent: {cell.tolist()}"
        )
    complete = cell.copy()
    complete[~pbc] = directions[len(sizes) :]
    return complete
