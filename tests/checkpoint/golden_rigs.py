"""The run whose checkpoints are kept in ``golden/``, one folder for each version of the files.

``python tests/checkpoint/golden_rigs.py`` makes the folder of the present version. Run it when a file gets a new
version, and never again for that version: what is there stands for what users have on their disks.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from checkpoint_rigs import Counting, adam, batches, state_of
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from nvalchemi_lightning.checkpoint import save
from nvalchemi_lightning.checkpoint.lock import LOCK
from nvalchemi_lightning.checkpoint.migrations import _CURRENT
from nvalchemi_lightning.checkpoint.states import copied, keyed_hooks
from nvalchemi_lightning.hooks import EMAHook
from nvalchemi_lightning.losses import EnergyMSELoss
from nvalchemi_lightning.specs import trust
from nvalchemi_lightning.strategy import TrainingStrategy

GOLDEN = Path(__file__).parent / "golden"


class Golden(nn.Module):
    """A model whose arithmetic is the same everywhere: products and sums of few numbers in float64."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.width = width
        self.weight = nn.Parameter(torch.linspace(-1, 1, width, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: Any) -> dict[str, Tensor]:
        """Return energies, shape (B, 1)."""
        per_atom = (batch.positions[:, : self.width] * self.weight).sum(dim=1, keepdim=True)
        return {"energy": per_atom.new_zeros(batch.num_graphs, 1).index_add(0, batch.batch_idx, per_atom)}


def golden_strategy() -> TrainingStrategy:
    """Return the strategy: schedule, average and a hook with state."""
    return TrainingStrategy(
        models=Golden(),
        optimizer_configs=adam(),
        loss_fn=EnergyMSELoss(),
        hooks=[EMAHook(decay=0.5), Counting()],
        num_steps=2,
    )


def everything(strategy: TrainingStrategy) -> dict[str, Any]:
    """Return what must come back, hooks included."""
    states = {type(hook).__name__: hook.state_dict() for hook in keyed_hooks(strategy.hooks).values()}
    return {**state_of(strategy), "hooks": copied(states, "hooks")}


def make() -> None:
    """Save after two and after four steps, in a folder and as Lightning does, with what must come back of each."""
    folder = GOLDEN / f"v{_CURRENT['record']}"
    trust("golden_rigs", "checkpoint_rigs")
    strategy, expected = golden_strategy(), []
    with tempfile.TemporaryDirectory() as made, contextlib.chdir(made):  # files note where they were made
        for steps in (2, 4):
            strategy.num_steps = steps
            saver = ModelCheckpoint(Path(f"{steps}"), filename=f"{steps}", save_top_k=-1, every_n_train_steps=steps)
            strategy.run(batches(), enable_progress_bar=False, callbacks=[saver], enable_checkpointing=True)
            save(strategy, "folder")
            expected.append(everything(strategy))
        shutil.copytree("folder", folder / "folder", ignore=shutil.ignore_patterns(LOCK))
        for steps in (2, 4):
            shutil.copy(f"{steps}/{steps}.ckpt", folder)
    torch.save(expected, folder / "expected.pt")


if __name__ == "__main__":
    import golden_rigs  # under its own name, which the files keep

    golden_rigs.make()
