"""A strategy as JSON data and back."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import checkpoint_rigs as rigs
import pytest
import torch
from checkpoint_rigs import Net, Strategy, adam, named_strategy, strategy
from torch import nn

from nvalchemi_lightning.counters import Counters
from nvalchemi_lightning.errors import ConfigurationError, ConfigurationTypeError, UntrustedPathError
from nvalchemi_lightning.losses import EnergyMSELoss, ForceMSELoss, LinearWeight
from nvalchemi_lightning.optim import OptimizerConfig
from nvalchemi_lightning.specs import without_timestamps
from nvalchemi_lightning.strategy import TrainingStrategy
from nvalchemi_lightning.strategy_spec import (
    checkpoint_dict,
    counters_from,
    require_json,
    spec_dict,
    strategy_arguments_from_spec,
    strategy_class,
    strategy_from_checkpoint_dict,
)
from nvalchemi_lightning.training_fn import default_training_fn

KEYS = [
    "optimizer_configs",
    "num_epochs",
    "num_steps",
    "epoch_step_modifier",
    "devices",
    "loss_fn_spec",
    "model_specs",
    "single_model_input",
    "training_fn",
    "lightning",
]


def build(form: Any, **arguments: Any) -> Strategy:
    return Strategy(**strategy_arguments_from_spec(form, **arguments))


@pytest.fixture
def form() -> dict[str, Any]:
    return spec_dict(strategy())


def test_the_keys_are_those_of_the_contract(form: dict[str, Any]) -> None:
    assert list(form) == KEYS
    assert form["training_fn"] == "nvalchemi_lightning.training_fn.default_training_fn"
    assert form["devices"] == ["cpu"]
    assert form["model_specs"]["main"]["hidden"] == 4


@pytest.mark.parametrize(
    "what",
    [
        strategy,
        lambda: named_strategy(num_epochs=3, epoch_step_modifier=0.5),
        lambda: strategy(loss_fn=EnergyMSELoss() + ForceMSELoss() * LinearWeight(start=1.0, end=0.1, num_steps=9)),
        lambda: strategy(optimizer_configs=OptimizerConfig(lr=1e-4)),
    ],
)
def test_round_trip_through_json(what: Any) -> None:
    form = spec_dict(what())
    text = json.dumps(form, allow_nan=False)
    again = build(json.loads(text))
    assert without_timestamps(spec_dict(again)) == without_timestamps(form)


def test_single_model_input_survives_even_for_a_mapping_of_one() -> None:
    named = strategy(models={"main": Net()}, training_fn=rigs.named_training_fn, optimizer_configs={"main": [adam()]})
    assert not build(spec_dict(named)).single_model_input
    assert build(spec_dict(strategy())).single_model_input


def test_b30_a_lambda_is_warned_about_and_must_be_passed_again() -> None:
    """B30: what cannot be stored is told when the recipe is made, with what to do."""
    with pytest.warns(UserWarning, match=r"Omitting non-importable training_fn from spec: .*pass training_fn= again"):
        form = spec_dict(strategy(training_fn=lambda model, batch: model(batch)))
    assert "training_fn" not in form
    with pytest.raises(ConfigurationError, match=r"training_fn of the spec must be a dotted path; got None"):
        build(form)
    given = build(form, training_fn=default_training_fn)
    assert given.training_fn is default_training_fn


def test_a_partial_is_no_importable_function_either() -> None:
    with pytest.warns(UserWarning, match="Omitting non-importable training_fn"):
        assert "training_fn" not in spec_dict(strategy(training_fn=partial(default_training_fn)))


def test_a_training_fn_of_a_script_is_recorded_under_main(monkeypatch: pytest.MonkeyPatch) -> None:
    main = __import__("__main__")

    def fn(model: nn.Module, batch: Any) -> Any:
        return model(batch)

    fn.__module__, fn.__qualname__ = "__main__", "fn"
    monkeypatch.setattr(main, "fn", fn, raising=False)
    form = spec_dict(strategy(training_fn=fn))
    assert form["training_fn"] == "__main__.fn"
    with pytest.raises(UntrustedPathError, match=r"training_fn: '__main__.fn' .*or pass training_fn="):
        build(form)


def test_b38_a_model_without_recipe_is_left_out_with_a_warning() -> None:
    model = Net()
    del model.hidden
    with pytest.warns(UserWarning, match=r"Omitting model spec for 'main': Net does not store .* 'hidden'"):
        form = spec_dict(strategy(models=model))
    assert form["model_specs"] == {}
    with pytest.raises(ConfigurationError, match="the spec holds no model; pass models="):
        build(form)
    assert build(form, models=model).models["main"] is model


def test_what_cannot_be_stored_is_named_when_the_recipe_is_made() -> None:
    config = OptimizerConfig(
        scheduler_cls=torch.optim.lr_scheduler.LambdaLR, scheduler_kwargs={"lr_lambda": lambda step: 0.5}
    )
    with pytest.raises(ConfigurationTypeError, match=r"optimizer_configs: .*lr_lambda"):
        spec_dict(strategy(optimizer_configs=config))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, {"b": float("nan")}]}, r"spec\['a'\]\[1\]\['b'\] is nan"),
        ({"a": {1: 2}}, r"spec\['a'\] has the key 1"),
        ({"a": Path("x")}, r"spec\['a'\] is a PosixPath|spec\['a'\] is a WindowsPath"),
    ],
)
def test_only_json_is_json(value: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        require_json(value, "spec")


@pytest.mark.parametrize("key", ["optimizer_configs", "devices", "loss_fn_spec"])
def test_required_keys(form: dict[str, Any], key: str) -> None:
    del form[key]
    with pytest.raises(ConfigurationError, match=rf"missing required key\(s\) \['{key}'\]"):
        build(form)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optimizer_configs", [1]),
        ("optimizer_configs", {"main": {}}),
        ("optimizer_configs", {"main": [1]}),
        ("devices", "cpu"),
        ("devices", [0]),
        ("loss_fn_spec", "EnergyMSELoss"),
        ("model_specs", []),
        ("single_model_input", 1),
        ("training_fn", 3),
    ],
)
def test_wrong_shapes_name_the_field(form: dict[str, Any], key: str, value: Any) -> None:
    form[key] = value
    with pytest.raises(ConfigurationError, match=rf"^{key} of the spec must"):
        build(form)


def test_the_key_0_of_old_files_means_main(form: dict[str, Any]) -> None:
    for key in ("optimizer_configs", "model_specs"):
        form[key] = {"0": form[key]["main"]}
    del form["single_model_input"]
    again = build(form)
    assert again.single_model_input
    assert list(again.optimizer_configs) == list(again.models) == ["main"]


def test_live_models_replace_recipes_which_are_not_looked_at(form: dict[str, Any]) -> None:
    form["model_specs"]["main"] = {"cls_path": "os.system", "command": "true"}
    model = Net(2)
    bare = build(form, models=model)
    assert bare.models["main"] is model
    assert bare.single_model_input
    named = strategy_arguments_from_spec(form, models={"main": model})
    assert named["models"] == {"main": model}


def test_a_bare_model_merged_into_named_ones_is_named() -> None:
    form = spec_dict(named_strategy())
    form["optimizer_configs"] = {"main": form["optimizer_configs"]["student"]}
    merged = strategy_arguments_from_spec(form, models=Net())["models"]
    assert sorted(merged) == ["main", "student", "teacher"]


def test_single_model_input_needs_main(form: dict[str, Any]) -> None:
    form["model_specs"] = {"other": form["model_specs"]["main"]}
    with pytest.raises(ConfigurationError, match=r"single_model_input needs exactly the model 'main'"):
        build(form)


def test_a_model_that_cannot_be_built_is_an_error_that_names_it(form: dict[str, Any]) -> None:
    form["model_specs"]["main"]["hiden"] = 3
    with pytest.raises(ConfigurationTypeError, match=r"model_specs\['main'\]: .*hiden.*pass models=\{'main': model\}"):
        build(form)


def test_overrides(form: dict[str, Any]) -> None:
    def assembler(*arguments: Any, **options: Any) -> Any:
        return {}

    again = build(
        form,
        hooks=[],
        loss_target_assembler=assembler,
        num_epochs=2,
        devices=["cpu"],
        validation_config=None,
        optimizer_configs=OptimizerConfig(lr=0.5),
    )
    assert again.loss_target_assembler is assembler
    assert (again.num_epochs, again.num_steps) == (2, None)
    assert again.optimizer_configs["main"][0].lr == 0.5
    assert build(form, num_steps=9).num_steps == 9


def test_unknown_overrides_are_refused(form: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationTypeError, match=r"got runtime overrides \['num_step'\].*did you mean 'num_steps'"):
        build(form, num_step=3)


def test_a_dotted_training_fn_resolves_only_in_trusted_packages(form: dict[str, Any]) -> None:
    again = build(form, training_fn="nvalchemi.training.strategy.default_training_fn")
    assert again.training_fn is default_training_fn
    with pytest.raises(UntrustedPathError, match=r"training_fn: 'os.system' lies outside"):
        build(form, training_fn="os.system")


def test_the_loss_must_be_a_loss(form: dict[str, Any]) -> None:
    form["loss_fn_spec"] = {"cls_path": "torch.nn.Linear", "in_features": 1, "out_features": 1}
    with pytest.raises(ConfigurationError, match=r"loss_fn_spec: .*is not a class derived from"):
        build(form)


def test_an_optimizer_config_must_be_one(form: dict[str, Any]) -> None:
    form["optimizer_configs"]["main"] = [{"cls_path": "torch.nn.Linear", "in_features": 1, "out_features": 1}]
    with pytest.raises(ConfigurationError, match=r"optimizer_configs\['main'\]: .*not a class derived from"):
        build(form)


def test_a_checkpoint_dict_adds_class_and_counters() -> None:
    what = strategy(step_count=3, batch_count=4, epoch_count=1, global_step_count=6)
    form = checkpoint_dict(what)
    assert form["strategy_cls"] == "checkpoint_rigs.Strategy"
    assert form["runtime_state"] == {
        "step_count": 3,
        "global_step_count": 6,
        "batch_count": 4,
        "epoch_count": 1,
        "epoch_step_count": 0,
    }
    again = strategy_from_checkpoint_dict(TrainingStrategy, json.loads(json.dumps(form)))
    assert type(again) is Strategy
    assert again.counters == what.counters


def test_the_strategy_class_must_be_importable() -> None:
    class Local(Strategy):
        pass

    with pytest.raises(ConfigurationTypeError, match="not an importable callable"):
        checkpoint_dict(strategy(cls=Local))


def test_strategy_class() -> None:
    assert strategy_class("nvalchemi.training.strategy.TrainingStrategy", TrainingStrategy) is TrainingStrategy
    assert strategy_class("checkpoint_rigs.Strategy", TrainingStrategy) is Strategy
    with pytest.raises(ConfigurationError, match=r"strategy_cls must be a dotted path; got 3"):
        strategy_class(3, TrainingStrategy)
    with pytest.raises(ConfigurationError, match=r"strategy_cls: .*is not a class derived from Strategy"):
        strategy_class("nvalchemi.training.strategy.TrainingStrategy", Strategy)
    with pytest.raises(UntrustedPathError, match=r"strategy_cls: 'my_lab.Mine' lies outside"):
        strategy_class("my_lab.Mine", TrainingStrategy)


def test_the_class_in_the_callers_hands_needs_no_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Strategy, "__module__", "my_lab")
    assert strategy_class("my_lab.Strategy", Strategy) is Strategy


def test_counters() -> None:
    assert counters_from(None) is None
    assert counters_from({"step_count": 5, "more": 1}) == Counters(step_count=5, global_step_count=5)
    assert counters_from({"step_count": 5, "global_step_count": 10}) == Counters(step_count=5, global_step_count=10)
    with pytest.raises(ConfigurationError, match="runtime_state must be an object"):
        counters_from([1])  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="runtime_state: step_count must be an integer >= 0; got -1"):
        counters_from({"step_count": -1})


def test_the_samples_of_the_reference_are_read(shared: Path) -> None:
    single = json.loads((shared / "samples/to_checkpoint_dict_demo.json").read_text())
    arguments = strategy_arguments_from_spec(single, models=Net())
    assert arguments["training_fn"] is default_training_fn
    named = json.loads((shared / "samples/to_spec_dict_named_models.json").read_text())
    models = {"student": Net(), "teacher": Net()}
    arguments = strategy_arguments_from_spec(named, models=models, training_fn=rigs.named_training_fn)
    assert arguments["models"] == models
    assert arguments["optimizer_configs"]["student"][0].optimizer_cls is torch.optim.AdamW
    assert arguments["num_epochs"] == 3
    with pytest.raises(UntrustedPathError, match=r"training_fn: '__main__.named_training_fn'"):
        strategy_arguments_from_spec(named, models=models)
    finetune = json.loads((shared / "samples/to_spec_dict_finetune.json").read_text())
    assert strategy_arguments_from_spec(finetune, models=Net())["num_steps"] == 2
