"""What one should know before one trusts statistics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nvalchemi_lightning.data.elements import SYMBOLS

if TYPE_CHECKING:
    from nvalchemi_lightning.models.statistics import AtomicStatistics

__all__ = ["remarks"]

_LARGEST_BINDING = 10.0
"""Energy per atom [eV] that no bonds reach: tungsten is bound by 8.9 eV, and few by more than 8."""

_FINE_ENOUGH = 1e-3
"""Distance of neighboring numbers of an energy [eV] beyond which training sees the rounding."""


def remarks(statistics: AtomicStatistics) -> list[str]:
    """Return a sentence for each thing that may surprise; see :attr:`AtomicStatistics.remarks`."""
    if not statistics.num_energies:
        return ["No structure has an energy, so the reference energies are zero."]
    return [*_about_references(statistics), *_about_energies(statistics)]


def _about_references(statistics: AtomicStatistics) -> Iterator[str]:
    unlabelled = [element for element in statistics.per_element if not element.labelled_atoms]
    fitted = statistics.references == "fitted"
    if fitted and unlabelled:
        names = " ".join(element.symbol for element in unlabelled)
        yield f"No structure with {names} has an energy, so the reference energies of these elements are zero."
    if fitted and statistics.rank < len(statistics.per_element) - len(unlabelled):
        yield (
            f"The compositions determine {statistics.rank} of {len(statistics.per_element)} reference energies, so "
            "they are not unique and the smallest ones were taken: they hold for these "
            "compositions alone. Energies of isolated atoms (--isolated-atoms) hold for all."
        )
    if fitted and statistics.isolated_atoms:
        names = " ".join(SYMBOLS[number] for number in statistics.isolated_atoms)
        yield (
            f"Isolated atoms of {names} are among the structures and took part in the fit; to take their energies "
            "as references, name the data as --isolated-atoms too."
        )


def _about_energies(statistics: AtomicStatistics) -> Iterator[str]:
    if statistics.energy_residual > _LARGEST_BINDING:
        yield (
            f"The reference energies leave {statistics.energy_residual:.4g} eV per atom, more than any bonds do: "
            "labels or references are of different methods, in another unit, or wrong."
        )
    if statistics.energy_resolution > _FINE_ENOUGH:
        yield (
            f"The dtype of the energies resolves only {statistics.energy_resolution:.2g} eV; store energies of that "
            "size in float64."
        )
