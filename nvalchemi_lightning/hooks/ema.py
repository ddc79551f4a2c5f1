"""An exponential moving average of the weights of a model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field, PrivateAttr, StringConstraints
from torch import Tensor, nn

from nvalchemi_lightning.checkpoint.states import plain_name, to_live_names
from nvalchemi_lightning.errors import ConfigurationError, LabelNotFoundError, TrainingStateError, nearest
from nvalchemi_lightning.hooks.update import TrainingUpdateHook
from nvalchemi_lightning.hooks.weight_average import WeightAverage
from nvalchemi_lightning.runtime import unwrap_model
from nvalchemi_lightning.specs.base import BaseSpec
from nvalchemi_lightning.specs.fields import fields_spec
from nvalchemi_lightning.stages import TrainingStage
from nvalchemi_lightning.strict_model import StrictModel

__all__ = ["EMAHook"]

_STATE, _PARTIAL = "averaged_model_state", "averaged_model_state_load"
# Files keep the average as `torch.optim.swa_utils.AveragedModel` does, which the reference uses.
_COUNT, _PREFIX = "n_averaged", "module."
# Unknown to the reference, and therefore in files only where it is used.
_NEW = {"warmup"}


class EMAHook(StrictModel, TrainingUpdateHook):
    """Keep an exponential moving average of one model, which validation evaluates instead of the live weights.

    Parameters
    ----------
    model_key : str
        Which model. Default ``"main"``.
    decay : float
        Share of the old average that an update keeps, in [0, 1). Default 0.999.
    update_every : int
        Update after steps whose number is a multiple of this, >= 1. Default 1.
    start_step : int
        First step that may update, >= 0. Default 0.
    warmup : bool
        Let the decay grow with the number n of updates so far, ``min(decay, (1 + n) / (10 + n))``, so that the first
        weights are soon forgotten. Default False.
    use_buffers : bool
        Average floating point buffers too. Default True; with False they are copied, as other buffers always are.
    num_updates : int
        Updates so far, >= 0; kept up to date by the hook.

    Raises
    ------
    pydantic.ValidationError
        If a value is out of bounds.

    Notes
    -----
    Updates happen at ``AFTER_OPTIMIZER_STEP``, after executed steps only. The first one copies the weights of that
    step, every later one sets ``average = decay * average + (1 - decay) * live``. The live weights are never touched,
    and validation sees the live weights until the first update.

    The average is a copy of the model in evaluation mode without gradients, on the devices and in the dtypes of the
    live tensors. If the model has a method ``modify_ema_methods()``, it is called once on the copy: a place to install
    again what ``copy.deepcopy`` loses. Average and count are part of checkpoints, in the reference's form.

    Examples
    --------
    >>> ema = EMAHook(decay=0.999)
    >>> strategy = TrainingStrategy(..., hooks=[ema])
    >>> strategy.run(loader)
    >>> averaged = ema.get_averaged_model()
    """

    priority: ClassVar[int] = 50

    model_key: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)] = "main"
    decay: float = Field(default=0.999, ge=0.0, lt=1.0)
    update_every: int = Field(default=1, ge=1)
    start_step: int = Field(default=0, ge=0)
    warmup: bool = False
    use_buffers: bool = True
    num_updates: int = Field(default=0, ge=0)

    _average: WeightAverage | None = PrivateAttr(default=None)
    _pending: dict[str, Any] = PrivateAttr(default_factory=dict)
    _workflow: Any = PrivateAttr(default=None)

    # Taking part in a run ---------------------------------------------------------------------------------------

    def on_register(self, workflow: Any) -> None:
        """Remember the strategy, and refuse a model key that it does not have.

        Raises
        ------
        LabelNotFoundError
            If there is no such model. It is a `KeyError`.
        """
        if workflow is not None:
            self._source(workflow.models)
        self._workflow = workflow

    def __call__(self, ctx: Any, stage: TrainingStage, will_skip: bool) -> tuple[bool, Tensor | None]:
        """Build the average at ``SETUP`` and update it after a step.

        Raises
        ------
        LabelNotFoundError
            If there is no such model. It is a `KeyError`.
        TrainingStateError
            If the hook holds the average of another model.
        """
        if stage is TrainingStage.AFTER_OPTIMIZER_STEP:
            completed = ctx.step_count + 1
            if not will_skip and completed >= self.start_step and completed % self.update_every == 0:
                self._update(ctx)
        elif stage is TrainingStage.SETUP:
            self._set_up(ctx.models, ctx.workflow)
        return True, ctx.loss

    def get_averaged_model(self) -> nn.Module:
        """Return the averaged model, in evaluation mode.

        Raises
        ------
        TrainingStateError
            If neither a run nor a checkpoint has built it yet.
        """
        if self._average is None:
            raise TrainingStateError(
                f"the average of {self.model_key!r} does not exist yet; it is built when a run begins (at SETUP) or a "
                "checkpoint is loaded"
            )
        return self._average.module

    # Checkpoints ------------------------------------------------------------------------------------------------

    def to_spec(self) -> BaseSpec:
        """Return the recipe, without the number of updates."""
        return fields_spec(self, without=("num_updates",))

    def state_dict(self) -> dict[str, Any]:
        """Return the configuration, the number of updates and, if there is one, the average."""
        state = self.model_dump(exclude=_NEW if not self.warmup else None)
        if self._average is not None:
            live = self._average.module.state_dict()
            tensors = {f"{_PREFIX}{plain_name(name)}": value for name, value in live.items()}
            state[_STATE] = {_COUNT: torch.tensor(self._average.count), **tensors}
        else:
            state.update(self._pending)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state; without a strategy the average follows when it is built.

        Raises
        ------
        ConfigurationError
            If the state was made with another configuration; nothing is changed.
        """
        own = self.model_dump(exclude={"num_updates"})
        saved = {**dict.fromkeys(_NEW, False), **state} if "decay" in state else state
        conflicts = [
            f"{key}={saved[key]!r} vs constructor {key}={value!r}"
            for key, value in own.items()
            if key in saved and saved[key] != value
        ]
        if conflicts:
            raise ConfigurationError(f"EMAHook checkpoint conflict: {'; '.join(conflicts)}; use the saved values")
        self.num_updates = int(state.get("num_updates", 0))
        self._average = None
        self._pending = {key: state[key] for key in (_STATE, _PARTIAL) if key in state}
        if self._pending and self._workflow is not None:
            self._set_up(self._workflow.models, self._workflow)

    def _load_pending(self, average: WeightAverage) -> None:
        if _STATE not in self._pending:
            return
        tensors = {name.removeprefix(_PREFIX): value for name, value in self._pending[_STATE].items()}
        count = int(tensors.pop(_COUNT, self.num_updates))
        to_live_names(tensors, average.module)
        if self._pending.get(_PARTIAL) == "partial":
            tensors = {**average.module.state_dict(), **tensors}
        average.module.load_state_dict(tensors)
        average.count, self._pending = count, {}

    # The average ------------------------------------------------------------------------------------------------

    def _source(self, models: Mapping[str, nn.Module]) -> nn.Module:
        if self.model_key not in models:
            raise LabelNotFoundError(
                f"EMAHook(model_key={self.model_key!r}): there is no such model; available keys: "
                f"{sorted(models)}{nearest(self.model_key, models)}"
            )
        return unwrap_model(models[self.model_key])

    def _build_averaged_model(self, source: nn.Module) -> nn.Module:
        """Return the copy that is to hold the average; a subclass may build it in another way."""
        return copy.deepcopy(source)

    def _set_up(self, models: Mapping[str, nn.Module], workflow: Any) -> WeightAverage:
        """Return the average, built if there is none, on the devices of its model, and shown to validation."""
        source = self._source(models)
        if self._average is None:
            self._average = self._built(source)
        elif source is not self._average.source:
            raise TrainingStateError(
                f"this EMAHook holds the average of another {type(self._average.source).__name__} than "
                f"models[{self.model_key!r}]; make a new EMAHook, and load the state of this one into it to go on"
            )
        self._average.align()
        self._average.published = False
        if self._average.count:
            self._publish(workflow, self._average)
        return self._average

    def _built(self, source: nn.Module) -> WeightAverage:
        module = self._build_averaged_model(source).requires_grad_(False).eval()
        modify = getattr(module, "modify_ema_methods", None)
        if callable(modify):
            modify()
        average = WeightAverage(module, source, use_buffers=self.use_buffers)
        self._load_pending(average)
        return average

    def _publish(self, workflow: Any, average: WeightAverage) -> None:
        publish = getattr(workflow, "set_inference_model", None)
        if publish is not None:
            publish(average.module, model_key=self.model_key)
            # The slot lives on the workflow's first device; the average has to stay with its model.
            average.align()
        average.published = True

    def _update(self, ctx: Any) -> None:
        average = self._average or self._set_up(ctx.models, ctx.workflow)
        average.update(self._decay_after(average.count))
        self.num_updates += 1
        if not average.published:
            self._publish(ctx.workflow, average)

    def _decay_after(self, updates: int) -> float:
        return min(self.decay, (1 + updates) / (10 + updates)) if self.warmup else self.decay
