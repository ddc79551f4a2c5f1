"""The order of samples: a function of seed and epoch alone, divided among ranks, resumable at any sample."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from nvalchemi_lightning.data.feeding.transforms import mixed_seed
from nvalchemi_lightning.errors import ConfigurationError

__all__ = ["Epoch", "EpochSampler", "rank_and_world"]

_BLOCK = 4096


def rank_and_world() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks, (0, 1) outside a distributed run."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


@dataclass
class Epoch:
    """Which pass over the data comes next.

    Attributes
    ----------
    number : int
        The epoch, from 0.
    announced : bool
        Whether somebody has said so since the last pass began; otherwise the next pass is the next epoch.
    """

    number: int = 0
    announced: bool = True

    def announce(self, number: int) -> None:
        """Say which epoch the next pass is.

        Raises
        ------
        ConfigurationError
            If it is negative.
        """
        if number < 0:
            raise ConfigurationError(f"epoch must be 0 or more, got {number}")
        self.number, self.announced = number, True

    def begin(self) -> int:
        """Return the epoch of a pass that begins now."""
        if not self.announced:
            self.number += 1
        self.announced = False
        return self.number


class EpochSampler(DistributedSampler[int]):
    """Sample indices of this rank for one epoch.

    Derives from ``DistributedSampler`` so that Lightning leaves it in place. Rank and number of ranks are looked up
    when an iteration begins, so it can be made before the processes are connected. The global random number
    generator is neither read nor advanced.

    Parameters
    ----------
    dataset : sized
        What is sampled from; only its length is used.
    shuffle : bool, default True
        Whether every epoch has its own random order; otherwise samples come in their order.
    seed : int, default 0
        With the epoch, decides the order. The same on every rank.
    pad : bool, default True
        Whether the first samples are repeated until every rank has the same number, as training needs. Without it
        every sample occurs exactly once over all ranks and ranks may differ by one, as evaluation needs.

    Attributes
    ----------
    clock : Epoch
        The epoch.
    start : int
        Position in the order over all ranks from which the next iteration begins, once; 0 is the whole epoch.

    Raises
    ------
    ConfigurationError
        If the seed is negative.

    Notes
    -----
    Of the order over all ranks, rank r of R takes positions r, r + R, r + 2 R, ... of what remains from ``start``, so
    a position is meaningful for another number of ranks too.
    """

    def __init__(self, dataset: Sized, *, shuffle: bool = True, seed: int = 0, pad: bool = True) -> None:
        # The constructor of the base class needs an initialised process group and fixes the rank; nothing is lost.
        if seed < 0:
            raise ConfigurationError(f"seed must be 0 or more, got {seed}")
        self.dataset: Any = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.pad = pad
        self.drop_last = False
        self.clock = Epoch()
        self.start = 0

    @property
    def epoch(self) -> int:  # type: ignore[override]
        """The epoch of the next iteration."""
        return self.clock.number

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is.

        Raises
        ------
        ConfigurationError
            If it is negative.
        """
        self.clock.announce(epoch)

    def __iter__(self) -> Iterator[int]:
        """Iterate over the samples of this rank, lazily: the epoch counts that is set at the first one."""
        start, self.start = self.start, 0
        rank, world = rank_and_world()
        self._check_padding(world)
        order = self._order()
        rest = order[start:]
        if self.pad and len(rest) % world:
            rest = torch.cat((rest, order[: world - len(rest) % world]))
        # In blocks: a list of a million Python integers takes 40 MB.
        for block in torch.split(rest[rank::world], _BLOCK):
            yield from block.tolist()

    def __len__(self) -> int:
        """Return the number of samples of this rank in a whole epoch."""
        self._check_padding(rank_and_world()[1])
        return self.remaining(0)

    @property
    def epoch_size(self) -> int:
        """Number of samples of a whole epoch over all ranks, without padding."""
        return len(self.dataset)

    def remaining(self, start: int) -> int:
        """Return how many samples of this rank remain from a position in the order over all ranks."""
        rank, world = rank_and_world()
        left = max(0, self.epoch_size - start)
        return (left + (world - 1 if self.pad else world - 1 - rank)) // world

    def _order(self) -> torch.Tensor:
        """Return the order of the epoch over all ranks."""
        if not self.shuffle:
            return torch.arange(self.epoch_size)
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, self.epoch))
        return torch.randperm(self.epoch_size, generator=generator)

    def _check_padding(self, world: int) -> None:
        if self.pad and self.epoch_size < world:
            raise ConfigurationError(
                f"{self.epoch_size} sample(s) cannot be divided among {world} ranks; use fewer ranks or more data"
            )
