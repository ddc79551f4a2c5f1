"""A whole training step of a force model, against the plain loop over the same objects: at most 1.2 times as long."""

from __future__ import annotations

import torch
from loops import Task, ours, plain
from measure import Rung, arguments, compare, report, save
from tiny import make_batches

from nvalchemi_lightning.losses import ComposedLossFunction, EnergyMSELoss, ForceMSELoss
from nvalchemi_lightning.models import DemoModel, DemoModelWrapper

ALLOWED = 1.2


def model() -> DemoModelWrapper:
    """Return the demo potential, always with the same weights."""
    torch.manual_seed(0)
    return DemoModelWrapper(DemoModel())


def loss() -> ComposedLossFunction:
    """Return the loss of energies and forces."""
    return EnergyMSELoss() + ForceMSELoss() * 10.0


TASK = Task(model, loss)


def main() -> None:
    """Measure and print the ratio."""
    options = arguments(__doc__, rounds=12)
    batches = make_batches()
    rungs = [
        Rung("plain loop", plain(TASK), batches),
        Rung("ours", ours(TASK), batches, "plain loop"),
    ]
    compare(rungs, rounds=options.rounds)
    report(rungs)
    ratio = rungs[1].undisturbed / rungs[0].undisturbed
    print(f"ratio {ratio:.2f}, allowed {ALLOWED}: {'ok' if ratio <= ALLOWED else 'missed'}")
    if options.save:
        save("step", {"ratio": round(ratio, 3), "allowed": ALLOWED, **{rung.name: rung.summary() for rung in rungs}})


if __name__ == "__main__":
    main()
