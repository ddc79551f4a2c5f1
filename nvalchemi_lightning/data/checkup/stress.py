"""Sign and unit of stress, from three facts.

- Stretched matter is under tension: among structures of one composition, stress grows with the volume, by the bulk
  modulus.
- Where vacuum separates a structure from its images along a direction, the stress along it is exactly
  ``-sum (r . n) (F . n) / V``.
- No structure that anyone computes is under hundreds of GPa in the median.

What is kept of each structure is 24 bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from functools import reduce
from math import gcd, log

import numpy as np

from nvalchemi_lightning.data.checkup.subject import Floats, Subject
from nvalchemi_lightning.data.checkup.units import unit_hint
from nvalchemi_lightning.data.checkup.watchers import Conclusion
from nvalchemi_lightning.data.sources.units import unit_factor

__all__ = ["StressConvention"]

_ENOUGH = 10
_MIN_SPREAD = 0.01
_CORRELATED = 0.5
_TYPICAL_MODULUS = 0.6
_MAX_MODULUS = 6.0
_VACUUM = 6.0
_MIN_VACUUM_STRESS = 0.01
_ENOUGH_VACUUM = 3
_MAX_MEDIAN = 1.0
_GPA = 1 / unit_factor("stress", "GPa")


class StressConvention:
    """Keeps volume and pressure, and stress against vacuum."""

    def __init__(self) -> None:
        self._groups: dict[tuple[tuple[int, int], ...], tuple[array[float], array[float]]] = {}
        self._sizes = array("d")
        self._ratios = array("d")

    def look(self, subject: Subject) -> None:
        """Keep the numbers of a structure with a volume."""
        if not subject.volume or not len(subject.edges):
            return
        stress = subject.known["stress"]
        self._sizes.append(float(np.linalg.norm(stress)) / 3**0.5)
        volumes, tensions = self._groups.setdefault(_formula(subject), (array("d"), array("d")))
        volumes.append(log(subject.volume / len(subject.numbers)))
        tensions.append(float(np.trace(stress)) / 3)
        if "forces" in subject.known:
            self._ratios.extend(_against_vacuum(subject, stress))

    def conclude(self) -> Iterable[Conclusion]:
        """Judge by each fact that the structures allow to use."""
        found = [*self._by_vacuum(), *self._by_volume()]
        yield from found
        median = float(np.median(self._sizes)) if len(self._sizes) >= _ENOUGH else 0.0
        if not found and median > _MAX_MEDIAN:
            yield Conclusion(
                f"the median stress is {median:.3g} eV/A^3, {median * _GPA:.0f} GPa; "
                + _causes("GPa or kbar", negative=False),
                severity="warning",
            )

    def _by_volume(self) -> Iterator[Conclusion]:
        groups = [np.array(group) for group in self._groups.values() if len(group[0]) > 2]
        if sum(group.shape[1] for group in groups) < _ENOUGH:
            return
        volumes, tensions = np.concatenate([group - group.mean(1, keepdims=True) for group in groups], axis=1)
        spread = volumes.std() * tensions.std()
        if volumes.std() < _MIN_SPREAD or not spread or abs((volumes * tensions).mean()) < _CORRELATED * spread:
            return
        modulus = float((volumes * tensions).mean() / (volumes**2).mean())
        unit = unit_hint("stress", abs(modulus) / _TYPICAL_MODULUS, 2.5) or "GPa or kbar"
        causes = _causes(unit if abs(modulus) > _MAX_MODULUS else "", negative=modulus < 0)
        if causes:
            yield Conclusion(
                f"stress changes with the logarithm of the volume by {modulus:.3g} eV/A^3, "
                f"a bulk modulus of {modulus * _GPA:.0f} GPa; {causes}"
            )

    def _by_vacuum(self) -> Iterator[Conclusion]:
        if len(self._ratios) < _ENOUGH_VACUUM:
            return
        median = float(np.median(self._ratios))
        if 0.5 < median < 2:
            return
        unit = unit_hint("stress", abs(median), 1.5) if median else ""
        yield Conclusion(
            f"stress towards vacuum is {median:.3g} times what the forces give, in the median of {len(self._ratios)}; "
            + (_causes(unit, negative=median < 0) or "it belongs to another calculation")
        )


def _causes(unit: str, *, negative: bool) -> str:
    sign = "the other sign" if negative else ""
    return "it seems to have " + " and ".join(filter(None, [sign, unit and f"the unit {unit}"])) if sign or unit else ""


def _formula(subject: Subject) -> tuple[tuple[int, int], ...]:
    divisor = reduce(gcd, (count for _, count in subject.composition))
    return tuple((element, count // divisor) for element, count in subject.composition)


def _against_vacuum(subject: Subject, stress: Floats) -> Iterator[float]:
    """Yield the stress by what the forces give, for each direction with vacuum."""
    normals = np.linalg.inv(subject.cell).T
    heights = 1 / np.linalg.norm(normals, axis=1)
    fractions = subject.positions @ np.linalg.inv(subject.cell)
    for axis in range(3):
        along = np.sort(fractions[:, axis] % 1.0)
        gaps = np.diff(along, append=along[0] + 1)
        widest = int(gaps.argmax())
        if gaps[widest] * heights[axis] < _VACUUM:
            continue
        start = along[(widest + 1) % len(along)]
        place = (fractions[:, axis] - start + 1e-9) % 1.0 * heights[axis]
        push = subject.known["forces"] @ normals[axis] * heights[axis]
        expected = -float(place @ push) / (subject.volume or 1.0)
        if abs(expected) * (subject.volume or 1.0) > _MIN_VACUUM_STRESS * len(place):
            normal = normals[axis] * heights[axis]
            yield float(normal @ stress @ normal) / expected
