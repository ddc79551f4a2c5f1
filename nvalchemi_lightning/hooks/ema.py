"""An exponential moving average of the weights of a model."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field, PrivateAttr, StringConstraints
from torch import Tensor, nn

from nvalchemi_lightning.errors import ConfigurationError, LabelNotFoundError, TrainingStateError, nearest
from nvalchemi_lightning.hooks.update import TrainingUpdateHook
from nvalchemi_lightning.runtime import unwrap_model
from nvalchemi_lightning.stages import TrainingStage
from nvalchemi_lightning.strict_model import StrictModel

__all__ = ["EMAHook"]

_STATE, _PARTIAL = "averaged_model_state", "averaged_model_state_load"
# Files keep the average as `torch.optim.swa_utils.AveragedModel` does, which the reference uses.
_COUNT, _PREFIX = "n_averaged", "module."


_Slot = tuple[nn.Module, nn.Module, str]
"""A module of the average, the live one, and the name of a buffer of both."""


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
    use_buffers: bool = True
    num_updates: int = Field(default=0, ge=0)

    _averaged: nn.Module | None = PrivateAttr(default=None)
    _average_of: nn.Module | None = PrivateAttr(default=None)
    _averages: int = PrivateAttr(default=0)
    _pending: dict[str, Any] = PrivateAttr(default_factory=dict)
    _workflow: Any = PrivateAttr(default=None)
    _published: bool = PrivateAttr(default=False)
    _groups: list[tuple[list[Tensor], list[Tensor]]] = PrivateAttr(default_factory=list)
    _mixed: list[_Slot] = PrivateAttr(default_factory=list)
    _copied: list[_Slot] = PrivateAttr(default_factory=list)

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
        if stage is TrainingStage.SETUP:
            self._set_up(ctx.models, ctx.workflow)
        elif stage is TrainingStage.AFTER_OPTIMIZER_STEP and not will_skip:
            completed = ctx.step_count + 1
            if completed >= self.start_step and completed % self.update_every == 0:
                self._update(ctx)
        return True, ctx.loss

    def get_averaged_model(self) -> nn.Module:
        """Return the averaged model, in evaluation mode.

        Raises
        ------
        TrainingStateError
            If neither a run nor a checkpoint has built it yet.
        """
        if self._averaged is None:
            raise TrainingStateError(
                f"the average of {self.model_key!r} does not exist yet; it is built when a run begins (at SETUP) or a "
                "checkpoint is loaded"
            )
        return self._averaged

    # Checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the configuration, the number of updates and, if there is one, the average."""
        state = self.model_dump()
        if self._averaged is not None:
            tensors = {f"{_PREFIX}{name}": value for name, value in self._averaged.state_dict().items()}
            state[_STATE] = {_COUNT: torch.tensor(self._averages), **tensors}
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
        conflicts = [
            f"{key}={state[key]!r} vs constructor {key}={value!r}"
            for key, value in own.items()
            if key in state and state[key] != value
        ]
        if conflicts:
            raise ConfigurationError(f"EMAHook checkpoint conflict: {'; '.join(conflicts)}; use the saved values")
        self.num_updates = int(state.get("num_updates", 0))
        self._averaged, self._averages = None, 0
        self._pending = {key: state[key] for key in (_STATE, _PARTIAL) if key in state}
        if self._pending and self._workflow is not None:
            self._set_up(self._workflow.models, self._workflow)

    def _load_pending(self, averaged: nn.Module) -> None:
        if _STATE not in self._pending:
            return
        tensors = {name.removeprefix(_PREFIX): value for name, value in self._pending[_STATE].items()}
        count = int(tensors.pop(_COUNT, self.num_updates))
        if self._pending.get(_PARTIAL) == "partial":
            tensors = {**averaged.state_dict(), **tensors}
        averaged.load_state_dict(tensors)
        self._averages, self._pending = count, {}

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

    def _set_up(self, models: Mapping[str, nn.Module], workflow: Any) -> nn.Module:
        """Return the average, built if there is none, on the devices of its model, and shown to validation."""
        source = self._source(models)
        if self._averaged is None:
            self._average_of = source
            averaged = self._build_averaged_model(source).requires_grad_(False).eval()
            modify = getattr(averaged, "modify_ema_methods", None)
            if callable(modify):
                modify()
            self._load_pending(averaged)
            self._averaged = averaged
            self._sort_buffers(source, averaged)
        elif source is not self._average_of:
            raise TrainingStateError(
                f"this EMAHook holds the average of another {type(self._average_of).__name__} than "
                f"models[{self.model_key!r}]; make a new EMAHook, and load the state of this one into it to go on"
            )
        self._align(source, self._averaged)
        self._published = False
        if self._averages:
            self._publish(workflow, source, self._averaged)
        return self._averaged

    def _sort_buffers(self, source: nn.Module, averaged: nn.Module) -> None:
        """Note where buffers are kept: a model may put a new tensor there at any time."""
        modules = dict(averaged.named_modules())
        self._mixed, self._copied = [], []
        for prefix, module in source.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                slots = self._mixed if self.use_buffers and _may_be_averaged(buffer) else self._copied
                slots.append((modules[prefix], module, name))

    def _align(self, source: nn.Module, averaged: nn.Module) -> None:
        """Bring every averaged tensor to the device and floating dtype of the live one, and pair the parameters."""
        pairs = list(zip(averaged.parameters(), source.parameters(), strict=True))
        for average, live in chain(pairs, zip(averaged.buffers(), source.buffers(), strict=True)):
            if average.device != live.device or average.dtype != live.dtype:
                average.data = average.data.to(live.device, live.dtype)
        self._groups = _grouped(pairs)

    def _publish(self, workflow: Any, source: nn.Module, averaged: nn.Module) -> None:
        publish = getattr(workflow, "set_inference_model", None)
        if publish is not None:
            publish(averaged, model_key=self.model_key)
            # The slot lives on the workflow's first device; the average has to stay with its model.
            self._align(source, averaged)
        self._published = True

    @torch.no_grad()
    def _update(self, ctx: Any) -> None:
        source = self._source(ctx.models)
        averaged = self._averaged if self._averaged is not None else self._set_up(ctx.models, ctx.workflow)
        first, share = self._averages == 0, 1.0 - self.decay
        for average, live in chain(self._groups, _grouped(_tensors(self._mixed))):
            if first:
                torch._foreach_copy_(average, live)
            else:
                torch._foreach_lerp_(average, live, share)
        for average_buffer, live_buffer in _tensors(self._copied):
            average_buffer.copy_(live_buffer)
        self._averages += 1
        self.num_updates += 1
        if not self._published:
            self._publish(ctx.workflow, source, averaged)


def _may_be_averaged(buffer: Tensor) -> bool:
    # A mask of infinities would become NaN: inf - inf.
    return buffer.is_floating_point() and bool(buffer.isfinite().all())


def _tensors(slots: Iterable[_Slot]) -> Iterator[tuple[Tensor, Tensor]]:
    for averaged, live, name in slots:
        yield getattr(averaged, name), getattr(live, name)


def _grouped(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Return lists of averaged and live tensors, one pair of lists per device and dtype: foreach kernels need that."""
    groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for average, live in pairs:
        averages, lives = groups.setdefault((live.device, live.dtype), ([], []))
        averages.append(average)
        lives.append(live)
    return list(groups.values())
