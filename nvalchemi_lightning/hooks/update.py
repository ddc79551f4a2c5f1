"""Policies that take part in the update of the weights, and the object that asks them in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from enum import Enum
from types import TracebackType
from typing import Any, ClassVar

from torch import Tensor

from nvalchemi_lightning.errors import ConfigurationError, ConfigurationTypeError
from nvalchemi_lightning.hooks.lifecycle import HookLifecycle
from nvalchemi_lightning.stages import TrainingStage

__all__ = ["TrainingUpdateHook", "TrainingUpdateOrchestrator", "fold"]

_STAGES = (
    TrainingStage.BEFORE_BATCH,
    TrainingStage.DO_BACKWARD,
    TrainingStage.DO_OPTIMIZER_STEP,
    TrainingStage.AFTER_OPTIMIZER_STEP,
)


class TrainingUpdateHook:
    """Base of policies that decide about zeroing and stepping, or transform the loss before it is differentiated.

    It is no `Hook`: it has neither ``stage`` nor ``frequency``. A strategy composes all its update hooks into one
    `TrainingUpdateOrchestrator`; ``a + b`` does so by hand.

    Attributes
    ----------
    priority : int
        Lower ones are asked first, equal ones in the order of registration. Accumulation has 10, mixed precision 20,
        clipping 30, skipping of spikes 40, everything else 50 (the default).

    Notes
    -----
    The optional members of a `Hook` are used here too: ``on_register``, ``prepare_strategy``,
    ``__enter__``/``__exit__`` or ``close``, ``state_dict`` and ``load_state_dict``.
    """

    priority: ClassVar[int] = 50
    # At most one hook with the same key may be registered.
    _exclusive_update_key: ClassVar[str | None] = None

    def _runs_on_stage(self, stage: TrainingStage) -> bool:
        return stage in _STAGES

    def __call__(self, ctx: Any, stage: TrainingStage, will_skip: bool) -> tuple[bool, Tensor | None]:
        """Take part in the update; a subclass replaces this.

        Parameters
        ----------
        ctx : TrainContext
            The batch and the run.
        stage : TrainingStage
            ``BEFORE_BATCH``: the first answer says whether gradients are zeroed. ``DO_BACKWARD``: the second answer
            replaces ``ctx.loss``. ``DO_OPTIMIZER_STEP``: the first answer says whether optimizers and schedulers
            step. ``AFTER_OPTIMIZER_STEP`` and ``SETUP``: the answers are ignored.
        will_skip : bool
            Whether an earlier hook has vetoed already; at ``AFTER_OPTIMIZER_STEP``, whether no step was taken.

        Returns
        -------
        bool, Tensor or None
            Whether to go on (False is a veto), and the loss.
        """
        return True, ctx.loss

    def end_batch(self) -> None:
        """Give back what must not outlive a batch; called after every batch, also after one that failed."""
        return

    def __add__(self, other: object) -> TrainingUpdateOrchestrator:
        """Compose two hooks, or a hook and an orchestrator, into a new orchestrator."""
        if not isinstance(other, TrainingUpdateHook | TrainingUpdateOrchestrator):
            return NotImplemented
        return TrainingUpdateOrchestrator(self, other)


class TrainingUpdateOrchestrator:
    """Ask update hooks in order, and keep what they decided for the owner of gradients and weights.

    Parameters
    ----------
    *hooks : TrainingUpdateHook or TrainingUpdateOrchestrator
        The hooks, sorted by priority; orchestrators are flattened.

    Attributes
    ----------
    hooks : tuple of TrainingUpdateHook
        The hooks in the order in which they are asked.
    zeroing_skipped, optimizer_step_skipped : bool
        Whether gradients were left in place, and whether no step was taken, at the newest batch.
    vetoed_by : str
        The hooks that vetoed the newest step, empty if none did.
    by_hand : bool
        Whether a user composed it, or part of it.

    Raises
    ------
    ConfigurationTypeError
        If an argument is anything else.
    ConfigurationError
        If a hook is there twice, or two hooks exclude each other.

    Notes
    -----
    The orchestrator calls neither backward nor an optimizer: the strategy does, as the hooks decided. Every hook is
    asked, also after a veto. ``frequency`` is always 1, since the hooks answer for every batch.
    """

    stage: Enum | None = None

    def __init__(self, *hooks: TrainingUpdateHook | TrainingUpdateOrchestrator) -> None:
        self.hooks = tuple(sorted(_flat(hooks), key=lambda hook: hook.priority))
        _check_exclusive(self.hooks)
        self.zeroing_skipped = False
        self.optimizer_step_skipped = False
        self.vetoed_by = ""
        self.by_hand = True
        self._lifecycle = HookLifecycle(self.hooks)

    @property
    def frequency(self) -> int:
        """How often it acts: on every batch."""
        return 1

    @frequency.setter
    def frequency(self, frequency: int) -> None:
        if frequency != 1:
            raise ConfigurationError(
                f"TrainingUpdateOrchestrator.frequency is always 1, got {frequency!r}: on other batches nobody would "
                "zero, transform or veto. Count batches inside the update hook"
            )

    def iter_hooks(self) -> Iterator[TrainingUpdateHook]:
        """Yield the hooks in the order in which they are asked."""
        return iter(self.hooks)

    def _runs_on_stage(self, stage: TrainingStage) -> bool:
        return stage is TrainingStage.SETUP or stage in _STAGES

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        """Ask every hook at ``stage``.

        Raises
        ------
        ConfigurationTypeError
            If an answer is of the wrong kind.
        """
        if stage is TrainingStage.BEFORE_BATCH:
            self.zeroing_skipped = bool(self._vetoes(ctx, stage))
        elif stage is TrainingStage.DO_BACKWARD:
            for hook in self.hooks:
                ctx.loss = _loss(hook, ctx, stage)
        elif stage is TrainingStage.DO_OPTIMIZER_STEP:
            self.vetoed_by = ", ".join(self._vetoes(ctx, stage))
            self.optimizer_step_skipped = bool(self.vetoed_by)
        else:
            skipped = stage is TrainingStage.AFTER_OPTIMIZER_STEP and self.optimizer_step_skipped
            for hook in self.hooks:
                hook(ctx, stage, skipped)

    def _vetoes(self, ctx: Any, stage: TrainingStage) -> list[str]:
        vetoes: list[str] = []
        for hook in self.hooks:
            proceed, _ = _answer(hook, ctx, stage, bool(vetoes))
            if type(proceed) is not bool:
                raise ConfigurationTypeError(
                    f"{type(hook).__name__}.__call__(stage={stage.name}) must return (bool, Tensor | None); "
                    f"proceed got {type(proceed).__name__}, {proceed!r}"
                )
            if not proceed:
                vetoes.append(type(hook).__name__)
        return vetoes

    def end_batch(self) -> None:
        """Let every hook give back what must not outlive a batch."""
        for hook in self.hooks:
            hook.end_batch()

    def __add__(self, other: object) -> TrainingUpdateOrchestrator:
        """Compose with a hook or an orchestrator into a new orchestrator."""
        if not isinstance(other, TrainingUpdateHook | TrainingUpdateOrchestrator):
            return NotImplemented
        return TrainingUpdateOrchestrator(self, other)

    def __enter__(self) -> TrainingUpdateOrchestrator:
        """Enter the hooks in order."""
        self._lifecycle.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the hooks in reverse order."""
        self._lifecycle.__exit__(kind, error, trace)

    def close(self) -> None:
        """Leave the hooks in reverse order, or close them if they were not entered."""
        if self._lifecycle.active:
            self._lifecycle.close()
            return
        for hook in reversed(self.hooks):
            close = getattr(hook, "close", None)
            if close is not None:
                close()


