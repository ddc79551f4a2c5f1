"""Training must not grow: no resident memory over 20 epochs, no autograd graph that outlives its step."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any

import torch
from loops import ours
from measure import ClockedBatches, arguments, save
from step import TASK
from tiny import make_batches

from nvalchemi_lightning import TrainingStage

EPOCHS = 20
BATCHES = 50  # per epoch
# The first epochs allocate what is kept: caches, optimizer state, arenas of the allocator.
SETTLED = 5
ALLOWED_GROWTH = 1.0  # [MB]


class Watch:
    """Notes memory at the end of each epoch, and what is left of the graph when a batch begins."""

    stage = None
    frequency = 1

    def __init__(self) -> None:
        self.resident: list[float] = []
        self.graphs: set[int] = set()

    def _runs_on_stage(self, stage: TrainingStage) -> bool:
        return stage in (TrainingStage.BEFORE_BATCH, TrainingStage.AFTER_EPOCH)

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        """Note what belongs to the stage."""
        if stage is TrainingStage.AFTER_EPOCH:
            self.resident.append(resident_megabytes())
        elif ctx.batch_count % BATCHES == BATCHES - 1:
            self.graphs.add(tensors_on_a_graph())


def resident_megabytes() -> float:
    """Return the resident memory of this process [MB]."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def tensors_on_a_graph() -> int:
    """Return how many living tensors hold on to an autograd graph."""
    # Not isinstance, which asks every object for its class and wakes lazy ones up.
    tensors = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
    return sum(each.grad_fn is not None for each in tensors)


def main() -> int:
    """Train, print what was seen, and return 1 if something grew."""
    options = arguments(__doc__)
    if not Path("/proc/self/statm").exists():
        print("memory: skipped, this system has no /proc")
        return 0
    watch = Watch()
    ours(TASK, watch, max_epochs=EPOCHS)(ClockedBatches(make_batches(), BATCHES - 1, warmup=0))
    growth = watch.resident[-1] - watch.resident[SETTLED - 1]
    print(f"resident memory after epochs {SETTLED} and {EPOCHS}: {growth:+.2f} MB (allowed {ALLOWED_GROWTH:+.2f})")
    print(f"tensors on a graph when a batch begins: {sorted(watch.graphs)} (allowed [0])")
    if options.save:
        save("memory", {"growth_mb": round(growth, 3), "tensors_on_a_graph": sorted(watch.graphs)})
    return int(growth > ALLOWED_GROWTH or watch.graphs != {0})


if __name__ == "__main__":
    sys.exit(main())
