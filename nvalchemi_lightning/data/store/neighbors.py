"""Finding out what a damaged neighbor list counted from.

A store counts atoms through all its structures: structure i owns the numbers ``ptr[i]`` to ``ptr[i + 1] - 1``. Two ways
of damaging that are known. Appending without adding what was there leaves the numbers of a block of structures too low
by ``ptr[b]``, where b is the first of the block; blocks are not recorded. Removing structures without renumbering
leaves the numbers of those behind too high by the atoms removed before, which are not recorded either. Both are found
again where only one answer fits all structures: the edges of a structure must lie within its atoms.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Extent", "NumberShifts", "find_shifts"]

Ints = NDArray[np.int64]


class Extent(NamedTuple):
    """What the edges of some structures say.

    Attributes
    ----------
    samples : ndarray of int64, shape (n,)
        Structures with edges, ascending.
    low, high : ndarray of int64, shape (n,)
        Smallest and largest atom number in the edges of each.
    """

    samples: Ints
    low: Ints
    high: Ints


class NumberShifts(NamedTuple):
    """What is to be added to the atom numbers.

    Attributes
    ----------
    shifts : ndarray of int64, shape (n,)
        For each structure of the extent; 0 where it is right or not known.
    unknown : ndarray of int64
        Structures for which several answers fit, or none.
    """

    shifts: Ints
    unknown: Ints


def find_shifts(extent: Extent, ptr: Ints) -> NumberShifts | None:
    """Return how to renumber the edges, or None where nothing is wrong.

    Parameters
    ----------
    extent : Extent
        What the edges say.
    ptr : ndarray of int64, shape (N + 1,)
        First atom of every structure, and the number of atoms.
    """
    first, last = ptr[extent.samples], ptr[extent.samples + 1] - 1
    if (extent.low >= first).all() and (extent.high <= last).all():
        return None
    # The shift of each structure lies between these; they agree where edges reach its first and its last atom.
    least, most = first - extent.low, last - extent.high
    found: Bounds | None = None
    if (least <= most).all():
        found = _after_append(least, most, extent.samples, ptr) if (most >= 0).all() else None
        if found is None and (least <= 0).all():
            found = _after_removal(least, most)
    low, high = found or (least, most)
    known = low == high
    return NumberShifts(np.where(known, low, 0), extent.samples[~known])


Bounds = tuple[Ints, Ints]


def _after_removal(least: Ints, most: Ints) -> Bounds | None:
    """Narrow the bounds of shifts that are negative and never rise; None if that is not so."""
    high = np.minimum.accumulate(np.minimum(most, 0))
    low = np.maximum.accumulate(least[::-1])[::-1]
    return (low, high) if (low <= high).all() else None


def _after_append(least: Ints, most: Ints, samples: Ints, ptr: Ints) -> Bounds | None:
    """Narrow the bounds of shifts that are 0 or the first atom of a block of structures; None if that is not so.

    A shift stays the same from structure to structure until another block begins.
    """
    choices: list[set[int]] = []
    fresh: list[set[int]] = []
    previous, before = -1, {0}
    for sample, low, high in zip(samples.tolist(), least.tolist(), most.tolist(), strict=True):
        starts = ptr[previous + 1 : sample + 1]
        begun = {0, *starts[np.searchsorted(starts, low) : np.searchsorted(starts, high, side="right")].tolist()}
        fresh.append({shift for shift in begun if low <= shift <= high})
        before = {shift for shift in before if low <= shift <= high} | fresh[-1]
        if not before:
            return None
        choices.append(before)
        previous = sample
    _drop_dead_ends(choices, fresh)
    bounds = [(min(shifts), max(shifts)) for shifts in choices]
    return np.array([low for low, _ in bounds]), np.array([high for _, high in bounds])


def _drop_dead_ends(choices: list[set[int]], fresh: list[set[int]]) -> None:
    """Keep the shifts from which the rest of the structures can be explained."""
    for place in reversed(range(len(choices) - 1)):
        if not fresh[place + 1] & choices[place + 1]:
            choices[place] = choices[place] & choices[place + 1]
