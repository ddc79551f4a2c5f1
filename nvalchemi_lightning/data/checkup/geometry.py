"""Checks of geometries: distances, cells, fragments, the unit of length."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from nvalchemi_lightning.data.checkup.subject import CUTOFF, Edges, Subject
from nvalchemi_lightning.data.checkup.watchers import Conclusion
from nvalchemi_lightning.data.elements import SYMBOLS

__all__ = ["LengthUnit", "close_atoms", "coincident_atoms", "fragments", "left_handed", "tiny_cell"]

_SAME_PLACE = 0.1
"""Part of the sum of the covalent radii; no interaction is so strong that atoms get there."""

_TOO_CLOSE = 0.6
"""The shortest bonds (N2, CO, O2 under strain) are above 0.7."""

_MIN_VOLUME = 1.0
_MIN_STRUCTURES = 5
_NOBLE = np.isin(np.arange(119), (2, 10, 18, 36, 54, 86))


def coincident_atoms(subject: Subject) -> str | None:
    """Find two atoms at one place."""
    return _closest(subject, 0.0, _SAME_PLACE)


def close_atoms(subject: Subject) -> str | None:
    """Find two atoms closer than they can come in matter."""
    return _closest(subject, _SAME_PLACE, _TOO_CLOSE)


def _closest(subject: Subject, low: float, high: float) -> str | None:
    if not len(subject.edges):
        return None
    edge = int(subject.closeness.argmin())
    if not low <= subject.closeness[edge] < high:
        return None
    edges, numbers = subject.edges, subject.numbers
    first, second = int(edges.source[edge]), int(edges.target[edge])
    image = " (an image)" if edges.shifts[edge].any() else ""
    one, two = SYMBOLS[numbers[first]], SYMBOLS[numbers[second]]
    return (
        f"{one} {first} and {two} {second}{image} are {edges.lengths[edge]:.3g} A apart, "
        f"{subject.closeness[edge]:.2f} of the sum of their covalent radii"
    )


def tiny_cell(subject: Subject) -> str | None:
    """Find cells with hardly any volume per atom."""
    if subject.volume is None or subject.volume >= _MIN_VOLUME * len(subject.numbers):
        return None
    return f"{subject.volume / len(subject.numbers):.3g} A^3 per atom"


def left_handed(subject: Subject) -> str | None:
    """Find left-handed lattice vectors."""
    if subject.volume is None or np.linalg.det(subject.cell) > 0:
        return None
    return "det(cell) < 0"


def fragments(subject: Subject) -> str | None:
    """Find parts that no neighbor list connects."""
    if len(subject.numbers) == 1:
        return None
    parts = np.bincount(_components(len(subject.numbers), subject.edges))
    sizes = sorted(parts[parts > 0].tolist(), reverse=True)
    if len(sizes) == 1:
        return None
    shown = ", ".join(map(str, sizes[:4])) + (", ..." if len(sizes) > 4 else "")
    return f"{len(sizes)} parts of {shown} atoms, more than {CUTOFF:g} A apart"


def _components(count: int, edges: Edges) -> NDArray[np.int64]:
    """Return for every atom the lowest atom that is connected to it."""
    label = np.arange(count)
    while True:
        lowest = label.copy()
        np.minimum.at(lowest, edges.source, label[edges.target])
        lowest = lowest[lowest]
        if np.array_equal(lowest, label):
            return label
        label = lowest


class LengthUnit:
    """Compares the shortest distances with covalent radii."""

    def __init__(self) -> None:
        self._closest = array("d")

    def look(self, subject: Subject) -> None:
        """Keep the shortest distance relative to the covalent radii."""
        if len(subject.edges) and not _NOBLE[subject.numbers].any():
            self._closest.append(float(subject.closeness.min()))

    def conclude(self) -> Iterable[Conclusion]:
        """Say what the median tells."""
        if len(self._closest) < _MIN_STRUCTURES:
            return
        median = float(np.median(self._closest))
        if not _TOO_CLOSE / 2 < median < 1.5:
            unit = "Bohr" if median > 1 else "nm"
            yield Conclusion(
                f"the shortest distance is {median:.2f} of the sum of the covalent radii in the median structure; "
                f"positions seem to be in {unit} instead of A"
            )
