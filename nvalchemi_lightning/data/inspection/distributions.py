"""How sizes, energies and forces of a data set are distributed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nvalchemi_lightning.data.batch import Batch
from nvalchemi_lightning.data.inspection.compositions import TABLE, compositions
from nvalchemi_lightning.data.inspection.histogram import Histogram

__all__ = ["Distributions"]


class Distributions:
    """Exact counts over a data set; the memory does not grow with it.

    Parameters
    ----------
    structures : iterable of Batch
        The data. Labels that are absent or NaN are passed over.
    reference_energies : mapping of int to float
        Energy of an atom by atomic number [eV], subtracted from the energies.

    Attributes
    ----------
    sizes : Counter
        Number of atoms to number of structures.
    energies : Histogram
        Energies after the reference energies, per atom [eV].
    forces : Histogram
        Decadic logarithms of the forces on atoms [eV/A], those that are zero left out.
    zero_forces : int
        Atoms whose force is exactly zero.
    """

    def __init__(self, structures: Iterable[Batch], reference_energies: Mapping[int, float]) -> None:
        self.sizes: Counter[int] = Counter()
        self.energies, self.forces = Histogram(), Histogram()
        self.zero_forces = 0
        references = np.zeros(TABLE)
        references[list(reference_energies)] = list(reference_energies.values())
        for batch in structures:
            self._add(batch, references)

    def _add(self, batch: Batch, references: NDArray[np.float64]) -> None:
        sizes = _values(batch.num_nodes_per_graph)
        counts = compositions(_values(batch.atomic_numbers), sizes)
        self.sizes.update(sizes.tolist())
        if "energy" in batch:
            self.energies.add((_values(batch.energy.double()).ravel() - counts @ references) / sizes)
        if "forces" in batch:
            self._add_forces(np.linalg.norm(_values(batch.forces.double()), axis=1))

    def _add_forces(self, sizes: NDArray[np.float64]) -> None:
        self.zero_forces += int((sizes == 0).sum())
        self.forces.add(np.log10(sizes[sizes != 0]))


def _values(tensor: Any) -> NDArray[Any]:
    values: NDArray[Any] = tensor.detach().cpu().numpy()
    return values
