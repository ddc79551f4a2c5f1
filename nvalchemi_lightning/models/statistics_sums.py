"""What one pass over a data set adds up for its statistics."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nvalchemi_lightning.data.inspection.compositions import TABLE, compositions
from nvalchemi_lightning.data.inspection.least_squares import LeastSquares
from nvalchemi_lightning.errors import DataError
from nvalchemi_lightning.neighbors import neighbor_list

__all__ = ["StatisticsSums", "blocks_of", "rms", "sizes_of"]


def rms(squares: float, count: int) -> float:
    """Return the root mean square of ``count`` numbers from the sum of their squares; NaN if there are none."""
    return math.sqrt(squares / count) if count else math.nan


class _MeanSquare:
    """Squares and their number, in ``bins`` bins."""

    def __init__(self, bins: int = 1) -> None:
        self.squares = np.zeros(bins)
        self.counts = np.zeros(bins, dtype=np.int64)

    def add(self, values: NDArray[np.float64], bins: NDArray[np.int64] | None = None) -> None:
        """Add numbers, each to its bin; NaN is passed over."""
        known = ~np.isnan(values)
        values, places = values[known], None if bins is None else bins[known]
        if places is None:
            places = np.zeros(len(values), dtype=np.int64)
        self.squares += np.bincount(places, weights=values**2, minlength=len(self.squares))
        self.counts += np.bincount(places, minlength=len(self.counts))

    def root(self) -> float:
        """Return the root mean square of all; NaN if there are none."""
        return rms(float(self.squares.sum()), int(self.counts.sum()))

    def roots(self) -> list[float]:
        """Return the root mean square of each bin."""
        return [rms(*of_bin) for of_bin in zip(self.squares.tolist(), self.counts.tolist(), strict=True)]


class StatisticsSums:
    """Sums over structures; their memory does not grow with the number of structures.

    Parameters
    ----------
    cutoff : float or None
        Distance within which neighbors are counted [A].

    Attributes
    ----------
    sizes : Counter
        Number of atoms to number of structures.
    atoms : ndarray, shape (119,)
        Atoms of each element.
    total : LeastSquares
        Compositions and energies of the structures with an energy.
    per_atom : LeastSquares
        The same divided by the number of atoms.
    labelled_atoms : ndarray, shape (119,)
        Atoms of each element in structures with an energy.
    labelled : Counter
        Label to number of structures with some of it.
    forces, stress : mean squares
        Components of the forces by element, and of the stress.
    edges : int
        Neighbors of all atoms.
    isolated : set of int
        Elements of single atoms with an energy and without neighbors.
    resolution : float
        Largest distance of an energy from the next number of its dtype; NaN without energies.
    """

    def __init__(self, cutoff: float | None) -> None:
        self._cutoff = cutoff
        self.sizes: Counter[int] = Counter()
        self.atoms = np.zeros(TABLE, dtype=np.int64)
        self.total, self.per_atom = LeastSquares(TABLE), LeastSquares(TABLE)
        self.labelled_atoms = np.zeros(TABLE, dtype=np.int64)
        self.labelled: Counter[str] = Counter()
        self.forces, self.stress = _MeanSquare(TABLE), _MeanSquare()
        self.edges = 0
        self.isolated: set[int] = set()
        self.resolution = math.nan

    def add(self, data: Any) -> None:
        """Add the structures of a batch, or a single one.

        Raises
        ------
        DataError
            If a label is infinite, or an atomic number that of no element.
        """
        sizes = sizes_of(data)
        numbers = data.atomic_numbers.long().cpu().numpy()
        counts = compositions(numbers, sizes)
        energy, forces, stress = (self._label(data, name) for name in ("energy", "forces", "stress"))
        if energy is not None:
            self._add_energies(energy.ravel(), counts.astype(np.float64))
            self.resolution = float(np.fmax(self.resolution, _resolution(data.energy)))
        if forces is not None:
            self.forces.add(forces.ravel(), np.repeat(numbers, 3))
            known = np.repeat(np.arange(len(sizes)), sizes)[~np.isnan(forces).all(axis=1)]
            self.labelled["forces"] += len(np.unique(known))
        if stress is not None:
            self._add_stress(stress.reshape(len(sizes), 9), data)
        alone = self._without_neighbors(data, sizes)
        if energy is not None:
            single = (sizes == 1) & alone & ~np.isnan(energy.ravel())
            self.isolated |= set(np.flatnonzero(counts[single].any(axis=0)).tolist())
        self.sizes.update(sizes.tolist())
        self.atoms += counts.sum(axis=0)

    def _label(self, data: Any, name: str) -> NDArray[np.float64] | None:
        value: Tensor | None = getattr(data, name, None)
        if value is None:
            return None
        values: NDArray[np.float64] = value.detach().double().cpu().numpy()
        if np.isinf(values).any():
            rows = np.flatnonzero(np.isinf(values.reshape(len(values), -1)).any(axis=1))
            sizes = sizes_of(data) if name == "forces" else np.ones(len(values), dtype=np.int64)
            place = int(np.searchsorted(np.cumsum(sizes), rows[0], side="right"))
            raise DataError(f"{name} of structure {self.sizes.total() + place} is infinite; correct it or leave it out")
        return values

    def _without_neighbors(self, data: Any, sizes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Count the neighbors, and return which structures have none; without a cutoff the periodic ones have."""
        if self._cutoff is None:
            pbc = getattr(data, "pbc", None)
            return np.full(len(sizes), True) if pbc is None else ~_is_periodic(pbc)
        edges = neighbor_list(data, self._cutoff)[0]
        self.edges += len(edges)
        structure = np.repeat(np.arange(len(sizes)), sizes)
        alone: NDArray[np.bool_] = np.bincount(structure[edges[:, 0].cpu().numpy()], minlength=len(sizes)) == 0
        return alone

    def _add_energies(self, energy: NDArray[np.float64], counts: NDArray[np.float64]) -> None:
        known = ~np.isnan(energy)
        energy, counts = energy[known], counts[known]
        sizes = counts.sum(axis=1)
        self.total.add(counts, energy)
        self.per_atom.add(counts / sizes[:, None], energy / sizes)
        self.labelled_atoms += counts.sum(axis=0).astype(np.int64)
        self.labelled["energy"] += len(energy)

    def _add_stress(self, stress: NDArray[np.float64], data: Any) -> None:
        pbc = getattr(data, "pbc", None)
        if pbc is not None:
            # Without periodicity there is no stress; stores that mix both hold zeros.
            stress = stress[_is_periodic(pbc)]
        self.stress.add(stress.ravel())
        self.labelled["stress"] += int((~np.isnan(stress).all(axis=1)).sum())


def _is_periodic(pbc: Tensor) -> NDArray[np.bool_]:
    periodic: NDArray[np.bool_] = pbc.reshape(-1, 3).any(dim=1).cpu().numpy()
    return periodic


def _resolution(energy: Tensor) -> float:
    """Return the distance of the largest energy from the next number of its dtype; NaN if all are."""
    largest = energy.detach().abs().nan_to_num(nan=-1.0).max()
    if largest < 0:
        return math.nan
    return float(torch.nextafter(largest, largest.new_tensor(math.inf)) - largest)


def blocks_of(structures: Iterable[Any] | str | os.PathLike[str]) -> Iterable[Any]:
    """Return the structures themselves, or those of a store or file."""
    if not isinstance(structures, (str, os.PathLike)):
        return structures
    from nvalchemi_lightning.data.inspection.blocks import read_blocks

    return read_blocks(structures)


def sizes_of(data: Any) -> NDArray[np.int64]:
    """Return the number of atoms of each structure of a batch, or of the single one, shape (B,)."""
    counts = getattr(data, "num_nodes_per_graph", None)
    if counts is None:
        return np.array([data.positions.shape[0]], dtype=np.int64)
    sizes: NDArray[np.int64] = counts.long().cpu().numpy()
    return sizes
