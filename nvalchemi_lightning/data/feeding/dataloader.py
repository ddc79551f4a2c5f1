"""Batches in an order that depends on seed and epoch alone, from any position of an epoch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, Self

import torch.utils.data

from nvalchemi_lightning._keywords import refuse_unknown_keywords
from nvalchemi_lightning.data.batch import Batch
from nvalchemi_lightning.data.feeding.dataset import InMemoryDataset
from nvalchemi_lightning.data.feeding.reading import BatchReader, BatchSource, Request
from nvalchemi_lightning.data.feeding.sampler import Epoch, EpochSampler, rank_and_world
from nvalchemi_lightning.data.feeding.structure_weights import notice_weights
from nvalchemi_lightning.data.feeding.transforms import BatchTransform, check_transforms, mixed_seed
from nvalchemi_lightning.errors import ConfigurationError, ConfigurationTypeError

__all__ = ["DataLoader"]


class _Position(NamedTuple):
    """Where a pass begins: batches of this rank, samples over all ranks if known, and the epoch if only in that."""

    batches: int = 0
    samples: int | None = None
    epoch: int | None = None


class DataLoader(torch.utils.data.DataLoader[Batch]):
    """Yields batches of structures.

    Parameters
    ----------
    dataset : Dataset, Batch, or sequence of AtomicData
        Anything with a length whose items are ``AtomicData``. One with ``__getitems__`` reads each batch in one go.
    batch_size : int, default 1
        Structures per batch and rank.
    shuffle : bool, default False
        Whether every epoch has its own random order.
    drop_last : bool, default False
        Whether an incomplete last batch is left out.
    seed : int, default 0
        With the epoch, decides the order and what random transforms draw.
    sampler : iterable of int, optional
        Order of your own instead of ``shuffle``.
    batch_sampler : iterable of list of int, optional
        Batches of your own instead of ``batch_size``, ``shuffle``, ``drop_last`` and ``sampler``.
    num_workers : int, default 0
        Processes that read ahead; 0 reads in this one.
    prefetch_factor : int, optional
        Batches that each worker reads ahead, default 2.
    persistent_workers : bool, default False
        Whether the workers stay from one pass to the next, which saves their start (40 ms, or seconds with "spawn")
        every epoch. They keep the data set as it was when the first pass began.
    pin_memory : bool, default False
        Whether batches come in page-locked memory, from which copies to a GPU are asynchronous. Has no meaning, and
        no effect, without an accelerator.
    batch_transforms : sequence of callable, optional
        Functions ``Batch -> Batch``, applied in turn in the worker.
    distributed_padding : bool, optional
        Whether samples are repeated until all ranks have the same number, as training needs; otherwise every sample
        goes to exactly one rank, as an evaluation needs. Default: where ``shuffle`` is set. Has no effect with a
        sampler of your own.
    multiprocessing_context : str or context, optional
        How workers start: "fork", "spawn" or "forkserver"; default: that of Python.

    Raises
    ------
    ConfigurationError
        If options exclude each other, a number is out of range, or there is no batch; with the numbers of samples
        and ranks and the batch size. The number of ranks is checked when a pass begins.
    ConfigurationTypeError
        If ``dataset`` is not one.
    UnknownNameError
        If a keyword does not exist; the message gives the nearest one.

    Notes
    -----
    Every pass is an epoch: the one that ``set_epoch`` named since the last pass began, else the next. It begins
    when its first batch is drawn. A sampler or batch sampler of your own that has ``set_epoch`` is told, once a pass.

    The global random number generators are neither read nor advanced: order, workers and random transforms depend on
    seed and epoch alone, and the transforms of a batch on its first sample too.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuse keywords that do not exist."""
        refuse_unknown_keywords(cls, kwargs)
        return super().__new__(cls)

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int = 1,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
        sampler: Iterable[int] | None = None,
        batch_sampler: Iterable[list[int]] | None = None,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory: bool = False,
        batch_transforms: Sequence[BatchTransform] | None = None,
        distributed_padding: bool | None = None,
        multiprocessing_context: Any = None,
    ) -> None:
        dataset = _checked_dataset(dataset)
        _check_numbers(batch_size, num_workers, seed)
        _check_needs_workers(num_workers, prefetch_factor=prefetch_factor, persistent_workers=persistent_workers)
        self.seed = seed
        self.batch_transforms = check_transforms(batch_transforms, "batch_transforms")
        self.distributed_padding = distributed_padding
        options: dict[str, Any] = {"batch_sampler": batch_sampler}
        if batch_sampler is None:
            if sampler is None:
                pad = shuffle if distributed_padding is None else distributed_padding
                sampler = EpochSampler(dataset, shuffle=shuffle, seed=seed, pad=pad)
            elif shuffle:
                raise ConfigurationError("shuffle=True and a sampler of your own exclude each other; leave one out")
            options = {"sampler": sampler, "batch_size": batch_size, "drop_last": drop_last}
        elif sampler is not None or shuffle or drop_last or batch_size != 1:
            raise ConfigurationError(
                "batch_sampler excludes sampler, shuffle, drop_last and batch_size; leave them out"
            )
        super().__init__(
            dataset,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory=pin_memory,
            collate_fn=Batch.from_data_list,
            multiprocessing_context=multiprocessing_context,
            **options,
        )
        self._order = self.sampler if isinstance(self.sampler, EpochSampler) else None
        self._clock = _clock_of(self.batch_sampler)
        self._pending = _Position()
        self._kept: BatchReader | None = None
        self._begun = 0
        self._drawn = 0
        self._check_not_empty()

    def __len__(self) -> int:
        """Return the number of batches of this rank in a whole epoch."""
        self._check_not_empty()
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        """Iterate over the batches of an epoch; nothing happens before the first one is drawn."""
        self._check_not_empty()
        epoch = self._clock.begin()
        self._tell_samplers(epoch)
        seed = mixed_seed(self.seed, epoch)
        requests = (Request(seed, indices) for indices in self._remaining(epoch))
        for batch in self._reader_of(epoch).read(requests):
            if not self._drawn:
                notice_weights(batch.field_levels)
            self._drawn += 1
            yield batch

    @property
    def _batches(self) -> Any:
        return self.batch_sampler

    @property
    def _unit(self) -> int:
        """What a batch adds to the position: samples over all ranks; 1 with a sampler of one's own."""
        return 1 if self._order is None else (self.batch_size or 1) * rank_and_world()[1]

    @property
    def _position(self) -> int:
        return self._begun + self._drawn * self._unit

    def _remaining(self, epoch: int) -> Iterator[list[int]]:
        """Return the index lists of the pass that begins, without those before its position."""
        position, self._pending = self._pending, _Position()
        if position.epoch not in (None, epoch):
            position = _Position()
        self._drawn = 0
        if self._order is None:
            self._begun = position.batches
            return islice(iter(self._batches), position.batches, None)
        begin = position.batches * self._unit if position.samples is None else position.samples
        self._order.start = self._begun = begin or self._order.start
        return iter(self._batches)

    def _tell_samplers(self, epoch: int) -> None:
        owners = {id(owner): owner for owner in (self.sampler, self._batches, getattr(self._batches, "sampler", None))}
        for owner in owners.values():
            set_epoch = getattr(owner, "set_epoch", None)
            if set_epoch is not None and not isinstance(owner, EpochSampler):
                set_epoch(epoch)

    def _reader_of(self, epoch: int) -> BatchReader:
        """Return what reads batches: new for each pass, or the one whose workers stay."""
        if self.persistent_workers and self._kept is not None and not self._kept.busy:
            return self._kept
        reader = BatchReader(
            BatchSource(self.dataset, self.batch_transforms),
            num_workers=self.num_workers,
            persistent_workers=self.persistent_workers,
            pin_memory=self.pin_memory and torch.accelerator.is_available(),
            timeout=self.timeout,
            worker_init_fn=self.worker_init_fn,
            multiprocessing_context=self.multiprocessing_context,
            # The seed of the workers; what transforms draw depends on the requests alone.
            generator=torch.Generator().manual_seed(mixed_seed(self.seed, epoch, rank_and_world()[0])),
            prefetch_factor=self.prefetch_factor,
        )
        if self.persistent_workers and self._kept is None:
            self._kept = reader
        return reader

    def __getstate__(self) -> dict[str, Any]:
        """Pickle and copy without the workers."""
        return {**self.__dict__, "_kept": None}

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next pass is.

        Raises
        ------
        ConfigurationError
            If it is negative.
        """
        self._clock.announce(epoch)

    def set_epoch_step(self, batches: int) -> None:
        """Let the next pass, and only that, begin after some batches of this rank, without reading them.

        Raises
        ------
        ConfigurationError
            If the number is negative.
        """
        if batches < 0:
            raise ConfigurationError(f"the number of batches to skip must be 0 or more, got {batches}")
        self._pending = _Position(batches)

    def state_dict(self) -> dict[str, int]:
        """Return the position behind the last batch that was handed out.

        Returns
        -------
        dict
            ``epoch``, ``batches`` of this rank and, where the sampler is ours, ``samples`` over all ranks, which also
            holds for another number of ranks. After the last batch of an epoch it is the beginning of the next.
        """
        if self._clock.announced:
            return self._state(self._clock.number, self._pending.batches, self._pending.samples)
        if self._is_finished():
            return self._state(self._clock.number + 1, 0, None)
        samples = None if self._order is None else self._position
        return self._state(self._clock.number, self._position // self._unit, samples)

    def _state(self, epoch: int, batches: int, samples: int | None) -> dict[str, int]:
        state = {"epoch": epoch, "batches": batches}
        return state if samples is None else {**state, "samples": samples}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Let the next pass begin where :meth:`state_dict` says.

        Raises
        ------
        ConfigurationError
            If the state is not one of a loader.
        """
        if not {"epoch", "batches"} <= set(state):
            raise ConfigurationError(f"the state of a loader has epoch and batches; got {dict(state)!r:.80}")
        self._clock.announce(state["epoch"])
        self._pending = _Position(state["batches"], state.get("samples"), state["epoch"])

    def _is_finished(self) -> bool:
        if self._order is not None:
            return self._order.remaining(self._position) < self._smallest_batch
        return hasattr(self._batches, "__len__") and self._position >= len(self._batches)

    @property
    def _smallest_batch(self) -> int:
        return (self.batch_size or 1) if self.drop_last else 1

    def _needed_samples(self, world: int) -> int:
        """Return how many samples give every rank a batch, or one rank in an evaluation."""
        if self._order is None:
            return 1
        if self._order.pad:
            return max(world, world * (self._smallest_batch - 1) + 1)
        return world * self._smallest_batch if self.drop_last else 1

    def _check_not_empty(self) -> None:
        world = rank_and_world()[1]
        samples = len(self.dataset) if self._order is None else self._order.epoch_size  # type: ignore[arg-type]
        needed = self._needed_samples(world)
        if samples < needed:
            raise ConfigurationError(
                f"there is no batch for some rank: {samples} sample(s), batch size {self.batch_size}, {world} rank(s), "
                f"drop_last={self.drop_last}; at least {needed} sample(s) are needed"
            )


