"""How large the structures of a data set are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

__all__ = ["SizeRange"]


@dataclass(frozen=True)
class SizeRange:
    """Atoms of the smallest, the middle and the largest structure."""

    smallest: int
    median: float
    largest: int

    @classmethod
    def of(cls, sizes: Mapping[int, int]) -> SizeRange:
        """Take them from a count of structures by number of atoms, which must not be empty."""
        atoms = np.array(sorted(sizes))
        ends = np.cumsum([sizes[size] for size in atoms.tolist()])
        # With an even number of structures the median lies between the two in the middle.
        middle = np.searchsorted(ends, [(ends[-1] - 1) // 2, ends[-1] // 2], side="right")
        return cls(int(atoms[0]), float(atoms[middle].mean()), int(atoms[-1]))
