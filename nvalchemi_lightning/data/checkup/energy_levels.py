"""A check that sets have one level of theory: the energies of elements must agree."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

import numpy as np

from nvalchemi_lightning.data.checkup.energy_fit import EnergyFit, EnergyRecords
from nvalchemi_lightning.data.checkup.subject import Subject
from nvalchemi_lightning.data.checkup.watchers import Conclusion

__all__ = ["EnergyLevels"]

_MAX_OFFSET_OF_COMPOSITION = 0.1
_MAX_OFFSET = 1.0


class EnergyLevels:
    """Compares the energies per element of sets."""

    def __init__(self) -> None:
        self._sets: dict[str, EnergyRecords] = {}

    def look(self, subject: Subject) -> None:
        """Keep the energy with its set."""
        self._sets.setdefault(subject.source, EnergyRecords()).look(subject)

    def conclude(self) -> Iterable[Conclusion]:
        """Compare every two sets, as far as their compositions allow."""
        fits = {name: EnergyFit.of(records) for name, records in self._sets.items() if len(records.energies)}
        for one, two in combinations(fits, 2):
            offset = _offset_of_compositions(fits[one], fits[two])
            if offset is None:
                offset = _offset_of_fit(fits[one], fits[two])
            if offset is not None:
                message = f"the energies of {two} are {offset:+.4g} eV per atom off those of {one}"
                yield Conclusion(message, source=f"{one}, {two}")


def _offset_of_compositions(one: EnergyFit, two: EnergyFit) -> float | None:
    """Compare compositions that both have; None if there are none, or they agree."""
    places = one.records.compositions, two.records.compositions
    common = [composition for composition in places[0] if composition in places[1]]
    if not common:
        return None
    offsets = [two.medians[places[1][each]] - one.medians[places[0][each]] for each in common]
    offset = float(np.median(offsets))
    return offset if abs(offset) > _MAX_OFFSET_OF_COMPOSITION + 5 * min(one.spread, two.spread) else None


def _offset_of_fit(one: EnergyFit, two: EnergyFit) -> float | None:
    """Compare the second with what the first predicts, for compositions that the first determines."""
    counts = two.records.counts
    _, sizes, directions = np.linalg.svd(one.records.counts, full_matrices=False)
    span = directions[sizes / sizes[0] > 1e-9]
    known = np.abs(counts - counts @ span.T @ span).max(1) < 1e-6 * counts.max()
    if not known.any():
        return None
    misses = two.medians - counts @ one.levels / counts.sum(1)
    offset = float(np.median(np.repeat(misses[known], two.sizes[known])))
    return offset if abs(offset) > _MAX_OFFSET + 5 * max(one.spread, two.spread) else None
