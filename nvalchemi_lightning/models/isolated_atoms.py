"""Reference energies from atoms that are alone."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from nvalchemi_lightning.errors import DataError
from nvalchemi_lightning.models.statistics_sums import blocks_of, sizes_of
from nvalchemi_lightning.neighbors import neighbor_list

__all__ = ["isolated_atom_energies"]


def isolated_atom_energies(structures: Iterable[Any] | str | os.PathLike[str], cutoff: float) -> dict[int, float]:
    """Return the energies of single atoms without neighbors, for ``AtomicStatistics.fit(reference_energies=...)``.

    Parameters
    ----------
    structures : iterable of AtomicData or Batch, str or PathLike
        Any structures, or a Zarr store or file. One atom in a primitive cell is no isolated atom: its images are
        neighbors.
    cutoff : float
        Distance within which an atom is a neighbor [A].

    Returns
    -------
    dict of int to float
        Energy by atomic number [eV].

    Raises
    ------
    FileNotFoundError
        If there is nothing at the path.
    DataError
        If two isolated atoms of an element have energies that differ by more than 1 meV.
    """
    found: dict[int, float] = {}
    for index, data in _single_atoms(structures):
        energy = getattr(data, "energy", None)
        if energy is None or bool(energy.isnan()) or len(neighbor_list(data, cutoff)[0]):
            continue
        element, value = int(data.atomic_numbers), float(energy)
        if abs(found.setdefault(element, value) - value) > 1e-3:
            raise DataError(
                f"structure {index} is an isolated atom of atomic number {element} with {value} eV, "
                f"but an earlier one has {found[element]} eV; keep one of them"
            )
    return found


def _single_atoms(structures: Iterable[Any] | str | os.PathLike[str]) -> Iterator[tuple[int, Any]]:
    """Yield number and structure of those that have one atom."""
    first = 0
    for data in blocks_of(structures):
        sizes = sizes_of(data)
        for place in np.flatnonzero(sizes == 1).tolist():
            yield first + place, data[place] if hasattr(data, "num_nodes_per_graph") else data
        first += len(sizes)
