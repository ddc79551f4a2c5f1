"""Clip gradients before a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from pydantic import Field, PrivateAttr, model_validator
from torch import Tensor, nn

from nvalchemi_lightning.errors import ConfigurationError, TrainingStateError
from nvalchemi_lightning.hooks.gradients import optimized_parameters, total_norm
from nvalchemi_lightning.hooks.update import TrainingUpdateHook
from nvalchemi_lightning.stages import TrainingStage
from nvalchemi_lightning.strict_model import StrictModel

__all__ = ["GradientClipHook"]


class GradientClipHook(StrictModel, TrainingUpdateHook):
    """Clip the gradients of everything that an optimizer holds, right before a step.

    Parameters
    ----------
    max_norm : float, optional
        Scale all gradients down together so that their 2-norm is at most this, > 0.
    max_value : float, optional
        Clamp every element to ``[-max_value, max_value]``, > 0. Exactly one of the two.
    per_model : bool
        Clip each model by its own norm. Default False: one norm over all models.
    error_if_nonfinite : bool
        Raise when a gradient is not finite. Default False; True waits for the device at every step, and is wrong
        together with float16, where a step with infinite gradients is skipped on purpose.

    Raises
    ------
    pydantic.ValidationError
        If not exactly one limit is given, or one is not positive.

    Notes
    -----
    Acts once per step (not per batch of an accumulation window), after `MixedPrecisionHook` has unscaled the
    gradients. The norm before clipping is left in ``ctx.gradient_norm`` for hooks that come later, and logged as
    ``gradient/norm``, with ``per_model`` also as ``gradient/norm/<model>``; nothing waits for the device.

    Examples
    --------
    >>> hook = GradientClipHook(max_norm=10.0)
    """

    priority: ClassVar[int] = 30
    _exclusive_update_key: ClassVar[str | None] = "GradientClipHook"

    max_norm: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    max_value: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    per_model: bool = False
    error_if_nonfinite: bool = False

    _last_total_norm: Tensor | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _one_limit(self) -> GradientClipHook:
        if (self.max_norm is None) == (self.max_value is None):
            raise ConfigurationError(
                "GradientClipHook requires exactly one of max_norm or max_value; "
                f"got max_norm={self.max_norm}, max_value={self.max_value}"
            )
        return self

    @property
    def last_total_norm(self) -> Tensor | None:
        """2-norm of all gradients before the newest step was clipped, a scalar; None before the first."""
        return self._last_total_norm

    def __call__(self, ctx: Any, stage: TrainingStage, will_skip: bool) -> tuple[bool, Tensor | None]:
        """Clip at ``DO_OPTIMIZER_STEP``, unless the step was vetoed.

        Raises
        ------
        TrainingStateError
            If a gradient is not finite and ``error_if_nonfinite`` is set.
        """
        if stage is TrainingStage.DO_OPTIMIZER_STEP and not will_skip:
            self._clip_all(ctx)
        return True, ctx.loss

    def _clip_all(self, ctx: Any) -> None:
        optimized = optimized_parameters(ctx)
        groups: dict[str, Iterable[nn.Parameter]] = {"": optimized.values()}
        if self.per_model:
            groups = {key: [p for p in model.parameters() if id(p) in optimized] for key, model in ctx.models.items()}
        norms = {key: self._clip(parameters, ctx) for key, parameters in groups.items()}
        total = torch.nn.utils.get_total_norm(norms.values()) if self.per_model else norms[""]
        self._last_total_norm = ctx.gradient_norm = total
        if ctx.workflow is not None:
            for key, norm in norms.items() if self.per_model else ():
                ctx.workflow.log(f"gradient/norm/{key}", norm)
            ctx.workflow.log("gradient/norm", total)

    def _clip(self, parameters: Iterable[nn.Parameter], ctx: Any) -> Tensor:
        held = [parameter for parameter in parameters if parameter.grad is not None]
        norm = total_norm(held)
        if self.error_if_nonfinite and not bool(norm.isfinite()):
            raise TrainingStateError(_not_finite(held, norm, ctx))
        if self.max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(held, self.max_norm, norm)
        elif self.max_value is not None:
            torch.nn.utils.clip_grad_value_(held, self.max_value)
        return norm


def _not_finite(parameters: Iterable[nn.Parameter], norm: Tensor, ctx: Any) -> str:
    bad = {id(p) for p in parameters if p.grad is not None and not bool(p.grad.isfinite().all())}
    names = [
        f"{key}.{name}" for key, model in ctx.models.items() for name, p in model.named_parameters() if id(p) in bad
    ]
    where = f", first in {names[0]}" if names else ""
    return (
        f"the gradient norm is {norm.item()} after {ctx.step_count} steps{where}; look at the structures of this "
        "batch, or leave error_if_nonfinite out"
    )
