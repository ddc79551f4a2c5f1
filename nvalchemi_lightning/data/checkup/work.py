"""Energies against forces and stress: between structures close to each other, the energy changes by the work.

From structure 1 to 2 that is ``-(F1 + F2) / 2 . dr + V (stress1 + stress2) / 2 : strain``, the trapezoidal rule, exact
up to third order. The two ends of the rule bracket the change; where they are far apart the path is not small, and
nothing is said. Only structures with the same atoms in the same order, one after the other in their set, are compared.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from nvalchemi_lightning.data.checkup.subject import Floats, Subject
from nvalchemi_lightning.data.checkup.units import unit_hint
from nvalchemi_lightning.data.checkup.watchers import Conclusion

__all__ = ["Work"]

_REMEMBERED = 64
"""Compositions of which the last structure is kept."""

_MAX_MOVE = 0.2
_MAX_STRAIN = 0.05
_MAX_TURN = 0.1
_ENOUGH = 10
_MAX_PAIRS = 100_000
_DOMINATES = 2.0
_EXACT = 1.08


class _Step(NamedTuple):
    """A small change between two structures [eV]."""

    energy: float
    by_forces: float
    by_stress: float


class Work:
    """Compares each structure with the one before it."""

    def __init__(self) -> None:
        self._last: OrderedDict[bytes, Subject] = OrderedDict()
        self._ratios = {"forces": array("d"), "stress": array("d")}

    def look(self, subject: Subject) -> None:
        """Keep the ratio of energy and work, if the structure before is close."""
        key = subject.numbers.tobytes() + bytes(subject.pbc)
        before = self._last.pop(key, None)
        self._last[key] = subject
        if len(self._last) > _REMEMBERED:
            self._last.popitem(last=False)
        step = None if before is None else _step(before, subject)
        if step is None:
            return
        for label, by, other in (
            ("forces", step.by_forces, step.by_stress),
            ("stress", step.by_stress, step.by_forces),
        ):
            if abs(by) > _DOMINATES * abs(other) and len(self._ratios[label]) < _MAX_PAIRS:
                self._ratios[label].append((step.energy - other) / by)

    def conclude(self) -> Iterable[Conclusion]:
        """Compare energies with the work of forces, and with that of stress."""
        for label, ratios in self._ratios.items():
            if len(ratios) < _ENOUGH:
                continue
            low, median, high = np.quantile(ratios, [0.25, 0.5, 0.75]).tolist()
            if 0.5 < median < 2:
                continue
            consistent = low * high > 0 and max(low / high, high / low) < 4
            message = (
                f"between {len(ratios)} pairs of close structures the energy changes by {median:.3g} times the work of "
                f"the {label} (half of them {low:.3g} to {high:.3g}), not by 1 times"
            )
            yield Conclusion(message + _explained(label, median), severity="error" if consistent else "warning")


def _explained(label: str, ratio: float) -> str:
    """Say what would explain the ratio."""
    size = max(abs(ratio), 1e-12)
    units = {
        label: unit_hint("force" if label == "forces" else "stress", 1 / size, _EXACT),
        "energies": unit_hint("energy", size, _EXACT),
    }
    signs = [f"the {label} have the other sign"] if ratio < 0 else []
    causes = [f"the {name} are in {unit}" for name, unit in units.items() if unit]
    explained = " and ".join(filter(None, [*signs, " or ".join(causes)]))
    return f"; perhaps {explained}" if explained else ""


def _step(before: Subject, after: Subject) -> _Step | None:
    """Return the step between two structures, or None if it is not small."""
    periodic = any(after.pbc)
    strain = _strain(before, after) if periodic else np.zeros((3, 3))
    if strain is None:
        return None
    moved = _moved(before, after) if periodic else _turned(before, after)
    if moved is None or np.abs(moved[0]).max() > _MAX_MOVE:
        return None
    displacement, forces = moved
    ends = [-float((one * displacement).sum()) for one in (before.known["forces"], forces)]
    by_forces = sum(ends) / 2
    by_stress = 0.0
    if strain.any():
        stress = (before.known["stress"] + after.known["stress"]) / 2
        by_stress = float((stress * strain).sum()) * ((before.volume or 0.0) + (after.volume or 0.0)) / 2
    if abs(ends[1] - ends[0]) >= abs(by_forces + by_stress):
        return None
    return _Step(float(after.known["energy"] - before.known["energy"]), by_forces, by_stress)


def _strain(before: Subject, after: Subject) -> Floats | None:
    """Return the strain that makes one cell the other; None if it is large, a rotation, or not labelled."""
    if np.abs(after.cell - before.cell).max() < 1e-6:
        return np.zeros((3, 3))
    if before.volume is None or not all("stress" in one.known for one in (before, after)):
        return None
    turn, stretch, axes = np.linalg.svd(np.linalg.solve(before.cell, after.cell))
    if np.abs(turn @ axes - np.eye(3)).max() > _MAX_TURN or np.abs(stretch - 1).max() > _MAX_STRAIN:
        return None
    result: Floats = axes.T @ np.diag(np.log(stretch)) @ axes
    return result


def _moved(before: Subject, after: Subject) -> tuple[Floats, Floats] | None:
    """Return how the atoms moved against the lattice, by the shortest way, and the forces after it."""
    if abs(np.linalg.det(after.cell)) < 1e-3:
        return None
    fractions = after.positions @ np.linalg.inv(after.cell) - before.positions @ np.linalg.inv(before.cell)
    fractions -= np.round(fractions) * np.array(after.pbc)
    fractions -= fractions.mean(0)
    return fractions @ (before.cell + after.cell) / 2, after.known["forces"]


def _turned(before: Subject, after: Subject) -> tuple[Floats, Floats]:
    """Return how the atoms of a molecule moved once it is turned onto the other, and the turned forces.

    References
    ----------
    W. Kabsch, Acta Crystallogr. A 32, 922 (1976), doi:10.1107/S0567739476001873.
    """
    one, two = (subject.positions - subject.positions.mean(0) for subject in (before, after))
    left, _, right = np.linalg.svd(two.T @ one)
    mirror = np.diag([1.0, 1.0, np.sign(np.linalg.det(left @ right)) or 1.0])
    turn = left @ mirror @ right
    return two @ turn - one, after.known["forces"] @ turn
