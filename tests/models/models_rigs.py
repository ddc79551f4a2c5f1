"""How the tests of models move and deform structures."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from ase import Atoms

from nvalchemi_lightning.data import Batch

Join = Callable[..., Batch]


def rattled(atoms: Atoms, seed: int = 0) -> Atoms:
    moved = atoms.copy()
    moved.positions += np.random.default_rng(seed).normal(scale=0.1, size=moved.positions.shape)
    return moved


def strained(atoms: Atoms, strain: np.ndarray, order: Sequence[int] = (0, 1, 2)) -> Atoms:
    """Deform positions and cell, and reorder the lattice vectors."""
    changed = atoms.copy()
    change = np.eye(3) + strain
    changed.set_cell((np.array(atoms.cell) @ change)[list(order)])
    changed.positions = atoms.positions @ change
    return changed
