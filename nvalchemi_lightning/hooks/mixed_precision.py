"""Run forward pass and loss in reduced precision."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any, ClassVar

import torch
from pydantic import BeforeValidator, PrivateAttr, field_serializer
from torch import Tensor
from torch.optim import Optimizer

from nvalchemi_lightning.errors import ConfigurationError, nearest
from nvalchemi_lightning.hooks.gradients import has_gradients
from nvalchemi_lightning.hooks.update import TrainingUpdateHook
from nvalchemi_lightning.specs.serializers import DTYPE_ALIASES
from nvalchemi_lightning.stages import TrainingStage
from nvalchemi_lightning.strict_model import StrictModel

__all__ = ["MixedPrecisionHook"]

_PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _as_dtype(precision: Any) -> torch.dtype:
    name = str(precision).lower().removeprefix("torch.")
    known = isinstance(precision, str | torch.dtype) and DTYPE_ALIASES.get(name, name) in _PRECISIONS
    if not known:
        raise ConfigurationError(
            f"MixedPrecisionHook.precision must be one of ({', '.join(_PRECISIONS)}); got {precision!r}"
            f"{nearest(name, [*_PRECISIONS, *DTYPE_ALIASES])}"
        )
    return _PRECISIONS[DTYPE_ALIASES.get(name, name)]


class _Scaler(torch.amp.GradScaler):
    """A gradient scaler that knows whether gradients were unscaled since its last update."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind
        self.unscaled = False

    def unscale_(self, optimizer: Optimizer) -> None:
        super().unscale_(optimizer)
        self.unscaled = True

    def update(self, new_scale: float | Tensor | None = None) -> None:
        super().update(new_scale)
        self.unscaled = False


class MixedPrecisionHook(StrictModel, TrainingUpdateHook):
    """Run forward pass and loss under autocast, and scale the loss where float16 needs it.

    Parameters
    ----------
    precision : torch.dtype or str
        ``torch.float32``, ``torch.bfloat16`` or ``torch.float16``, their names, or ``"fp32"``, ``"bf16"``, ``"fp16"``.
        float32 changes nothing.

    Raises
    ------
    pydantic.ValidationError
        If it is anything else.

    Notes
    -----
    Autocast spans ``BEFORE_BATCH`` to ``DO_BACKWARD`` and is left before the backward pass, also when a batch fails.
    Predictions in half precision reach the loss as float32. Weights, gradients and optimizers stay in the model's own
    precision; a float64 model is not changed at all.

    With float16 the loss is scaled, and gradients are unscaled when a step is not vetoed, before they are clipped. A
    step whose gradients are not finite is skipped: neither weights, schedulers, averaged weights nor ``step_count``
    move, and the scale shrinks. An update hook that vetoes after this one (priority above 20) must let the gradients
    be zeroed. The scale is part of checkpoints and goes on over runs.

    Examples
    --------
    >>> hook = MixedPrecisionHook(precision="bf16")
    """

    priority: ClassVar[int] = 20
    _exclusive_update_key: ClassVar[str | None] = "MixedPrecisionHook"

    # The validator is part of the annotation, so specs convert names too.
    precision: Annotated[torch.dtype, BeforeValidator(_as_dtype)]

    _autocast: torch.autocast | None = PrivateAttr(default=None)
    _scaler: _Scaler | None = PrivateAttr(default=None)
    _scaler_state: dict[str, Any] = PrivateAttr(default_factory=dict)

    @field_serializer("precision")
    def _as_name(self, precision: torch.dtype) -> str:
        return str(precision).removeprefix("torch.")

    def __call__(self, ctx: Any, stage: TrainingStage, will_skip: bool) -> tuple[bool, Tensor | None]:
        """Open and close autocast, scale the loss, unscale the gradients."""
        if stage is TrainingStage.BEFORE_BATCH:
            self._open(ctx)
        elif stage is TrainingStage.DO_BACKWARD:
            self.end_batch()
            if self._scaler is not None:
                return True, self._scaler.scale(ctx.loss)
        elif stage is TrainingStage.DO_OPTIMIZER_STEP and self._scaler is not None:
            ctx.grad_scaler = self._scaler
            for optimizer in () if will_skip else filter(has_gradients, ctx.optimizers):
                self._scaler.unscale_(optimizer)
        elif stage is TrainingStage.AFTER_OPTIMIZER_STEP:
            self.end_batch()
        return True, ctx.loss

    def _open(self, ctx: Any) -> None:
        self.end_batch()
        if self.precision is torch.float32:
            return
        kind = _device_of(ctx).type
        if self.precision is torch.float16:
            ctx.grad_scaler = self._scaler_on(kind)
        self._autocast = torch.autocast(kind, dtype=self.precision)
        self._autocast.__enter__()  # type: ignore[no-untyped-call]

    def _scaler_on(self, kind: str) -> _Scaler:
        if self._scaler is None or self._scaler.kind != kind:
            state = self.state_dict()
            self._scaler = _Scaler(kind)
            self._scaler.load_state_dict(state.get("scaler", self._scaler.state_dict()))
        return self._scaler

    def end_batch(self) -> None:
        """Leave autocast, and let the scaler forget gradients that were unscaled for a step that did not come."""
        autocast, self._autocast = self._autocast, None
        if autocast is not None:
            autocast.__exit__(None, None, None)
        # After a veto by a later hook, or a failure: without an update gradients could never be unscaled again, and
        # infinite ones would never shrink the scale.
        if self._scaler is not None and self._scaler.unscaled:
            self._scaler.update()

    def close(self) -> None:
        """Leave autocast; the scaler is kept for the next run."""
        self.end_batch()

    def inference_autocast(self, device: torch.device | str) -> AbstractContextManager[Any]:
        """Return the context for evaluation in this precision; it never touches the scaler.

        Parameters
        ----------
        device : torch.device or str
            Where the models are evaluated.
        """
        if self.precision is torch.float32:
            return nullcontext()
        return torch.autocast(torch.device(device).type, dtype=self.precision)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scaler; empty if there is none."""
        if self._scaler is not None:
            return {"scaler": self._scaler.state_dict()}
        return {"scaler": dict(self._scaler_state)} if self._scaler_state else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the state of a scaler; without float16 there is nothing to take over."""
        if self.precision is not torch.float16:
            return
        self._scaler_state = dict(state.get("scaler", {}))
        self._scaler = None


def _device_of(ctx: Any) -> torch.device:
    positions = getattr(ctx.batch, "positions", None)
    device: torch.device = ctx.workflow.devices[0] if positions is None else positions.device
    return device
