"""The only file that names private or version-dependent attributes of Lightning (checked with 2.6.6).

Every function says which attribute it uses and why no public one does.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.inheritance import get_all_subclasses
from torch.utils.data import BatchSampler, DataLoader

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = [
    "TrainerLimits",
    "align_epoch",
    "align_global_step",
    "align_log_step",
    "allow_gradients_in_evaluation",
    "attach_first",
    "attach_missing",
    "can_stop_early",
    "count_update",
    "drop_idle_profiler",
    "fast_forward",
    "fit",
    "follow_counters",
    "has_own_validation_data",
    "is_heard",
    "leave_validation_to",
    "quiet",
    "run_validation",
    "schedule_validation",
    "shard_evaluation_ourselves",
    "show",
    "silence_mode_warning",
    "silence_wrong_advice",
    "take_over_limits",
    "unwrap_loaders",
]

# A batch count that no run reaches. Not inf: Lightning validates at every epoch end when it is inf.
_NEVER = 2**62


@dataclass(frozen=True)
class TrainerLimits:
    """What the Trainer was asked for and the owner now does itself.

    Attributes
    ----------
    max_steps : int or None
        Executed optimizer steps of this Trainer, None without a limit.
    every_n_epochs, every_n_steps : int or None
        The Trainer's validation cadence.
    val_batches : float or int
        Its ``limit_val_batches``.
    """

    max_steps: int | None
    every_n_epochs: int | None
    every_n_steps: int | None
    val_batches: float | int


def take_over_limits(trainer: Trainer) -> TrainerLimits:
    """Take ``max_steps`` from a Trainer, and note its validation cadence.

    ``max_steps`` makes Lightning train a phantom epoch on resume (``_iteration_based_training``), and its cadence
    counts batches, not executed steps. ``epoch_loop.max_steps`` has no public setter.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    max_steps = None if epoch_loop.max_steps == -1 else epoch_loop.max_steps
    interval, every_n_epochs = trainer.val_check_interval, trainer.check_val_every_n_epoch
    every_n_steps = interval if isinstance(interval, int) else None
    epoch_loop.max_steps = -1
    every_n_epochs = every_n_epochs if every_n_steps is None else None
    return TrainerLimits(max_steps, every_n_epochs, every_n_steps, trainer.limit_val_batches)


def leave_validation_to(trainer: Trainer, *, validates: bool, val_batches: float | int) -> None:
    """Say whether the run validates, in the terms by which native callbacks decide when to act.

    Without validation they must find the Trainer's defaults: ModelCheckpoint and EarlyStopping then act at the end
    of training epochs. Lightning's own loop stays out of it with no validation batches.
    """
    trainer.limit_val_batches = val_batches if validates else 0
    trainer.check_val_every_n_epoch = None if validates else 1
    trainer.val_check_interval = _NEVER if validates else 1.0


def allow_gradients_in_evaluation(trainer: Trainer) -> None:
    """Let models differentiate under ``trainer.validate``, ``test`` and ``predict``.

    Inference mode cannot be left again for its tensors. The loops' ``inference_mode`` has no setter after
    construction of the Trainer.
    """
    for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        loop.inference_mode = False


def silence_mode_warning(trainer: Trainer) -> None:
    """Drop the warning about modules in evaluation mode: models without an optimizer are frozen on purpose."""
    trainer.fit_loop._warn_if_modules_in_eval_mode = _nothing  # type: ignore[method-assign]


def is_heard(trainer: Trainer, *methods: str) -> bool:
    """Return whether a callback or the module defines one of these Lightning hooks."""
    listeners = [*trainer.callbacks, trainer.lightning_module]  # type: ignore[attr-defined]
    return any(is_overridden(method, listener) for method in methods for listener in listeners)


def unwrap_loaders() -> None:
    """Undo what Lightning does to loader classes while it requests loaders, and leaves behind if that fails.

    ``_replace_dunder_methods`` has no ``finally``: every loader made later would keep all that is ever assigned to it.
    """
    for base in (DataLoader, BatchSampler):
        for cls in {base, *get_all_subclasses(base)}:
            for name in ("__init__", "__setattr__", "__delattr__"):
                original = cls.__dict__.get(f"__old{name}")
                if original is not None:
                    setattr(cls, name, original)
                    delattr(cls, f"__old{name}")


def drop_idle_profiler(trainer: Trainer) -> None:
    """Replace the profiler that records nothing: it still opens a generator for each of a dozen hooks per batch."""
    if type(trainer.profiler) is PassThroughProfiler:  # type: ignore[attr-defined]
        trainer.profiler = _IdleProfiler()  # type: ignore[attr-defined]


class _IdleProfiler(PassThroughProfiler):
    _nothing = nullcontext()

    def profile(self, action_name: str) -> Any:
        return self._nothing


def show(trainer: Trainer, numbers: Mapping[str, float]) -> None:
    """Put numbers where progress bars and callbacks read them.

    ``LightningModule.log`` would leave entries that Lightning walks on every later batch of the epoch.
    """
    trainer.progress_bar_metrics.update(numbers)
    trainer.callback_metrics.update({name: torch.tensor(number) for name, number in numbers.items()})


def silence_wrong_advice() -> None:
    """Drop what the user of a Trainer can do nothing about.

    Lightning's advice to save a "pre-optimization state" in manual optimization is wrong for one owner, and its use
    of ``LeafSpec``, which torch 2.13 deprecates, is its own. DDP's remark on strides is about weights of shape (1, N),
    whose gradients torch lays out otherwise; the numbers are right.
    """
    warnings.filterwarnings("ignore", message="Using ModelCheckpoint with manual optimization")
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")