def fold(
    present: TrainingUpdateOrchestrator | None, hook: TrainingUpdateHook | TrainingUpdateOrchestrator
) -> TrainingUpdateOrchestrator:
    """Return the one orchestrator of a strategy after a registration; nothing that exists is changed.

    Parameters
    ----------
    present : TrainingUpdateOrchestrator or None
        The one so far.
    hook : TrainingUpdateHook or TrainingUpdateOrchestrator
        What is registered. An orchestrator that comes first is kept as the same object.

    Raises
    ------
    ConfigurationError
        If both were composed by hand, a hook is there twice, or two hooks exclude each other.
    """
    composed = isinstance(hook, TrainingUpdateOrchestrator)
    if present is None and isinstance(hook, TrainingUpdateOrchestrator):
        return hook
    if present is not None and present.by_hand and composed:
        raise ConfigurationError(
            "Only one TrainingUpdateOrchestrator is allowed; compose update hooks with `+` before registration."
        )
    folded = TrainingUpdateOrchestrator(hook) if present is None else TrainingUpdateOrchestrator(present, hook)
    folded.by_hand = composed or (present is not None and present.by_hand)
    if present is not None:
        folded.zeroing_skipped = present.zeroing_skipped
        folded.optimizer_step_skipped = present.optimizer_step_skipped
    return folded


