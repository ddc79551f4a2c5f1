"""Cutting epochs into accumulation windows, whose contents are known before their first batch is trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from nvalchemi_lightning.counters import Counters
from nvalchemi_lightning.window import Window, window_places

__all__ = ["AccumulationPolicy", "Windows"]


class AccumulationPolicy(Protocol):
    """What the loop asks of the hook that accumulates."""

    steps: int

    def count(self, batch: Any) -> Tensor:
        """Return what a batch holds of that by which the window is normalized, float64, shape (K,)."""

    def carried(self, epoch: int, position: int) -> Tensor | None:
        """Return the counts of the batches whose gradients wait for this batch, shape (N, K), or None."""


class Windows:
    """The windows of one run.

    Windows begin at multiples of ``policy.steps`` in every epoch, and the last one ends with the epoch.

    Parameters
    ----------
    policy : AccumulationPolicy
        The hook that accumulates.
    counters : Counters
        Where the run is; never written.
    batches_per_epoch : int or None
        The number of batches that an epoch gives, None when unknown.
    sum_over_ranks : callable, optional
        Sums a tensor over all ranks.
    """

    def __init__(
        self,
        policy: AccumulationPolicy,
        counters: Counters,
        batches_per_epoch: int | None,
        sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._policy = policy
        self._counters = counters
        self._batches_per_epoch = batches_per_epoch
        self._sum_over_ranks = sum_over_ranks
        self._ahead: dict[int, Window] = {}

    def room(self, position: int) -> int:
        """Return how many batches the window still takes, from a position in the epoch."""
        room = self._policy.steps - position % self._policy.steps
        if self._batches_per_epoch is None:
            return room
        return max(min(room, self._batches_per_epoch - position), 1)

    def open(self, position: int, batches: Sequence[Any]) -> None:
        """Take the batches that were drawn for the window, the first of them at a position in the epoch."""
        if not batches:
            return
        own = torch.stack([self._policy.count(batch) for batch in batches])
        counts = own if self._sum_over_ranks is None else self._sum_over_ranks(own)
        carried = self._policy.carried(self._counters.epoch_count, position)
        if carried is not None:
            counts = torch.cat((carried.to(counts.device), counts))
        self._ahead.update(enumerate(window_places(counts, own), position))

    def take(self) -> Window:
        """Return the window of the batch that is trained next."""
        return self._ahead.pop(self._counters.epoch_step_count)
