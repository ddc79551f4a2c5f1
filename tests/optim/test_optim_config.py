"""OptimizerConfig: what it accepts, what it refuses, what it builds, and its recipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from nvalchemi_lightning.errors import ConfigurationTypeError, UnknownNameError, UntrustedPathError
from nvalchemi_lightning.optim import OptimizerConfig, uses_validation_metric
from nvalchemi_lightning.specs import create_model_spec, create_model_spec_from_json, trust


@pytest.fixture
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["nvalchemi_lightning.specs.trust"], "_added", {})
    trust(__name__)


@pytest.fixture
def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))]


class Sgd2(SGD):
    """A user's optimizer that forwards its keywords; the name of its first parameter is its own."""

    def __init__(self, weights, scale=1.0, **kwargs):
        super().__init__(weights, **kwargs)
        self.scale = scale


class Plateau2(ReduceLROnPlateau):
    """A user's metric-driven scheduler."""


def relative_error(summary: Mapping[str, Any]) -> float:
    return summary["total_loss"] / 2


def halved(step: int) -> float:
    return 0.5**step


def through_json(config: OptimizerConfig) -> OptimizerConfig:
    return OptimizerConfig.from_spec(create_model_spec_from_json(json.loads(config.to_spec().model_dump_json())))


def refusal(caught: pytest.ExceptionInfo[ValidationError]) -> BaseException:
    """Return the error of ours inside pydantic's."""
    error: BaseException = caught.value.errors()[0]["ctx"]["error"]
    return error


# Shorthand ----------------------------------------------------------------------------------------------------------


def test_lr_alone_is_adamw(parameters: list[nn.Parameter]) -> None:
    config = OptimizerConfig(lr=1e-4)
    optimizer, scheduler = config.build(parameters)
    assert type(optimizer) is AdamW
    assert optimizer.param_groups[0]["lr"] == 1e-4
    assert optimizer.param_groups[0]["weight_decay"] == 1e-2
    assert scheduler is None
    assert (config.lr, config.weight_decay, config.optimizer_kwargs) == (1e-4, None, {"lr": 1e-4})


def test_shorthand_folds_into_the_keywords_and_leaves_the_callers_dict_alone() -> None:
    given = {"betas": (0.9, 0.95)}
    config = OptimizerConfig(lr=0.1, weight_decay=0, optimizer_kwargs=given)
    assert config.optimizer_kwargs == {"betas": (0.9, 0.95), "lr": 0.1, "weight_decay": 0.0}
    assert given == {"betas": (0.9, 0.95)}
    assert OptimizerConfig(optimizer_kwargs={"lr": 0.3}).lr == 0.3
    assert OptimizerConfig(lr=None).optimizer_kwargs == {}
    assert OptimizerConfig() == OptimizerConfig(optimizer_cls=AdamW)


def test_shorthand_and_keyword_together_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"lr=0.1 and optimizer_kwargs\['lr'\]=0.2 are both given; keep one"):
        OptimizerConfig(lr=0.1, optimizer_kwargs={"lr": 0.2})


def test_an_unknown_field_names_the_nearest_one() -> None:
    with pytest.raises(ValidationError, match="has no field 'optimiser_cls'; did you mean 'optimizer_cls'") as caught:
        OptimizerConfig(optimiser_cls=Adam)
    assert isinstance(refusal(caught), UnknownNameError)
    with pytest.raises(ValidationError, match=r"has no field 'learning_rate' \(fields: lr, "):
        OptimizerConfig(learning_rate=0.1)


def test_a_configuration_does_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        OptimizerConfig().optimizer_cls = SGD


