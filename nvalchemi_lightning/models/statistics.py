"""Numbers of a data set that a model starts from: energies per element and the size of the forces."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nvalchemi_lightning.errors import DataError
from nvalchemi_lightning.models.graph import structure_of_atoms
from nvalchemi_lightning.neighbors import neighbor_list

__all__ = ["AtomicStatistics", "isolated_atom_energies"]

_TABLE = 119  # rows of a table indexed by atomic number


@dataclass(frozen=True)
class AtomicStatistics:
    """What a model needs to know about a data set before training.

    Attributes
    ----------
    elements : tuple of int
        Atomic numbers that occur, ascending.
    reference_energies : tuple of float
        Energy of an atom of each element [eV].
    rank : int
        Number of independent compositions among the structures with an energy. Below the number of elements the
        reference energies are not unique, and the smallest ones are taken: they describe these compositions, and say
        nothing about others.
    num_structures : int
        Structures with an energy.
    energy_scale : float
        What the reference energies leave unexplained, as the standard deviation per atom [eV] if atoms contribute
        independently; NaN without energies.
    force_scale : float
        Root mean square of the force components [eV/A]; NaN without forces.
    neighbors_per_atom : float
        Mean number of neighbors; NaN without a cutoff.
    """

    elements: tuple[int, ...]
    reference_energies: tuple[float, ...]
    rank: int
    num_structures: int
    energy_scale: float
    force_scale: float
    neighbors_per_atom: float

    @property
    def is_degenerate(self) -> bool:
        """Whether the compositions do not determine the reference energies."""
        return self.rank < len(self.elements)

    @classmethod
    def fit(
        cls,
        structures: Iterable[Any],
        *,
        cutoff: float | None = None,
        reference_energies: Mapping[int, float] | None = None,
    ) -> AtomicStatistics:
        """Compute the statistics in one pass.

        Parameters
        ----------
        structures : iterable of AtomicData or Batch
            The training data. Labels that are absent or NaN are passed over.
        cutoff : float, optional
            Distance within which neighbors are counted [A]; not counted by default.
        reference_energies : mapping of int to float, optional
            Energy of an atom by atomic number [eV]. By default they are fitted to the energies by least squares, in
            float64.

        Raises
        ------
        DataError
            If there is no structure, or ``reference_energies`` lacks an element.
        """
        sums = _Sums()
        for data in structures:
            sums.add(data, cutoff)
        elements = torch.nonzero(sums.atoms).flatten()
        if not len(elements):
            raise DataError("there are no structures to compute statistics from")
        gram, moment = sums.gram[elements][:, elements], sums.moment[elements]
        if reference_energies is None:
            energies = torch.linalg.pinv(gram, hermitian=True) @ moment
        else:
            energies = _given(reference_energies, elements)
        residual = sums.squares - 2 * energies @ moment + energies @ gram @ energies
        return cls(
            elements=tuple(elements.tolist()),
            reference_energies=tuple(energies.tolist()),
            rank=int(torch.linalg.matrix_rank(gram, hermitian=True)),
            num_structures=sums.labelled,
            energy_scale=_root(residual.clamp(min=0).item(), sums.labelled_atoms),
            force_scale=_root(sums.force_squares, sums.force_components),
            neighbors_per_atom=math.nan if cutoff is None else sums.edges / sums.atoms.sum().item(),
        )


def _given(energies: Mapping[int, float], elements: Tensor) -> Tensor:
    missing = [element for element in elements.tolist() if element not in energies]
    if missing:
        raise DataError(f"reference_energies lacks the atomic numbers {missing}; it has {sorted(energies)}")
    return torch.tensor([energies[element] for element in elements.tolist()], dtype=torch.float64)


def _root(squares: float, count: int) -> float:
    return math.sqrt(squares / count) if count else math.nan


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


@dataclass
class _Sums:
    """What one pass adds up; the energies enter as normal equations over atomic numbers."""

    atoms: Tensor = field(default_factory=lambda: _zeros(_TABLE))
    gram: Tensor = field(default_factory=lambda: _zeros(_TABLE, _TABLE))
    moment: Tensor = field(default_factory=lambda: _zeros(_TABLE))
    squares: float = 0.0
    labelled: int = 0
    labelled_atoms: int = 0
    force_squares: float = 0.0
    force_components: int = 0
    edges: int = 0

    def add(self, data: Any, cutoff: float | None) -> None:
        numbers = data.atomic_numbers.long().cpu()
        counts = _zeros(int(data.num_graphs), _TABLE)
        counts.index_put_(
            (structure_of_atoms(data).cpu(), numbers), torch.ones((), dtype=torch.float64), accumulate=True
        )
        self.atoms += counts.sum(0)
        energy, forces = getattr(data, "energy", None), getattr(data, "forces", None)
        if energy is not None:
            self._add_energies(energy.detach().double().flatten().cpu(), counts)
        if forces is not None:
            known = forces.detach().double()[~forces.isnan()]
            self.force_squares += known.square().sum().item()
            self.force_components += known.numel()
        if cutoff is not None:
            self.edges += len(neighbor_list(data, cutoff)[0])

    def _add_energies(self, energy: Tensor, counts: Tensor) -> None:
        known = ~energy.isnan()
        energy, counts = energy[known], counts[known]
        self.gram += counts.T @ counts
        self.moment += counts.T @ energy
        self.squares += energy.square().sum().item()
        self.labelled += len(energy)
        self.labelled_atoms += int(counts.sum())


def isolated_atom_energies(structures: Iterable[Any], cutoff: float) -> dict[int, float]:
    """Return the energies of single atoms without neighbors, for ``AtomicStatistics.fit(reference_energies=...)``.

    Parameters
    ----------
    structures : iterable of AtomicData
        Any structures. One atom in a primitive cell is no isolated atom: its images are neighbors.
    cutoff : float
        Distance within which an atom is a neighbor [A].

    Returns
    -------
    dict of int to float
        Energy by atomic number [eV].

    Raises
    ------
    DataError
        If two isolated atoms of an element have energies that differ by more than 1 meV.
    """
    found: dict[int, float] = {}
    for index, data in enumerate(structures):
        energy = getattr(data, "energy", None)
        if (
            data.positions.shape[0] != 1
            or energy is None
            or bool(energy.isnan())
            or len(neighbor_list(data, cutoff)[0])
        ):
            continue
        element, value = int(data.atomic_numbers), float(energy)
        if abs(found.setdefault(element, value) - value) > 1e-3:
            raise DataError(
                f"structure {index} is an isolated atom of atomic number {element} with {value} eV, "
                f"but an earlier one has {found[element]} eV; keep one of them"
            )
    return found
