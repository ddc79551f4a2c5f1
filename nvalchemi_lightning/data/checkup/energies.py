"""Checks of the energies of a set: outliers, constants, and what its compositions determine."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from nvalchemi_lightning.data.checkup.energy_fit import EnergyFit, EnergyRecords, deviation
from nvalchemi_lightning.data.checkup.subject import Subject
from nvalchemi_lightning.data.checkup.watchers import Conclusion, Examples
from nvalchemi_lightning.data.elements import SYMBOLS

__all__ = ["ConstantEnergies", "EnergyOutliers", "Undetermined"]

_ENOUGH = 20
_MANY_DEVIATIONS = 12.0
_FLOOR = 0.02
_MANY_EQUAL = 10


class EnergyOutliers:
    """Finds energies far from those of other structures."""

    def __init__(self) -> None:
        self._kept = EnergyRecords()
        self._source = ""

    def look(self, subject: Subject) -> None:
        """Keep the energy."""
        self._source = subject.source
        self._kept.look(subject)

    def conclude(self) -> Iterable[Conclusion]:
        """Compare each with its own composition, or with the fit where that has few structures."""
        if len(self._kept.energies) < _ENOUGH:
            return
        fit, per_atom = EnergyFit.of(self._kept), self._kept.per_atom
        expected = (self._kept.counts @ fit.levels / self._kept.counts.sum(1))[self._kept.places]
        allowed = np.full(len(per_atom), fit.spread)
        for composition, group in self._kept.groups():
            if len(group) >= _ENOUGH:
                expected[group] = fit.medians[composition]
                allowed[group] = deviation(per_atom[group])
        misses = per_atom - expected
        examples = Examples()
        for place in np.flatnonzero(np.abs(misses) > np.maximum(_MANY_DEVIATIONS * allowed, _FLOOR)).tolist():
            seen = f"{misses[place]:+.3g} eV per atom from what is expected; {allowed[place]:.2g} is usual"
            examples.add(self._source, self._kept.numbers[place], seen)
        if examples.count:
            yield Conclusion("energies far from those of other structures", examples)


class ConstantEnergies:
    """Finds compositions of which all structures have one energy."""

    def __init__(self) -> None:
        self._kept = EnergyRecords()

    def look(self, subject: Subject) -> None:
        """Keep the energy."""
        self._kept.look(subject)

    def conclude(self) -> Iterable[Conclusion]:
        """Name the energy and how many have it."""
        energies, same = np.frombuffer(self._kept.energies), 0
        for _, group in self._kept.groups() if len(energies) else ():
            if len(group) >= _MANY_EQUAL and np.ptp(energies[group]) == 0:
                same += len(group)
        if same:
            yield Conclusion(f"{same} structures have the same energy as all others of their composition")


class Undetermined:
    """Finds sets whose compositions do not determine energies per element."""

    def __init__(self) -> None:
        self._rows: set[tuple[tuple[int, int], ...]] = set()

    def look(self, subject: Subject) -> None:
        """Note the composition."""
        self._rows.add(subject.composition)

    def conclude(self) -> Iterable[Conclusion]:
        """Compare the number of independent compositions with the number of elements."""
        elements = sorted({element for row in self._rows for element, _ in row})
        counts = np.array([[dict(row).get(element, 0) for element in elements] for row in self._rows])
        rank = int(np.linalg.matrix_rank(counts)) if elements else 0
        if rank < len(elements):
            names = " ".join(SYMBOLS[element] for element in elements)
            yield Conclusion(f"{rank} independent compositions of the {len(elements)} elements {names}")