# Values (B90) -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["1e-4", "1.e-4", ".0001", "0.0001", 1e-4])
def test_b90_text_that_is_a_number_becomes_one(text: Any) -> None:
    value = OptimizerConfig(lr=text).optimizer_kwargs["lr"]
    assert value == 1e-4
    assert type(value) is float


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"lr": "abc"}, r"optimizer_kwargs\['lr'\] is 'abc'; give float"),
        ({"lr": True}, r"optimizer_kwargs\['lr'\] is True; give .*, not a bool"),
        ({"lr": [0.1]}, r"optimizer_kwargs\['lr'\] is \[0.1\]; give"),
        ({"optimizer_kwargs": {"betas": 0.9}}, r"optimizer_kwargs\['betas'\] is 0.9; give tuple"),
        ({"optimizer_kwargs": {"betas": (0.9,)}}, r"optimizer_kwargs\['betas'\] is \(0.9,\); give tuple"),
        ({"optimizer_kwargs": {"amsgrad": "perhaps"}}, r"optimizer_kwargs\['amsgrad'\] is 'perhaps'; give bool"),
        ({"optimizer_kwargs": [("lr", 1)]}, "valid dictionary"),
        (
            {"scheduler_cls": StepLR, "scheduler_kwargs": {"step_size": 0.5}},
            r"scheduler_kwargs\['step_size'\] is 0.5; give int",
        ),
        (
            {"scheduler_cls": ReduceLROnPlateau, "scheduler_kwargs": {"mode": "low"}},
            r"scheduler_kwargs\['mode'\] is 'low'; give .*'min', 'max'",
        ),
    ],
)
def test_b90_a_wrong_type_is_refused_with_key_value_and_type(kwargs: dict[str, Any], match: str) -> None:
    with pytest.raises(ValidationError, match=match):
        OptimizerConfig(**kwargs)


def test_lists_of_json_become_the_tuples_that_torch_wants(parameters: list[nn.Parameter]) -> None:
    config = OptimizerConfig(optimizer_kwargs={"betas": [0.8, 0.9]})
    assert config.build(parameters)[0].param_groups[0]["betas"] == (0.8, 0.9)


# Classes and keywords -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        (
            {"optimizer_cls": nn.Linear},
            "optimizer_cls must be a class derived from Optimizer, .*; got <class 'torch.nn",
        ),
        ({"optimizer_cls": 3}, "optimizer_cls must be a class derived from Optimizer"),
        ({"optimizer_cls": SGD([torch.zeros(1)])}, "optimizer_cls must be a class derived from Optimizer"),
        ({"optimizer_cls": "torch.optim.Nope"}, "optimizer_cls must resolve to an importable class: .*has no 'Nope'"),
        ({"optimizer_cls": "torch.nn.Linear"}, "optimizer_cls must resolve .*is not a class derived from Optimizer"),
        ({"scheduler_cls": AdamW}, "scheduler_cls must be a class derived from LRScheduler"),
        (
            {"scheduler_cls": "torch.optim.AdamW"},
            "scheduler_cls must resolve .*is not a class derived from LRScheduler",
        ),
        (
            {"optimizer_kwargs": {"bogus": 1}},
            r"Invalid optimizer kwargs for AdamW: \['bogus'\]; it takes amsgrad, betas",
        ),
        ({"optimizer_kwargs": {"beta": 1}}, r"Invalid optimizer kwargs for AdamW: \['beta'\]; did you mean 'betas'"),
        ({"optimizer_kwargs": {"params": []}}, r"Invalid optimizer kwargs for AdamW: \['params'\]"),
        ({"scheduler_kwargs": {"gamma": 1}}, r"scheduler_kwargs \['gamma'\] need a scheduler_cls"),
        ({"scheduler_cls": StepLR}, "scheduler_kwargs for StepLR: missing a required argument: 'step_size'"),
        (
            {"scheduler_cls": StepLR, "scheduler_kwargs": {"step": 1}},
            r"Invalid scheduler kwargs for StepLR: \['step'\]; did you mean 'step_size'",
        ),
        (
            {"scheduler_cls": StepLR, "scheduler_kwargs": {"optimizer": None, "step_size": 1}},
            r"Invalid scheduler kwargs for StepLR: \['optimizer'\]",
        ),
        ({"scheduler_metric_adapter": "loss"}, "scheduler_metric_adapter='loss' needs a scheduler_cls such as Reduce"),
        ({"scheduler_cls": ReduceLROnPlateau, "scheduler_metric_adapter": 3}, "scheduler_metric_adapter"),
        (
            {"scheduler_cls": StepLR, "scheduler_kwargs": {"step_size": 1}, "scheduler_metric_adapter": "total_loss"},
            "needs a scheduler_cls such as ReduceLROnPlateau; StepLR steps once per optimizer step and reads none",
        ),
    ],
)
def test_what_cannot_work_is_refused_at_construction(kwargs: dict[str, Any], match: str) -> None:
    with pytest.raises(ValidationError, match=match):
        OptimizerConfig(**kwargs)


