"""Sign and unit of forces, from what is known about bonds: a longer bond pulls, and by how much.

For pairs of neighbors the force along the bond falls with its length; the slope is the stiffness. It is 25 to 50 eV/A^2
for hydrogen bound to carbon, nitrogen or oxygen and 2 to 30 for bonds between other atoms. Sets whose forces do not
depend on bond lengths show no correlation, and nothing is said about them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from nvalchemi_lightning.data.checkup.subject import Floats, Subject
from nvalchemi_lightning.data.checkup.units import unit_hint
from nvalchemi_lightning.data.checkup.watchers import Conclusion
from nvalchemi_lightning.data.covalent_radii import COVALENT_RADII
from nvalchemi_lightning.data.elements import SYMBOLS

__all__ = ["BondForces"]

_BONDED = 1.25
"""Longest bond by the sum of the covalent radii."""

_ENOUGH = 100
_CORRELATED = 0.3
_MIN_SPREAD = 0.005
_HYDROGEN = (8.0, 35.0, 150.0)
_NONMETALS = (0.8, 12.0, 100.0)
_HEAVY = (0.15, 2.5, 30.0)
_OTHERS = (0.15, 6.0, 150.0)
"""Lowest, typical and highest stiffness [eV/A^2] of bonds: of hydrogen with B to F, among B to F, among atoms beyond
neon, and of all others."""

_SOFT = np.isin(np.arange(119), (2, 3, 4, 10, 11, 12, 18, 19, 20, 36, 37, 38, 54, 55, 56, 80, 86, 87, 88))
"""Noble gases, alkali and alkaline earth metals and mercury, whose contacts may be softer than any bond."""


@dataclass
class _Pairs:
    """Sums over bonds of one kind: lengths and the forces along them."""

    sums: Floats

    def add(self, length: Floats, force: Floats) -> None:
        """Add bonds."""
        ones = np.ones_like(length)
        self.sums += [row.sum() for row in (ones, length, force, length**2, force**2, length * force)]

    @property
    def count(self) -> float:
        """Number of bonds."""
        return float(self.sums[0])

    @property
    def moments(self) -> tuple[float, float, float]:
        """Variances of length and force, and their covariance."""
        length, force, squares, forces, products = self.sums[1:] / self.count
        return squares - length**2, forces - force**2, products - length * force

    @property
    def correlation(self) -> float:
        """Correlation of force and length; 0 if either hardly varies."""
        length, force, product = self.moments
        return product / np.sqrt(length * force) if length > _MIN_SPREAD**2 and force > 0 else 0.0

    @property
    def stiffness(self) -> float:
        """Fall of the force with the length [eV/A^2]."""
        length, _, product = self.moments
        return -product / length


class BondForces:
    """Adds up bonds by the elements that they join."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[int, int], _Pairs] = {}

    def look(self, subject: Subject) -> None:
        """Add the bonds of a structure."""
        numbers, forces = subject.numbers, subject.known["forces"]
        if not len(subject.edges):
            return
        soft = _SOFT[numbers]
        firm = ~(soft[subject.edges.source] | soft[subject.edges.target])
        ordered = numbers[subject.edges.source] <= numbers[subject.edges.target]
        bonds = subject.edges.where(firm & ordered & (subject.closeness < _BONDED) & (subject.edges.lengths > 0))
        pull = ((forces[bonds.target] - forces[bonds.source]) * bonds.vectors).sum(1) / bonds.lengths / 2
        excess = bonds.lengths - COVALENT_RADII[numbers[bonds.source]] - COVALENT_RADII[numbers[bonds.target]]
        kinds = numbers[bonds.source] * 1000 + numbers[bonds.target]
        for kind in np.unique(kinds).tolist():
            own = kinds == kind
            pairs = self._pairs.setdefault(divmod(kind, 1000), _Pairs(np.zeros(6)))
            pairs.add(excess[own], pull[own])

    def conclude(self) -> Iterable[Conclusion]:
        """Judge the kinds of bonds that tell something; most of them must agree."""
        telling = {
            kind: pairs
            for kind, pairs in self._pairs.items()
            if pairs.count >= _ENOUGH and abs(pairs.correlation) > _CORRELATED
        }
        if not telling:
            return
        total = sum(pairs.count for pairs in telling.values())
        pushing = {kind: pairs for kind, pairs in telling.items() if pairs.stiffness < 0}
        if _most(pushing, total):
            yield Conclusion(
                f"forces push atoms apart where bonds are long ({_shown(pushing)}): they have the sign of gradients"
            )
        for outside in (_outside(telling, soft=True), _outside(telling, soft=False)):
            if _most(outside, total):
                ratios = [abs(pairs.stiffness) / _range(kind)[1] for kind, pairs in outside.items()]
                factor = float(np.exp(np.mean(np.log(ratios))))
                unit = unit_hint("force", factor, 2.5)
                hint = f"; the forces seem to be in {unit}" if unit else ""
                yield Conclusion(f"bonds have an impossible stiffness ({_shown(outside)}){hint}")


def _range(kind: tuple[int, int]) -> tuple[float, float, float]:
    """Return lowest, typical and highest stiffness of a kind of bond, the lighter element first."""
    light = [element == 1 or 5 <= element <= 9 for element in kind]
    if all(light):
        return _HYDROGEN if kind[0] == 1 else _NONMETALS
    return _HEAVY if kind[0] > 10 else _OTHERS


def _outside(pairs: dict[tuple[int, int], _Pairs], *, soft: bool) -> dict[tuple[int, int], _Pairs]:
    return {
        kind: one
        for kind, one in pairs.items()
        if (abs(one.stiffness) < _range(kind)[0] if soft else abs(one.stiffness) > _range(kind)[2])
    }


def _most(some: dict[tuple[int, int], _Pairs], total: float) -> bool:
    return sum(pairs.count for pairs in some.values()) > total / 2


def _shown(pairs: dict[tuple[int, int], _Pairs]) -> str:
    largest = sorted(pairs.items(), key=lambda item: -item[1].count)[:3]
    return ", ".join(f"{SYMBOLS[a]}-{SYMBOLS[b]} {one.stiffness:.3g} eV/A^2" for (a, b), one in largest)