def shard_evaluation_ourselves(trainer: Trainer) -> None:
    """Keep Lightning from injecting a sampler that repeats samples to fill up the ranks.

    The flag lives on the private accelerator connector.
    """
    trainer._accelerator_connector.use_distributed_sampler = False


def attach_first(trainer: Trainer, callback: Any, *, replacing: tuple[type, ...]) -> None:
    """Put a callback in front of every other: it must be told of an exception before any other fails.

    ``trainer.callbacks`` has no public way to insert. Callbacks of an earlier fit, of the types ``replacing``, go.
    """
    others = [each for each in trainer.callbacks if not isinstance(each, replacing)]  # type: ignore[attr-defined]
    trainer.callbacks = [callback, *others]  # type: ignore[attr-defined]


def attach_missing(trainer: Trainer, callbacks: Iterable[Any]) -> None:
    """Add the callbacks that a Trainer does not have yet, before it puts them in order and sets them up.

    ``LightningModule.configure_callbacks`` would replace others of the same class.
    """
    present = {id(each) for each in trainer.callbacks}  # type: ignore[attr-defined]
    trainer.callbacks.extend(each for each in callbacks if id(each) not in present)  # type: ignore[attr-defined]


def count_update(trainer: Trainer) -> None:
    """Count one executed update, whatever the number of optimizers.

    ``trainer.global_step`` reads ``manual_optimization.optim_step_progress``, which Lightning moves once per
    wrapped optimizer.
    """
    progress = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
    progress.increment_ready()
    progress.increment_completed()


def align_global_step(trainer: Trainer, step_count: int) -> None:
    """Make a fresh Trainer's ``global_step``, and the step of native loggers, continue from ``step_count``."""
    epoch_loop = trainer.fit_loop.epoch_loop
    total = epoch_loop.manual_optimization.optim_step_progress.total
    total.ready = total.completed = step_count
    epoch_loop._batches_that_stepped = step_count


def align_log_step(trainer: Trainer, step_count: int) -> None:
    """Let ``LearningRateMonitor`` and other native loggers count executed steps, not batches.

    They log against ``_batches_that_stepped``, to which Lightning adds one when the batch is over.
    """
    trainer.fit_loop.epoch_loop._batches_that_stepped = step_count - 1


def align_epoch(trainer: Trainer, epoch_count: int) -> None:
    """Make a fresh Trainer's ``current_epoch`` continue from ``epoch_count``."""
    current: Any = trainer.fit_loop.epoch_progress.current
    current.ready = current.started = current.processed = current.completed = epoch_count


def follow_counters(trainer: Trainer, epoch_count: int) -> None:
    """Let a Trainer that was restored from a checkpoint go on where the counters are.

    Lightning's own restart skips an epoch if the checkpoint was written at its last batch. The flags that begin it
    have no public setter. One of them stays: in a later epoch than the first, Lightning would otherwise begin to
    iterate the loader twice.
    """
    loop: Any = trainer.fit_loop
    if loop.is_resuming:
        for each in (loop, loop.epoch_loop, loop.epoch_loop.val_loop):
            each.restarting = each._loaded_from_state_dict = False
        align_epoch(trainer, epoch_count)
    loop._resuming_from_checkpoint = epoch_count > 0


def fast_forward(trainer: Trainer, batches: int) -> None:
    """Let ``batch_idx`` and the end of the epoch account for batches that are behind.

    Called while the first batch of a pass is fetched. ``fetched`` has no public setter.
    """
    loop: Any = trainer.fit_loop
    if loop._data_fetcher.length is None:  # fetched ahead of the loop, which then begins to count anew
        return
    current = loop.epoch_loop.batch_progress.current
    current.ready = current.started = current.processed = current.completed = batches
    loop._data_fetcher.fetched += batches


def can_stop_early(trainer: Trainer) -> bool:
    """Return whether the Trainer's minimum of epochs and steps has been reached."""
    return bool(trainer.fit_loop._can_stop_early)


def schedule_validation(trainer: Trainer, *, due: bool) -> None:
    """Let Lightning's own loop validate after the present batch, or not."""
    trainer.val_check_batch = 1 if due else _NEVER


def run_validation(trainer: Trainer) -> None:
    """Run Lightning's validation loop now, in the middle of ``fit``.

    ``first_loop_iter`` is saved because the logger connector would otherwise forget that a training epoch is open.
    """
    connector = trainer._logger_connector
    first_loop_iter = connector._first_loop_iter
    trainer.validating = True
    trainer.fit_loop.epoch_loop.val_loop.run()
    trainer.training = True
    connector._first_loop_iter = first_loop_iter


def fit(trainer: Trainer, module: LightningModule) -> None:
    """Run ``trainer.fit``; an interrupt by the user stays a ``KeyboardInterrupt``.

    Lightning ends the interpreter with ``SystemExit`` instead, which would close a notebook's cell without a word.
    """
    try:
        trainer.fit(module)
    except SystemExit as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise error.__context__ from None
        raise


def has_own_validation_data(trainer: Trainer, module: LightningModule) -> bool:
    """Return whether validation data was handed to ``fit`` rather than configured on the module."""
    source = trainer.fit_loop.epoch_loop.val_loop._data_source
    return source.instance is not module and source.is_defined()


@contextmanager
def quiet() -> Iterator[None]:
    """Keep Lightning's informational messages (devices, tips, limits reached) off the terminal."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            # The owner logs at the end of every epoch too.
            warnings.filterwarnings("ignore", message=".*smaller than the logging interval")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _nothing() -> None:
    return None
