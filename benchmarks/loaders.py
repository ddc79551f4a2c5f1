"""Shuffled batches from one store: this package's loader and that of nvalchemi-toolkit, which has to be installed."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from measure import arguments, save
from nvalchemi.data import Batch as ReferenceBatch
from nvalchemi.data import datapipes as reference
from synthetic import blocks, make_store

from nvalchemi_lightning.data import AtomicDataZarrReader, DataLoader, Dataset

BATCH = 64
OURS = "nvalchemi_lightning"


def make_reference_store(path: Path, count: int) -> Path:
    """Write the same structures with the reference's writer."""
    writer = reference.AtomicDataZarrWriter(path)
    for number, block in enumerate(blocks(count)):
        raw = ReferenceBatch.from_raw_dicts([dict(structure) for structure in block.to_data_list()])
        (writer.append if number else writer.write)(raw)
    return path


def ours(path: Path) -> Iterable[Any]:
    """Return a loader of this package that has read nothing yet."""
    return DataLoader(Dataset(AtomicDataZarrReader(path)), batch_size=BATCH, shuffle=True)


def theirs(path: Path, **options: Any) -> Iterable[Any]:
    """Return a loader of the reference."""
    dataset = reference.Dataset(reference.AtomicDataZarrReader(path), device="cpu", skip_validation=True)
    return reference.DataLoader(dataset, batch_size=BATCH, shuffle=True, **options)


def validating(path: Path) -> Iterable[Any]:
    """Return a loader of the reference with its defaults."""
    dataset = reference.Dataset(reference.AtomicDataZarrReader(path), device="cpu")
    return reference.DataLoader(dataset, batch_size=BATCH, shuffle=True)


def timed(batches: Iterable[Any]) -> tuple[int, float, float]:
    """Return how many structures there were, and the time on the wall and of the processor [s]."""
    wall, cpu = time.perf_counter(), time.process_time()
    count = sum(batch.num_graphs for batch in batches)
    return count, time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    """Measure and print."""
    options = arguments(__doc__, structures=100_000, batches=100, rounds=5)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        own = make_store(Path(name) / "ours.zarr", options.structures)
        other = make_reference_store(Path(name) / "theirs.zarr", options.structures)
        ways: dict[str, Callable[[], Iterable[Any]]] = {
            OURS: lambda: ours(own),
            f"{OURS}, the reference's store": lambda: ours(other),
            "reference, defaults": lambda: validating(own),
            "reference, no validation": lambda: theirs(own),
            "reference, no validation, no prefetch": lambda: theirs(own, prefetch_factor=0),
            "reference, no validation, no prefetch, its own store": lambda: theirs(other, prefetch_factor=0),
        }
        taken: dict[str, list[tuple[int, float, float]]] = {way: [] for way in ways}
        for _ in range(options.rounds):
            for way, make in ways.items():
                taken[way].append(timed(islice(make(), options.batches)))
        epoch = timed(ours(own))
    rows = {way: summary(times) for way, times in taken.items()} | {f"{OURS}, all batches": summary([epoch])}
    best = {clock: max(row[clock] for way, row in rows.items() if OURS not in way) for clock in rows[OURS]}
    for way, row in rows.items():
        print(f"{way:54}" + "".join(f"{rate:10,} {clock}" for clock, rate in row.items()))
    ratios = {clock: round(rows[OURS][clock] / best[clock], 1) for clock in best}
    print(f"times the fastest of the reference (target 5): {ratios}")
    if options.save:
        save("loaders", {"rates": rows, "times_the_reference": ratios})


def summary(times: list[tuple[int, float, float]]) -> dict[str, int]:
    """Return structures per second in the best round, on either clock."""
    return {
        "per_s": round(max(count / wall for count, wall, _ in times)),
        "per_cpu_s": round(max(count / cpu for count, _, cpu in times)),
    }


if __name__ == "__main__":
    main()
