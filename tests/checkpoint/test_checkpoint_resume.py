"""A run that is stopped after any batch and resumed ends exactly as the one that was not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from resume_rigs import SCENARIOS, STEPS, Noisy, Scenario, differing, outcome

from nvalchemi_lightning.hooks import CheckpointHook
from nvalchemi_lightning.module import AlchemiModule
from nvalchemi_lightning.specs import trust
from nvalchemi_lightning.stages import TrainingStage
from nvalchemi_lightning.strategy import TrainingStrategy

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "accelerator": "cpu",
    "strategy": "nvalchemi",
}


@pytest.fixture(autouse=True)
def _trusted_model() -> None:
    trust("resume_rigs")


def run(what: TrainingStrategy, scenario: Scenario) -> TrainingStrategy:
    what.run(scenario.loader(), enable_progress_bar=False)
    return what


def some(count: int) -> list[int]:
    """Return a few of the checkpoints: within epochs, at their ends, and the last."""
    return sorted({0, 1, 3, 4, 7, count - 1} & set(range(count)))


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_from_the_strategys_own_checkpoints(scenario: Scenario, root: Path) -> None:
    """Both ways to load; every file was written within the run that was never stopped."""
    hook = CheckpointHook(root, step_interval=1, async_save=False)
    whole = outcome(run(scenario.strategy(0, hook), scenario))
    for index in some(STEPS):
        if index < whole["counters"]["step_count"]:
            hooks = scenario.fields(5)["hooks"]
            torch.manual_seed(99)
            loaded = TrainingStrategy.load_checkpoint(
                root, index, models=Noisy(), hooks=hooks, validation_config=scenario.validating()
            )
            assert not differing(outcome(run(loaded, scenario)), whole), index
            restored = scenario.strategy(6)
            restored.restore_checkpoint(root, index)
            torch.manual_seed(98)
            assert not differing(outcome(run(restored, scenario)), whole), index


SAVERS = {
    "after batches": {"every_n_train_steps": 1},
    "after validation": {"every_n_epochs": 1, "save_on_train_epoch_end": False},
    "after epochs": {"every_n_epochs": 1, "save_on_train_epoch_end": True},
}


@pytest.mark.parametrize(
    ("scenario", "when"),
    [
        pytest.param(scenario, when, id=f"{name}, {when}")
        for name, scenario in SCENARIOS.items()
        for when in SAVERS
        if scenario.validation is not None or when != "after validation"
    ],
)
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_from_checkpoints_of_lightning(scenario: Scenario, when: str, tmp_path: Path) -> None:
    """``trainer.fit(..., ckpt_path=...)`` with files of ModelCheckpoint, saved at its three moments."""
    saver = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{step}-{epoch}", **SAVERS[when])
    whole = AlchemiModule(scenario.strategy(0))
    Trainer(max_epochs=-1, callbacks=[saver], **QUIET).fit(whole, scenario.loader())
    expected = outcome(whole.recipe)
    files = sorted(tmp_path.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    assert len(files) > 1
    for place in some(len(files)):
        module = AlchemiModule(scenario.strategy(7))
        again = ModelCheckpoint(tmp_path, save_top_k=-1, filename="again-{step}-{epoch}", **SAVERS[when])
        Trainer(max_epochs=-1, callbacks=[again], **QUIET).fit(module, scenario.loader(), ckpt_path=files[place])
        assert not differing(outcome(module.recipe), expected), files[place].name


class StopError(Exception):
    """Ends a run from outside."""


class Stopping:
    """A hook that ends the run in its sixth batch."""

    frequency = 1
    stage = TrainingStage.BEFORE_FORWARD

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        if ctx.batch_count == 5 and not ctx.validating:
            raise StopError


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_from_the_last_checkpoint_after_a_crash(tmp_path: Path) -> None:
    """``ckpt_path="last"`` finds what ModelCheckpoint wrote before the run broke off."""
    scenario = SCENARIOS["plateau by steps"]

    def fit(module: AlchemiModule, **options: Any) -> dict[str, Any]:
        saver = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=1)
        Trainer(max_epochs=-1, callbacks=[saver], **QUIET).fit(module, scenario.loader(), **options)
        return outcome(module.recipe)

    whole = AlchemiModule(scenario.strategy(0))
    Trainer(max_epochs=-1, enable_checkpointing=False, **QUIET).fit(whole, scenario.loader())
    with pytest.raises(StopError):
        fit(AlchemiModule(scenario.strategy(0, Stopping())))
    assert not differing(fit(AlchemiModule(scenario.strategy(7)), ckpt_path="last"), outcome(whole.recipe))
