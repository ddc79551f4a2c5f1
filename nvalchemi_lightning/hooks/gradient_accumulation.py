"""Accumulate gradients over several batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isclose
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, PrivateAttr
from torch import Tensor

from nvalchemi_lightning.context import TrainContext
from nvalchemi_lightning.data.feeding.sampler import rank_and_world
from nvalchemi_lightning.errors import ConfigurationError, TrainingStateError
from nvalchemi_lightning.hooks.update import TrainingUpdateHook
from nvalchemi_lightning.losses.targets import count_labels
from nvalchemi_lightning.runtime import iter_qualified_named_parameters
from nvalchemi_lightning.stages import TrainingStage
from nvalchemi_lightning.strict_model import StrictModel
from nvalchemi_lightning.window import Window, window_places

__all__ = ["GradientAccumulationHook"]

_MISSING = object()


@dataclass(frozen=True, eq=False)
class _Unfinished:
    """A window whose gradients, those of its first batches, wait for the next batch.

    ``at`` is the epoch and the position of that batch, None outside an epoch. ``gradients`` is None where the
    parameters hold them.
    """

    batches: int
    counts: Tensor
    loss: Tensor
    at: tuple[int, int] | None
    gradients: dict[str, Tensor] | None = None


class GradientAccumulationHook(StrictModel, TrainingUpdateHook):
    """Step once per window of several batches, with the gradient of one large batch.

    Parameters
    ----------
    steps : int
        Batches of a window, >= 1. The last window of an epoch may have fewer.
    normalize : {"labels", "graphs", "atoms", "batch"}
        What a mean over the window divides by. ``"labels"`` (default): each loss term by its own count over the
        window, whatever that is (structures, atoms or components that have the label). This is the gradient of
        the batch that holds all structures of the window. ``"graphs"``, ``"atoms"``: the loss of a batch weighs as
        much as its structures or atoms do. ``"batch"``: every batch weighs the same.

    Raises
    ------
    pydantic.ValidationError
        If a value is out of bounds.
    TrainingStateError
        In a run with ``"labels"``, if a hook has replaced ``ctx.loss``, the target assembler reads predictions, or
        the count of a term depends on predictions or on a hook that changes labels. With anything but ``"batch"``
        in `train_batch`, which does not know the window.

    Notes
    -----
    The batches of a window are drawn from the loader together, so that its counts are known before the first forward
    pass. They wait in host memory, one at a time goes to the device. On several ranks the counts are summed over the
    ranks, and gradients are averaged at the last batch of a window.

    Windows begin anew with every epoch, so ``num_epochs`` means passes over the data. A run ends only between
    windows, also when it is asked to stop. Schedules, clipping, averages, logging and validation by steps act once
    per window. A veto of its step, by another hook or by a scaler, drops the window; a veto at an earlier batch
    changes nothing. ``ctx.loss`` and ``ctx.losses`` are those of the batch; that of the window is ``ctx.window_loss``
    and logged as ``loss/window``.

    A checkpoint within a window holds its gradients, those of every rank, and training goes on exactly. In
    `train_batch` every ``steps`` calls are a window.

    Examples
    --------
    >>> hook = GradientAccumulationHook(4)
    """

    priority: ClassVar[int] = 10
    _exclusive_update_key: ClassVar[str | None] = "GradientAccumulationHook"

    steps: int = Field(ge=1)
    normalize: Literal["labels", "graphs", "atoms", "batch"] = "labels"

    _unfinished: _Unfinished | None = PrivateAttr(default=None)
    _loss: Tensor | None = PrivateAttr(default=None)
    _workflow: Any = PrivateAttr(default=None)
    _counts_checked: bool = PrivateAttr(default=False)
    _alone: bool = PrivateAttr(default=False)

    def __init__(self, steps: Any = _MISSING, **fields: Any) -> None:
        given = {} if steps is _MISSING else {"steps": steps}
        super().__init__(**given, **fields)

    def on_register(self, workflow: Any) -> None:
        """Remember the strategy, whose loss and models the windows are about."""
        self._workflow = workflow

    # What the loop asks -----------------------------------------------------------------------------------------

    def count(self, batch: Any) -> Tensor:
        """Return what a batch holds of that by which the window is normalized, float64, shape (K,)."""
        if self.normalize == "labels":
            workflow = self._workflow
            return count_labels(
                workflow.loss_fn, batch, workflow=workflow, target_assembler=workflow.loss_target_assembler
            )
        number = {"graphs": batch.num_graphs, "atoms": len(batch.positions), "batch": 1}[self.normalize]
        return torch.tensor([number], dtype=torch.float64)

    def carried(self, epoch: int, position: int) -> Tensor | None:
        """Return the counts of the batches whose gradients wait for this batch, shape (N, K), or None."""
        unfinished = self._unfinished
        if unfinished is None or unfinished.at != (epoch, position):
            return None
        return unfinished.counts[: unfinished.batches]

    # Taking part in a run ---------------------------------------------------------------------------------------

    def __call__(self, ctx: TrainContext, stage: TrainingStage, will_skip: bool) -> tuple[bool, Tensor | None]:
        """Keep gradients within a window, weigh the loss, and step at the end of it.

        Raises
        ------
        TrainingStateError
            If what the window divides by cannot be known.
        """
        if stage is TrainingStage.SETUP:
            self._counts_checked = False
        elif stage is TrainingStage.BEFORE_BATCH:
            return self._begin(ctx), ctx.loss
        elif stage is TrainingStage.DO_BACKWARD:
            return True, ctx.loss if ctx.loss is None else self._weighed(ctx.loss, ctx, _window(ctx))
        elif stage is TrainingStage.DO_OPTIMIZER_STEP:
            return _window(ctx).last, ctx.loss
        elif stage is TrainingStage.AFTER_OPTIMIZER_STEP:
            self._end(ctx, _window(ctx), skipped=will_skip)
        return True, ctx.loss

    def _begin(self, ctx: TrainContext) -> bool:
        """Return whether gradients are dropped: at the first batch of a window."""
        self._alone = ctx.window is None
        if ctx.window is None:
            ctx.window = self._window_of_calls()
        unfinished = self._unfinished
        if ctx.window.first or unfinished is None:
            self._unfinished = self._loss = None
            return True
        if unfinished.gradients is not None:
            _put_back(unfinished.gradients, ctx)
            self._unfinished = replace(unfinished, gradients=None)
        self._loss = unfinished.loss
        return False

    def _window_of_calls(self) -> Window:
        if self.normalize != "batch" and self.steps > 1:
            raise TrainingStateError(
                f"GradientAccumulationHook(normalize={self.normalize!r}) must know a window before its first batch, "
                "but train_batch hands over one batch at a time; train with run(), or write "
                f"GradientAccumulationHook({self.steps}, normalize='batch')"
            )
        unfinished = self._unfinished
        index = 0 if unfinished is None or unfinished.at is not None else unfinished.batches
        ones = torch.ones(self.steps, 1, dtype=torch.float64)
        return next(window_places(ones, ones[index:]))

    def _weighed(self, loss: Tensor, ctx: TrainContext, window: Window) -> Tensor:
        # From here until the batch is done the gradients are neither those before it nor those after it.
        self._unfinished = None
        if window.size > 1:
            loss = self._by_terms(loss, ctx, window) if self.normalize == "labels" else _times(loss, window.shares[0])
        self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()
        ctx.window_loss = self._loss
        return loss

    def _by_terms(self, loss: Tensor, ctx: TrainContext, window: Window) -> Tensor:
        losses = ctx.losses or {}
        if loss is not losses.get("total_loss"):
            raise TrainingStateError(
                "a hook has replaced ctx.loss, so what its terms are divided by is not known; "
                f"write GradientAccumulationHook({self.steps}, normalize='graphs')"
            )
        self._check_counts(losses["per_component_count"], window.own)
        weights, values = losses["per_component_weight"].values(), losses["per_component_unweighted"].values()
        terms = zip(values, weights, window.shares, strict=True)
        parts = [_times(value, weight * share) for value, weight, share in terms]
        return sum(parts[1:], start=parts[0])

    def _check_counts(self, counts: Mapping[str, Tensor], expected: Tensor) -> None:
        """Compare once per run, since reading them waits for the device."""
        if self._counts_checked:
            return
        self._counts_checked = True
        for (name, count), before in zip(counts.items(), expected.tolist(), strict=True):
            if not isclose(float(count), before, rel_tol=1e-5):  # sums of weights are rounded
                raise TrainingStateError(
                    f"{name} divides by {float(count):g}, but its labels were counted as {before:g} when the batch "
                    "left the loader: a hook has changed them, or the count depends on predictions; write "
                    f"GradientAccumulationHook({self.steps}, normalize='graphs')"
                )

    def _end(self, ctx: TrainContext, window: Window, *, skipped: bool) -> None:
        loss = self._loss
        if not window.last and loss is not None:
            at = None if self._alone else (ctx.epoch, ctx.epoch_step_count + 1)
            self._unfinished = _Unfinished(window.index + 1, window.counts, loss, at)
        elif not skipped and loss is not None and ctx.workflow is not None:
            ctx.workflow.log("loss/window", loss)

    # Checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the gradients of an unfinished window and what is needed to go on.

        Empty between windows, and on several ranks, each of which has gradients of its own: see `rank_state_dict`.
        """
        return {} if rank_and_world()[1] > 1 else self._window_state()

    def rank_state_dict(self) -> dict[str, Any]:
        """Return on several ranks what `state_dict` returns on one."""
        return self._window_state() if rank_and_world()[1] > 1 else {}

    def load_rank_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the unfinished window of this rank; on one rank it came with `load_state_dict`."""
        if state:
            self.load_state_dict(state)

    def _window_state(self) -> dict[str, Any]:
        unfinished = self._unfinished
        if unfinished is None:
            return {}
        gradients = unfinished.gradients
        if gradients is None:
            named = iter_qualified_named_parameters(self._workflow.models)
            gradients = {name: parameter.grad for name, parameter in named if parameter.grad is not None}
        return {
            **self.model_dump(),
            "counts": unfinished.counts[: unfinished.batches],
            "loss": unfinished.loss,
            "at": unfinished.at,
            "gradients": gradients,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over an unfinished window, or none.

        Raises
        ------
        ConfigurationError
            If the window is that of another configuration; nothing is changed.
        """
        saved = {key: state[key] for key in type(self).model_fields if key in state}
        if saved and saved != self.model_dump():
            raise ConfigurationError(
                f"the checkpoint was saved within a window of {_shown(saved)}, which {_shown(self.model_dump())} "
                "cannot continue; keep the arguments, or go on from a checkpoint that was saved after a step"
            )
        self._unfinished = None
        if saved:
            at = state["at"]
            self._unfinished = _Unfinished(
                batches=len(state["counts"]),
                counts=state["counts"],
                loss=state["loss"],
                at=None if at is None else (at[0], at[1]),
                gradients=dict(state["gradients"]),
            )


def _window(ctx: TrainContext) -> Window:
    if ctx.window is None:
        raise TrainingStateError("GradientAccumulationHook was not asked at BEFORE_BATCH of this batch")
    return ctx.window


def _times(value: Tensor, factor: float | Tensor) -> Tensor:
    # The dtype stays that of the value.
    return value * (factor.to(value.dtype) if isinstance(factor, Tensor) else factor)


def _put_back(gradients: Mapping[str, Tensor], ctx: TrainContext) -> None:
    for name, parameter in iter_qualified_named_parameters(ctx.models or {}):
        gradient = gradients.get(name)
        parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)


def _shown(arguments: Mapping[str, Any]) -> str:
    return f"GradientAccumulationHook({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
