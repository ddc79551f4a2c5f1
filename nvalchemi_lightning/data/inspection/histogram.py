"""Histograms of numbers that come in blocks, whose range is not known before."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["Histogram"]

_FINEST = -40
"""Exponent of the smallest width of a bin; 2**-40 is 1e-12."""


class Histogram:
    """Exact counts in bins of equal width, which is the smallest power of two for which the bins suffice.

    Bins begin at multiples of their width, so two of them join to one of the double width when the range grows. The
    result therefore depends on the numbers alone, not on their order or blocks.

    Parameters
    ----------
    bins : int, default 64
        Largest number of bins.
    """

    def __init__(self, bins: int = 64) -> None:
        self._bins = bins
        self._exponent = _FINEST
        self._first = 0
        self._counts = np.zeros(0, dtype=np.int64)

    def add(self, values: NDArray[np.float64]) -> None:
        """Count finite numbers; NaN is passed over."""
        values = values[~np.isnan(values)]
        if not len(values):
            return
        low, high = float(values.min()), float(values.max())
        if len(self._counts):
            low, high = min(low, self._edge(0)), max(high, self._edge(len(self._counts) - 1))
        while not self._holds(low, high):
            self._coarsen()
        self._extend(_place(low, self._exponent), _place(high, self._exponent))
        places = np.floor(np.ldexp(values, -self._exponent)) - self._first
        self._counts += np.bincount(places.astype(np.int64), minlength=len(self._counts))

    def _holds(self, low: float, high: float) -> bool:
        # Places beyond 2**52 would not be exact.
        exact = math.frexp(max(abs(low), abs(high)))[1] - self._exponent <= 52
        return exact and _place(high, self._exponent) - _place(low, self._exponent) < self._bins

    def _edge(self, number: int) -> float:
        return math.ldexp(self._first + number, self._exponent)

    def _coarsen(self) -> None:
        self._exponent += 1
        if len(self._counts):
            places = (self._first + np.arange(len(self._counts))) // 2
            self._first = int(places[0])
            self._counts = np.bincount(places - self._first, weights=self._counts).astype(np.int64)

    def _extend(self, first: int, last: int) -> None:
        if not len(self._counts):
            self._first = first
        before = self._first - first
        after = last - (self._first + len(self._counts) - 1)
        self._counts = np.pad(self._counts, (before, after))
        self._first = first

    @property
    def counts(self) -> NDArray[np.int64]:
        """Numbers in each bin, shape (n,); the first and the last bin are not empty."""
        return self._counts

    @property
    def edges(self) -> NDArray[np.float64]:
        """Where the bins begin, and where the last one ends, shape (n + 1,)."""
        edges: NDArray[np.float64] = np.ldexp(np.arange(len(self._counts) + 1.0) + self._first, self._exponent)
        return edges


def _place(value: float, exponent: int) -> int:
    return math.floor(math.ldexp(value, -exponent))
