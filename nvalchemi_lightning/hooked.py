"""The part of a recipe that hooks and the run say to each other through."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import cached_property
from typing import Any

from pydantic import Field, PrivateAttr, field_validator, model_validator
from torch import Tensor

from nvalchemi_lightning.checkpoint.provenance import RunProvenance
from nvalchemi_lightning.counted import CountedRecipe
from nvalchemi_lightning.errors import ConfigurationError, ConfigurationTypeError
from nvalchemi_lightning.hooks.gradient_accumulation import GradientAccumulationHook
from nvalchemi_lightning.hooks.lifecycle import HookLifecycle, each_hook
from nvalchemi_lightning.hooks.registry import HookRegistry
from nvalchemi_lightning.hooks.update import TrainingUpdateOrchestrator
from nvalchemi_lightning.requests import RunRequests
from nvalchemi_lightning.resume import ResumePoint
from nvalchemi_lightning.stages import TrainingStage

__all__ = ["HookedRecipe"]


class HookedRecipe(CountedRecipe):
    """Hooks of a training run, and what they may ask of it.

    Attributes
    ----------
    hooks : iterable
        Hooks in firing order. All update hooks are composed into one `TrainingUpdateOrchestrator` at the position of
        the first; Lightning callbacks are handed to the Trainer.
    """

    hooks: list[Any] = Field(default_factory=list)

    _callbacks: list[Any] = PrivateAttr(default_factory=list)
    _running: Any = PrivateAttr(default=None)
    _on_new_hook: Callable[[], None] | None = PrivateAttr(default=None)

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        # Only now, when nothing can be refused any more, are hooks told about the workflow.
        hooks, self.hooks = self.hooks, []
        for hook in hooks:
            self.register_hook(hook)

    @field_validator("hooks", mode="before")
    @classmethod
    def _as_list(cls, hooks: Any) -> list[Any]:
        if callable(hooks):  # one of pydantic can be iterated, over its fields
            raise ConfigurationError(f"hooks must be a list of hooks; got {type(hooks).__name__}, write hooks=[...]")
        if isinstance(hooks, (str, bytes)) or not isinstance(hooks, Iterable):
            raise ConfigurationError(f"hooks must be a list of hooks; got {hooks!r}")
        return list(hooks)

    @model_validator(mode="after")
    def _check_hooks(self) -> HookedRecipe:
        HookRegistry.on_trial(hook for hook in self.hooks if not _is_lightning_callback(hook))
        self.check_accumulation()
        return self

    @property
    def accumulation(self) -> GradientAccumulationHook | None:
        """The hook that accumulates gradients over windows of batches, if there is one."""
        return next((hook for hook in each_hook(self.hooks) if isinstance(hook, GradientAccumulationHook)), None)

    def check_accumulation(self) -> None:
        """Refuse two answers to how many steps an epoch has.

        Raises
        ------
        ConfigurationError
            If ``num_epochs`` is converted by an ``epoch_step_modifier`` although a hook declares its windows.
        """
        hook, modifier = self.accumulation, self.epoch_step_modifier
        if hook is not None and self.num_epochs is not None and modifier != 1.0:
            raise ConfigurationError(
                f"GradientAccumulationHook({hook.steps}) makes num_epochs={self.num_epochs} passes over the data, but "
                f"epoch_step_modifier={modifier} would make {self.num_epochs} * len(dataloader) * {modifier} steps of "
                "it; leave epoch_step_modifier out, or set num_steps instead of num_epochs"
            )

    @property
    def running(self) -> Any:
        """The module that runs the recipe now, or None."""
        return self._running

    @running.setter
    def running(self, module: Any) -> None:
        self._running = module

    @cached_property
    def registry(self) -> HookRegistry:
        """The registered hooks by stage."""
        return HookRegistry()

    @cached_property
    def scope(self) -> HookLifecycle:
        """The context that enters and leaves the hooks."""
        return HookLifecycle(self.registry)

    @cached_property
    def requests(self) -> RunRequests:
        """What hooks ask of the run."""
        return RunRequests()

    @cached_property
    def resume(self) -> ResumePoint:
        """What a checkpoint holds besides the recipe, weights, hooks and counters."""
        return ResumePoint(self.registry)

    @cached_property
    def provenance(self) -> RunProvenance:
        """What a checkpoint says of where it comes from."""
        return RunProvenance()

    @property
    def lightning_callbacks(self) -> list[Any]:
        """The Lightning callbacks among the hooks, for the Trainer."""
        return list(self._callbacks)

    def register_hook(self, hook: Any, stage: TrainingStage | None = None) -> None:
        """Add a hook, or a Lightning callback, at the end of the order.

        Parameters
        ----------
        hook : Hook, TrainingUpdateHook, TrainingUpdateOrchestrator or lightning.pytorch.Callback
            An update hook joins the others in one orchestrator; a callback is handed to the Trainer of the next run.
        stage : TrainingStage, optional
            Overrides ``hook.stage``.

        Raises
        ------
        ConfigurationError, ConfigurationTypeError
            See `HookRegistry.register`.
        """
        if _is_lightning_callback(hook):
            self._register_callback(hook, stage)
            self.hooks.append(hook)
        else:
            self._register_hook(hook, stage)
        if self._on_new_hook is not None:
            self._on_new_hook()

    def _register_hook(self, hook: Any, stage: TrainingStage | None) -> None:
        before = self.registry.register(hook, stage, workflow=self)
        with ExitStack() as undo:
            undo.callback(self.registry.restore, before)
            self.scope.add(hook)
            undo.pop_all()
        policy = self.registry.policy
        self.hooks[:] = [policy if isinstance(known, TrainingUpdateOrchestrator) else known for known in self.hooks]
        added = hook if any(hook is known for known in self.registry) else policy
        if not any(added is known for known in self.hooks):
            self.hooks.append(added)

    def _register_callback(self, callback: Any, stage: TrainingStage | None) -> None:
        if isinstance(callback, type):
            raise ConfigurationTypeError(f"{callback.__name__} is a class; pass an instance, {callback.__name__}(...)")
        name = type(callback).__name__
        if stage is not None:
            raise ConfigurationError(f"{name} is a Lightning callback; it has methods instead of a stage ({stage})")
        if any(callback is known for known in self._callbacks):
            raise ConfigurationError(f"{name} is registered already; hooks must not contain duplicates")
        self._callbacks.append(callback)

    def tell_of_new_hooks(self, listener: Callable[[], None] | None) -> None:
        """Call ``listener`` after every registration, as long as a run is open; None ends that."""
        self._on_new_hook = listener

    def prepare_hooks(self) -> None:
        """Let hooks look at the strategy before models are moved and ``SETUP`` fires."""
        for hook in each_hook(self.registry):
            prepare = getattr(hook, "prepare_strategy", None)
            if prepare is not None:
                prepare(self)

    def stop(self, reason: str) -> None:
        """End the run cleanly after the current batch; with several ranks, after the next one, on all of them.

        Parameters
        ----------
        reason : str
            Why, for whoever reads the log.
        """
        self.requests.stop_reason = reason

    @property
    def stop_reason(self) -> str | None:
        """Why the newest run was asked to stop, or None if it was not."""
        return self.requests.stop_reason

    def defer(self, action: Callable[[], None]) -> None:
        """Do something once the present point of the loop is over.

        That is after the validation that is due there and the schedulers that listen to it: what a checkpoint of
        this point must contain.

        Parameters
        ----------
        action : callable
            Called without arguments, once.
        """
        self.requests.deferred.append(action)

    def log(self, name: str, value: Tensor | float) -> None:
        """Hand a scalar to the loggers at the next logging cadence.

        Parameters
        ----------
        name : str
            Its tag, for example ``"gradient/norm"``.
        value : Tensor or float
            The newest value; a tensor stays on its device until the cadence, so this never waits for it.
        """
        self.requests.scalars[name] = value.detach() if isinstance(value, Tensor) else value


def _is_lightning_callback(hook: Any) -> bool:
    """Recognize a Lightning callback without importing Lightning."""
    return hasattr(hook, "on_train_batch_start") and hasattr(hook, "state_key")
