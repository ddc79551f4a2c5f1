"""How long converting plain extended XYZ files takes, over ASE only parsing them."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path

import ase.io
import numpy as np
from ase import Atoms
from ase.build import bulk, molecule
from ase.calculators.singlepoint import SinglePointCalculator
from measure import arguments, save

from nvalchemi_lightning.data import convert

TARGET = 1.0


def labelled(atoms: Atoms, number: int) -> Atoms:
    """Return the atoms moved a little, with an energy, forces and, where there is a cell, a stress."""
    rng = np.random.default_rng(number)
    atoms.rattle(0.05, rng=rng)
    stress = {"stress": rng.normal(size=6)} if atoms.cell.rank == 3 else {}
    atoms.calc = SinglePointCalculator(atoms, energy=rng.normal(), forces=rng.normal(size=(len(atoms), 3)), **stress)
    return atoms


def molecules() -> Iterator[Atoms]:
    """Yield molecules of 9 atoms without a cell, whose comment lines say more than their labels."""
    for number in count():
        atoms = labelled(molecule("CH3CH2OH"), number)
        atoms.info |= {"config_type": "ethanol", "number": number, "split": "train"}
        yield atoms


def crystals() -> Iterator[Atoms]:
    """Yield periodic cells of 64 atoms with stress."""
    return (labelled(bulk("Si", cubic=True).repeat(2), number) for number in count())


def seconds(work: Callable[[], object]) -> float:
    """Return the CPU time of a piece of work."""
    start = time.process_time()
    work()
    return time.process_time() - start


def parse(path: Path) -> None:
    """Let ASE parse a file."""
    for _ in ase.io.iread(path):
        pass


def ratio(path: Path, rounds: int) -> dict[str, float]:
    """Return the median of the ratios of converting a file to parsing it, one after the other."""
    store = path.with_suffix(".zarr")
    pairs = []
    for _ in range(rounds + 1):
        pairs.append((seconds(lambda: parse(path)), seconds(lambda: convert(path, store))))
        shutil.rmtree(store)
    warm = pairs[1:]  # The first round imports.
    return {
        "ase_s": round(statistics.median(parsing for parsing, _ in warm), 3),
        "ratio": round(statistics.median(converting / parsing for parsing, converting in warm), 2),
    }


def main() -> None:
    """Measure and print."""
    options = arguments(__doc__, rounds=5)
    files = {
        "10000 molecules of 9 atoms": islice(molecules(), 10_000),
        "1000 molecules of 9 atoms": islice(molecules(), 1_000),
        "2000 cells of 64 atoms": islice(crystals(), 2_000),
        "200 cells of 64 atoms": islice(crystals(), 200),
    }
    result = {}
    with tempfile.TemporaryDirectory() as name:
        for number, (title, frames) in enumerate(files.items()):
            path = Path(name) / f"{number}.extxyz"
            ase.io.write(path, list(frames))
            result[title] = ratio(path, options.rounds)
            verdict = "ok" if result[title]["ratio"] <= TARGET else "missed"
            print(
                f"{title:28}  ASE {result[title]['ase_s']:6.3f} s   converting {result[title]['ratio']:5.2f} {verdict}"
            )
    if options.save:
        save("conversion", result)


if __name__ == "__main__":
    main()
