"""Write down what a run really did."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from enum import Enum
from itertools import groupby
from types import TracebackType
from typing import Any, NamedTuple

from nvalchemi_lightning.errors import ConfigurationError
from nvalchemi_lightning.hooks.lifecycle import each_hook
from nvalchemi_lightning.stages import REPLACEMENT_STAGES, TrainingStage

__all__ = ["TraceEvent", "TraceHook"]


class TraceEvent(NamedTuple):
    """A stage that fired, or a hook that was called there.

    Attributes
    ----------
    stage : str
        Name of the stage.
    hook : str
        Class of the hook; empty for the stage itself, which comes before its hooks.
    step_count, batch_count, epoch, epoch_step_count : int
        The counters at that moment.
    validating : bool
        Whether the stage belongs to a validation batch.
    """

    stage: str
    hook: str
    step_count: int
    batch_count: int
    epoch: int
    epoch_step_count: int
    validating: bool

    @property
    def counters(self) -> tuple[int, int, int, int]:
        """Steps, batches, epochs, batches of the epoch."""
        return self.step_count, self.batch_count, self.epoch, self.epoch_step_count


class TraceHook:
    """Note every stage that fires and every hook that is called, with the counters at that moment.

    Nothing is derived from what is configured: the trace comes from the place that calls the hooks. A hook is noted
    before it is called, so after an exception the last event says who raised it. Hooks that are composed into one
    orchestrator are noted one by one.

    Parameters
    ----------
    keep : int
        So many newest events are kept, >= 1; default 10000. A step without further hooks makes about 12.

    Attributes
    ----------
    events : deque of TraceEvent
        The events of all runs since `clear`, oldest first.

    Raises
    ------
    ConfigurationError
        If ``keep`` is not positive, or the strategy has another `TraceHook`.

    Examples
    --------
    >>> trace = TraceHook()
    >>> TrainingStrategy(..., hooks=[trace]).run(loader)
    >>> print(trace)
    """

    stage: Enum | None = None
    frequency = 1

    def __init__(self, keep: int = 10_000) -> None:
        if not isinstance(keep, int) or keep < 1:
            raise ConfigurationError(f"TraceHook(keep={keep!r}) keeps nothing; give a positive number of events")
        self.events: deque[TraceEvent] = deque(maxlen=keep)
        self._registry: Any = None

    def _runs_on_stage(self, stage: TrainingStage) -> bool:
        # Being registered there makes the stages around batches fire; what is noted comes from the registry.
        return stage not in REPLACEMENT_STAGES

    def on_register(self, workflow: Any) -> None:
        """Remember whose hooks are watched."""
        if any(isinstance(hook, TraceHook) for hook in workflow.registry):
            raise ConfigurationError("the strategy has a TraceHook already; one trace holds everything")
        self._registry = workflow.registry

    def __enter__(self) -> TraceHook:
        """Begin to watch."""
        self._registry.watcher = self._note
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop watching."""
        self._registry.watcher = None

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        """Do nothing: the stage was noted when it fired."""

    def clear(self) -> None:
        """Forget all events."""
        self.events.clear()

    def lines(self) -> list[str]:
        """Return the trace in a form that is easy to read and to compare.

        Returns
        -------
        list of str
            A line for every value of the counters: ``"step batch epoch epoch_step: STAGE(Hook, Hook) STAGE"``.
            The stages of validation batches are in brackets.
        """
        return [
            f"{' '.join(map(str, counters))}: {' '.join(_shown(list(events)))}"
            for counters, events in groupby(self.events, key=lambda event: event.counters)
        ]

    def __str__(self) -> str:
        """Return `lines` as text."""
        return "\n".join(self.lines())

    def _note(self, stage: TrainingStage, ctx: Any, hook: Any) -> None:
        if hook is self:
            return
        names = [""] if hook is None else [type(each).__name__ for each in each_hook([hook])]
        counters = ctx.step_count, ctx.batch_count, ctx.epoch, ctx.epoch_step_count
        self.events.extend(TraceEvent(stage.name, name, *counters, ctx.validating) for name in names)


def _shown(events: list[TraceEvent]) -> Iterator[str]:
    """Yield every stage with the hooks that follow it."""
    starts = [i for i, event in enumerate(events) if not event.hook or i == 0]
    for start, stop in zip(starts, [*starts[1:], len(events)], strict=True):
        first = events[start]
        name = f"[{first.stage}]" if first.validating else first.stage
        hooks = [event.hook for event in events[start:stop] if event.hook]
        yield f"{name}({', '.join(hooks)})" if hooks else name
