"""Skip steps that would spoil the weights."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import Field, PrivateAttr, model_validator
from torch import Tensor

from nvalchemi_lightning.data.feeding.sampler import rank_and_world
from nvalchemi_lightning.errors import ConfigurationError, TrainingStateError
from nvalchemi_lightning.hooks.gradients import optimized_parameters, total_norm
from nvalchemi_lightning.hooks.quarantine import BatchNote, append_record, listed, suspects
from nvalchemi_lightning.hooks.running_bound import RunningBound
from nvalchemi_lightning.hooks.update import TrainingUpdateHook
from nvalchemi_lightning.stages import TrainingStage
from nvalchemi_lightning.strict_model import StrictModel

__all__ = ["SpikeSkipHook"]

_LOG = logging.getLogger(__name__)


class SpikeSkipHook(StrictModel, TrainingUpdateHook):
    """Skip a step whose loss or gradient is not finite, or far above what it was lately.

    Parameters
    ----------
    factor : float
        Loss and gradient norm may lie this many spreads above their running median, > 0. Default 30.
    window : int
        The medians are those of so many accepted steps, >= 1. Default 100.
    min_history : int
        Before so many accepted steps only what is not finite is skipped, between 1 and ``window``. Default 20.
    max_consecutive : int
        So many steps in a row may be skipped, >= 0; one more ends the run with an error. Default 10.
    quarantine_file : str or Path, optional
        Gets one line of JSON per skipped step, appended by rank 0: ``step``, ``epoch``, ``batch``, ``reason``,
        ``loss``, ``norm``, ``threshold`` and ``structures``. Numbers that are not finite are text (``"nan"``).

    Raises
    ------
    pydantic.ValidationError
        If a value is out of bounds, or the file is a folder.

    Notes
    -----
    The spread is 1.4826 times the median absolute deviation, but at least a tenth of the median.

    A skipped step leaves weights, moments of optimizers, schedulers, averaged weights and ``step_count`` as they are,
    and drops its gradients. What the forward pass itself changes, such as the running statistics of a batch
    normalization, is not undone. Under accumulation the window is judged as a whole, when it would step: by the mean
    loss over it and the norm of its summed gradients. One bad batch therefore drops the window.

    On several ranks the decision is that on the mean loss of all ranks, the same everywhere. It needs the numbers on
    the host: this hook waits for the device once per step, for one transfer of two numbers. The norm is that before
    clipping; `GradientClipHook` has computed it already.

    With float16 a finite loss with an infinite gradient is left to the scaler, which skips the step and lowers its
    scale. Every skipped step is a warning in the log of this module; their number is logged as ``spikes/skipped``.
    The running medians are part of checkpoints.

    Examples
    --------
    >>> hook = SpikeSkipHook(quarantine_file="runs/example/quarantine.jsonl")
    """

    priority: ClassVar[int] = 40
    _exclusive_update_key: ClassVar[str | None] = "SpikeSkipHook"

    factor: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    window: int = Field(default=100, ge=1)
    min_history: int = Field(default=20, ge=1)
    max_consecutive: int = Field(default=10, ge=0)
    quarantine_file: Path | None = None

    _losses: RunningBound = PrivateAttr()
    _norms: RunningBound = PrivateAttr()
    _notes: list[BatchNote] = PrivateAttr(default_factory=list)
    _measured: tuple[float, float] = PrivateAttr(default=(math.nan, math.nan))
    _skipped: int = PrivateAttr(default=0)
    _consecutive: int = PrivateAttr(default=0)

    @model_validator(mode="after")
    def _check_together(self) -> SpikeSkipHook:
        if self.min_history > self.window:
            raise ConfigurationError(
                f"SpikeSkipHook.min_history={self.min_history} is never reached with window={self.window}; "
                "give a larger window or a smaller min_history"
            )
        if self.quarantine_file is not None and self.quarantine_file.is_dir():
            raise ConfigurationError(
                f"SpikeSkipHook.quarantine_file={str(self.quarantine_file)!r} is a folder; "
                f"write {str(self.quarantine_file / 'quarantine.jsonl')!r}"
            )
        return self

    def model_post_init(self, context: Any) -> None:
        """Begin without a history."""
        self._losses, self._norms = (
            RunningBound(factor=self.factor, window=self.window, min_history=self.min_history) for _ in range(2)
        )

    @property
    def skipped(self) -> int:
        """How many steps were skipped, over all runs."""
        return self._skipped

    def __call__(self, ctx: Any, stage: TrainingStage, will_skip: bool) -> tuple[bool, Tensor | None]:
        """Note every batch, decide at ``DO_OPTIMIZER_STEP``, and learn from a step that was taken.

        Raises
        ------
        TrainingStateError
            If more than ``max_consecutive`` steps in a row are skipped.
        """
        if stage is TrainingStage.BEFORE_BATCH and not will_skip:
            self._notes = []
        elif stage is TrainingStage.DO_OPTIMIZER_STEP:
            self._notes.append(BatchNote.of(ctx))
            if not will_skip:
                return self._decide(ctx), ctx.loss
        elif stage is TrainingStage.AFTER_OPTIMIZER_STEP and not will_skip:
            loss, norm = self._measured
            self._losses.accept(loss)
            self._norms.accept(norm)
            self._consecutive = 0
        return True, ctx.loss

    def _decide(self, ctx: Any) -> bool:
        notes, self._notes = self._notes, []
        mean = torch.stack([note.loss for note in notes]).mean() if ctx.window_loss is None else ctx.window_loss
        norm = ctx.gradient_norm
        if norm is None:
            norm = total_norm(optimized_parameters(ctx).values())
        self._measured = _fetched(mean.double(), norm)
        reason = self._reason(scaled=ctx.grad_scaler is not None)
        if reason:
            self._skip(ctx, notes, reason)
        if ctx.workflow is not None:
            ctx.workflow.log("spikes/skipped", float(self._skipped))
        return not reason

    def _reason(self, *, scaled: bool) -> str:
        """Return why the step must not be taken, nothing if it may; a scaler sees to infinite gradients itself."""
        loss, norm = self._measured
        checked = [("loss", loss, self._losses)]
        if math.isfinite(norm) or not scaled:
            checked.append(("gradient norm", norm, self._norms))
        for name, value, history in checked:
            if not math.isfinite(value):
                return f"the {name} is {value}"
            if value > history.bound():
                return f"the {name} {value:.4g} is above {history.bound():.4g}"
        return ""

    def _skip(self, ctx: Any, notes: list[BatchNote], reason: str) -> None:
        self._skipped += 1
        self._consecutive += 1
        found = suspects(notes)
        for model in ctx.models.values():
            for parameter in model.parameters():
                parameter.grad = None
        if self.quarantine_file is not None:
            append_record(self.quarantine_file, self._record(ctx, reason), found)
        where = f"after {ctx.step_count} steps, in epoch {ctx.epoch}"
        _LOG.warning("a step is skipped %s: %s; look at %s", where, reason, listed(found))
        if self._consecutive > self.max_consecutive:
            raise TrainingStateError(
                f"{self._consecutive} steps in a row were skipped {where}, the last because {reason}; look at "
                f"{listed(found)}, lower the learning rate, or raise SpikeSkipHook(factor={self.factor:g}, "
                f"max_consecutive={self.max_consecutive})"
            )

    def _record(self, ctx: Any, reason: str) -> dict[str, Any]:
        loss, norm = self._measured
        return {
            "step": ctx.step_count,
            "epoch": ctx.epoch,
            "batch": ctx.batch_count,
            "reason": reason,
            "loss": loss,
            "norm": norm,
            "threshold": {"loss": self._losses.bound(), "norm": self._norms.bound()},
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the history of accepted steps and the counts of skipped ones."""
        return {
            "losses": self._losses.values,
            "norms": self._norms.values,
            "skipped": self._skipped,
            "consecutive": self._consecutive,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a history; of one that is longer than ``window`` the newest part."""
        self._losses.restart(state["losses"])
        self._norms.restart(state["norms"])
        self._skipped, self._consecutive = state["skipped"], state["consecutive"]


def _fetched(loss: Tensor, norm: Tensor) -> tuple[float, float]:
    """Return two scalars as the mean over all ranks; the one moment at which the host waits."""
    both = torch.stack([loss, norm.detach().to(loss)])
    world = rank_and_world()[1]
    if world > 1:
        torch.distributed.all_reduce(both)
        both /= world
    loss_value, norm_value = both.tolist()
    return loss_value, norm_value
