"""Least squares over rows that come in blocks and are not kept."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["LeastSquares", "Solution"]

_BLOCK = 4096
"""Rows that are gathered before they are reduced; a reduction costs about as much for one row as for a hundred."""


class Solution(NamedTuple):
    """What fits best.

    Attributes
    ----------
    values : ndarray, shape (k,)
        The smallest of the vectors that leave the least squares.
    rank : int
        Number of independent rows; below k the values are not unique.
    """

    values: NDArray[np.float64]
    rank: int


class LeastSquares:
    """The problem of minimizing ``|A x - b|``, one block of rows after another.

    All rows so far are kept as the triangular factor of ``[A b]``, which has as many rows as columns. Unlike the
    normal equations it does not square the condition of the problem, and residuals do not come as differences of
    large sums.

    Parameters
    ----------
    columns : int
        Number of unknowns k.

    References
    ----------
    A. Bjorck, Numerical Methods for Least Squares Problems, SIAM 1996, section 2.5 (sequential QR).
    """

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._factor = np.zeros((0, columns + 1))
        self._waiting: list[NDArray[np.float64]] = []
        self._waiting_rows = 0
        self.rows = 0

    def add(self, design: NDArray[np.float64], target: NDArray[np.float64]) -> None:
        """Add the rows of A, shape (n, k), and of b, shape (n,)."""
        self._waiting.append(np.column_stack([design, target]))
        self._waiting_rows += len(target)
        self.rows += len(target)
        if self._waiting_rows >= _BLOCK:
            self._reduced()

    def _reduced(self) -> NDArray[np.float64]:
        if self._waiting:
            rows = np.concatenate([self._factor, *self._waiting])
            used = rows.any(axis=0)
            triangle = np.linalg.qr(rows[:, used], mode="r")
            self._factor = np.zeros((len(triangle), rows.shape[1]))
            self._factor[:, used] = triangle
            self._waiting, self._waiting_rows = [], 0
        return self._factor

    def solve(self) -> Solution:
        """Return the best values; zero for unknowns that no row has."""
        factor = self._reduced()
        left, sizes, right = np.linalg.svd(factor[:, :-1], full_matrices=False)
        # The rule of numpy.linalg.lstsq, with room for the roundings of many reductions of a few rows.
        tolerance = np.finfo(np.float64).eps * max(self.rows, self._columns)
        rank = int((sizes > tolerance * sizes.max(initial=0.0)).sum())
        values = right[:rank].T @ ((left[:, :rank].T @ factor[:, -1]) / sizes[:rank])
        return Solution(values, rank)

    def residual(self, values: NDArray[np.float64]) -> float:
        """Return ``|A x - b|`` for any x, shape (k,)."""
        return float(np.linalg.norm(self._reduced() @ np.append(values, -1.0)))
