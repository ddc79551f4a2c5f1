"""Label molecular-dynamics frames of a few small molecules with GFN2-xTB.

Run ``python make_molecules.py`` in an environment with ``ase`` and ``tblite`` (two minutes on one core). It writes
``molecules.extxyz.gz`` beside itself: energies [eV] and forces [eV/A] under ASE's standard names.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterator
from pathlib import Path

import ase.io
import numpy as np
from ase import Atoms, units
from ase.build import molecule
from ase.calculators.singlepoint import SinglePointCalculator
from ase.md.langevin import Langevin
from ase.md.velocitydistribution import Stationary, thermalize_momenta
from ase.optimize import BFGS
from tblite.ase import TBLite

SEED = 2024
NAMES = {
    "water": "H2O",
    "ammonia": "NH3",
    "methane": "CH4",
    "formaldehyde": "H2CO",
    "methanol": "CH3OH",
    "methylamine": "H3CNH2",
    "ethane": "C2H6",
    "ethanol": "CH3CH2OH",
}
TEMPERATURES = (300.0, 450.0, 600.0)  # [K]
FRAMES = {"train": 24, "val": 4, "test": 6}  # per molecule and temperature
TIME_STEP = 0.5  # [fs], about a twentieth of the fastest C-H, N-H and O-H vibrations
FRICTION = 0.02  # [1/fs], forgets the velocities within 50 fs
EQUILIBRATION = 400  # steps
STRIDE = 50  # steps between two frames, 25 fs


def relaxed(formula: str) -> Atoms:
    """Return a molecule of ASE's G2 collection at its GFN2-xTB minimum."""
    atoms = molecule(formula)
    atoms.calc = TBLite(method="GFN2-xTB", verbosity=0)
    BFGS(atoms, logfile=None).run(fmax=0.01, steps=200)
    return atoms


def labelled(atoms: Atoms, **info: object) -> Atoms:
    """Return a copy that holds species, positions, energy and forces, and nothing else."""
    frame = Atoms(atoms.symbols, positions=atoms.positions, info=info)
    frame.calc = SinglePointCalculator(frame, energy=atoms.get_potential_energy(), forces=atoms.get_forces())
    return frame


def trajectory(start: Atoms, temperature: float, frames: int, rng: np.random.Generator) -> Iterator[Atoms]:
    """Yield the moving molecule every 25 fs of Langevin dynamics, after 200 fs of equilibration."""
    atoms = start.copy()
    atoms.calc = TBLite(method="GFN2-xTB", verbosity=0)
    thermalize_momenta(atoms, temperature_K=temperature, rng=rng)
    Stationary(atoms)
    dynamics = Langevin(
        atoms, TIME_STEP * units.fs, temperature_K=temperature, friction=FRICTION / units.fs, rng=rng, fixcm=False
    )
    dynamics.run(EQUILIBRATION)
    for _ in range(frames):
        dynamics.run(STRIDE)
        yield atoms


def dataset(seed: int = SEED) -> Iterator[Atoms]:
    """Yield every labelled frame; each (molecule, temperature, split) is a trajectory of its own."""
    rng = np.random.default_rng(seed)
    for name, formula in NAMES.items():
        start = relaxed(formula)
        for temperature in TEMPERATURES:
            for split, frames in FRAMES.items():
                for atoms in trajectory(start, temperature, frames, rng):
                    yield labelled(atoms, name=name, config_type=f"{temperature:.0f}K", split=split)


def write(path: Path, frames: list[Atoms]) -> None:
    """Write a gzipped extxyz whose bytes depend on the frames alone, not on the clock."""
    text = io.StringIO()
    ase.io.write(text, frames, format="extxyz")
    path.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))


if __name__ == "__main__":
    target = Path(__file__).with_name("molecules.extxyz.gz")
    frames = list(dataset())
    write(target, frames)
    print(f"{len(frames)} frames, {target.stat().st_size / 1e6:.2f} MB: {target}")
