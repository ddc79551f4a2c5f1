"""An update of averaged weights, against the bare kernels on the same tensors: at most 1.2 times as long."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from measure import ClockedBatches, Rung, arguments, compare, report, save
from torch import Tensor, nn

from nvalchemi_lightning.context import TrainContext
from nvalchemi_lightning.hooks import EMAHook
from nvalchemi_lightning.models import PaiNN
from nvalchemi_lightning.stages import TrainingStage

ALLOWED, DECAY = 1.2, 0.99


def model() -> PaiNN:
    """Return the reference potential for four elements, always with the same weights."""
    torch.manual_seed(0)
    return PaiNN(elements=(1, 6, 7, 8))


def ours(loader: ClockedBatches) -> nn.Module:
    """Let the hook follow a model that stands still."""
    hook, ctx = EMAHook(decay=DECAY), TrainContext(batch=None, models={"main": model()})
    hook(ctx, TrainingStage.SETUP, False)
    for _ in loader:
        hook(ctx, TrainingStage.AFTER_OPTIMIZER_STEP, False)
    return hook.get_averaged_model()


def bare(loader: ClockedBatches) -> nn.Module:
    """Call the kernels on lists that are made beforehand: parameters, floating buffers, other buffers."""
    live = model()
    averaged = copy.deepcopy(live).requires_grad_(False)
    parameters = [*averaged.parameters()], [*live.parameters()]
    floating, others = buffers(live, averaged, Tensor.is_floating_point), buffers(live, averaged, is_integer)
    for _ in loader:
        with torch.no_grad():
            torch._foreach_lerp_(*parameters, 1.0 - DECAY)
            torch._foreach_lerp_(*floating, 1.0 - DECAY)
            torch._foreach_copy_(*others)
    return averaged


def buffers(live: nn.Module, averaged: nn.Module, which: Callable[[Tensor], bool]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the buffers of a kind, of the average and of the live model."""
    both = averaged.buffers(), live.buffers()
    return tuple([buffer for buffer in side if which(buffer)] for side in both)  # type: ignore[return-value]


def is_integer(buffer: Tensor) -> bool:
    """Return whether a buffer cannot be averaged."""
    return not buffer.is_floating_point()


def main() -> None:
    """Measure and print the ratio."""
    options = arguments(__doc__, rounds=12)
    rungs = [Rung("bare kernels", bare, [None]), Rung("EMAHook", ours, [None], "bare kernels")]
    compare(rungs, rounds=options.rounds, periods=20)
    report(rungs)
    ratio = rungs[1].undisturbed / rungs[0].undisturbed
    print(f"ratio {ratio:.2f}, allowed {ALLOWED}: {'ok' if ratio <= ALLOWED else 'missed'}")
    if options.save:
        result = {rung.name: rung.summary() for rung in rungs}
        save("averaging", {"ratio": round(ratio, 3), "allowed": ALLOWED, **result})


if __name__ == "__main__":
    main()
