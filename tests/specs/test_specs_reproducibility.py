"""The five things that make a training run reproducible, and the rules of specs that no other file has."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from specs_rigs import Counting, Net, Renamed, assembler, run, strategy, training_fn, trusting_rigs
from torch import nn

from nvalchemi_lightning.errors import ConfigurationError, ConfigurationTypeError
from nvalchemi_lightning.losses import ComposedLossFunction, EnergyMSELoss, LinearWeight
from nvalchemi_lightning.specs import (
    BaseSpec,
    create_model_spec,
    create_model_spec_from_json,
    register_type_serializer,
)
from nvalchemi_lightning.strategy import TrainingStrategy


@pytest.fixture(autouse=True)
def _trusted() -> Iterator[None]:
    with trusting_rigs():
        yield


class Free:
    """Takes any keyword."""

    def __init__(self, **options: Any) -> None:
        self.options = options


class Ramp:
    """A schedule of a user, without a recipe."""

    per_epoch = False

    def __call__(self, step: int, epoch: int) -> float:
        return float(step)


# The five rules of the page -----------------------------------------------------------------------------------------


def test_rule_1_a_model_is_described_by_its_arguments_of_the_same_name() -> None:
    assert strategy(models=Net(7)).to_spec_dict()["model_specs"]["main"]["hidden"] == 7


def test_rule_1_what_is_kept_under_another_name_is_said_with_the_line_to_write() -> None:
    with pytest.warns(UserWarning, match=r"Omitting model spec for 'main': .*add self\.width = width"):
        form = strategy(models=Renamed()).to_spec_dict()
    assert form["model_specs"] == {}


def test_rule_2_functions_are_dotted_paths_and_never_code() -> None:
    text = json.dumps(strategy(training_fn=training_fn, loss_target_assembler=assembler).to_spec_dict())
    assert '"specs_rigs.training_fn"' in text
    assert '"specs_rigs.assembler"' in text
    again = TrainingStrategy.from_spec_dict(json.loads(text))
    assert (again.training_fn, again.loss_target_assembler) == (training_fn, assembler)


def test_rule_2_a_lambda_is_left_out_with_a_warning_and_asked_for_again() -> None:
    with pytest.warns(UserWarning, match="Omitting non-importable training_fn from spec"):
        form = strategy(training_fn=lambda model, batch: {}).to_spec_dict()
    assert "training_fn" not in form
    with pytest.raises(ConfigurationError, match="pass training_fn= again"):
        TrainingStrategy.from_spec_dict(form)


def test_rule_3_a_schedule_needs_to_spec() -> None:
    loss = EnergyMSELoss() * LinearWeight(start=1.0, end=0.5, num_steps=4)
    form = json.loads(json.dumps(strategy(loss_fn=loss).to_spec_dict()))
    assert form["loss_fn_spec"]["weights"][0]["end"] == 0.5
    assert TrainingStrategy.from_spec_dict(form).to_spec_dict()["loss_fn_spec"]["weights"][0]["num_steps"] == 4
    with pytest.raises(TypeError, match=r"weights\[0\] must be .* with per_epoch and to_spec\(\)"):
        ComposedLossFunction([EnergyMSELoss()], weights=[Ramp()])


def test_rule_4_a_hook_with_state_gets_it_back_in_the_instance_that_is_given(tmp_path: Path) -> None:
    run(strategy(hooks=[Counting()])).save_checkpoint(tmp_path / "runs")
    hook = Counting()
    TrainingStrategy.load_checkpoint(tmp_path / "runs", hooks=[hook])
    assert hook.seen == 3


def test_rule_5_a_model_that_cannot_be_rebuilt_is_not_saved_at_all(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Cannot save strategy checkpoint because model spec generation failed"):
        strategy(models=Renamed()).save_checkpoint(tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


# Rules of specs -----------------------------------------------------------------------------------------------------


def test_unknown_keywords_are_stored_where_the_target_takes_any() -> None:
    spec = create_model_spec(Free, anything=3, lr=torch.float64)
    assert spec.accepts_kwarg("whatever")
    assert spec.build().options == {"anything": 3, "lr": torch.float64}


def test_a_keyword_that_is_missing_is_found_when_it_is_built_and_not_before() -> None:
    spec = create_model_spec(nn.Linear, in_features=2)
    with pytest.raises(
        ConfigurationTypeError, match=r"Failed to build torch\.nn\.modules\.linear\.Linear from spec \(saved"
    ):
        spec.build()


def test_keywords_that_are_left_out_keep_the_default_of_the_day() -> None:
    assert "bias" not in create_model_spec(nn.Linear, in_features=2, out_features=1).model_dump()


@pytest.mark.parametrize("stamp", ["2026-11-29T18:02:54.940707+00:00", "yesterday", 7])
def test_the_time_of_making_is_kept_as_it_is(stamp: Any) -> None:
    form = {"cls_path": "torch.nn.ReLU", "timestamp": stamp}
    assert create_model_spec_from_json(form).model_dump()["timestamp"] == stamp


def test_the_time_of_making_is_utc_to_the_microsecond() -> None:
    stamp = create_model_spec(nn.ReLU).timestamp
    assert stamp.endswith("+00:00")
    assert len(stamp) == len("2026-11-29T18:02:54.940707+00:00")


def test_unknown_keys_of_a_recipe_are_passed_over() -> None:
    form = {**strategy().to_spec_dict(), "of_a_newer_version": 1}
    assert TrainingStrategy.from_spec_dict(form).num_steps == 3


def test_names_of_the_public_face_are_those_of_the_reference() -> None:
    import nvalchemi_lightning as face

    assert face.BaseSpec is BaseSpec
    assert face.create_model_spec is create_model_spec
    assert face.create_model_spec_from_json is create_model_spec_from_json
    assert face.register_type_serializer is register_type_serializer


def test_the_example_of_the_cli_page_is_read_without_a_timestamp() -> None:
    """The page writes model and hook specs by hand, in the names of the reference."""
    form: Mapping[str, Any] = {
        "cls_path": "nvalchemi.hooks.neighbor_list.NeighborListHook",
        "cutoff": 6.0,
        "format": "coo",
    }
    assert create_model_spec_from_json(form).build().cutoff == 6.0
    form = {
        "cls_path": "nvalchemi.training.hooks.checkpoint.CheckpointHook",
        "checkpoint_dir": "runs/my-model/checkpoints",
        "step_interval": 500,
    }
    assert create_model_spec_from_json(form).build().step_interval == 500
