"""How many atoms of each element structures have."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nvalchemi_lightning.data.elements import MAX_ATOMIC_NUMBER
from nvalchemi_lightning.errors import DataError

__all__ = ["TABLE", "compositions"]

TABLE = MAX_ATOMIC_NUMBER + 1
"""Columns of a table by atomic number; column 0 stays empty."""


def compositions(numbers: NDArray[Any], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count the atoms of each element in each structure.

    Parameters
    ----------
    numbers : ndarray of int, shape (V,)
        Atomic numbers of the atoms, structure after structure.
    sizes : ndarray of int64, shape (B,)
        Atoms of each structure.

    Returns
    -------
    ndarray of int64, shape (B, 119)
        Counts by atomic number.

    Raises
    ------
    DataError
        If a number is not that of an element.
    """
    wrong = numbers[(numbers < 1) | (numbers > MAX_ATOMIC_NUMBER)]
    if wrong.size:
        raise DataError(f"{wrong[0]} is no atomic number; they go from 1 to {MAX_ATOMIC_NUMBER}")
    structure = np.repeat(np.arange(len(sizes)), sizes)
    flat = np.bincount(structure * TABLE + numbers, minlength=len(sizes) * TABLE)
    return flat.reshape(len(sizes), TABLE)
