"""One structure as the checks see it: plain arrays in float64, and what several checks need, computed once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nvalchemi_lightning.data.atomic_data import AtomicData
from nvalchemi_lightning.data.covalent_radii import COVALENT_RADII
from nvalchemi_lightning.neighbors import neighbor_list

__all__ = ["CUTOFF", "LABELS", "Edges", "Floats", "Subject"]

Floats = NDArray[np.float64]

CUTOFF = 5.0
"""Distance within which atoms count as neighbors [A]; about that of usual models."""

LABELS = ("energy", "forces", "stress", "virial", "dipole", "charges")
"""What structures may be labelled with."""

_SHAPES: Mapping[str, tuple[int, ...]] = {"energy": (), "stress": (3, 3), "virial": (3, 3), "dipole": (3,)}


@dataclass(frozen=True)
class Edges:
    """All pairs of atoms within the cutoff, in both directions, sorted by the first.

    Attributes
    ----------
    source, target : ndarray of int
        Atoms, shape (E,).
    shifts : ndarray of int
        Lattice images of the targets, shape (E, 3).
    vectors : ndarray
        From source to target, shape (E, 3) [A].
    lengths : ndarray
        Shape (E,) [A].
    """

    source: NDArray[np.int64]
    target: NDArray[np.int64]
    shifts: NDArray[np.int64]
    vectors: Floats
    lengths: Floats

    def __len__(self) -> int:
        return len(self.source)

    def where(self, chosen: NDArray[np.bool_]) -> Edges:
        """Return some of them."""
        return Edges(
            self.source[chosen],
            self.target[chosen],
            self.shifts[chosen],
            self.vectors[chosen],
            self.lengths[chosen],
        )


@dataclass(frozen=True)
class Subject:
    """One structure.

    Attributes
    ----------
    data : AtomicData
        What was read.
    source : str
        Its set.
    number : int
        Its position there.
    held_out : bool
        Whether its set is not trained on.
    """

    data: AtomicData
    source: str
    number: int
    held_out: bool = False

    @cached_property
    def numbers(self) -> NDArray[np.int64]:
        """Atomic numbers, shape (V,)."""
        return self.data.atomic_numbers.detach().cpu().numpy().astype(np.int64)

    @cached_property
    def positions(self) -> Floats:
        """Positions relative to the first atom, shape (V, 3) [A]."""
        positions: Floats = _floats(self.data.positions)
        relative: Floats = positions - positions[0]
        return relative

    @cached_property
    def pbc(self) -> tuple[bool, bool, bool]:
        """Periodicity along each lattice vector."""
        a, b, c = (False, False, False) if self.data.pbc is None else self.data.pbc[0].tolist()
        return a, b, c

    @cached_property
    def cell(self) -> Floats:
        """Lattice vectors as rows, shape (3, 3) [A]; zeros without a cell."""
        return np.zeros((3, 3)) if self.data.cell is None else _floats(self.data.cell[0])

    @cached_property
    def volume(self) -> float | None:
        """Volume [A^3] of a cell that is periodic along all three vectors."""
        return abs(float(np.linalg.det(self.cell))) if all(self.pbc) else None

    @cached_property
    def known(self) -> Mapping[str, Floats]:
        """The labels of which every number is known.

        ``energy`` has shape () [eV], ``forces`` (V, 3) [eV/A], ``stress`` [eV/A^3] and ``virial`` [eV] (3, 3).
        """
        values = {label: getattr(self.data, label) for label in LABELS}
        arrays = {label: _floats(value) for label, value in values.items() if value is not None}
        return {
            label: array.reshape(_SHAPES.get(label, array.shape))
            for label, array in arrays.items()
            if not np.isnan(array).any()
        }

    def has(self, label: str) -> bool:
        """Say whether a label is there and not NaN throughout."""
        value = getattr(self.data, label)
        return value is not None and not bool(value.isnan().all())

    @cached_property
    def edges(self) -> Edges:
        """Pairs of atoms within :data:`CUTOFF`.

        Raises
        ------
        DataError
            If atoms are absurdly far apart.
        """
        pairs, shifts = neighbor_list(self.data, CUTOFF)
        source, target = pairs.numpy().T
        images = shifts.numpy().astype(np.int64)
        vectors = self.positions[target] - self.positions[source] + images @ self.cell
        return Edges(source, target, images, vectors, np.sqrt((vectors * vectors).sum(1)))

    @cached_property
    def closeness(self) -> Floats:
        """Length of every edge by the sum of the covalent radii, shape (E,)."""
        radii = COVALENT_RADII[self.numbers]
        result: Floats = self.edges.lengths / (radii[self.edges.source] + radii[self.edges.target])
        return result

    @property
    def is_isolated_atom(self) -> bool:
        """Whether it is a single atom without images nearby."""
        return len(self.numbers) == 1 and not len(self.edges)

    @cached_property
    def composition(self) -> tuple[tuple[int, int], ...]:
        """Pairs (atomic number, number of atoms), ascending."""
        elements, counts = np.unique(self.numbers, return_counts=True)
        return tuple(zip(elements.tolist(), counts.tolist(), strict=True))


def _floats(tensor: Tensor) -> Floats:
    result: Floats = tensor.detach().cpu().double().numpy()
    return result
