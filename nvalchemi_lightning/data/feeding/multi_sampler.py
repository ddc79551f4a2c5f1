"""How much of each data set an epoch, or every batch, holds: orders over a ``MultiDataset``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, Self, TypeAlias, get_args

import torch
from torch import Tensor
from torch.utils.data import Sampler

from nvalchemi_lightning.data.feeding.multi_dataset import MultiDataset
from nvalchemi_lightning.data.feeding.sampler import Epoch, EpochSampler, rank_and_world
from nvalchemi_lightning.data.feeding.shares import Streams, positive, shares, sizes_of
from nvalchemi_lightning.errors import ConfigurationError, UnknownNameError, nearest

__all__ = ["EpochPolicy", "MultiDatasetBatchSampler", "MultiDatasetSampler"]

EpochPolicy: TypeAlias = Literal["dataset_size", "min_size", "max_size"]


class MultiDatasetSampler(EpochSampler):
    """An epoch of several data sets, each with its share.

    The number of samples that each set gives is the same in every epoch; which ones changes. A set that gives fewer
    than it has gives a random choice; one that gives more repeats itself, but no sample for the third time before all
    have occurred twice.

    Parameters
    ----------
    dataset : MultiDataset
        The data sets.
    weights : sequence of float, optional
        Share of each set; need not add up to 1. Default: the sizes, so that every sample occurs once.
    num_samples : int, optional
        Samples of an epoch over all ranks. Default: as many as there are.
    shuffle : bool, default True
        Whether the order is random; otherwise one set follows the other.
    seed : int, default 0
        With the epoch, decides the order. The same on every rank.
    pad : bool, default True
        See :class:`EpochSampler`.

    Raises
    ------
    ConfigurationError
        If a number is out of range, or weights do not fit the data sets.
    ConfigurationTypeError
        If ``dataset`` is not a ``MultiDataset``.

    Examples
    --------
    Three quarters from the first of two sets, whatever their sizes::

        DataLoader(mixed, batch_size=64, sampler=MultiDatasetSampler(mixed, weights=[3, 1]))
    """

    def __init__(
        self,
        dataset: MultiDataset,
        *,
        weights: Sequence[float] | None = None,
        num_samples: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        pad: bool = True,
    ) -> None:
        super().__init__(dataset, shuffle=shuffle, seed=seed, pad=pad)
        sizes = sizes_of(dataset)
        total = positive("num_samples", sum(sizes) if num_samples is None else num_samples)
        self.samples_per_dataset = shares(total, sizes if weights is None else weights, sizes)

    @property
    def epoch_size(self) -> int:
        """Number of samples of a whole epoch over all ranks, without padding."""
        return sum(self.samples_per_dataset)

    def _order(self) -> Tensor:
        streams = Streams(self.dataset, self.seed, self.epoch, self.shuffle)
        order = torch.cat([streams.take(number, count) for number, count in enumerate(self.samples_per_dataset)])
        return order[torch.randperm(len(order), generator=streams.generator)] if self.shuffle else order


class MultiDatasetBatchSampler(Sampler[list[int]]):
    """Batches that all hold the same number of samples of each data set.

    Parameters
    ----------
    dataset : MultiDataset
        The data sets.
    batch_size : int, optional
        Samples per batch and rank, divided in proportion to ``weights``.
    weights : sequence of float, optional
        Share of each set; need not add up to 1. Default: the sizes.
    samples_per_dataset : sequence of int, optional
        Samples of each set in every batch, instead of ``batch_size`` and ``weights``.
    num_batches : int, optional
        Batches per epoch and rank. Default: what ``epoch_policy`` says.
    epoch_policy : {"dataset_size", "min_size", "max_size"}, default "dataset_size"
        An epoch ends when as many samples were drawn as there are, when the set that is used up first is, or when
        every set is. A set that is used up before begins again, in another order.
    shuffle : bool, default True
        Whether each set is drawn in a random order.
    seed : int, default 0
        With the epoch, decides the order. The same on every rank.

    Attributes
    ----------
    samples_per_dataset : tuple of int
        Samples of each set in every batch.

    Raises
    ------
    ConfigurationError
        If a number is out of range, options exclude each other, or a set with a share would not occur in a batch.
    ConfigurationTypeError
        If ``dataset`` is not a ``MultiDataset``.
    UnknownNameError
        If there is no such policy.

    Examples
    --------
    As many of the small set as of the large one in every batch::

        DataLoader(mixed, batch_sampler=MultiDatasetBatchSampler.balanced(mixed, batch_size=64))
    """

    def __init__(
        self,
        dataset: MultiDataset,
        batch_size: int | None = None,
        *,
        weights: Sequence[float] | None = None,
        samples_per_dataset: Sequence[int] | None = None,
        num_batches: int | None = None,
        epoch_policy: EpochPolicy = "dataset_size",
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        sizes = sizes_of(dataset)
        if (samples_per_dataset is None) == (batch_size is None) or (samples_per_dataset and weights):
            raise ConfigurationError("give either batch_size, with weights if you like, or samples_per_dataset")
        if samples_per_dataset is not None:
            counts = shares(sum(samples_per_dataset), samples_per_dataset, sizes)
        else:
            counts = shares(positive("batch_size", batch_size), sizes if weights is None else weights, sizes)
            _check_all_occur(counts, sizes if weights is None else weights)
        if seed < 0:
            raise ConfigurationError(f"seed must be 0 or more, got {seed}")
        self.dataset = dataset
        self.samples_per_dataset = counts
        self.shuffle = shuffle
        self.seed = seed
        self.clock = Epoch()
        self._given = None if num_batches is None else positive("num_batches", num_batches)
        self._whole = _batches_over_all_ranks(counts, sizes, epoch_policy)

    @classmethod
    def balanced(
        cls,
        dataset: MultiDataset,
        batch_size: int,
        *,
        num_batches: int | None = None,
        epoch_policy: EpochPolicy = "dataset_size",
        shuffle: bool = True,
        seed: int = 0,
    ) -> Self:
        """Return one whose batches hold equally many samples of every data set, as far as the size divides."""
        weights = [1.0] * len(dataset.datasets)
        return cls(
            dataset,
            batch_size,
            weights=weights,
            num_batches=num_batches,
            epoch_policy=epoch_policy,
            shuffle=shuffle,
            seed=seed,
        )

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is.

        Raises
        ------
        ConfigurationError
            If it is negative.
        """
        self.clock.announce(epoch)

    def __len__(self) -> int:
        """Return the number of batches of this rank in an epoch."""
        if self._given is not None:
            return self._given
        # As everywhere in training, all ranks have the same number.
        return math.ceil(self._whole / rank_and_world()[1])

    def __iter__(self) -> Iterator[list[int]]:
        """Iterate over the batches of this rank: of every round of batches, one goes to each."""
        rank, world = rank_and_world()
        streams = Streams(self.dataset, self.seed, self.clock.number, self.shuffle)
        batches = len(self)
        drawn = [
            streams.take(number, count * batches * world).view(batches, world, count)[:, rank]
            for number, count in enumerate(self.samples_per_dataset)
        ]
        yield from torch.cat(drawn, 1).tolist()


def _check_all_occur(counts: Sequence[int], weights: Sequence[float]) -> None:
    absent = [
        number for number, (count, weight) in enumerate(zip(counts, weights, strict=True)) if weight and not count
    ]
    if absent:
        raise ConfigurationError(
            f"a batch of {sum(counts)} has no place for data set(s) {absent} with weights {list(weights)}; make "
            "batches larger, or use MultiDatasetSampler, whose shares hold over an epoch"
        )


def _batches_over_all_ranks(counts: Sequence[int], sizes: Sequence[int], policy: EpochPolicy) -> int:
    known = get_args(EpochPolicy)
    if policy not in known:
        raise UnknownNameError(
            f"epoch_policy must be one of {', '.join(known)}, got {policy!r}{nearest(policy, known)}"
        )
    if policy == "dataset_size":
        return math.ceil(sum(sizes) / sum(counts))
    batches = [size / count for size, count in zip(sizes, counts, strict=True) if count]
    return max(1, int(min(batches))) if policy == "min_size" else math.ceil(max(batches))
