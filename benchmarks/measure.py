"""Compare variants of a training loop: interleaved runs, CPU time of every step, one table of differences."""

from __future__ import annotations

import argparse
import json
import logging
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning
import torch

__all__ = ["ClockedBatches", "Rung", "arguments", "compare", "report", "save"]

RESULTS = Path(__file__).parent / "results"

# Steps after which everything periodic (such as logging) has happened once.
PERIOD = 50


class ClockedBatches:
    """A loader that reads the clock itself, so that no callback has to.

    A loop asks for the next batch when it is done with the last one: the time between two requests is a whole step,
    whoever runs the loop. Steps before the first full period (start-up, first touches of memory) do not count.

    Parameters
    ----------
    batches : sequence
        Handed out in turn.
    steps : int
        How many steps are timed.
    warmup : int
        Steps before them.
    """

    def __init__(self, batches: Sequence[Any], steps: int, warmup: int = PERIOD) -> None:
        self._batches = batches
        self._steps = steps
        self._warmup = warmup
        self._readings: list[float] = []

    def __len__(self) -> int:
        # One more than is timed: the last timed step ends with a request, too.
        return self._warmup + self._steps + 1

    def __iter__(self) -> Iterator[Any]:
        self._readings = []
        for number in range(len(self)):
            self._readings.append(time.process_time())
            yield self._batches[number % len(self._batches)]

    def microseconds(self) -> list[float]:
        """Return the CPU time of each timed step [us]."""
        timed = self._readings[self._warmup :]
        return [(end - start) * 1e6 for start, end in pairwise(timed)]


@dataclass
class Rung:
    """One variant of the loop.

    Attributes
    ----------
    name : str
        Its row in the table.
    run : callable
        Trains a fresh model on the loader it is given, and returns it.
    batches : sequence
        Its data.
    over : str or None
        The variant whose time is subtracted.
    target : float or None
        The difference that is allowed [us].
    times : list of float
        CPU time of every step [us]; whole periods one after the other.
    """

    name: str
    run: Callable[[ClockedBatches], Any]
    batches: Sequence[Any]
    over: str | None = None
    target: float | None = None
    times: list[float] = field(default_factory=list)

    @property
    def undisturbed(self) -> float:
        """CPU time per step when other processes leave the caches alone [us].

        The lower decile of every step of the period, averaged over the period: a step that logs is rare, but it is
        compared with its like and counts with its share.
        """
        return statistics.fmean(lower_decile(self.times[phase::PERIOD]) for phase in range(PERIOD))

    def summary(self) -> dict[str, Any]:
        """Return the numbers to keep [us]."""
        return {
            "us_per_step": round(self.undisturbed, 1),
            "median": round(statistics.median(self.times), 1),
            "over": self.over,
            "target": self.target,
        }


def lower_decile(values: Sequence[float]) -> float:
    """Return what a tenth of the values does not exceed."""
    return sorted(values)[len(values) // 10]


def compare(rungs: Sequence[Rung], *, rounds: int, periods: int = 4) -> None:
    """Run every rung once per round, so that a slow moment of the machine meets all of them.

    Parameters
    ----------
    rungs : sequence of Rung
        Their ``times`` are filled.
    rounds : int
        How often each rung runs.
    periods : int
        How many periods of steps a run takes.
    """
    for _ in range(rounds):
        for rung in rungs:
            loader = ClockedBatches(rung.batches, periods * PERIOD)
            rung.run(loader)
            rung.times += loader.microseconds()


def report(rungs: Sequence[Rung]) -> None:
    """Print times and differences."""
    best = {rung.name: rung.undisturbed for rung in rungs}
    width = max(map(len, best))
    print(f"{'':{width}}  us/step  median    diff  target")
    for rung in rungs:
        row = f"{rung.name:{width}}  {best[rung.name]:7.0f}  {statistics.median(rung.times):6.0f}"
        if rung.over is not None:
            difference = best[rung.name] - best[rung.over]
            row += f"  {difference:+6.0f}  {_verdict(difference, rung.target):12}  over {rung.over}"
        print(row)


def _verdict(value: float, target: float | None) -> str:
    if target is None:
        return ""
    return f"{target:+5.0f} {'ok' if value <= target else 'missed'}"


def save(name: str, result: Any) -> None:
    """Write a result and what it was measured with to ``results/<name>.json``."""
    RESULTS.mkdir(exist_ok=True)
    versions = {"python": platform.python_version(), "torch": torch.__version__, "lightning": lightning.__version__}
    text = json.dumps({"versions": versions, "result": result}, indent=1)
    (RESULTS / f"{name}.json").write_text(text + "\n")


def arguments(description: str | None, **numbers: int) -> argparse.Namespace:
    """Parse the command line, and make torch and Lightning behave as the benchmarks need.

    Parameters
    ----------
    description : str
        What ``--help`` says.
    **numbers : int
        Options and their defaults, such as ``rounds=12``.
    """
    parser = argparse.ArgumentParser(description=description)
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"number of {name}, default {default}")
    parser.add_argument("--save", action="store_true", help="keep the numbers in benchmarks/results")
    torch.set_num_threads(1)
    silence_lightning()
    return parser.parse_args()


def silence_lightning() -> None:
    """Switch off Lightning's remarks; they concern loaders and loggers that are meant to be as they are."""
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
