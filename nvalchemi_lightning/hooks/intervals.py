"""Intervals between stages: their two ends, their statistics, and the file that lists them."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

__all__ = ["IntervalLog", "Mark", "Span"]

COLUMNS = ("rank", "step", "stage", "t_since_init_s", "delta_s")


@dataclass(frozen=True, eq=False)
class Mark:
    """The time at which a stage was reached, on the host and, if it has an event, on the device."""

    stage: str
    step: int
    rank: int
    host: float
    event: Any

    @property
    def is_over(self) -> bool:
        """Whether the device has got there; the host never waits for the answer."""
        return self.event is None or bool(self.event.query())

    def seconds_to(self, later: Mark) -> float:
        """Return the time from here to a later mark [s], on the device where both have an event."""
        if self.event is None or later.event is None:
            return later.host - self.host
        later.event.synchronize()
        return float(self.event.elapsed_time(later.event)) / 1e3


class Span:
    """Running statistics of one interval."""

    def __init__(self) -> None:
        self.count, self.mean, self.squares, self.low, self.high = 0, 0.0, 0.0, math.inf, -math.inf

    def add(self, seconds: float) -> None:
        """Take in one measurement."""
        self.count += 1
        shift = seconds - self.mean
        self.mean += shift / self.count
        self.squares += shift * (seconds - self.mean)
        self.low, self.high = min(self.low, seconds), max(self.high, seconds)

    def statistics(self) -> dict[str, float]:
        """Return mean, standard deviation of the population, extremes and total [s], and the number."""
        return {
            "mean_s": self.mean,
            "std_s": math.sqrt(max(self.squares, 0.0) / self.count),
            "min_s": self.low,
            "max_s": self.high,
            "total_s": self.mean * self.count,
            "n_samples": self.count,
        }


class IntervalLog:
    """A CSV file that is opened when there is something to write.

    Parameters
    ----------
    path : Path or None
        The file of rank 0; others get a name of their own.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: TextIO | None = None

    def write(self, rank: int, row: tuple[Any, ...]) -> None:
        """Append a row, if there is a path."""
        if self._path is None:
            return
        if self._file is None:
            self._file = self._opened(self._path, rank)
        csv.writer(self._file).writerow(row)

    def _opened(self, path: Path, rank: int) -> TextIO:
        path = path if rank == 0 else path.with_stem(f"{path.stem}_rank{rank}")
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", newline="", encoding="utf-8")
        if file.tell() == 0:
            csv.writer(file).writerow(COLUMNS)
        return file

    def close(self) -> None:
        """Close the file; writing opens it again and goes on at its end."""
        file, self._file = self._file, None
        if file is not None:
            file.close()