def test_an_untrusted_class_path_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"'subprocess\.Popen' lies outside the trusted packages") as caught:
        OptimizerConfig(optimizer_cls="subprocess.Popen", optimizer_kwargs={"args": ["true"]})
    assert isinstance(refusal(caught), UntrustedPathError)


def test_a_users_optimizer_may_forward_keywords_and_name_its_parameters(parameters: list[nn.Parameter]) -> None:
    optimizer, _ = OptimizerConfig(optimizer_cls=Sgd2, lr=0.5, optimizer_kwargs={"scale": 2}).build(parameters)
    assert (optimizer.scale, optimizer.param_groups[0]["lr"]) == (2, 0.5)
    with pytest.raises(ValidationError, match=r"Invalid optimizer kwargs for Sgd2: \['weights'\]"):
        OptimizerConfig(optimizer_cls=Sgd2, optimizer_kwargs={"weights": []})


# Building and recipes -----------------------------------------------------------------------------------------------

CONFIGS = [
    ({"lr": 0.1}, AdamW, type(None)),
    ({"optimizer_cls": Adam, "lr": 1e-3, "optimizer_kwargs": {"betas": (0.8, 0.9)}}, Adam, type(None)),
    ({"optimizer_cls": "torch.optim.sgd.SGD", "lr": 1e-3, "optimizer_kwargs": {"momentum": 0.9}}, SGD, type(None)),
    ({"scheduler_cls": StepLR, "scheduler_kwargs": {"step_size": 2, "gamma": 0.5}}, AdamW, StepLR),
    ({"scheduler_cls": MultiStepLR, "scheduler_kwargs": {"milestones": [2, 4]}}, AdamW, MultiStepLR),
    (
        {"scheduler_cls": "torch.optim.lr_scheduler.CosineAnnealingLR", "scheduler_kwargs": {"T_max": 5}},
        AdamW,
        CosineAnnealingLR,
    ),
    ({"scheduler_cls": OneCycleLR, "scheduler_kwargs": {"max_lr": 0.1, "total_steps": 5}}, AdamW, OneCycleLR),
    ({"scheduler_cls": LambdaLR, "scheduler_kwargs": {"lr_lambda": halved}}, AdamW, LambdaLR),
    (
        {"scheduler_cls": ReduceLROnPlateau, "scheduler_kwargs": {"mode": "min"}, "scheduler_metric_adapter": "x"},
        AdamW,
        ReduceLROnPlateau,
    ),
    ({"scheduler_cls": ReduceLROnPlateau, "scheduler_metric_adapter": relative_error}, AdamW, ReduceLROnPlateau),
    (
        {
            "scheduler_cls": SequentialLR,
            "scheduler_kwargs": {
                "schedulers": [
                    create_model_spec(LinearLR, start_factor=0.1, total_iters=2),
                    create_model_spec(CosineAnnealingLR, T_max=4),
                ],
                "milestones": [2],
            },
        },
        AdamW,
        SequentialLR,
    ),
    (
        {
            "scheduler_cls": ChainedScheduler,
            "scheduler_kwargs": {"schedulers": (create_model_spec(ConstantLR), create_model_spec(StepLR, step_size=1))},
        },
        AdamW,
        ChainedScheduler,
    ),
]


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize(("kwargs", "optimizer_cls", "scheduler_cls"), CONFIGS)
def test_configurations_build_and_their_recipes_come_back(
    kwargs: dict[str, Any], optimizer_cls: type, scheduler_cls: type, parameters: list[nn.Parameter]
) -> None:
    config = OptimizerConfig(**kwargs)
    optimizer, scheduler = config.build(parameters)
    assert type(optimizer) is optimizer_cls
    assert type(scheduler) is scheduler_cls
    again, scheduler_again = through_json(config).build(parameters)
    assert again.param_groups[0].keys() == optimizer.param_groups[0].keys()
    assert rates(optimizer, scheduler) == rates(again, scheduler_again)
    assert through_json(config).scheduler_metric_adapter == config.scheduler_metric_adapter


