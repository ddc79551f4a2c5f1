"""Knowing at the end of a run, however it ends, whether its state can be saved and is not saved yet."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from nvalchemi_lightning.context import TrainContext
from nvalchemi_lightning.resume import gather_from_ranks
from nvalchemi_lightning.stages import TrainingStage
from nvalchemi_lightning.stop_signals import stopping_on_signals

__all__ = ["FOLLOWED_STAGES", "SavingAtExit"]

FOLLOWED_STAGES = (TrainingStage.BEFORE_BATCH, TrainingStage.BEFORE_BACKWARD, TrainingStage.AFTER_BATCH)
"""The stages that `SavingAtExit.follow` must see."""


@dataclass
class SavingAtExit:
    """Follow a run.

    Attributes
    ----------
    rank : int
        The rank of this process.
    """

    # Not compared: two hooks of the same options are equal whatever runs they follow.
    rank: int = field(default=0, compare=False)
    _workflow: Any = field(default=None, compare=False, repr=False)
    _saved_at: tuple[int, int] | None = field(default=None, compare=False)
    _batch_began: Any = field(default=None, compare=False, repr=False)
    _is_updating: bool = field(default=False, compare=False)
    _is_listening: bool = field(default=False, compare=False)
    _listening: ExitStack = field(default_factory=ExitStack, compare=False, repr=False)

    def begin(self, workflow: Any) -> None:
        """Begin to follow a strategy; what it holds now counts as saved."""
        self._workflow = workflow
        self._batch_began, self._is_updating = None, False
        self.saved(workflow)

    def stop_listening(self) -> None:
        """Give the signals back to those who had them."""
        self._listening.close()
        self._is_listening = False

    def _listen(self) -> None:
        # Not before the first batch: Lightning takes SIGTERM itself when a run begins.
        if not self._is_listening:
            self._listening.enter_context(stopping_on_signals(self._stop))
            self._is_listening = True

    def _stop(self, name: str) -> None:
        self._workflow.stop(f"{name} arrived")

    def follow(self, ctx: TrainContext, stage: TrainingStage) -> None:
        """Note where in a batch the run is, and its random states before it; from now on, signals are requests."""
        self.rank = ctx.global_rank
        if stage is TrainingStage.BEFORE_BATCH:
            self._listen()
            self._batch_began = self._workflow.resume.state()
        elif stage is TrainingStage.BEFORE_BACKWARD:
            self._is_updating = True
        elif stage is TrainingStage.AFTER_BATCH:
            self._batch_began, self._is_updating = None, False

    def saved(self, workflow: Any) -> None:
        """Note that the present state is saved."""
        self._saved_at = self._position(workflow)

    def unsaved(self, error: BaseException | None) -> tuple[Any, dict[int, Any] | None]:
        """Return the strategy and the states of its ranks if they are to be saved, else None for the latter.

        Parameters
        ----------
        error : BaseException or None
            What ends the run. It is told if the state cannot be saved.
        """
        workflow = self._workflow
        if workflow is None or self._saved_at == self._position(workflow):
            return workflow, None
        if self._is_updating:
            if error is not None:
                error.add_note("The run was not saved at its exit, because it failed while the weights were updated")
            return workflow, None
        if error is None:
            return workflow, gather_from_ranks(workflow.resume.state())
        return workflow, {self.rank: self._batch_began or workflow.resume.state()}

    @staticmethod
    def _position(workflow: Any) -> tuple[int, int]:
        return workflow.batch_count, workflow.epoch_count
