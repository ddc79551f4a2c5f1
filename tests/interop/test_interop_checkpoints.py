"""Checkpoints of one product in the other; needs nvalchemi-toolkit 0.3.0 (``nox -s interop``)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from interop_rigs import (
    assert_same_weights,
    our_strategy,
    reference,
    reference_batches,
    reference_model,
    run,
    their_strategy,
)

from nvalchemi_lightning import OptimizerConfig, TrainingStrategy, ValidationConfig
from nvalchemi_lightning.checkpoint import load_checkpoint, save_checkpoint
from nvalchemi_lightning.hooks import (
    CheckpointHook,
    EMAHook,
    GradientAccumulationHook,
    GradientClipHook,
    SpikeSkipHook,
)
from nvalchemi_lightning.stages import TrainingStage

theirs = reference()
pytestmark = [pytest.mark.filterwarnings("default")]


def our_run(folder: Path, **retention: Any) -> tuple[TrainingStrategy, EMAHook]:
    """Train over four epochs with every hook that has state, and save after each step."""
    average = EMAHook(decay=0.9)
    hooks = [average, GradientAccumulationHook(2), GradientClipHook(max_norm=1.0), SpikeSkipHook()]
    strategy = our_strategy(
        reference_model(),
        num_epochs=4,
        hooks=[*hooks, CheckpointHook(folder, step_interval=1, **retention)],
        validation_config=ValidationConfig(validation_data=reference_batches(), every_n_epochs=1),
    )
    return run(strategy), average


def test_plain_checkpoints_cross_both_ways(tmp_path: Path) -> None:
    strategy = run(our_strategy(reference_model()))
    strategy.save_checkpoint(tmp_path / "ours")
    loaded = theirs.TrainingStrategy.load_checkpoint(tmp_path / "ours", models=reference_model())
    assert loaded.step_count == 4
    assert_same_weights(strategy.models["main"], loaded.models["main"])
    loaded.save_checkpoint(tmp_path / "theirs")
    back = TrainingStrategy.load_checkpoint(tmp_path / "theirs", models=reference_model())
    assert back.counters == strategy.counters


@pytest.mark.parametrize("retention", [{}, {"keep_last": 2}, {"keep_last": 1, "keep_best": "total_loss"}])
def test_checkpoints_of_ours_with_every_hook_load_there(tmp_path: Path, retention: dict[str, Any]) -> None:
    strategy, average = our_run(tmp_path, **retention)
    their_average = theirs.EMAHook(decay=0.9)
    # Models are built from their recipe there.
    loaded = theirs.TrainingStrategy.load_checkpoint(tmp_path, hooks=[their_average])
    assert (loaded.step_count, loaded.batch_count, loaded.epoch_count) == (4, 8, 4)
    assert_same_weights(strategy.models["main"], loaded.models["main"])
    loaded.num_epochs = 6
    run(loaded)
    # Epochs are counted in steps there, so that the run ends after those of six epochs without accumulation.
    assert loaded.step_count == 12
    assert their_average.num_updates == average.num_updates + 8


def test_every_checkpoint_that_pruning_leaves_loads_there(tmp_path: Path) -> None:
    our_run(tmp_path, keep_last=2)
    kept = sorted(int(path.stem) for path in (tmp_path / "models" / "main" / "checkpoints").iterdir())
    assert kept == [2, 3]
    for index in kept:
        assert theirs.TrainingStrategy.load_checkpoint(tmp_path, index).step_count == index + 1


class SaveAfter:
    """Saves a strategy once so many batches have been seen."""

    stage = TrainingStage.AFTER_BATCH
    frequency = 1

    def __init__(self, batches: int, folder: Path) -> None:
        self.batches = batches
        self.folder = folder

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        if ctx.workflow.batch_count == self.batches:
            ctx.workflow.save_checkpoint(self.folder)


def test_a_checkpoint_within_a_window_goes_on_there_with_a_step_for_every_batch(tmp_path: Path) -> None:
    loader = reference_batches() * 3
    hooks = [GradientAccumulationHook(3), EMAHook(decay=0.9), SaveAfter(4, tmp_path)]
    assert run(our_strategy(reference_model(), num_epochs=1, hooks=hooks), loader).step_count == 2
    loaded = theirs.TrainingStrategy.load_checkpoint(tmp_path, hooks=[theirs.EMAHook(decay=0.9)])
    assert (loaded.step_count, loaded.batch_count, loaded.epoch_step_count) == (1, 4, 4)
    assert run(loaded, loader).step_count == len(loader)


def test_the_reference_refuses_several_parameter_groups(tmp_path: Path) -> None:
    config = OptimizerConfig(lr=1e-3, weight_decay=1e-2, no_decay="bias_and_scale")
    run(our_strategy(reference_model(), optimizer_configs=config)).save_checkpoint(tmp_path)
    with pytest.raises(TypeError, match="no_decay"):
        theirs.TrainingStrategy.load_checkpoint(tmp_path)


def test_the_reference_saves_into_a_folder_of_ours(tmp_path: Path) -> None:
    our_run(tmp_path, keep_last=2)
    loaded = theirs.TrainingStrategy.load_checkpoint(tmp_path, hooks=[theirs.EMAHook(decay=0.9)])
    loaded.num_epochs = 6
    run(loaded).save_checkpoint(tmp_path)
    again = TrainingStrategy.load_checkpoint(tmp_path, hooks=[EMAHook(decay=0.9)])
    assert again.step_count == 12
    assert_same_weights(again.models["main"], loaded.models["main"])
    assert TrainingStrategy.load_checkpoint(tmp_path / "step_4", hooks=[EMAHook(decay=0.9)]).step_count == 4


# Runs of the reference -------------------------------------------------------------------------------------------


def their_run(folder: Path, epochs: int, **interval: int) -> tuple[Any, Any]:
    """Train there with averaging and a schedule, and save after every second step unless another interval is given."""
    average = theirs.EMAHook(decay=0.9)
    hooks = [average, theirs.CheckpointHook(folder, **(interval or {"step_interval": 2}))]
    return run(their_strategy(reference_model(), num_epochs=epochs, hooks=hooks)), average


def load_built(folder: Path, average: EMAHook) -> TrainingStrategy:
    return TrainingStrategy.load_checkpoint(folder, hooks=[average])


def load_into_given(folder: Path, average: EMAHook) -> TrainingStrategy:
    return TrainingStrategy.load_checkpoint(folder, models=reference_model(), hooks=[average])


@pytest.mark.parametrize("load", [load_built, load_into_given])
def test_a_run_of_the_reference_goes_on_here_to_the_same_bits(
    tmp_path: Path, load: Callable[[Path, EMAHook], TrainingStrategy]
) -> None:
    whole, whole_average = their_run(tmp_path / "whole", epochs=5)
    stopped, _ = their_run(tmp_path / "stopped", epochs=3)
    average = EMAHook(decay=0.9)
    resumed = load(tmp_path / "stopped", average)
    assert_same_weights(resumed.models["main"], stopped.models["main"])
    resumed.num_epochs = 5
    run(resumed)
    assert (resumed.step_count, average.num_updates) == (10, 10)
    assert_same_weights(resumed.models["main"], whole.models["main"])
    assert_same_weights(average.get_averaged_model(), whole_average.get_averaged_model().module)


def test_a_run_of_ours_goes_on_there_to_the_same_bits(tmp_path: Path) -> None:
    def started(epochs: int) -> tuple[TrainingStrategy, EMAHook]:
        average = EMAHook(decay=0.9)
        return run(our_strategy(reference_model(), num_epochs=epochs, hooks=[average])), average

    whole, whole_average = started(5)
    started(3)[0].save_checkpoint(tmp_path)
    average = theirs.EMAHook(decay=0.9)
    resumed = theirs.TrainingStrategy.load_checkpoint(tmp_path, hooks=[average])
    resumed.num_epochs = 5
    run(resumed)
    assert_same_weights(resumed.models["main"], whole.models["main"])
    assert_same_weights(average.get_averaged_model().module, whole_average.get_averaged_model())


@pytest.mark.parametrize(
    ("interval", "alias", "steps"),
    [("step_interval", "step_2", 2), ("epoch_interval", "epoch_2", 4), ("step_interval", "final", 6)],
)
def test_names_of_checkpoints_lead_into_folders_of_the_reference(
    tmp_path: Path, interval: str, alias: str, steps: int
) -> None:
    their_run(tmp_path, epochs=3, **{interval: 1})
    loaded = TrainingStrategy.load_checkpoint(tmp_path / alias, hooks=[EMAHook(decay=0.9)])
    assert loaded.step_count == steps


def test_we_save_into_a_folder_of_the_reference(tmp_path: Path) -> None:
    their_run(tmp_path, epochs=3)
    resumed = load_built(tmp_path, EMAHook(decay=0.9))
    resumed.num_epochs = 5
    assert run(resumed).save_checkpoint(tmp_path) == 3
    for index, steps in ((3, 10), (0, 2)):
        loaded = theirs.TrainingStrategy.load_checkpoint(tmp_path, index, hooks=[theirs.EMAHook(decay=0.9)])
        assert loaded.step_count == steps


# Components without a strategy -----------------------------------------------------------------------------------


def test_components_cross_both_ways(tmp_path: Path) -> None:
    from nvalchemi import training

    first = reference_model()
    spec = training.create_model_spec(type(first), model=training.create_model_spec(type(first.model), hidden_dim=8))
    optimizer = torch.optim.Adam(first.parameters(), lr=1e-3)
    recipe = training.create_model_spec(torch.optim.Adam, lr=1e-3)
    training.save_checkpoint(
        tmp_path / "theirs", models={"main": (first, spec)}, optimizers={"opt": (optimizer, recipe)}
    )
    loaded = load_checkpoint(tmp_path / "theirs")
    assert_same_weights(loaded.models["main"][0], first)
    save_checkpoint(tmp_path / "ours", models=loaded.models, optimizers=loaded.optimizers)
    again = training.load_checkpoint(tmp_path / "ours")
    assert_same_weights(again.models["main"][0], first)
    assert again.optimizers["opt"][0].param_groups[0]["lr"] == 1e-3
