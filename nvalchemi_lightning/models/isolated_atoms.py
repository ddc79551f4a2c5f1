"""Reference energies from atoms that are alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nvalchemi_lightning.errors import DataError
from nvalchemi_lightning.neighbors import neighbor_list

__all__ = ["isolated_atom_energies"]


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