def rates(optimizer: Optimizer, scheduler: LRScheduler | None) -> list[float]:
    """Return the learning rates of four steps."""
    found = []
    for _ in range(4):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step(1.0)
        elif scheduler is not None:
            scheduler.step()
    return found


def test_schedulers_inside_a_sequence_drive_the_same_optimizer(parameters: list[nn.Parameter]) -> None:
    config = OptimizerConfig(lr=1.0, **CONFIGS[-2][0])
    optimizer, scheduler = config.build(parameters)
    assert rates(optimizer, scheduler) == pytest.approx([0.1, 0.55, 1.0, 0.5 * (1 + 2**-0.5)])


@settings(deadline=None, max_examples=50)
@given(
    lr=st.floats(0, 10),
    decay=st.floats(0, 1),
    betas=st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)),
    step_size=st.integers(1, 100),
    gamma=st.floats(allow_nan=False, allow_infinity=False),
)
def test_any_recipe_comes_back_equal(
    lr: float, decay: float, betas: tuple[float, float], step_size: int, gamma: float
) -> None:
    config = OptimizerConfig(
        lr=lr,
        weight_decay=decay,
        optimizer_kwargs={"betas": betas},
        scheduler_cls=StepLR,
        scheduler_kwargs={"step_size": step_size, "gamma": gamma},
    )
    assert through_json(config) == config


def test_a_recipe_that_cannot_be_stored_is_refused_with_its_key() -> None:
    config = OptimizerConfig(scheduler_cls=LambdaLR, scheduler_kwargs={"lr_lambda": lambda step: 1.0})
    with pytest.raises(ConfigurationTypeError, match=r"scheduler_kwargs\['lr_lambda'\]: .*not an importable callable"):
        config.to_spec()
    config = OptimizerConfig(scheduler_cls=ReduceLROnPlateau, scheduler_metric_adapter=lambda summary: 0.0)
    with pytest.raises(ConfigurationTypeError, match=r"scheduler_metric_adapter: .*not an importable callable"):
        config.to_spec()


def test_from_spec_refuses_the_recipe_of_something_else() -> None:
    with pytest.raises(ConfigurationTypeError, match=r"the spec builds torch\.nn.*Linear, not an OptimizerConfig"):
        OptimizerConfig.from_spec(create_model_spec(nn.Linear, in_features=1, out_features=1))


def test_the_json_schema_and_dump_are_plain(shared: Path) -> None:
    properties = OptimizerConfig.model_json_schema()["properties"]
    assert properties["optimizer_cls"] == {"default": "torch.optim.AdamW", "title": "Optimizer Cls", "type": "string"}
    assert set(properties) == set(OptimizerConfig.model_fields)
    assert json.loads(OptimizerConfig(lr=0.1, scheduler_cls=None).model_dump_json()) == {
        "optimizer_cls": "torch.optim.adamw.AdamW",
        "optimizer_kwargs": {"lr": 0.1},
        "scheduler_cls": None,
        "scheduler_kwargs": {},
        "scheduler_metric_adapter": None,
        "parameters": None,
        "param_groups": [],
        "no_decay": None,
    }


# Frozen parameters (B17) and metric-driven schedulers (B51) -----------------------------------------------------------


def test_b17_frozen_parameters_never_enter_an_optimizer(parameters: list[nn.Parameter]) -> None:
    parameters[1].requires_grad_(False)
    optimizer, _ = OptimizerConfig(weight_decay=0.1).build(parameters)
    assert [p for group in optimizer.param_groups for p in group["params"]] == [parameters[0]]


@pytest.mark.parametrize(
    ("scheduler_cls", "expected"), [(None, False), (StepLR, False), (ReduceLROnPlateau, True), (Plateau2, True)]
)
def test_b51_uses_validation_metric(scheduler_cls: type | None, expected: bool) -> None:
    assert uses_validation_metric(scheduler_cls) is expected


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    with pytest.raises(ValidationError, match="LBFGS evaluates the loss several times per step"):
        OptimizerConfig(optimizer_cls=torch.optim.LBFGS)


@pytest.mark.parametrize(("value", "message"), [(-1.0, "Invalid learning rate: -1.0"), ("fast", "give float")])
def test_values_that_the_optimizer_refuses_are_refused_at_once(value: object, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        OptimizerConfig(lr=value)