def _flat(hooks: tuple[Any, ...]) -> Iterator[TrainingUpdateHook]:
    for i, hook in enumerate(hooks):
        if isinstance(hook, TrainingUpdateOrchestrator):
            yield from hook.hooks
        elif isinstance(hook, TrainingUpdateHook):
            yield hook
        else:
            got = f"the class {hook.__name__}" if isinstance(hook, type) else type(hook).__name__
            raise ConfigurationTypeError(
                f"argument {i} must be a TrainingUpdateHook or TrainingUpdateOrchestrator; got {got}. "
                "Pass the hooks one by one: call TrainingUpdateOrchestrator(*hooks)"
            )


def _check_exclusive(hooks: tuple[TrainingUpdateHook, ...]) -> None:
    twice = next((id_ for id_, count in Counter(map(id, hooks)).items() if count > 1), None)
    by_key: dict[str, TrainingUpdateHook] = {}
    for hook in hooks:
        if id(hook) == twice:
            raise ConfigurationError(
                f"{type(hook).__name__} is registered already and would act twice; update hooks must not contain "
                "duplicates"
            )
        key = hook._exclusive_update_key  # noqa: SLF001  private to hooks, and this is their registration
        if key is not None and by_key.setdefault(key, hook) is not hook:
            raise ConfigurationError(
                f"Only one update hook with exclusive key {key!r} may be registered; got "
                f"{type(by_key[key]).__name__} and {type(hook).__name__}. Keep one of them"
            )


def _answer(hook: TrainingUpdateHook, ctx: Any, stage: TrainingStage, will_skip: bool) -> tuple[Any, Any]:
    answer: Any = hook(ctx, stage, will_skip)
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise ConfigurationTypeError(
            f"{type(hook).__name__}.__call__(stage={stage.name}) must return (bool, Tensor | None); got {answer!r}. "
            "Return (True, ctx.loss) where nothing is decided"
        )
    return answer


def _loss(hook: TrainingUpdateHook, ctx: Any, stage: TrainingStage) -> Tensor:
    _, loss = _answer(hook, ctx, stage, False)
    if not isinstance(loss, Tensor):
        raise ConfigurationTypeError(
            f"{type(hook).__name__} did not provide a Tensor loss for DO_BACKWARD; got {loss!r}. "
            "Return (True, ctx.loss) where nothing is transformed"
        )
    if not loss.requires_grad and ctx.loss.requires_grad:
        raise ConfigurationTypeError(
            f"{type(hook).__name__} returned a loss at DO_BACKWARD that is cut off from the weights; compute it from "
            "ctx.loss, without .detach(), .item() or torch.no_grad()"
        )
    return loss
