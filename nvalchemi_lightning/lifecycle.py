"""The order of a run as it is resolved: who acts at which stage, and how often."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from nvalchemi_lightning.hooks.gradient_accumulation import GradientAccumulationHook
from nvalchemi_lightning.hooks.lifecycle import each_hook
from nvalchemi_lightning.hooks.update import TrainingUpdateHook
from nvalchemi_lightning.stages import REPLACEMENT_STAGES, STAGES, Count, TrainingStage

if TYPE_CHECKING:
    from nvalchemi_lightning.hooks.registry import HookRegistry

__all__ = ["HookEntry", "Lifecycle", "StageEntry"]

_FORWARD = (TrainingStage.BEFORE_FORWARD, TrainingStage.AFTER_FORWARD)


@dataclass(frozen=True)
class HookEntry:
    """A hook at a stage.

    Attributes
    ----------
    name : str
        Its class.
    priority : int or None
        Of an update hook, by which it is ordered; others are called in the order of registration.
    often : str
        How often it is called.
    """

    name: str
    priority: int | None
    often: str

    def __str__(self) -> str:
        """Return name, priority and, unless it is called every time, how often."""
        priority = "" if self.priority is None else f"[{self.priority}]"
        return f"{self.name}{priority}" + (f" ({self.often})" if self.often != "every time" else "")


@dataclass(frozen=True)
class StageEntry:
    """A stage of the resolved order.

    Attributes
    ----------
    stage : str
        Its name.
    often : str
        How often it fires under the present accumulation.
    owner : str or None
        Who acts at a replacement stage: ``"strategy"`` or the hook that claims it. None at other stages.
    hooks : tuple of HookEntry
        The hooks in the order in which they are called.
    """

    stage: str
    often: str
    owner: str | None
    hooks: tuple[HookEntry, ...]


@dataclass(frozen=True)
class Lifecycle:
    """The resolved order of a run; prints as a table.

    Attributes
    ----------
    stages : tuple of StageEntry
        All eighteen, in the order of the loop.
    batches_per_step : int
        Batches of an accumulation window; the last one of an epoch may have fewer.
    validation : str
        When the run validates.
    """

    stages: tuple[StageEntry, ...]
    batches_per_step: int
    validation: str

    @classmethod
    def of(cls, registry: HookRegistry, validation: Any = None) -> Lifecycle:
        """Resolve the order of the hooks of a registry.

        Parameters
        ----------
        registry : HookRegistry
            The hooks.
        validation : ValidationConfig, optional
            When the run validates.
        """
        window = next((h.steps for h in each_hook(registry) if isinstance(h, GradientAccumulationHook)), 1)
        entries = tuple(
            StageEntry(stage.name, _often(stage, window), _owner(registry, stage), tuple(_hooks(registry, stage)))
            for stage in TrainingStage
        )
        return cls(entries, window, _cadence(validation))

    def data(self) -> dict[str, Any]:
        """Return everything as JSON data."""
        return asdict(self)

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Return stage, how often, owner and hooks of every stage, as text."""
        return [(e.stage, e.often, e.owner or "", ", ".join(map(str, e.hooks))) for e in self.stages]

    def __str__(self) -> str:
        """Return the table."""
        rows = [("stage", "fires", "owner", "hooks, in order"), *self.rows()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, f"validation: {self.validation}"])


def _often(stage: TrainingStage, window: int) -> str:
    counted = STAGES[stage].counted_by
    if counted != "step":
        return f"once per {counted}"
    often = "once per step" if window == 1 else f"{window} times per step"
    return f"{often}, and per validation batch" if stage in _FORWARD else often


def _owner(registry: HookRegistry, stage: TrainingStage) -> str | None:
    if stage not in REPLACEMENT_STAGES:
        return None
    claimant = registry.claimant(stage)
    return "strategy" if claimant is None or claimant is registry.policy else type(claimant).__name__


def _hooks(registry: HookRegistry, stage: TrainingStage) -> Iterator[HookEntry]:
    counted = STAGES[stage].counted_by
    for hook in registry.at(stage):
        for each in each_hook([hook]):
            if isinstance(each, TrainingUpdateHook):
                yield HookEntry(type(each).__name__, each.priority, "every time")
            else:
                yield HookEntry(type(each).__name__, None, _turns(each.frequency, counted))


def _turns(frequency: int, counted: Count) -> str:
    return "every time" if frequency == 1 or counted == "run" else f"every {frequency} {counted}s"


def _cadence(validation: Any) -> str:
    if validation is None:
        return "none"
    for unit in ("epoch", "step"):
        every = getattr(validation, f"every_n_{unit}s")
        if every is not None:
            return f"every {f'{every} {unit}s' if every > 1 else unit}, and at the end"
    return "at the end"
