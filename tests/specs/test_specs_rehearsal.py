"""`TrainingStrategy.rehearse`: what would be lost is named before compute is spent, and nothing is changed."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from specs_rigs import (
    Counting,
    Forgetful,
    Fragile,
    Net,
    Renamed,
    Shifted,
    batches,
    random_draws,
    run,
    strategy,
    trusting_rigs,
)
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, StepLR

from nvalchemi_lightning import rehearsal
from nvalchemi_lightning.errors import ConfigurationError, TrainingStateError
from nvalchemi_lightning.hooks import CheckpointHook, EMAHook
from nvalchemi_lightning.optim import OptimizerConfig
from nvalchemi_lightning.resume import keeping_random_states
from nvalchemi_lightning.specs.trust import _added
from nvalchemi_lightning.stages import TrainingStage
from nvalchemi_lightning.strategy import TrainingStrategy
from nvalchemi_lightning.validation import ValidationConfig


@pytest.fixture(autouse=True)
def _trusted() -> Iterator[None]:
    with trusting_rigs():
        yield


class ForgettingSchedule(LRScheduler):
    """A schedule whose state does not say where it stands."""

    def get_lr(self) -> list[float]:
        return [group["lr"] * 0.5 for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch, "noise": float(torch.rand(()))}


def step_lr() -> OptimizerConfig:
    return OptimizerConfig(
        optimizer_cls=torch.optim.Adam, lr=0.1, scheduler_cls=StepLR, scheduler_kwargs={"step_size": 2}
    )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"optimizer_configs": step_lr()},
        {"hooks": [CheckpointHook("runs", step_interval=1), EMAHook()]},
        {"hooks": [Counting()]},
        {
            "models": {"a": Net(2), "b": Net(3)},
            "optimizer_configs": {"a": [step_lr()]},
            "training_fn": "specs_rigs.named_fn",
        },
        {
            "optimizer_configs": OptimizerConfig(lr=0.1, scheduler_cls=ReduceLROnPlateau),
            "validation_config": ValidationConfig(validation_data=batches(1), every_n_steps=1),
        },
    ],
    ids=["plain", "schedule", "hooks", "a hook of the script", "named models", "validation"],
)
def test_what_comes_back_passes(fields: dict[str, Any]) -> None:
    strategy(**fields).rehearse()


def test_a_strategy_that_has_trained_passes_too() -> None:
    what = run(strategy(optimizer_configs=step_lr(), hooks=[EMAHook(decay=0.5)]))
    what.rehearse()


def test_nothing_is_changed() -> None:
    """Weights, gradients, optimizers, counters, random states, hooks and files are as before."""
    what = strategy(optimizer_configs=step_lr(), hooks=[EMAHook()])
    with keeping_random_states():
        expected = random_draws()
    weights = {name: value.clone() for name, value in what.models["main"].state_dict().items()}
    recipe, files = (
        json.dumps(what.to_checkpoint_dict()["runtime_state"]),
        sorted(Path(tempfile.gettempdir()).iterdir()),
    )
    what.rehearse()
    assert random_draws() == expected
    assert not what.has_optimizers
    assert all(torch.equal(value, weights[name]) for name, value in what.models["main"].state_dict().items())
    assert json.dumps(what.to_checkpoint_dict()["runtime_state"]) == recipe
    assert [p for p in sorted(Path(tempfile.gettempdir()).iterdir()) if p not in files and "rehearsal" in p.name] == []


def test_a_filter_that_is_set_after_a_rehearsal_still_counts() -> None:
    what = strategy()
    what.rehearse()
    what.set_optimizer_parameter_filter(["main.layers.0.weight"])
    assert len(what.flat_optimizers()[0][0].param_groups[0]["params"]) == 1


def test_optimizers_that_exist_stay_the_same_objects() -> None:
    what = run(strategy())
    before = what.flat_optimizers()[0][0]
    moments = {name: value.clone() for name, value in before.state[next(iter(before.state))].items()}
    what.rehearse()
    after = what.flat_optimizers()[0][0]
    assert after is before
    assert all(torch.equal(value, moments[name]) for name, value in after.state[next(iter(after.state))].items())


def test_training_is_the_same_with_and_without_a_rehearsal() -> None:
    torch.manual_seed(3)
    plain = run(strategy())
    torch.manual_seed(3)
    rehearsed = strategy()
    rehearsed.rehearse()
    run(rehearsed)
    for one, other in zip(plain.models["main"].parameters(), rehearsed.models["main"].parameters(), strict=True):
        assert torch.equal(one, other)


# What would be lost -------------------------------------------------------------------------------------------------


def test_b38_a_model_without_a_recipe_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"generation failed for model\(s\) \['main'\]: .*self\.width = width"):
        strategy(models=Renamed()).rehearse()


def test_a_training_fn_that_cannot_be_imported_is_asked_for() -> None:
    def local(model: Any, batch: Any) -> Any:
        return {"predicted_energy": model(batch)["energy"]}

    what = strategy(training_fn=local)
    with pytest.raises(ConfigurationError, match=r"could not be resumed .*training_fn.*pass training_fn= again"):
        what.rehearse()
    what.rehearse(training_fn=local)


def test_a_package_that_is_not_trusted_is_named() -> None:
    what = strategy()
    _added.clear()
    with pytest.raises(ConfigurationError, match=r'\[.main.\]: .*nvalchemi_lightning\.trust\("specs_rigs"\)'):
        what.rehearse()
    what.rehearse(models=Net())


def test_a_model_that_cannot_be_built_again_is_named() -> None:
    what = strategy(models=Fragile())
    Fragile.built = True
    try:
        with pytest.raises(ConfigurationError, match=r"Fragile cannot be built .*the licence server is away"):
            what.rehearse()
    finally:
        Fragile.built = False


def test_a_buffer_that_is_not_saved_is_named_by_its_path() -> None:
    model = Shifted()
    strategy(models=model).rehearse()
    model.shift += 2.5
    with pytest.raises(ConfigurationError, match=r"buffers\.main\.shift is .*\[2\.5\].*\[0\.0\]; .*persistent"):
        strategy(models=model).rehearse()


def test_parameters_that_were_frozen_by_hand_are_named() -> None:
    what = strategy()
    what.models["main"].layers[0].requires_grad_(False)
    with pytest.raises(ConfigurationError, match=r"could not be resumed.*main_optimizer.*layers"):
        what.rehearse()


def test_a_hook_that_forgets_is_named_by_its_path() -> None:
    what = strategy(hooks=[Forgetful()])
    what.hooks[0].seen = 4
    with pytest.raises(ConfigurationError, match=r"hooks\.specs_rigs\.Forgetful:0\.seen is 4 and would come back as 0"):
        what.rehearse()


def test_a_schedule_that_forgets_is_named_by_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_added, __name__, None)
    config = OptimizerConfig(lr=0.1, scheduler_cls=ForgettingSchedule)
    with pytest.raises(ConfigurationError, match=r"states\.schedulers\.main_scheduler\.noise is 0\."):
        strategy(optimizer_configs=config).rehearse()


def test_a_long_list_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "_SHOWN", 1)
    model = Shifted()
    model.register_buffer("second", torch.ones(1), persistent=False)
    model.shift += 1
    with pytest.raises(ConfigurationError, match=r"(?s)shift is.*\n  \.\.\.$"):
        strategy(models=model).rehearse()


def test_an_override_is_not_a_loss() -> None:
    what = run(strategy())
    what.rehearse(num_steps=9, optimizer_configs=step_lr())


def test_a_rehearsal_is_no_part_of_a_run() -> None:
    class Rehearsing:
        stage, frequency = TrainingStage.AFTER_BATCH, 1

        def __call__(self, ctx: Any, stage: TrainingStage) -> None:
            ctx.workflow.rehearse()

    with pytest.raises(TrainingStateError, match=r"rehearse\(\) was called while a run is under way"):
        run(strategy(hooks=[Rehearsing()]))


def test_a_subclass_is_rebuilt_as_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = []

    class Own(TrainingStrategy):
        pass

    monkeypatch.setitem(globals(), "Own", Own)
    Own.__qualname__ = "Own"
    real = rehearsal.load
    monkeypatch.setattr(rehearsal, "load", lambda cls, *a, **k: kinds.append(cls) or real(cls, *a, **k))
    plain = strategy()
    fields = {"models": Net(), "optimizer_configs": plain.optimizer_configs, "loss_fn": plain.loss_fn, "num_steps": 1}
    Own(**fields).rehearse()
    assert kinds == [Own]
