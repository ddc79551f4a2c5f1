"""Hooks, validation and target assembler in the recipe of a strategy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import specs_rigs
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from pydantic import BaseModel
from specs_rigs import Counting, Net, assembler, batches, run, strategy, trusting_rigs

from nvalchemi_lightning.errors import ConfigurationError, ConfigurationTypeError, UntrustedPathError
from nvalchemi_lightning.hooks import (
    CheckpointHook,
    EMAHook,
    GradientAccumulationHook,
    GradientClipHook,
    MixedPrecisionHook,
    NeighborListHook,
    SpikeSkipHook,
)
from nvalchemi_lightning.hooks.lifecycle import each_hook
from nvalchemi_lightning.hooks.recipes import hook_from, hook_spec
from nvalchemi_lightning.losses import EnergyMAELoss, assemble_loss_targets
from nvalchemi_lightning.specs import trust
from nvalchemi_lightning.stages import TrainingStage
from nvalchemi_lightning.strategy import TrainingStrategy
from nvalchemi_lightning.validation import ValidationConfig


@pytest.fixture(autouse=True)
def _trusted() -> Iterator[None]:
    with trusting_rigs():
        yield


def through_json(what: TrainingStrategy) -> dict[str, Any]:
    form: dict[str, Any] = json.loads(json.dumps(what.to_spec_dict(), allow_nan=False))
    return form


# Hooks --------------------------------------------------------------------------------------------------------------

SHIPPED = [
    CheckpointHook("runs", step_interval=5, keep_last=2),
    EMAHook(decay=0.9, warmup=True),
    GradientAccumulationHook(4, normalize="graphs"),
    GradientClipHook(max_norm=1.5),
    MixedPrecisionHook(precision="bf16"),
    NeighborListHook(cutoff=5.0, skin=0.5),
    NeighborListHook(cutoff=4.0, stage=TrainingStage.BEFORE_BATCH),
    SpikeSkipHook(factor=10.0, quarantine_file="spikes.jsonl"),
]


@pytest.mark.parametrize("hook", SHIPPED, ids=lambda hook: type(hook).__name__)
def test_the_recipe_of_a_shipped_hook_gives_the_hook_and_its_text_again(hook: Any) -> None:
    form = json.loads(hook_spec(hook).model_dump_json())
    again = hook_from(form)
    assert type(again) is type(hook)
    assert hook_spec(again) == hook_spec(hook)
    if isinstance(hook, BaseModel):
        assert again.model_dump() == hook.model_dump()
    else:
        assert (again.cutoff, again.stage) == (hook.cutoff, hook.stage)


def test_fields_that_have_their_default_and_counts_of_the_run_are_left_out() -> None:
    ema, checkpoints = EMAHook(), CheckpointHook("runs", epoch_interval=1)
    ema.num_updates, checkpoints.last_checkpoint_index = 7, 3
    assert dict(hook_spec(ema).kwargs) == {}
    assert dict(hook_spec(checkpoints).kwargs) == {"checkpoint_dir": Path("runs"), "epoch_interval": 1}


def test_hooks_come_back_when_they_are_asked_for_and_only_then() -> None:
    hooks = [CheckpointHook("runs", step_interval=2), EMAHook(), GradientClipHook(max_norm=1.0)]
    form = through_json(strategy(hooks=hooks))
    assert TrainingStrategy.from_spec_dict(form).hooks == []
    again = TrainingStrategy.from_spec_dict(form, hooks="saved")
    assert [type(hook) for hook in each_hook(again.hooks)] == [CheckpointHook, GradientClipHook, EMAHook]
    assert through_json(again)["lightning"]["hooks"][0]["step_interval"] == 2
    assert not Path("runs").exists()


def test_a_checkpoint_brings_hooks_back_with_their_state(tmp_path: Path) -> None:
    what = run(strategy(hooks=[EMAHook(decay=0.5)]))
    what.save_checkpoint(tmp_path / "runs")
    again = TrainingStrategy.load_checkpoint(tmp_path / "runs", hooks="saved")
    (ema,) = each_hook(again.hooks)
    assert ema.num_updates == 3
    for one, other in zip(
        ema.get_averaged_model().parameters(),
        next(each_hook(what.hooks)).get_averaged_model().parameters(),
        strict=True,
    ):
        assert torch.equal(one, other)


def test_hooks_without_a_recipe_are_named_and_asked_for_when_they_are_missed() -> None:
    form = through_json(strategy(hooks=[Counting(), LearningRateMonitor(), EMAHook()]))
    entries = form["lightning"]["hooks"]
    assert [entry.get("omitted", "").rpartition(".")[2] for entry in entries] == ["Counting", "LearningRateMonitor", ""]
    assert TrainingStrategy.from_spec_dict(form).hooks == []
    with pytest.raises(ConfigurationError, match=r"cannot bring back specs_rigs\.Counting \(Counting has no to_spec"):
        TrainingStrategy.from_spec_dict(form, hooks="saved")


@pytest.mark.parametrize(
    ("form", "error", "match"),
    [
        ({"cls_path": "os.system", "command": "true"}, UntrustedPathError, r"lightning\.hooks\[0\]: 'os\.system' lies"),
        (
            {"cls_path": "torch.nn.Linear", "in_features": 1, "out_features": 1},
            ConfigurationError,
            r"hooks\[0\]: .*not a class of hooks.*pass hooks=\[",
        ),
        (
            {"cls_path": "nvalchemi_lightning.data.convert", "source": "a", "target": "b"},
            UntrustedPathError,
            "is a function",
        ),
        ({"cls_path": "specs_rigs.training_fn", "model": 1, "batch": 2}, ConfigurationError, "not a class"),
        (
            {"cls_path": "nvalchemi_lightning.hooks.EMAHook", "decay": 2.0},
            ConfigurationError,
            r"lightning\.hooks\[0\]: nvalchemi_lightning\.hooks\.EMAHook\.decay is 2\.0",
        ),
        (
            {"cls_path": "nvalchemi_lightning.hooks.SpikeSkipHook", "min_history": 9, "window": 3},
            ConfigurationError,
            r"SpikeSkipHook cannot be built \(ValidationError(.|\n)*larger window",
        ),
        (3, ConfigurationTypeError, r"hooks\[0\]: a spec is a JSON object"),
    ],
)
def test_a_hook_of_a_file_must_be_one(form: Any, error: type[Exception], match: str) -> None:
    spec = through_json(strategy())
    spec["lightning"]["hooks"] = [form]
    with pytest.raises(error, match=match):
        TrainingStrategy.from_spec_dict(spec, hooks="saved")


def test_only_saved_is_a_word_for_hooks() -> None:
    form = through_json(strategy())
    with pytest.raises(ConfigurationError, match="a list of hooks, 'saved' or None; got 'all'"):
        TrainingStrategy.from_spec_dict(form, hooks="all")
    del form["lightning"]
    with pytest.raises(ConfigurationError, match="does not say which hooks"):
        TrainingStrategy.from_spec_dict(form, hooks="saved")


def test_a_to_spec_of_another_kind_is_refused() -> None:
    hook = Counting()
    hook.to_spec = lambda: {"cls_path": "specs_rigs.Counting"}  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationTypeError, match=r"Counting\.to_spec\(\) must return a BaseSpec; got \{'cls_path'"):
        hook_spec(hook)


# Validation ---------------------------------------------------------------------------------------------------------


def validated() -> TrainingStrategy:
    config = ValidationConfig(
        validation_data=batches(1),
        every_n_steps=2,
        use_ema="never",
        name="held_out",
        loss_fn=EnergyMAELoss(),
        validation_fn=specs_rigs.training_fn,
        batch_callback=lambda **values: None,
    )
    return strategy(validation_config=config)


def test_b_03_the_validation_comes_back_with_data_to_evaluate() -> None:
    form = through_json(validated())
    data = batches(2)
    config = TrainingStrategy.from_spec_dict(form, validation_data=data).validation_config
    assert config is not None
    assert config.validation_data is data
    assert (config.every_n_steps, config.use_ema, config.name) == (2, "never", "held_out")
    assert config.loss_fn is not None
    assert [type(component) for component in config.loss_fn.components] == [EnergyMAELoss]
    assert config.validation_fn is specs_rigs.training_fn
    assert config.batch_callback is None


def test_without_data_there_is_no_validation() -> None:
    form = through_json(validated())
    assert TrainingStrategy.from_spec_dict(form).validation_config is None
    own = ValidationConfig(validation_data=batches(1))
    assert TrainingStrategy.from_spec_dict(form, validation_config=own).validation_config is own
    with pytest.raises(ConfigurationError, match="were both given; give one"):
        TrainingStrategy.from_spec_dict(form, validation_config=own, validation_data=batches(1))


def test_validation_data_needs_a_stored_validation() -> None:
    with pytest.raises(ConfigurationError, match="cannot be used: it is not there; pass validation_config="):
        TrainingStrategy.from_spec_dict(through_json(strategy()), validation_data=batches(1))
    config = ValidationConfig(validation_data=batches(1), validation_fn=lambda model, batch: {})
    form = through_json(strategy(validation_config=config))
    with pytest.raises(ConfigurationError, match=r"cannot be used: .*lambda.*; pass validation_config="):
        TrainingStrategy.from_spec_dict(form, validation_data=batches(1))


# Target assembler ---------------------------------------------------------------------------------------------------


def test_b_03_the_target_assembler_comes_back_by_name() -> None:
    form = through_json(strategy(loss_target_assembler=assembler))
    assert form["lightning"]["loss_target_assembler"] == "specs_rigs.assembler"
    assert TrainingStrategy.from_spec_dict(form).loss_target_assembler is assembler
    default = through_json(strategy())
    assert TrainingStrategy.from_spec_dict(default).loss_target_assembler is assemble_loss_targets
    del default["lightning"]
    assert TrainingStrategy.from_spec_dict(default).loss_target_assembler is assemble_loss_targets


def test_an_assembler_that_cannot_be_imported_must_be_passed_again() -> None:
    def local(loss_fn: Any, predictions: Any, batch: Any, **options: Any) -> Any:
        return {}

    with pytest.warns(UserWarning, match="Omitting non-importable loss_target_assembler from spec: .*top level"):
        form = through_json(strategy(loss_target_assembler=local))
    with pytest.raises(ConfigurationError, match="could not be imported and was not stored: pass loss_target_assembl"):
        TrainingStrategy.from_spec_dict(form)
    assert TrainingStrategy.from_spec_dict(form, loss_target_assembler=local).loss_target_assembler is local


def test_an_assembler_resolves_only_in_trusted_packages() -> None:
    form = through_json(strategy(loss_target_assembler=assembler))
    form["lightning"]["loss_target_assembler"] = "os.system"
    with pytest.raises(UntrustedPathError, match=r"lightning\.loss_target_assembler: .*pass loss_target_assembler=<"):
        TrainingStrategy.from_spec_dict(form)


def test_extras_must_be_an_object() -> None:
    form = through_json(strategy())
    form["lightning"] = [1]
    with pytest.raises(ConfigurationError, match=r"lightning of the spec must be an object; got \[1\]"):
        TrainingStrategy.from_spec_dict(form)


# Trust --------------------------------------------------------------------------------------------------------------


def test_functions_of_this_package_are_not_called_unless_it_is_trusted_by_name() -> None:
    """`convert` writes a store; named by a file, for a parameter that takes anything, it would be called."""
    form = {"cls_path": "specs_rigs.Net", "hidden": {"cls_path": "nvalchemi_lightning.data.convert"}}
    spec = {**through_json(strategy()), "model_specs": {"main": form}}
    with pytest.raises(UntrustedPathError, match=r"model_specs\['main'\]: .*convert' is a function"):
        TrainingStrategy.from_spec_dict(spec)
    with pytest.raises(UntrustedPathError, match=r"call nvalchemi_lightning\.trust\('nvalchemi_lightning'\)"):
        hook_from({"cls_path": "nvalchemi_lightning.data.open_source", "path": "x"})
    trust("nvalchemi_lightning")
    with pytest.raises(ConfigurationError, match="not a class of hooks"):
        hook_from({"cls_path": "nvalchemi_lightning.data.open_source", "path": "x"})


def test_a_model_that_fails_to_build_is_named() -> None:
    form = through_json(strategy(models=Net(2)))
    form["model_specs"]["main"]["hidden"] = -1
    with pytest.raises(ConfigurationError, match=r"\['main'\]: specs_rigs\.Net cannot be built \(RuntimeError"):
        TrainingStrategy.from_spec_dict(form)
