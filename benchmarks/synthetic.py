"""Stores of made-up structures of about twenty atoms, as large as one likes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from nvalchemi_lightning.data import AtomicDataZarrWriter, Batch

__all__ = ["make_store"]

BLOCK = 4096


def make_store(path: Path, count: int) -> Path:
    """Write a store of so many structures with energies and forces."""
    AtomicDataZarrWriter(path).write(blocks(count))
    return path


def blocks(count: int) -> Iterator[Batch]:
    """Yield the structures, always the same ones."""
    generator = np.random.default_rng(0)
    for start in range(0, count, BLOCK):
        sizes = generator.integers(15, 26, min(BLOCK, count - start))
        atoms = int(sizes.sum())
        vectors = torch.from_numpy(generator.standard_normal((2, atoms, 3), dtype=np.float32))
        yield Batch.from_levels(
            node={
                "positions": vectors[0] * 3,
                "atomic_numbers": torch.from_numpy(generator.choice([1, 6, 7, 8], atoms).astype(np.int32)),
                "forces": vectors[1],
            },
            system={"energy": torch.from_numpy(generator.standard_normal((len(sizes), 1), dtype=np.float32))},
            num_nodes_per_graph=torch.from_numpy(sizes),
        )
