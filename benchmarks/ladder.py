"""What each layer between a bare PyTorch loop and this package costs per training step.

The model is so small that a step is all overhead. Every rung trains the same weights on the same batches and must
arrive at the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from loops import Run, Supervised, ours, plain, trainer_switches
from measure import ClockedBatches, Rung, arguments, compare, report, save
from tiny import TINY, as_tensors, make_batches, plain_tensors
from torch import Tensor, nn

from nvalchemi_lightning import TrainingStage
from nvalchemi_lightning.data import Batch
from nvalchemi_lightning.stages import REPLACEMENT_STAGES

OBSERVABLE = tuple(stage for stage in TrainingStage if stage not in REPLACEMENT_STAGES)
FIVE = (
    TrainingStage.BEFORE_BATCH,
    TrainingStage.AFTER_FORWARD,
    TrainingStage.AFTER_LOSS,
    TrainingStage.AFTER_BACKWARD,
    TrainingStage.AFTER_OPTIMIZER_STEP,
)
LOG_EVERY = 10


class Automatic(LightningModule):
    """The smallest module with automatic optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.task = Supervised(TINY)
        self.model = self.task.model

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the task's optimizer."""
        return self.task.optimizer

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss."""
        return self.task.loss(batch)


class Manual(Automatic):
    """The smallest module with manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
        """Do by hand what automatic optimization does."""
        optimizer = self.optimizers()
        loss = self.task.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class EmptyHook:
    """A hook that does nothing at some stages."""

    stage = None
    frequency = 1

    def __init__(self, stages: Iterable[TrainingStage]) -> None:
        self._stages = frozenset(stages)

    def _runs_on_stage(self, stage: TrainingStage) -> bool:
        return stage in self._stages

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        """Do nothing."""


class LogOne:
    """A hook that logs one number of its own as often as the module logs its four."""

    stage = TrainingStage.AFTER_LOSS
    frequency = LOG_EVERY

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        """Log the loss under another name."""
        ctx.workflow.log("loss/own", ctx.loss)


class NoOpLogger(Logger):
    """A logger that drops everything."""

    name = "none"
    version = 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Drop the numbers."""

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Drop the parameters."""


def bare(module: type[Automatic]) -> Run:
    """Return a run of a bare Lightning module."""

    def run(loader: ClockedBatches) -> nn.Module:
        instance = module()
        Trainer(**trainer_switches()).fit(instance, loader)
        return instance.model

    return run


def rungs() -> list[Rung]:
    """Return the ladder, bottom first."""
    batches = make_batches()
    tensors = [as_tensors(batch) for batch in batches]
    logged = {"logger": NoOpLogger(), "log_every_n_steps": LOG_EVERY}
    return [
        Rung("plain loop, tensors", plain_tensors, tensors),
        Rung("plain loop, our objects", plain(TINY), batches, "plain loop, tensors", 150),
        Rung("Lightning, automatic", bare(Automatic), batches, "plain loop, our objects"),
        Rung("Lightning, manual", bare(Manual), batches, "plain loop, our objects"),
        Rung("ours", ours(TINY), batches, "Lightning, manual", 60),
        Rung("ours, 1 stage observed", ours(TINY, EmptyHook(FIVE[:1])), batches, "Lightning, manual"),
        Rung("ours, 5 stages observed", ours(TINY, EmptyHook(FIVE)), batches, "Lightning, manual"),
        Rung("ours, every stage observed", ours(TINY, EmptyHook(OBSERVABLE)), batches, "Lightning, manual", 120),
        # Five values every ten steps: 20 us each are 10 us per step.
        Rung("ours, 5 scalars every 10 steps", ours(TINY, LogOne(), **logged), batches, "ours", 10),
    ]


def check_same_weights(ladder: list[Rung]) -> None:
    """Train every rung for a few steps and compare the weights."""
    trained = []
    for rung in ladder:
        model = rung.run(ClockedBatches(rung.batches, 5, warmup=0))
        trained.append(nn.utils.parameters_to_vector(model.parameters()).detach())
        assert torch.equal(trained[-1], trained[0]), f"{rung.name!r} trains other weights than {ladder[0].name!r}"


def main() -> None:
    """Measure and print the ladder."""
    options = arguments(__doc__, rounds=12)
    ladder = rungs()
    check_same_weights(ladder)
    compare(ladder, rounds=options.rounds)
    report(ladder)
    if options.save:
        save("ladder", {rung.name: rung.summary() for rung in ladder})


if __name__ == "__main__":
    main()
