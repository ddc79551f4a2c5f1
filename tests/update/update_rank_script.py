"""What two ranks do about spikes of one of them; every rank writes its findings to ``<folder>/rank_<rank>.json``.

Lightning starts this script again for the second rank.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from update_rigs import Potential, Stage, adam, batches, run, strategy

from nvalchemi_lightning.data import AtomicData, DataLoader
from nvalchemi_lightning.hooks import EMAHook, SpikeSkipHook
from nvalchemi_lightning.losses import ForceMSELoss

# Rank 1 has the structures of odd number, two per batch: 11 is in its third batch, 25 in the seventh.
BROKEN, SPIKE = 11, 25


class Heard(logging.Handler):
    """Keeps the messages of a logger."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


class Trace:
    """Notes at which batch which rank has seen which structures, and how many steps there were."""

    stage = Stage.AFTER_BATCH
    frequency = 1

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.numbers: list[list[int]] = []

    def __call__(self, ctx: Any, stage: Any) -> None:
        self.steps.append(ctx.step_count)
        self.numbers.append([origin.number for origin in ctx.batch.origins])


def data() -> list[AtomicData]:
    """Return structures of which one makes the model fail and one has a label that is far off."""
    found = batches(32, dtype=torch.float32)[0].to_data_list()
    found[BROKEN].atomic_numbers[0] = 2
    found[SPIKE].forces *= 1e4
    return found


def trained(**options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    trace, heard = Trace(), Heard()
    hook, ema = SpikeSkipHook(min_history=3, **options), EMAHook(decay=0.5)
    what = strategy(hook, ema, trace, models=Potential(), optimizer_configs=adam(), loss_fn=ForceMSELoss())
    logger = logging.getLogger("nvalchemi_lightning.hooks.spike_skip")
    logger.addHandler(heard)
    error = ""
    try:
        run(what, DataLoader(data(), batch_size=2), strategy="nvalchemi_ddp", devices=2)
    except RuntimeError as raised:
        error = str(raised)
    finally:
        logger.removeHandler(heard)
    return {
        "error": error,
        "heard": heard.messages,
        "steps": trace.steps,
        "numbers": trace.numbers,
        "skipped": hook.skipped,
        "history": hook.state_dict(),
        "weights": [p.flatten().tolist() for p in what.models["main"].parameters()],
        "averaged": [p.flatten().tolist() for p in ema.get_averaged_model().parameters()],
    }


def main(folder: Path) -> None:
    warnings.simplefilter("error")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    found = {"strict": trained(max_consecutive=0), "patient": trained(quarantine_file=folder / "quarantine.jsonl")}
    (folder / f"rank_{torch.distributed.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
