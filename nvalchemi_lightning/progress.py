"""How one run advances: its loader, its target, and the end of its epochs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from nvalchemi_lightning.context import TrainContext
from nvalchemi_lightning.errors import ConfigurationError
from nvalchemi_lightning.feeding import EpochLoader, as_loader, loader_length
from nvalchemi_lightning.recipe import TrainingRecipe
from nvalchemi_lightning.windowing import Windows

__all__ = ["RunProgress"]


class RunProgress:
    """The state of one run that is not part of the recipe.

    Parameters
    ----------
    recipe : TrainingRecipe
        Whose counters advance.

    Attributes
    ----------
    started : bool
        Whether a batch was trained.
    stepped : bool
        Whether the newest batch made an optimizer step.
    epoch_closed : bool
        Whether the newest pass exhausted its loader.
    ctx : TrainContext or None
        The context of the newest batch.
    windows : Windows or None
        The accumulation windows, None where every batch may make a step.
    """

    def __init__(self, recipe: TrainingRecipe) -> None:
        self._recipe = recipe
        self._counters, self._requests = recipe.counters, recipe.requests
        self._epochs: EpochLoader | None = None
        self._batches_per_epoch: int | None = None
        self._target: int | None = None
        self._steps_before = recipe.step_count
        self.started = False
        self.stepped = False
        self.epoch_closed = False
        self.ctx: TrainContext | None = None
        self.windows: Windows | None = None

    def feed(
        self,
        loader: Any,
        *,
        limit: float | int | None,
        steps_left: int | None,
        on_skip: Callable[[int], None],
        sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
    ) -> EpochLoader:
        """Return the epochs of a loader, from the position of the counters to the target.

        Parameters
        ----------
        loader : iterable of Batch
            The user's loader.
        limit : float, int or None
            The Trainer's ``limit_train_batches``: a share or a number of batches per epoch.
        steps_left : int or None
            How many optimizer steps the Trainer allows from here; the recipe's own target may come earlier.
        on_skip : callable
            Told how many batches of a pass are skipped, if any.
        sum_over_ranks : callable, optional
            Sums a tensor over all ranks.

        Raises
        ------
        ConfigurationError, ConfigurationTypeError
            If the loader is empty or none, the limit leaves nothing, or the counters do not fit.
        """
        length = loader_length(as_loader(loader))
        self._batches_per_epoch = _limited(length, limit)
        if self._batches_per_epoch == 0:
            raise ConfigurationError(f"limit_train_batches={limit} of {length} batches leaves none to train on")
        if self._batches_per_epoch is not None:
            self._recipe.reconcile_counters(self._batches_per_epoch)
        self._recipe.check_accumulation()
        own = self._recipe.target_steps(self._batches_per_epoch)
        trainers = None if steps_left is None else self._recipe.step_count + steps_left
        self._target = min((target for target in (own, trainers) if target is not None), default=None)
        self._recipe.provenance.begin_run(loader)
        policy, resume = self._recipe.accumulation, self._recipe.resume
        if policy is not None:
            self.windows = Windows(policy, self._counters, self._batches_per_epoch, sum_over_ranks)
        self._epochs = EpochLoader(loader, self._counters, self._is_pass_over, length, resume, on_skip, self.windows)
        return self._epochs

    @property
    def fed(self) -> bool:
        """Whether the run has its loader."""
        return self._epochs is not None

    @property
    def idle(self) -> bool:
        """Whether batches were trained, but no optimizer stepped."""
        return self.started and self._counters.step_count == self._steps_before

    def finished(self) -> bool:
        """Return whether the target is reached or somebody asked to stop; a window is always trained to its end."""
        window = None if self.ctx is None else self.ctx.window
        if window is not None and not window.last:
            return False
        counters, epochs = self._counters, self._recipe.target_epochs
        if self._target is not None and counters.step_count >= self._target:
            return True
        if epochs is not None and counters.epoch_count >= epochs:
            return True
        return self._requests.must_stop()

    def _is_pass_over(self) -> bool:
        return self.at_epoch_end() or self.finished()

    def at_epoch_end(self) -> bool:
        """Return whether the newest batch is the last one of a loader of known length."""
        return self._counters.epoch_step_count == self._batches_per_epoch

    def close_epoch(self) -> None:
        """Advance the epoch counter if the pass reached the end of its loader.

        Raises
        ------
        ConfigurationError
            If the pass produced no batch, so that training would go on for ever, or fewer than its length.
        """
        epochs, counters = self._epochs, self._counters
        if epochs is None:
            return
        length = self._batches_per_epoch
        if length is None:
            self.epoch_closed = epochs.exhausted and epochs.delivered > 0
        else:
            self.epoch_closed = counters.epoch_step_count >= length
        if self.epoch_closed:
            counters.epoch_done()
        elif epochs.exhausted and length is not None and epochs.delivered > 0:
            raise ConfigurationError(
                f"len({type(epochs.loader).__name__}) is {length}, but the epoch ended after "
                f"{counters.epoch_step_count} batches; the length must be that of a whole pass"
            )
        elif epochs.delivered == 0 and not self.finished():
            raise ConfigurationError(
                f"dataloader produced no batches before reaching the target step count {self._target}; "
                f"the {type(epochs.loader).__name__} is empty or can be iterated only once"
            )


def _limited(length: int | None, limit: float | int | None) -> int | None:
    if limit is None or (isinstance(limit, float) and limit == 1.0):
        return length
    if isinstance(limit, int):
        return limit if length is None else min(length, limit)
    return None if length is None else int(length * limit)
