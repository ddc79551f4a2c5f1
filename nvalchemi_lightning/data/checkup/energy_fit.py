"""Energies per element that the structures of a set agree on, whatever a few of them say.

What is kept of each structure is 20 bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from nvalchemi_lightning.data.checkup.subject import Floats, Subject

__all__ = ["EnergyFit", "EnergyRecords", "deviation"]

_ROUNDS = 30
_ATOMS = 119


@dataclass
class EnergyRecords:
    """Energy and composition of the structures of a set that are not isolated atoms."""

    compositions: dict[tuple[tuple[int, int], ...], int] = field(default_factory=dict)
    of_structure: array[int] = field(default_factory=lambda: array("i"))
    energies: array[float] = field(default_factory=lambda: array("d"))
    numbers: array[int] = field(default_factory=lambda: array("q"))

    def look(self, subject: Subject) -> None:
        """Keep energy and composition."""
        if subject.is_isolated_atom:
            return
        self.of_structure.append(self.compositions.setdefault(subject.composition, len(self.compositions)))
        self.energies.append(float(subject.known["energy"]))
        self.numbers.append(subject.number)

    @property
    def counts(self) -> Floats:
        """Atoms of each element in each composition, shape (C, 119)."""
        counts = np.zeros((len(self.compositions), _ATOMS))
        for row, composition in enumerate(self.compositions):
            for element, count in composition:
                counts[row, element] = count
        return counts

    @property
    def per_atom(self) -> Floats:
        """Energy per atom of each structure [eV]."""
        sizes = self.counts.sum(1)
        per_atom: Floats = np.frombuffer(self.energies) / sizes[self.places]
        return per_atom

    @property
    def places(self) -> NDArray[np.int32]:
        """Composition of each structure."""
        return np.frombuffer(self.of_structure, np.int32)

    def groups(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield each composition with its structures."""
        order = np.argsort(self.places, kind="stable")
        ends = np.cumsum(np.bincount(self.places, minlength=len(self.compositions)))
        yield from enumerate(np.split(order, ends[:-1]))


@dataclass(frozen=True)
class EnergyFit:
    """Energies per element that most compositions agree with.

    Attributes
    ----------
    records : EnergyRecords
        What was fitted.
    levels : ndarray
        Energy by atomic number, shape (119,) [eV].
    medians : ndarray
        Median energy per atom of each composition [eV].
    sizes : ndarray of int
        Structures of each composition.
    spread : float
        Typical deviation of an energy per atom from the fit [eV].
    """

    records: EnergyRecords
    levels: Floats
    medians: Floats
    sizes: NDArray[np.int64]
    spread: float

    @classmethod
    def of(cls, records: EnergyRecords) -> EnergyFit:
        """Fit least absolute deviations to the medians, by least squares whose weights are adapted."""
        counts, per_atom = records.counts, records.per_atom
        fractions = counts / counts.sum(1, keepdims=True)
        groups = [group for _, group in records.groups()]
        medians = np.array([np.median(per_atom[group]) for group in groups])
        sizes = np.array([len(group) for group in groups])
        weights = np.sqrt(sizes.astype(np.float64))
        for _ in range(_ROUNDS):
            levels = np.linalg.lstsq(fractions * weights[:, None], medians * weights, rcond=1e-9)[0]
            misses = np.abs(fractions @ levels - medians)
            weights = np.sqrt(sizes / np.maximum(misses, 1e-3))
        residuals = per_atom - (fractions @ levels)[records.places]
        return cls(records, levels, medians, sizes, deviation(residuals))


def deviation(values: Floats) -> float:
    """Return the standard deviation that the inner four fifths stand for; two phases in one set widen it."""
    low, high = np.quantile(values, [0.1, 0.9])
    return float(high - low) / 2.563
