"""What averaging, clipping, accumulation and logging cost per batch, over a bare Lightning module that does them.

Both accumulate two batches, clip, average the weights and log five numbers every ten steps, and must arrive at the
same weights.
"""

from __future__ import annotations

from typing import Any

import torch
from ladder import LOG_EVERY, Automatic, LogOne, NoOpLogger
from lightning.pytorch import Trainer
from loops import Run, ours, trainer_switches
from measure import ClockedBatches, Rung, arguments, compare, report, save
from tiny import TINY, make_batches
from torch import nn

from nvalchemi_lightning.data import Batch
from nvalchemi_lightning.hooks import EMAHook, GradientAccumulationHook, GradientClipHook

ALLOWED = 300
WINDOW, DECAY, MAX_NORM = 2, 0.999, 1.0


class ManualPolicies(Automatic):
    """A module that does all of it by hand, as cheaply as it goes."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.parameters_list = [*self.model.parameters()]
        self.average = [parameter.detach().clone() for parameter in self.parameters_list]
        self.steps = 0

    def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
        """Accumulate, and at the end of a window clip, step, average and log."""
        optimizer = self.optimizers()
        loss = self.task.loss(batch) / WINDOW
        if batch_idx % WINDOW == 0:
            optimizer.zero_grad()
        self.manual_backward(loss)
        if batch_idx % WINDOW == WINDOW - 1:
            norm = nn.utils.clip_grad_norm_(self.parameters_list, MAX_NORM)
            optimizer.step()
            self.steps += 1
            with torch.no_grad():
                torch._foreach_lerp_(self.average, self.parameters_list, 1.0 - DECAY)
            if self.steps % LOG_EVERY == 0:
                numbers = torch.stack([loss, loss, loss, loss, norm]).tolist()
                self.logger.log_metrics(dict(zip("abcde", numbers, strict=True)), self.steps)


def bare(loader: ClockedBatches) -> nn.Module:
    """Train by hand."""
    module = ManualPolicies()
    Trainer(**{**trainer_switches(), "logger": NoOpLogger()}).fit(module, loader)
    return module.model


def hooks() -> list[Any]:
    """Return the policies anew: they hold state."""
    accumulation = GradientAccumulationHook(WINDOW, normalize="batch")
    return [accumulation, GradientClipHook(max_norm=MAX_NORM), EMAHook(decay=DECAY), LogOne()]


def with_hooks(loader: ClockedBatches) -> nn.Module:
    """Train by the recipe."""
    run: Run = ours(TINY, *hooks(), logger=NoOpLogger(), log_every_n_steps=LOG_EVERY)
    return run(loader)


def main() -> None:
    """Measure and print the difference."""
    options = arguments(__doc__, rounds=12)
    batches = make_batches()
    rungs = [
        Rung("Lightning, manual, all policies", bare, batches),
        Rung("ours, all policies", with_hooks, batches, "Lightning, manual, all policies", ALLOWED),
    ]
    one, two = (rung.run(ClockedBatches(batches, 7, warmup=0)) for rung in rungs)
    pairs = zip(one.parameters(), two.parameters(), strict=True)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in pairs), "the two train other weights"
    compare(rungs, rounds=options.rounds)
    report(rungs)
    if options.save:
        save("policies", {rung.name: rung.summary() for rung in rungs})


if __name__ == "__main__":
    main()