def _clock_of(batch_sampler: Any) -> Epoch:
    sampler = getattr(batch_sampler, "sampler", None)
    return sampler.clock if isinstance(sampler, EpochSampler) else Epoch()


def _checked_dataset(dataset: Any) -> Any:
    if isinstance(dataset, Batch) or (isinstance(dataset, (list, tuple)) and len(dataset)):
        # As one batch, so that a label which some structures have is there, as NaN, in every batch.
        return InMemoryDataset(dataset)
    if isinstance(dataset, (str, bytes, Mapping)) or not (
        hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    ):
        raise ConfigurationTypeError(
            f"dataset must be a Dataset, a Batch or a list of AtomicData, got {type(dataset).__name__} "
            f"{dataset!r:.80}; for a store use Dataset(AtomicDataZarrReader(path))"
        )
    return dataset


def _check_numbers(batch_size: int, num_workers: int, seed: int) -> None:
    for name, value, least in (("batch_size", batch_size, 1), ("num_workers", num_workers, 0), ("seed", seed, 0)):
        if not isinstance(value, int) or value < least:
            raise ConfigurationError(f"{name} must be an integer of at least {least}, got {value!r}")


def _check_needs_workers(num_workers: int, **options: int | None) -> None:
    for name, value in options.items():
        if value and not num_workers:
            raise ConfigurationError(f"{name}={value} needs num_workers of at least 1; leave it out")
