"""What one action on a store costs, in a process of its own: ``python apart.py ACTION STORE`` prints JSON.

A new row is a new function in ``ACTIONS``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvalchemi_lightning.data import AtomicDataZarrReader, DataLoader, Dataset, inspect_data
from nvalchemi_lightning.models import AtomicStatistics

__all__ = ["ACTIONS", "apart"]

CACHE = 16 * 2**20
"""Bytes for decoded chunks: memory that is asked for, and would hide memory that is not."""

BATCHES = 300


def opening(path: Path) -> None:
    """Open a store and count its structures."""
    len(AtomicDataZarrReader(path))


def reading(path: Path) -> None:
    """Read batches in their order, from the beginning."""
    _draw(path, shuffle=False)


def shuffling(path: Path) -> None:
    """Read batches in random order."""
    _draw(path, shuffle=True)


def _draw(path: Path, *, shuffle: bool) -> None:
    loader = DataLoader(Dataset(AtomicDataZarrReader(path, cache_bytes=CACHE)), batch_size=64, shuffle=shuffle)
    for number, _ in enumerate(loader, 1):
        if number == BATCHES:
            return


def inspecting(path: Path) -> None:
    """Count structures, elements and labels."""
    inspect_data(path)


def statistics(path: Path) -> None:
    """Fit reference energies and take the size of the forces."""
    AtomicStatistics.fit(path)


ACTIONS: dict[str, Callable[[Path], None]] = {
    "opening": opening,
    "reading": reading,
    "shuffling": shuffling,
    "inspecting": inspecting,
    "statistics": statistics,
}


def apart(action: str, path: Path) -> dict[str, float]:
    """Run an action in a new process: CPU time, and the peak of resident memory beyond what imports take [MB]."""
    command = [sys.executable, __file__, action, str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603  starts this file
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _peak() -> float:
    """Return the peak of resident memory [MB]."""
    # Not ru_maxrss, which begins at the size of the process that started this one.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024 / 1e6


def _measure(action: Callable[[Path], Any], path: Path) -> dict[str, float]:
    import torch
    import zarr  # noqa: F401  what every action imports is no part of it

    torch.set_num_threads(1)
    before = _peak()
    start = time.process_time()
    action(path)
    return {"cpu_seconds": round(time.process_time() - start, 4), "megabytes": round(_peak() - before, 1)}


if __name__ == "__main__":
    print(json.dumps(_measure(ACTIONS[sys.argv[1]], Path(sys.argv[2]))))
