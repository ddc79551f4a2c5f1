"""How fast structures come from a store, what they cost in memory, and whether training waits for them."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from apart import ACTIONS, apart
from ase.build import molecule
from measure import arguments, lower_decile, save
from synthetic import make_store

from nvalchemi_lightning import EnergyMSELoss, ForceMSELoss, OptimizerConfig, TrainingStrategy
from nvalchemi_lightning.data import AtomicData, AtomicDataZarrReader, Batch, DataLoader, Dataset, InMemoryDataset
from nvalchemi_lightning.models import AtomicStatistics, PaiNN
from nvalchemi_lightning.neighbors import neighbor_list

BATCH = 64
ROUNDS = 3
EXAMPLES = Path(__file__).parents[1] / "examples"


def best_rate(count: int, draw: Callable[[], Any], clock: Callable[[], float] = time.process_time) -> float:
    """Return how many of ``count`` things ``draw`` handles per second of CPU time in its best round."""
    times = []
    for _ in range(ROUNDS):
        start = clock()
        draw()
        times.append(clock() - start)
    return count / min(times)


def exhausted(batches: Iterable[Any]) -> None:
    """Draw everything."""
    for _ in batches:
        pass


def rates(path: Path) -> dict[str, dict[str, float]]:
    """Return structures and decoded megabytes a second of every way to read a store."""
    reader = AtomicDataZarrReader(path)
    count = len(reader)
    sample = reader.read_batch(range(min(count, 1000)))
    size = sum(value.nbytes for _, value in sample) / len(sample) / 1e6  # decoded [MB per structure]
    few = np.random.default_rng(0).permutation(count)[:2000].tolist()
    rows = {"its files, one after the other": best_rate(count, lambda: read_files(path))}
    rows["batches in order"] = best_rate(count, lambda: exhausted(DataLoader(Dataset(reader), batch_size=BATCH)))
    for workers in (0, 2):
        loader = DataLoader(
            Dataset(AtomicDataZarrReader(path)),
            batch_size=BATCH,
            shuffle=True,
            num_workers=workers,
            persistent_workers=workers > 0,
        )
        # Time that workers take is seen on the clock of the wall alone.
        clock = time.perf_counter if workers else time.process_time
        rows[f"shuffled batches, {workers} workers"] = best_rate(count, lambda loader=loader: exhausted(loader), clock)
    rows["shuffled batches, no cache"] = best_rate(64 * 60, lambda: exhausted(uncached(path, 60)))
    dataset = Dataset(reader)
    rows["one by one, random"] = best_rate(len(few), lambda: [dataset[index] for index in few])
    rows["one by one, random, no cache"] = best_rate(100, lambda: read_alone(path, few[:100]))
    alone = rows["one by one, random"]
    return {
        name: {
            "structures_per_s": round(rate),
            "mb_per_s": round(rate * size, 1),
            "times_one_by_one": round(rate / alone, 1),
        }
        for name, rate in rows.items()
    }


def read_files(path: Path) -> None:
    """Read every chunk of the fields as it lies on the disk, undecoded."""
    for file in sorted(path.glob("core/*/c/**/*")):
        if file.is_file():
            file.read_bytes()


def uncached(path: Path, batches: int) -> Iterator[Batch]:
    """Yield shuffled batches whose chunks are all decoded anew."""
    reader = AtomicDataZarrReader(path, cache_bytes=0)
    return islice(DataLoader(Dataset(reader), batch_size=BATCH, shuffle=True), batches)


def read_alone(path: Path, indices: list[int]) -> None:
    """Read structures one by one, each from chunks decoded anew."""
    dataset = Dataset(AtomicDataZarrReader(path, cache_bytes=0))
    for index in indices:
        dataset[index]


def memory(folder: Path, sizes: list[int]) -> dict[str, dict[str, float]]:
    """Return time and memory of every action, by itself, on a small and a large store."""
    stores = {size: make_store(folder / f"{size}.zarr", size) for size in sizes}
    return {f"{action}, {size} structures": apart(action, stores[size]) for action in ACTIONS for size in sizes}


def ethanol_edges() -> float:
    """Return the time of the neighbor lists of a batch of 16 ethanol molecules, cutoff 5 A [ms]."""
    frames = [molecule("CH3CH2OH") for _ in range(16)]
    for number, atoms in enumerate(frames):
        atoms.rattle(0.1, seed=number)
    batch = Batch.from_data_list([AtomicData.from_atoms(atoms) for atoms in frames])
    times = []
    for _ in range(300):
        start = time.perf_counter()
        neighbor_list(batch, 5.0)
        times.append(time.perf_counter() - start)
    return 1e3 * lower_decile(times)


class Reading(NamedTuple):
    """Both clocks at a moment."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Reading:
        """Read the clocks of the wall and of this thread."""
        return cls(time.perf_counter(), time.thread_time())


