"""The eighteen points of a training run at which hooks fire, and one table that says all about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Literal

__all__ = ["REPLACEMENT_STAGES", "STAGES", "Count", "StageInfo", "TrainingStage"]

Count = Literal["run", "epoch", "step", "validation"]


class TrainingStage(Enum):
    """A point of the training loop at which hooks fire.

    The loop, as pseudo-code::

        SETUP                               models placed, no optimizers yet
        until the target is reached:
            for batch in loader:
                BEFORE_TRAINING             first batch of the run
                BEFORE_EPOCH                first batch of the epoch
                BEFORE_BATCH
                    gradients are zeroed
                BEFORE_FORWARD
                    predictions = training_fn(model, batch)
                AFTER_FORWARD
                BEFORE_LOSS
                    losses = loss_fn(predictions, targets)
                AFTER_LOSS
                BEFORE_BACKWARD
                DO_BACKWARD                 loss.backward(), once
                AFTER_BACKWARD
                BEFORE_OPTIMIZER_STEP
                DO_OPTIMIZER_STEP           optimizers step, then their schedulers
                AFTER_OPTIMIZER_STEP
                    counters advance
                AFTER_BATCH
                    validation that is due by steps: AFTER_VALIDATION, metric schedulers
            AFTER_EPOCH                     loader exhausted, epoch counted
                validation that is due by epochs: AFTER_VALIDATION, metric schedulers
        AFTER_TRAINING
            final validation, unless these weights were just validated: AFTER_VALIDATION

    ``BEFORE_FORWARD`` and ``AFTER_FORWARD`` also surround the forward pass of every validation batch.
    """

    SETUP = 1
    BEFORE_TRAINING = 2
    BEFORE_EPOCH = 3
    BEFORE_BATCH = 4
    BEFORE_FORWARD = 5
    AFTER_FORWARD = 6
    BEFORE_LOSS = 7
    AFTER_LOSS = 8
    BEFORE_BACKWARD = 9
    DO_BACKWARD = 10
    AFTER_BACKWARD = 11
    BEFORE_OPTIMIZER_STEP = 12
    DO_OPTIMIZER_STEP = 13
    AFTER_OPTIMIZER_STEP = 14
    AFTER_BATCH = 15
    AFTER_EPOCH = 16
    AFTER_TRAINING = 17
    AFTER_VALIDATION = 18


@dataclass(frozen=True)
class StageInfo:
    """What there is to know about one stage.

    Attributes
    ----------
    stage : TrainingStage
        The stage.
    fires : str
        When it fires.
    dispatched_by : str
        The Lightning method of its callback, or the place in the module that calls it.
    counted_by : {"run", "epoch", "step", "validation"}
        The count against which a hook's ``frequency`` is checked; ``"run"`` ignores the frequency.
    available : str
        What the context holds there for the first time.
    """

    stage: TrainingStage
    fires: str
    dispatched_by: str
    counted_by: Count
    available: str


def _table() -> dict[TrainingStage, StageInfo]:
    step, batch_start = "training_step", "on_train_batch_start"
    rows: tuple[tuple[str, str, str, Count, str], ...] = (
        ("SETUP", "once per run, before optimizers are built", "setup", "run", "models, counters"),
        ("BEFORE_TRAINING", "once per run, with the first batch", batch_start, "run", "batch, optimizers"),
        ("BEFORE_EPOCH", "with the first batch of an epoch", batch_start, "epoch", "batch"),
        ("BEFORE_BATCH", "every batch, before gradients are zeroed", step, "step", "batch"),
        ("BEFORE_FORWARD", "every training and validation batch", step, "step", "batch"),
        ("AFTER_FORWARD", "every training and validation batch", step, "step", "predictions"),
        ("BEFORE_LOSS", "every batch", step, "step", "predictions"),
        ("AFTER_LOSS", "every batch", step, "step", "loss, losses (on the graph)"),
        ("BEFORE_BACKWARD", "every batch", step, "step", "loss, losses (on the graph)"),
        ("DO_BACKWARD", "every batch; belongs to one owner", step, "step", "loss, losses (on the graph)"),
        ("AFTER_BACKWARD", "every batch", step, "step", "gradients, losses (detached)"),
        ("BEFORE_OPTIMIZER_STEP", "every batch", step, "step", "gradients"),
        ("DO_OPTIMIZER_STEP", "every batch; belongs to one owner", step, "step", "gradients"),
        ("AFTER_OPTIMIZER_STEP", "every batch, before counters advance", step, "step", "updated weights"),
        ("AFTER_BATCH", "every batch, after counters advanced", "on_train_batch_end", "step", "everything"),
        ("AFTER_EPOCH", "when the loader is exhausted", "on_train_epoch_end", "epoch", "last batch and loss"),
        ("AFTER_TRAINING", "once per run, before the final validation", "on_train_end", "run", "last batch"),
        ("AFTER_VALIDATION", "after every validation pass", "on_validation_end", "validation", "validation"),
    )
    return {TrainingStage[name]: StageInfo(TrainingStage[name], *rest) for name, *rest in rows}  # type: ignore[arg-type]


STAGES: Mapping[TrainingStage, StageInfo] = MappingProxyType(_table())
"""Every stage in loop order with its `StageInfo`; documentation and tests are made from it."""

REPLACEMENT_STAGES = (TrainingStage.DO_BACKWARD, TrainingStage.DO_OPTIMIZER_STEP)
"""The stages that at most one hook may claim; the claimant acts instead of the default."""
