"""Taking from each of several data sets its share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nvalchemi_lightning.data.feeding.multi_dataset import MultiDataset
from nvalchemi_lightning.data.feeding.transforms import mixed_seed
from nvalchemi_lightning.errors import ConfigurationError, ConfigurationTypeError

__all__ = ["Streams", "positive", "shares", "sizes_of"]


class Streams:
    """Endless orders of each data set in one epoch.

    Parameters
    ----------
    dataset : MultiDataset
        The data sets.
    seed, epoch : int
        Decide the orders.
    shuffle : bool
        Whether they are random.
    """

    def __init__(self, dataset: MultiDataset, seed: int, epoch: int, shuffle: bool) -> None:
        self.generator = torch.Generator().manual_seed(mixed_seed(seed, epoch))
        self._offsets = dataset.offsets
        self._sizes = sizes_of(dataset)
        self._shuffle = shuffle

    def take(self, number: int, count: int) -> Tensor:
        """Return so many samples of a data set: whole passes over it, and a part of another."""
        size = self._sizes[number]
        passes = [self._pass(size) for _ in range(-(-count // size) if size else 0)]
        found = torch.cat(passes)[:count] if passes else torch.empty(0, dtype=torch.int64)
        return found + self._offsets[number]

    def _pass(self, size: int) -> Tensor:
        return torch.randperm(size, generator=self.generator) if self._shuffle else torch.arange(size)


def shares(total: int, weights: Sequence[float], sizes: Sequence[int]) -> tuple[int, ...]:
    """Divide a number in proportion to weights: rounded down, and the rest to the largest remainders.

    Parameters
    ----------
    total : int
        What is divided.
    weights : sequence of float
        One for each data set.
    sizes : sequence of int
        Samples of each data set.

    Raises
    ------
    ConfigurationError
        If the weights are not one for each data set, are negative, not finite or all zero, or give a share to an
        empty set.
    """
    if len(weights) != len(sizes):
        raise ConfigurationError(f"there are {len(sizes)} data sets, but {len(weights)} shares: {list(weights)}")
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not sum(weights) > 0:
        raise ConfigurationError(f"shares must be 0 or more, finite and not all 0, got {list(weights)}")
    for number, (weight, size) in enumerate(zip(weights, sizes, strict=True)):
        if weight and not size:
            raise ConfigurationError(f"data set {number} is empty but has a share of {weight}; leave it out")
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [int(part) for part in exact]
    by_remainder = sorted(range(len(exact)), key=lambda number: counts[number] - exact[number])
    for number in by_remainder[: total - sum(counts)]:
        counts[number] += 1
    return tuple(counts)


def sizes_of(dataset: MultiDataset) -> list[int]:
    """Return the number of samples of each data set."""
    if not isinstance(dataset, MultiDataset):
        raise ConfigurationTypeError(f"dataset must be a MultiDataset, got {type(dataset).__name__}")
    return [len(part) for part in dataset.datasets]


def positive(name: str, value: int | None) -> int:
    """Return a number that must be an integer of at least 1."""
    if not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{name} must be an integer of at least 1, got {value!r}")
    return value
