"""The hooks of a run: checked at registration, ordered by stage, fired from one table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any

from nvalchemi_lightning.context import TrainContext
from nvalchemi_lightning.errors import ConfigurationError, ConfigurationTypeError, TrainingStateError, nearest
from nvalchemi_lightning.hooks.lifecycle import each_hook
from nvalchemi_lightning.hooks.protocol import Hook
from nvalchemi_lightning.hooks.update import TrainingUpdateHook, TrainingUpdateOrchestrator, fold
from nvalchemi_lightning.stages import REPLACEMENT_STAGES, STAGES, TrainingStage

__all__ = ["HookRegistry", "Watcher", "runs_on", "stray_stop_iteration"]


Watcher = Callable[[TrainingStage, TrainContext, Any], None]
"""Takes the stage, the context, and the hook that is called next, or None for the stage itself."""


def stray_stop_iteration(where: str) -> TrainingStateError:
    """Return the error for a ``StopIteration`` that Lightning's loops would take for the end of the data.

    Parameters
    ----------
    where : str
        What raised it.
    """
    return TrainingStateError(f"StopIteration came out of {where}; catch it there, or use next(iterator, default)")


def runs_on(hook: Hook, stage: TrainingStage) -> bool:
    """Return whether ``hook`` fires at ``stage``."""
    decides = getattr(hook, "_runs_on_stage", None)
    return bool(decides(stage)) if decides is not None else hook.stage is stage


class HookRegistry:
    """The hooks of one strategy, in the order of their registration.

    Attributes
    ----------
    stage : TrainingStage or None
        The stage that fired last. Only the registry and the owner of updates write it.
    validations : int
        Validation passes so far, for the frequency of hooks at ``AFTER_VALIDATION``. The evaluation counts them.
    policy : TrainingUpdateOrchestrator or None
        All update hooks in one, at the position of the first of them.
    watcher : callable or None
        Told of every stage that fires, and of every hook that is about to be called there.
    """

    def __init__(self) -> None:
        self._hooks: list[Hook] = []
        self._table: dict[TrainingStage, tuple[Hook, ...]] = dict.fromkeys(TrainingStage, ())
        self.validations = 0
        self.stage: TrainingStage | None = None
        self.policy: TrainingUpdateOrchestrator | None = None
        self.watcher: Watcher | None = None

    def __iter__(self) -> Iterator[Hook]:
        return iter(self._hooks)

    def __len__(self) -> int:
        return len(self._hooks)

    def at(self, stage: TrainingStage) -> tuple[Hook, ...]:
        """Return the hooks of one stage in firing order."""
        return self._table[stage]

    def claimant(self, stage: TrainingStage) -> Hook | None:
        """Return the hook that owns a replacement stage, or None for the default path."""
        hooks = self._table[stage]
        return hooks[0] if hooks else None

    def fire(self, stage: TrainingStage, ctx: TrainContext) -> None:
        """Call every hook of ``stage`` whose turn it is.

        A validation forward ignores ``frequency``: a hook that prepares inputs must not miss a batch there.
        """
        self.stage = stage
        hooks, watcher = self._table[stage], self.watcher
        if watcher is not None:
            watcher(stage, ctx, None)
        if not hooks:
            return
        count = 0 if ctx.validating else self._count(stage, ctx)
        for hook in hooks:
            if count % hook.frequency == 0:
                if watcher is not None:
                    watcher(stage, ctx, hook)
                try:
                    hook(ctx, stage)
                except StopIteration as error:
                    raise stray_stop_iteration(f"{type(hook).__name__} at {stage.name}") from error

    def _count(self, stage: TrainingStage, ctx: TrainContext) -> int:
        counted_by = STAGES[stage].counted_by
        if counted_by == "step":
            return ctx.step_count
        if counted_by == "epoch":
            return ctx.epoch
        return self.validations if counted_by == "validation" else 0

    def register(
        self, hook: Hook | TrainingUpdateHook, stage: TrainingStage | None = None, *, workflow: Any = None
    ) -> list[Hook]:
        """Check a hook, tell it about the workflow and append it; update hooks are folded into one orchestrator.

        Parameters
        ----------
        hook : Hook, TrainingUpdateHook or TrainingUpdateOrchestrator
            The hook.
        stage : TrainingStage, optional
            Assigned to ``hook.stage`` once the hook has passed every check.
        workflow : object, optional
            Handed to ``hook.on_register`` where that exists.

        Returns
        -------
        list of Hook
            The hooks without this one, for `restore`.

        Raises
        ------
        ConfigurationTypeError
            If the object is no hook, has no stage, or its stage is not a `TrainingStage`.
        ConfigurationError
            If its frequency is not a positive integer, it is registered already, ``stage`` cannot be set on it,
            it claims a replacement stage that has an owner, or it is an update hook that excludes another.
        """
        self._check(hook, stage)
        if stage is not None:
            _assign_stage(hook, stage)
        for each in each_hook([hook]):
            on_register = getattr(each, "on_register", None)
            if on_register is not None:
                on_register(workflow)
        before = self._hooks
        self._hold(self._joined(hook))
        return before

    def restore(self, hooks: Iterable[Hook]) -> None:
        """Hold these hooks again, as before a registration that failed."""
        self._hold(list(hooks))

    @classmethod
    def on_trial(cls, hooks: Iterable[Hook | TrainingUpdateHook]) -> HookRegistry:
        """Return a registry as if hooks were registered one after the other; none of them is told or changed.

        Raises
        ------
        ConfigurationError, ConfigurationTypeError
            As `register` does.
        """
        trial = cls()
        for hook in hooks:
            trial._check(hook, None)
            trial._hold(trial._joined(hook))
        return trial

    def _joined(self, hook: Any) -> list[Hook]:
        """Return the hooks with one more; update hooks share the place of the first of them."""
        if not isinstance(hook, TrainingUpdateHook | TrainingUpdateOrchestrator):
            return [*self._hooks, hook]
        policy = fold(self.policy, hook)
        if self.policy is None:
            return [*self._hooks, policy]
        return [policy if known is self.policy else known for known in self._hooks]

    def _hold(self, hooks: list[Hook]) -> None:
        self._hooks = hooks
        self.policy = next((hook for hook in hooks if isinstance(hook, TrainingUpdateOrchestrator)), None)
        self._table = {stage: tuple(hook for hook in hooks if runs_on(hook, stage)) for stage in TrainingStage}

    def _check(self, hook: Any, stage: TrainingStage | None) -> None:
        if not isinstance(hook, TrainingUpdateHook | TrainingUpdateOrchestrator):
            self._check_plain(hook, stage)
            return
        if stage is not None:
            raise ConfigurationError(
                f"stage= is not supported for TrainingUpdateHook and TrainingUpdateOrchestrator; register "
                f"{type(hook).__name__} without stage={stage!r}, it is asked at the stages of the update"
            )
        for each in each_hook([hook]):
            _check_on_register(each)
        policy = fold(self.policy, hook)
        if self.policy is None:
            self._check_plain(policy, None)

    def _check_plain(self, hook: Hook, stage: TrainingStage | None) -> None:
        name = type(hook).__name__
        _check_frequency(hook)
        if any(hook is known for known in self._hooks):
            raise ConfigurationError(
                f"{name} is registered already and would fire twice; hooks must not contain duplicates"
            )
        _check_on_register(hook)
        decides = getattr(hook, "_runs_on_stage", None) is not None
        if decides and stage is not None:
            raise ConfigurationError(f"{name} decides its stages itself; register it without stage={stage!r}")
        if not decides:
            _check_stage(name, hook.stage if stage is None else stage)
        for claimed in REPLACEMENT_STAGES:
            claims = runs_on(hook, claimed) if decides or stage is None else stage is claimed
            if claims:
                self._check_claim(hook, claimed)

    def _check_claim(self, hook: Hook, stage: TrainingStage) -> None:
        owner, name = self.claimant(stage), type(hook).__name__
        if owner is not None:
            raise ConfigurationError(
                f"At most one hook may claim {stage.name}; got 2: {type(owner).__name__}, {name}. "
                f"Observe at {stage.name.replace('DO_', 'BEFORE_')} or {stage.name.replace('DO_', 'AFTER_')} instead, "
                "or subclass TrainingUpdateHook so that both are composed into one owner"
            )
        if hook.frequency != 1:
            raise ConfigurationError(
                f"{name} claims {stage.name} with frequency={hook.frequency}; a claimant acts on every batch "
                "(frequency=1), otherwise batches would pass without an update"
            )


def _check_frequency(hook: Any) -> None:
    if isinstance(hook, type):
        raise ConfigurationTypeError(f"{hook.__name__} is a class; pass an instance, {hook.__name__}(...)")
    if not isinstance(hook, Hook):
        missing = [name for name in ("frequency", "stage", "__call__") if not hasattr(hook, name)]
        raise ConfigurationTypeError(
            f"{type(hook).__name__} is no hook: it lacks {', '.join(missing)} "
            "(a hook has `frequency`, `stage` and `__call__(ctx, stage)`)"
        )
    if not isinstance(hook.frequency, int) or hook.frequency < 1:
        raise ConfigurationError(
            f"Hook frequency must be a positive integer, got {hook.frequency!r} ({type(hook).__name__}.frequency)"
        )


def _check_on_register(hook: Any) -> None:
    on_register = getattr(hook, "on_register", None)
    if on_register is not None and not callable(on_register):
        raise ConfigurationTypeError(f"{type(hook).__name__}.on_register must be callable; got {on_register!r}")


def _check_stage(name: str, stage: Enum | None) -> None:
    if stage is None:
        raise ConfigurationTypeError(
            f"{name} has no stage assigned; set `stage` or register it with stage=TrainingStage.…"
        )
    if not isinstance(stage, TrainingStage):
        hint = _stage_hint(stage) if isinstance(stage, str) else ""
        raise ConfigurationTypeError(f"{name}: training only accepts TrainingStage stages; got {stage!r}{hint}")


def _stage_hint(name: str) -> str:
    if name.upper() in TrainingStage.__members__:
        return f"; write TrainingStage.{name.upper()}"
    return nearest(name.upper(), TrainingStage.__members__)


def _assign_stage(hook: Any, stage: TrainingStage) -> None:
    try:
        hook.stage = stage
    except AttributeError as error:
        raise ConfigurationError(
            f"{type(hook).__name__}.stage is fixed to {hook.stage!r}; register it without stage={stage!r}"
        ) from error
