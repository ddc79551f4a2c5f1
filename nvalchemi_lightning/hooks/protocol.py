"""What makes an object a hook."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, Protocol, runtime_checkable

from nvalchemi_lightning.stages import TrainingStage

__all__ = ["CheckpointableHook", "Hook"]


@runtime_checkable
class Hook(Protocol):
    """An object called at one stage of the training loop.

    Three members are required. Further members are used when they exist: ``_runs_on_stage(stage) -> bool`` (decides
    the stages instead of ``stage``), ``on_register(workflow)``, ``prepare_strategy(workflow)`` (at the top of every
    run), ``__enter__``/``__exit__`` or ``close()`` (around the run), ``state_dict``/``load_state_dict`` (a state that
    is the same on all ranks), and ``rank_state_dict``/``load_rank_state_dict`` (one that each rank has for itself).

    Attributes
    ----------
    frequency : int
        Fire when the count that belongs to the stage (steps, epochs or validations) is a multiple of it.
    stage : TrainingStage or None
        Where to fire; None only with ``_runs_on_stage``.
    """

    frequency: int
    stage: Enum | None

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        """Act at ``stage`` on the context."""


@runtime_checkable
class CheckpointableHook(Protocol):
    """A hook whose state belongs into checkpoints."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state: tensors, numbers, strings and containers of them."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state that `state_dict` returned."""
