"""How large a noisy quantity may become, judged by its recent past."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median

__all__ = ["RunningBound"]

# The standard deviation of a normal distribution in units of its median absolute deviation.
_SIGMA = 1.4826
# A very even history would make every small rise an outlier.
_LEAST_SPREAD = 0.1


class RunningBound:
    """Median plus a multiple of the spread of the newest values.

    Parameters
    ----------
    factor : float
        How many spreads above the median the bound lies.
    window : int
        How many values are remembered.
    min_history : int
        With fewer values than this there is no bound.

    Notes
    -----
    The spread is 1.4826 times the median absolute deviation, an estimate of the standard deviation that a few outliers
    do not move [1]_, but at least a tenth of the median.

    References
    ----------
    .. [1] P. J. Rousseeuw and C. Croux, J. Am. Stat. Assoc. 88, 1273 (1993).
    """

    def __init__(self, *, factor: float, window: int, min_history: int) -> None:
        self._factor = factor
        self._min_history = min_history
        self._values: deque[float] = deque(maxlen=window)

    @property
    def values(self) -> list[float]:
        """The values that are remembered, oldest first."""
        return list(self._values)

    def restart(self, values: Iterable[float]) -> None:
        """Remember these values, the newest of them if they are too many, and no others."""
        self._values.clear()
        self._values.extend(values)

    def accept(self, value: float) -> None:
        """Remember one more value, in the place of the oldest."""
        self._values.append(value)

    def bound(self) -> float:
        """Return how large the next value may be; infinite as long as the history is too short."""
        if len(self._values) < self._min_history:
            return math.inf
        middle = median(self._values)
        deviation = median([abs(value - middle) for value in self._values])
        return middle + self._factor * max(_SIGMA * deviation, _LEAST_SPREAD * abs(middle))
