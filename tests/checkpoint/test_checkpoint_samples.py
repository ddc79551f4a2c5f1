"""Folders that the reference wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_rigs import assert_same, named_training_fn, state_of, strategy

from nvalchemi_lightning.checkpoint import load, restore, save
from nvalchemi_lightning.checkpoint.reference_names import in_own_names
from nvalchemi_lightning.data import AtomicDataZarrReader, Batch, Dataset
from nvalchemi_lightning.models import DemoModel, DemoModelWrapper
from nvalchemi_lightning.optim import OptimizerConfig
from nvalchemi_lightning.strategy import TrainingStrategy
from nvalchemi_lightning.validation import ValidationConfig

EMA = in_own_names("nvalchemi.training.hooks.ema.EMAHook")
UNUSED = pytest.mark.filterwarnings("ignore:the checkpoint has states of hooks that are not there")


class Average:
    """Stands for the hook whose state the reference saved."""

    stage = None
    frequency = 1

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def _runs_on_stage(self, stage: Any) -> bool:
        return False

    def __call__(self, ctx: Any, stage: Any) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


Average.__module__, _, Average.__qualname__ = EMA.rpartition(".")


@pytest.fixture
def samples(shared: Path) -> Path:
    return shared / "samples"


def first_batch(samples: Path) -> Batch:
    dataset = Dataset(AtomicDataZarrReader(samples / "mixed32.zarr"))
    return Batch.from_data_list([dataset[i] for i in range(8)])


@pytest.mark.parametrize("index", [0, 1, 2, -1])
def test_every_index_of_the_demo_run(samples: Path, index: int) -> None:
    oracle = json.loads((samples / "ckpt_oracle.json").read_text())[str(2 if index == -1 else index)]
    hook = Average()
    again = load(TrainingStrategy, samples / "ckpt_demo_async", index, hooks=[hook])
    counters = vars(again.counters)
    assert {key: oracle[key] for key in counters if key in oracle} == {
        key: value for key, value in counters.items() if key in oracle
    }
    optimizer, scheduler = again.optimizers()["main"][0]
    assert optimizer.param_groups[0]["lr"] == oracle["lr"]
    assert scheduler is not None
    assert scheduler.last_epoch == oracle["step_count"]
    assert {int(state["step"]) for state in optimizer.state.values()} == {oracle["step_count"]}
    assert hook.state["num_updates"] == oracle["ema_num_updates"]
    energy = again.models["main"].eval()(first_batch(samples))["energy"].flatten()
    torch.testing.assert_close(energy, torch.tensor(oracle["energy_first_batch"]), rtol=1e-6, atol=1e-6)


def test_names_lead_to_the_steps_of_the_demo_run(samples: Path) -> None:
    hooks = [Average()]
    assert load(TrainingStrategy, samples / "ckpt_demo_async/step_4", hooks=hooks).step_count == 4
    assert load(TrainingStrategy, samples / "ckpt_demo_async/final", hooks=hooks).step_count == 6
    with pytest.raises(FileNotFoundError, match="no checkpoint step_3; it has step_2, step_4, step_6"):
        load(TrainingStrategy, samples / "ckpt_demo_async/step_3")


def test_what_the_reference_wrote_is_written_again_as_it_was(samples: Path, root: Path) -> None:
    sample = samples / "ckpt_demo_async"
    again = load(TrainingStrategy, sample, hooks=[Average()])
    save(again, root, checkpoint_index=2)
    assert json.loads((root / "manifest.json").read_text()) == json.loads((sample / "manifest.json").read_text())
    for path in sorted(sample.rglob("checkpoints/2.pt")):
        written = torch.load(root / path.relative_to(sample), weights_only=True)
        assert_same(without_moment(written), without_moment(torch.load(path, weights_only=True)))
    for name in ("strategy.json", "models/main/spec.json", "optimizers/main_optimizer/spec.json"):
        ours, theirs = (json.loads((folder / name).read_text()) for folder in (root, sample))
        ours.pop("lightning", None)  # what the reference does not store, and passes over
        assert without_time(ours) == without_time(theirs)


def without_moment(state: dict[str, Any]) -> dict[str, Any]:
    """Drop what newer versions of torch add to a schedule."""
    return {key: value for key, value in state.items() if key not in ("_is_initial", "_get_lr_called_within_step")}


def without_time(form: Any) -> Any:
    if isinstance(form, dict):
        return {key: without_time(value) for key, value in form.items() if key != "timestamp"}
    return [without_time(item) for item in form] if isinstance(form, list) else form


@UNUSED
def test_weights_for_a_model_at_hand(samples: Path) -> None:
    model = DemoModelWrapper(DemoModel(hidden_dim=8))
    again = load(TrainingStrategy, samples / "ckpt_demo_async", models=model)
    built = load(TrainingStrategy, samples / "ckpt_demo_async")
    assert again.models["main"] is model
    assert_same(state_of(again), state_of(built))


def test_named_models(samples: Path) -> None:
    again = load(
        TrainingStrategy,
        samples / "ckpt_named_models",
        training_fn=named_training_fn,
        validation_config=ValidationConfig(validation_data=[]),
    )
    assert list(again.models) == ["student", "teacher"]
    assert not again.single_model_input
    assert again.counters.step_count == 1
    optimizer, scheduler = again.optimizers()["student"][0]
    assert type(scheduler) is torch.optim.lr_scheduler.ReduceLROnPlateau
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    assert len(optimizer.state) == 12
    saved = torch.load(samples / "ckpt_named_models/models/teacher/checkpoints/0.pt", weights_only=True)
    assert_same(dict(again.models["teacher"].state_dict()), dict(saved))


def test_a_fine_tuning_run_into_a_live_strategy(samples: Path) -> None:
    live = strategy(
        models=DemoModelWrapper(DemoModel(hidden_dim=4)), optimizer_configs=OptimizerConfig(lr=1e-4), num_steps=4
    )
    live.models["main"].model.embedding.requires_grad_(False)
    restore(live, samples / "ckpt_finetune")
    assert live.step_count == 2
    saved = torch.load(samples / "ckpt_finetune/models/main/checkpoints/0.pt", weights_only=True)
    assert_same(dict(live.models["main"].state_dict()), dict(saved))
    assert len(live.optimizers()["main"][0][0].state) == 11
