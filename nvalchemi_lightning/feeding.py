"""Feeding a run: one pass over the user's loader at a time, from the position that the counters say."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, default_collate

from nvalchemi_lightning.counters import Counters
from nvalchemi_lightning.errors import ConfigurationError, ConfigurationTypeError, DataError
from nvalchemi_lightning.resume import ResumePoint
from nvalchemi_lightning.windowing import Windows

__all__ = ["EpochLoader", "OneLoader", "as_loader", "checked_batch", "loader_length"]


def as_loader(loader: Any) -> Iterable[Any]:
    """Return ``loader`` if batches can be drawn from it.

    Raises
    ------
    ConfigurationTypeError
        If it is not iterable, or is text.
    ConfigurationError
        If it is empty.
    """
    if hasattr(loader, "num_nodes_per_graph"):
        raise ConfigurationTypeError("dataloader must be an iterable of Batch; one Batch is no loader, write [batch]")
    if isinstance(loader, (str, bytes)) or not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
        raise ConfigurationTypeError(
            f"dataloader must be an iterable of Batch; got {type(loader).__name__} {loader!r:.80}"
        )
    if isinstance(loader, DataLoader) and loader.collate_fn is default_collate:
        raise ConfigurationTypeError(
            "torch's DataLoader cannot collate structures; use nvalchemi_lightning.data.DataLoader, "
            "which takes the same dataset and options"
        )
    if loader_length(loader) == 0:
        raise ConfigurationError(f"dataloader must contain at least one batch; got an empty {type(loader).__name__}")
    return loader  # type: ignore[no-any-return]


def loader_length(loader: Any) -> int | None:
    """Return the number of batches of one pass, or None if the loader does not know it."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


class OneLoader:
    """A loader of any kind behind a plain iterable.

    Parameters
    ----------
    loader : iterable of Batch
        What is iterated.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = as_loader(loader)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    @classmethod
    def unwrap(cls, loader: Any) -> Any:
        """Return the loader behind the wrapper, or ``loader`` if it is not wrapped."""
        return loader.loader if isinstance(loader, cls) else loader


class EpochLoader:
    """An iterable over one epoch of batches that continues where the counters are.

    Each pass starts lazily, at its first batch: the samplers are told the epoch (``set_epoch``), batches that the
    counters say were consumed are skipped (``set_epoch_step`` where the loader has it, otherwise drawn and
    dropped), and the pass ends early, without drawing a batch too many, once ``finished()`` is true. Where gradients
    are accumulated, the batches of a window are drawn together.

    Parameters
    ----------
    loader : iterable of Batch
        The user's loader; iterated once per epoch.
    counters : Counters
        Read at the start of a pass; never written.
    finished : callable
        Asked before every batch, or before every window.
    batches_per_epoch : int or None
        The length to report, None when unknown.
    resume : ResumePoint
        Lets a loader draw the order of an interrupted pass again.
    on_skip : callable
        Told how many batches of a pass are skipped, if any.
    windows : Windows, optional
        The accumulation windows of the run.

    Attributes
    ----------
    exhausted : bool
        Whether the last pass reached the end of the loader.
    delivered : int
        Batches of the current pass that were handed out, or skipped because they had been before.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        counters: Counters,
        finished: Callable[[], bool],
        batches_per_epoch: int | None,
        resume: ResumePoint,
        on_skip: Callable[[int], None],
        windows: Windows | None = None,
    ) -> None:
        self.loader = loader
        self.exhausted = False
        self.delivered = 0
        self._counters = counters
        self._finished = finished
        self._batches_per_epoch = batches_per_epoch
        self._windows = windows
        self._resume = resume
        self._on_skip = on_skip

    def __len__(self) -> int:
        if self._batches_per_epoch is None:
            raise TypeError(f"{type(self.loader).__name__} has no length")
        return self._batches_per_epoch

    def __iter__(self) -> Iterator[Any]:
        self.exhausted, self.delivered = False, self._counters.epoch_step_count
        if self._finished():
            return
        _announce_epoch(self.loader, self._counters.epoch_count)
        position = self._counters.epoch_step_count
        if position:
            self._on_skip(position)
        with self._resume.beginning_a_pass(position):
            batches = self._from_position()
        while not self._finished():
            drawn = self._draw(batches, position)
            self.exhausted = not drawn
            if self.exhausted:
                return
            position += len(drawn)
            while drawn:
                self.delivered += 1
                yield drawn.popleft()

    def _draw(self, batches: Iterator[Any], position: int) -> deque[Any]:
        room = 1 if self._windows is None else self._windows.room(position)
        drawn = deque(checked_batch(batch, self.loader) for batch in islice(batches, room))
        if self._windows is not None:
            self._windows.open(position, drawn)
        return drawn

    def _from_position(self) -> Iterator[Any]:
        skip = self._counters.epoch_step_count
        set_epoch_step = getattr(self.loader, "set_epoch_step", None)
        if skip and set_epoch_step is not None:
            set_epoch_step(skip)
            skip = 0
        batches = iter(self.loader)
        for _ in range(skip):
            next(batches, None)
        return batches


def _announce_epoch(loader: Any, epoch: int) -> None:
    """Call ``set_epoch`` on the loader itself or on the first of its samplers that has it."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    candidates = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    for candidate in candidates:
        set_epoch = getattr(candidate, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
            return


def checked_batch(batch: Any, loader: Any) -> Any:
    """Return what a loader handed out if it is a batch.

    Raises
    ------
    DataError
        If it is something else.
    """
    if not hasattr(batch, "num_nodes_per_graph"):
        raise DataError(
            f"{type(loader).__name__} yielded {type(batch).__name__}; training needs Batch objects "
            "(nvalchemi_lightning.data.DataLoader collates them)"
        )
    return batch
