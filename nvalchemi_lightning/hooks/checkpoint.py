"""Save checkpoints while training goes on."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

from pydantic import Field, PrivateAttr, model_validator

from nvalchemi_lightning.checkpoint.buffers import HostBuffers
from nvalchemi_lightning.checkpoint.pruning import retain
from nvalchemi_lightning.checkpoint.reading import latest_index
from nvalchemi_lightning.checkpoint.snapshot import Description, Snapshot, take_snapshot
from nvalchemi_lightning.checkpoint.writing import write
from nvalchemi_lightning.context import TrainContext
from nvalchemi_lightning.errors import AlchemiError, ConfigurationError, TrainingStateError
from nvalchemi_lightning.hooks.saving_at_exit import FOLLOWED_STAGES, SavingAtExit
from nvalchemi_lightning.resume import gather_from_ranks
from nvalchemi_lightning.specs.base import BaseSpec
from nvalchemi_lightning.specs.fields import fields_spec
from nvalchemi_lightning.stages import TrainingStage
from nvalchemi_lightning.strict_model import StrictModel

__all__ = ["CheckpointHook"]

_MISSING = object()


class CheckpointHook(StrictModel):
    """Save the strategy every so many executed steps, or every so many epochs.

    Parameters
    ----------
    checkpoint_dir : str or Path
        The folder; checkpoints are numbered on from those that it holds.
    step_interval : int, optional
        Save at ``AFTER_BATCH`` when the number of executed steps is a multiple of it. A batch without a step saves
        nothing.
    epoch_interval : int, optional
        Save at ``AFTER_EPOCH`` when the number of completed epochs is a multiple of it. Exactly one of the two.
    async_save : bool
        Copy the state on the training thread, but write on a background thread. Default True. At most one write is
        pending: the next save waits for it. A failed write is reported after the next batch, or at the end.
    rank_zero_only : bool
        Let only rank 0 write. With False every rank writes, rank r > 0 into the sub-folder ``rank_<r>``: for folders
        that are local to a node.
    keep_last : int, optional
        After a save, remove all checkpoints of the folder but so many of the newest.
    keep_best : str, optional
        A number of the validation summary, such as ``"total_loss"`` or ``"forces_mae"``: the checkpoint with the
        smallest is kept too. Only a checkpoint that is saved right after a validation has one. Alone, it keeps the
        best and the newest.
    save_on_exit : bool
        Save at the end of a run as well, also at one that fails, unless that state is saved already. SIGINT and
        SIGTERM then end the run after the present batch; the second SIGINT interrupts at once. Default False.
    last_checkpoint_index : int, optional
        The index that was written last, >= 0; kept up to date by the hook.

    Raises
    ------
    pydantic.ValidationError
        If not exactly one interval is given, or a number is not positive.
    ConfigurationError
        Before a run with ``keep_best``, if there is no validation.

    Notes
    -----
    When a validation is due at the same point, the checkpoint is written after it and after the schedulers that
    listen to it. Before the first batch the recipe is written once in memory, so a strategy that cannot be saved
    fails there and not at the first checkpoint.

    A run that fails between the backward pass and the end of its batch is not saved at its exit, because the weights
    may be half updated. One that fails earlier in a batch is saved as it was before the batch.

    Examples
    --------
    >>> hook = CheckpointHook("runs/example/checkpoints", step_interval=1000)
    """

    frequency: ClassVar[int] = 1
    stage: ClassVar[TrainingStage | None] = None

    checkpoint_dir: Path
    step_interval: int | None = Field(default=None, gt=0)
    epoch_interval: int | None = Field(default=None, gt=0)
    async_save: bool = True
    rank_zero_only: bool = True
    keep_last: int | None = Field(default=None, gt=0)
    keep_best: str | None = Field(default=None, min_length=1)
    save_on_exit: bool = False
    last_checkpoint_index: int | None = Field(default=None, ge=0)

    _writer: ThreadPoolExecutor | None = PrivateAttr(default=None)
    _pending: Future[None] | None = PrivateAttr(default=None)
    _seen_steps: int = PrivateAttr(default=0)
    _description: Description = PrivateAttr(default_factory=Description)
    _buffers: HostBuffers = PrivateAttr(default_factory=HostBuffers)
    _exit: SavingAtExit = PrivateAttr(default_factory=SavingAtExit)

    def __init__(self, checkpoint_dir: Any = _MISSING, **fields: Any) -> None:
        given = {} if checkpoint_dir is _MISSING else {"checkpoint_dir": checkpoint_dir}
        super().__init__(**given, **fields)

    @model_validator(mode="after")
    def _one_interval(self) -> CheckpointHook:
        if (self.step_interval is None) == (self.epoch_interval is None):
            raise ConfigurationError(
                "CheckpointHook requires exactly one of step_interval or epoch_interval; "
                f"got step_interval={self.step_interval}, epoch_interval={self.epoch_interval}"
            )
        return self

    def to_spec(self) -> BaseSpec:
        """Return the recipe, without the index that was written last."""
        return fields_spec(self, without=("last_checkpoint_index",))

    def prepare_strategy(self, strategy: Any) -> None:
        """See before a run that the strategy can be saved, and where the count of checkpoints stands."""
        self._description = Description()
        self._description.of(strategy)
        if self.keep_best is not None and not _validates(strategy):
            raise ConfigurationError(
                f"CheckpointHook(keep_best={self.keep_best!r}) compares validations, but there is none; set "
                "validation_config, or leave keep_best out"
            )
        self._exit.begin(strategy)
        self._seen_steps = strategy.step_count
        newest = latest_index(self.checkpoint_dir)
        if newest >= 0:
            self.last_checkpoint_index = newest

    def _runs_on_stage(self, stage: TrainingStage) -> bool:
        saving = stage in (TrainingStage.AFTER_BATCH, TrainingStage.AFTER_EPOCH)
        return saving or (self.save_on_exit and stage in FOLLOWED_STAGES)

    def __call__(self, ctx: TrainContext, stage: TrainingStage) -> None:
        """Save if it is time, once the present point of the loop is over.

        Raises
        ------
        TrainingStateError
            If there is no strategy, or the hook was not entered and writes in the background.
        OSError
            If an earlier background write failed.
        """
        if self.save_on_exit:
            self._exit.follow(ctx, stage)
        self._report()
        if not self._due(ctx, stage):
            return
        workflow = ctx.workflow
        if workflow is None:
            raise TrainingStateError("CheckpointHook saves a strategy, but the context has none; set ctx.workflow")
        if self.async_save and self._writer is None:
            raise TrainingStateError(
                "CheckpointHook's async writer is not initialized; call it inside a run or `with strategy:`, "
                "or set async_save=False"
            )
        rank = ctx.global_rank
        getattr(workflow, "defer", _at_once)(lambda: self._save(workflow, rank))

    def _due(self, ctx: TrainContext, stage: TrainingStage) -> bool:
        if self.epoch_interval is not None:
            return stage is TrainingStage.AFTER_EPOCH and ctx.epoch > 0 and ctx.epoch % self.epoch_interval == 0
        if stage is not TrainingStage.AFTER_BATCH:
            return False
        stepped, self._seen_steps = ctx.step_count != self._seen_steps, ctx.step_count
        return stepped and ctx.step_count % (self.step_interval or 1) == 0

    def _save(self, workflow: Any, rank: int) -> None:
        ranks = gather_from_ranks(workflow.resume.state())
        if self.rank_zero_only and rank != 0:
            return
        self._wait()
        snapshot = take_snapshot(workflow, ranks, self._buffers, self._description)
        self._exit.saved(workflow)
        if self._writer is None:
            self._write(self._folder(rank), snapshot)
        else:
            self._pending = self._writer.submit(self._write, self._folder(rank), snapshot)

    def _folder(self, rank: int) -> Path:
        return self.checkpoint_dir if rank == 0 else self.checkpoint_dir / f"rank_{rank}"

    def _write(self, folder: Path, snapshot: Snapshot) -> None:
        self.last_checkpoint_index = write(folder, snapshot)
        retain(folder, self.keep_last, self.keep_best)

    def _report(self) -> None:
        """Raise the error of a background write that has ended."""
        if self._pending is not None and self._pending.done():
            self._wait()

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def __enter__(self) -> CheckpointHook:
        """Start the background thread."""
        if self.async_save:
            self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the pending write, and save; a failure becomes a note on an error that is under way."""
        self._exit.stop_listening()
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.shutdown()
        failure = self._pending.exception() if self._pending is not None else None
        self._pending = None
        if self.save_on_exit and failure is None:
            failure = self._save_at_exit(error)
        if failure is not None and error is None:
            raise failure
        if failure is not None:
            error.add_note(f"A checkpoint could not be written either: {failure!r}")  # type: ignore[union-attr]

    def _save_at_exit(self, error: BaseException | None) -> Exception | None:
        """Save the state that is not saved yet; return what kept it from being written."""
        workflow, ranks = self._exit.unsaved(error)
        if ranks is None or (self.rank_zero_only and self._exit.rank != 0):
            return None
        try:
            self._write(self._folder(self._exit.rank), take_snapshot(workflow, ranks, self._buffers, self._description))
        except (OSError, AlchemiError) as failure:
            return failure
        return None


def _validates(strategy: Any) -> bool:
    return strategy.validation_config is not None if strategy.running is None else strategy.running.validates


def _at_once(action: Any) -> None:
    action()
