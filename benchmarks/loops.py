"""The same training, run by a plain loop and by this package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Trainer
from measure import ClockedBatches
from torch import Tensor, nn

from nvalchemi_lightning import AlchemiModule, OptimizerConfig
from nvalchemi_lightning.data import Batch
from nvalchemi_lightning.losses import as_composed_loss, compute_supervised_loss, loss_target_keys
from nvalchemi_lightning.training_fn import default_training_fn

__all__ = ["Run", "Supervised", "Task", "ours", "plain", "trainer_switches"]

Run = Callable[[ClockedBatches], nn.Module]
"""Trains a fresh model on a loader and returns it."""

LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Task:
    """What every variant of a benchmark trains.

    Attributes
    ----------
    make_model : callable
        Returns the model, always with the same weights.
    make_loss : callable
        Returns the loss.
    """

    make_model: Callable[[], nn.Module]
    make_loss: Callable[[], Any]


class Supervised:
    """Model, loss and optimizer of one run.

    Parameters
    ----------
    task : Task
        What to train.
    """

    def __init__(self, task: Task) -> None:
        self.model = task.make_model()
        self.loss_fn = as_composed_loss(task.make_loss())
        self.target_keys = loss_target_keys(self.loss_fn)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=LEARNING_RATE)

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of a batch."""
        predictions = default_training_fn(self.model, batch)
        output = compute_supervised_loss(
            self.loss_fn, predictions, batch, step=0, epoch=0, target_keys=self.target_keys
        )
        return output["total_loss"]


def plain(task: Task) -> Run:
    """Return a run of the loop that everybody writes; it copies batches to the device, as Lightning does."""

    def run(loader: ClockedBatches) -> nn.Module:
        supervised = Supervised(task)
        for source in loader:
            loss = supervised.loss(source.to("cpu"))
            supervised.optimizer.zero_grad()
            loss.backward()
            supervised.optimizer.step()
        return supervised.model

    return run


def ours(task: Task, *hooks: Any, **switches: Any) -> Run:
    """Return a run of this package's module.

    Parameters
    ----------
    task : Task
        What to train.
    *hooks
        Hooks of the run.
    **switches
        More options of the Trainer.
    """

    def run(loader: ClockedBatches) -> nn.Module:
        model = task.make_model()
        config = OptimizerConfig(optimizer_cls=torch.optim.Adam, lr=LEARNING_RATE)
        module = AlchemiModule(models=model, optimizer_configs=config, loss_fn=task.make_loss(), hooks=list(hooks))
        Trainer(strategy="nvalchemi", **trainer_switches(**switches)).fit(module, loader)
        return model

    return run


def trainer_switches(**more: Any) -> dict[str, Any]:
    """Return the options of every Trainer: no progress bar, logger, checkpoint or summary, one pass."""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return {"accelerator": "cpu", "devices": 1, "max_epochs": 1, **quiet, **more}
