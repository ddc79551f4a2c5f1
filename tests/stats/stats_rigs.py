"""Structures with random labels, some of them missing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from nvalchemi_lightning.data import AtomicData, Batch

ELEMENTS = (1, 6, 8, 79)


def structure(numbers: Sequence[int], **labels: object) -> AtomicData:
    """Return atoms in a row, 1.5 A apart, with these labels."""
    positions = torch.zeros(len(numbers), 3, dtype=torch.float64)
    positions[:, 0] = 1.5 * torch.arange(len(numbers))
    values = {name: torch.as_tensor(value, dtype=torch.float64) for name, value in labels.items() if name != "pbc"}
    if "pbc" in labels:
        values["pbc"] = torch.tensor([labels["pbc"]])
        values.setdefault("cell", 20.0 * torch.eye(3, dtype=torch.float64).unsqueeze(0))
    return AtomicData(positions=positions, atomic_numbers=torch.tensor(numbers), **values)


def random_structures(rng: np.random.Generator, count: int, offset: float = 0.0) -> list[AtomicData]:
    """Return structures of one to nine atoms, each label missing in about a third of them."""
    return [_random(rng, offset) for _ in range(count)]


def _random(rng: np.random.Generator, offset: float) -> AtomicData:
    numbers = rng.choice(ELEMENTS, rng.integers(1, 10)).tolist()
    labels: dict[str, object] = {"pbc": rng.choice([True, False], 3).tolist()}
    if rng.random() < 0.7:
        labels["energy"] = [[offset * len(numbers) + rng.normal()]]
    if rng.random() < 0.7:
        labels["forces"] = rng.normal(size=(len(numbers), 3))
    if rng.random() < 0.7:
        labels["stress"] = rng.normal(size=(1, 3, 3))
    return structure(numbers, **labels)


def cut(structures: list[AtomicData], sizes: Sequence[int]) -> Iterator[Batch]:
    """Yield the structures as batches of these sizes in turn."""
    start, turn = 0, 0
    while start < len(structures):
        stop = start + sizes[turn % len(sizes)]
        yield Batch.from_data_list(structures[start:stop])
        start, turn = stop, turn + 1


def rms(values: np.ndarray) -> float:
    return math.sqrt(np.mean(np.square(values)))