class Clocked:
    """A loader that notes how long each batch is waited for, and how long the step after it takes."""

    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader
        self._waited: list[Reading] = []
        self._stepped: list[Reading] = []

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        batches = iter(self._loader)
        for _ in range(len(self)):
            asked = Reading.now()
            batch = next(batches)
            given = Reading.now()
            yield batch
            back = Reading.now()
            self._waited.append(Reading(given.wall - asked.wall, given.cpu - asked.cpu))
            self._stepped.append(Reading(back.wall - given.wall, back.cpu - given.cpu))

    def share(self) -> dict[str, float]:
        """Return what part of an undisturbed step goes into waiting, on the wall and in the CPU time of this thread."""
        wait, step = (
            Reading(*(lower_decile(times) for times in zip(*readings, strict=True)))
            for readings in (self._waited, self._stepped)
        )
        return {
            "wait_ms": round(1e3 * wait.wall, 2),
            "step_ms": round(1e3 * step.wall, 2),
            "share": round(wait.wall / (wait.wall + step.wall), 4),
            "cpu_share": round(wait.cpu / (wait.cpu + step.cpu), 4),
        }


def waiting(folder: Path, epochs: int) -> dict[str, dict[str, float]]:
    """Return how long the quickstart waits for batches of its training set, however they are fed."""
    sys.path.insert(0, str(EXAMPLES))
    import ase.io
    from quickstart import CUTOFF, MOLECULES, dataset

    frames = [atoms for atoms in ase.io.read(MOLECULES, index=":") if atoms.info["split"] == "train"]
    in_memory = dataset(folder / "quickstart.zarr", frames)
    stored = Dataset(AtomicDataZarrReader(folder / "quickstart.zarr"))
    statistics = AtomicStatistics.fit(in_memory, cutoff=CUTOFF)
    ways: dict[str, tuple[Dataset | InMemoryDataset, int]] = {
        "in memory, no worker": (in_memory, 0),
        "store, no worker": (stored, 0),
        "store, one worker": (stored, 1),
    }
    found = {}
    for name, (source, workers) in ways.items():
        clocked = Clocked(
            DataLoader(source, batch_size=8, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
        )
        strategy = TrainingStrategy(
            models=PaiNN.from_statistics(statistics, cutoff=CUTOFF),
            optimizer_configs=OptimizerConfig(lr=3e-3),
            loss_fn=EnergyMSELoss(per_atom=True) + ForceMSELoss() * 10.0,
            num_epochs=epochs,
        )
        strategy.run(clocked)
        found[name] = clocked.share()
    return found


def show(title: str, rows: dict[str, dict[str, float]]) -> None:
    """Print a table."""
    print(f"\n{title}")
    for name, values in rows.items():
        print(f"  {name:34}" + "".join(f"{value:>12} {unit}" for unit, value in values.items()))


def main() -> None:
    """Measure and print."""
    options = arguments(__doc__, structures=100_000, largest=1_000_000, epochs=6)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        result: dict[str, Any] = {"rates": rates(make_store(folder / "rates.zarr", options.structures))}
        show(f"A store of {options.structures} structures of about 20 atoms, batches of {BATCH}", result["rates"])
        result["memory"] = memory(folder, [1000, options.largest])
        show("In a process of its own", result["memory"])
        result["edges_of_16_ethanol_ms"] = round(ethanol_edges(), 3)
        print(f"\nneighbor lists of 16 ethanol molecules: {result['edges_of_16_ethanol_ms']} ms (allowed 1 ms)")
        result["waiting"] = waiting(folder, options.epochs)
        show("Waiting for data in the quickstart (allowed 5 % of a step)", result["waiting"])
    if options.save:
        save("data", result)


if __name__ == "__main__":
    main()
