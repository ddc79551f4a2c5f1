"""Two ranks with dropout of their own are stopped and go on; each writes what differs to ``<folder>/found_<rank>``.

Lightning starts this script again for the second rank.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from resume_rigs import SCENARIOS, Noisy, Scenario, differing, outcome

from nvalchemi_lightning.hooks import CheckpointHook
from nvalchemi_lightning.module import AlchemiModule
from nvalchemi_lightning.specs import trust
from nvalchemi_lightning.strategy import TrainingStrategy

DDP: dict[str, Any] = {"strategy": "nvalchemi_ddp", "devices": 2}
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "accelerator": "cpu",
    "max_epochs": -1,
}
RANK = int(os.environ.get("LOCAL_RANK", "0"))


def scattered(scenario: Scenario, seed: int, *hooks: Any) -> TrainingStrategy:
    """Return a strategy with weights by the seed, and random numbers of this rank alone from here on."""
    what = scenario.strategy(seed, *hooks)
    torch.manual_seed(1000 + 10 * seed + RANK)
    return what


def own_checkpoints(folder: Path, scenario: Scenario) -> list[list[str]]:
    hook = CheckpointHook(folder, step_interval=1)
    whole = scattered(scenario, 0, hook)
    whole.run(scenario.loader(), enable_progress_bar=False, **DDP)
    expected, found = outcome(whole), []
    for index in (0, 1, 3):
        again = TrainingStrategy.load_checkpoint(
            folder, index, models=Noisy(), hooks=scenario.fields(5)["hooks"], validation_config=scenario.validating()
        )
        torch.manual_seed(77)
        again.run(scenario.loader(), enable_progress_bar=False, **DDP)
        found.append(differing(outcome(again), expected))
    return found


def native_checkpoints(folder: Path, scenario: Scenario) -> list[list[str]]:
    saver = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    whole = AlchemiModule(scattered(scenario, 0))
    Trainer(callbacks=[saver], **DDP, **QUIET).fit(whole, scenario.loader())
    expected, found = outcome(whole.recipe), []
    for step in (1, 2, 4):
        again = AlchemiModule(scattered(scenario, 6))
        saver = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="again-{step}")
        trainer = Trainer(callbacks=[saver], **DDP, **QUIET)
        trainer.fit(again, scenario.loader(), ckpt_path=folder / f"step={step}.ckpt")
        found.append(differing(outcome(again.recipe), expected))
    return found


class EveryBatch(Checkpoint):
    """Saves after every batch, also where it made no step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / f"batch={pl_module.recipe.batch_count}.ckpt")


def within_windows(folder: Path, scenario: Scenario) -> list[list[str]]:
    whole = AlchemiModule(scattered(scenario, 0))
    Trainer(callbacks=[EveryBatch(folder)], **DDP, **QUIET).fit(whole, scenario.loader())
    expected, found = outcome(whole.recipe), []
    for batch in (1, 2, 4):
        again = AlchemiModule(scattered(scenario, 6))
        again_saver = EveryBatch(folder / "again")
        trainer = Trainer(callbacks=[again_saver], **DDP, **QUIET)
        trainer.fit(again, scenario.loader(), ckpt_path=folder / f"batch={batch}.ckpt")
        found.append(differing(outcome(again.recipe), expected))
    return found


def main(folder: Path) -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="Checkpoint directory")
    torch.set_num_threads(1)
    trust("resume_rigs")
    found: dict[str, Any] = {}
    for number, name in enumerate(("plain", "random transforms", "plateau by steps")):
        found[f"{name}, own"] = own_checkpoints(folder / f"own{number}", SCENARIOS[name])
        found[f"{name}, native"] = native_checkpoints(folder / f"native{number}", SCENARIOS[name])
    found["within windows"] = within_windows(folder / "windows", SCENARIOS["accumulation"])
    (folder / f"found_{RANK}").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
