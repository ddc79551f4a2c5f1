"""A model of one weight, and hooks and runs to watch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nvalchemi_lightning.data import AtomicData, Batch
from nvalchemi_lightning.losses import EnergyMSELoss
from nvalchemi_lightning.optim import OptimizerConfig
from nvalchemi_lightning.stages import TrainingStage
from nvalchemi_lightning.strategy import TrainingStrategy
from nvalchemi_lightning.validation import ValidationConfig


class One(nn.Module):
    """The energy is one weight per atom."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def forward(self, batch: Any) -> dict[str, Tensor]:
        return {"energy": self.w * batch.num_nodes_per_graph[:, None]}


class BoomError(Exception):
    """Raised by the hooks of these tests."""


class Logger:
    """A hook that does nothing."""

    def __init__(self, stage: TrainingStage = TrainingStage.AFTER_BATCH, frequency: int = 1) -> None:
        self.stage = stage
        self.frequency = frequency

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        """Do nothing."""


class Failing(Logger):
    """A hook that fails after so many steps."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        if ctx.step_count == self.after:
            raise BoomError


def batches(count: int = 3) -> list[Batch]:
    """Return batches of one atom."""
    atom = AtomicData(positions=torch.zeros(1, 3), atomic_numbers=torch.tensor([1]), energy=torch.ones(1, 1))
    return [Batch.from_data_list([atom]) for _ in range(count)]


def strategy(*hooks: Any, **fields: Any) -> TrainingStrategy:
    """Return a strategy of two steps with these hooks."""
    defaults = {"models": One(), "optimizer_configs": OptimizerConfig(), "loss_fn": EnergyMSELoss(), "num_steps": 2}
    return TrainingStrategy(**{**defaults, "hooks": list(hooks), **fields})


def run(what: TrainingStrategy, count: int = 3, **options: Any) -> TrainingStrategy:
    """Run without a progress bar and return the strategy."""
    what.run(batches(count), enable_progress_bar=False, **options)
    return what


def validation(**cadence: Any) -> ValidationConfig:
    """Return a validation on one batch."""
    return ValidationConfig(validation_data=batches(1), **cadence)
