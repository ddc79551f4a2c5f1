"""Parameters in groups by name, and divided among several optimizers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, AdamW, Optimizer, Rprop
from torch.optim.lr_scheduler import StepLR

from nvalchemi_lightning.errors import ConfigurationError, ConfigurationTypeError, UnknownNameError
from nvalchemi_lightning.optim import (
    OptimizerConfig,
    ParamGroup,
    setup_optimizers,
    step_optimizers,
)
from nvalchemi_lightning.specs import create_model_spec_from_json


class Potential(nn.Module):
    """Parameters of every kind: an embedding, weights, biases, a scale, a number."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 1))
        self.shift = nn.Parameter(torch.zeros(()))


SLOW = ParamGroup(pattern="*.embedding.*", name="embedding", lr=1e-4, weight_decay=0.0)


def contents(optimizer: Optimizer, model: nn.Module) -> dict[str, list[str]]:
    """Return the names of the parameters of every group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {group["name"]: [names[id(p)] for p in group["params"]] for group in optimizer.param_groups}


def built(model: nn.Module, **fields: Any) -> Optimizer:
    ((optimizer, _),) = setup_optimizers(model, {"main": [OptimizerConfig(**fields)]})["main"]
    return optimizer


def options(optimizer: Optimizer) -> dict[str, tuple[float, float]]:
    return {group["name"]: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups}


# Groups by pattern --------------------------------------------------------------------------------------------------


def test_the_first_match_wins_and_the_rest_is_the_default_group() -> None:
    model = Potential()
    last = ParamGroup(pattern="main.layers.2.*", lr=1e-2)
    layers = ParamGroup(pattern="*.layers.*", name="layers", weight_decay=0.5)
    optimizer = built(model, lr=1e-3, weight_decay=0.1, param_groups=[SLOW, last, layers])
    assert contents(optimizer, model) == {
        "default": ["shift"],
        "embedding": ["embedding.weight"],
        "main.layers.2.*": ["layers.2.weight", "layers.2.bias"],
        "layers": ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"],
    }
    assert options(optimizer) == {
        "default": (1e-3, 0.1),
        "embedding": (1e-4, 0.0),
        "main.layers.2.*": (1e-2, 0.1),
        "layers": (1e-3, 0.5),
    }


def test_without_groups_there_is_one_without_a_name() -> None:
    """Its state is that of the reference."""
    assert "name" not in built(Potential()).param_groups[0]


def test_a_default_group_without_parameters_is_left_out() -> None:
    optimizer = built(Potential(), param_groups=[SLOW, ParamGroup(pattern="*", name="rest")])
    assert [group["name"] for group in optimizer.param_groups] == ["embedding", "rest"]


def test_patterns_are_case_sensitive_and_know_the_model() -> None:
    models = {"student": Potential(), "teacher": Potential()}
    configs = {"teacher": [OptimizerConfig(param_groups=[ParamGroup(pattern="teacher.shift")])]}
    ((optimizer, _),) = setup_optimizers(models, configs)["teacher"]
    assert optimizer.param_groups[1]["params"] == [models["teacher"].shift]
    with pytest.raises(
        UnknownNameError, match=r"param_groups\[0\]: the pattern 'main\.Shift' matches no parameter; na"
    ):
        built(Potential(), param_groups=[ParamGroup(pattern="main.Shift")])


def test_a_pattern_without_a_parameter_lists_the_nearest_names() -> None:
    groups = [SLOW, ParamGroup(pattern="*.layers.0.wieght")]
    with pytest.raises(UnknownNameError, match=r"param_groups\[1\]: .*the nearest ones 'main\.layers\.0\.weight', "):
        built(Potential(), param_groups=groups)


def test_a_pattern_that_earlier_ones_leave_nothing_is_refused() -> None:
    groups = [ParamGroup(pattern="*.layers.*"), ParamGroup(pattern="*.layers.0.*")]
    message = (
        r"param_groups\[1\]: earlier patterns take all 2 parameters that '\*\.layers\.0\.\*' matches, such as "
        r"'main\.layers\.0\.weight' by '\*\.layers\.\*'; the first match wins, so put the narrower pattern first"
    )
    with pytest.raises(ConfigurationError, match=message):
        built(Potential(), param_groups=groups)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"param_groups": [{"pattern": "*", "lr": -1e-3}]}, r"param_groups\.0\.lr\n.*greater than or equal to 0"),
        ({"param_groups": [{"pattern": "*", "lr": float("inf")}]}, r"param_groups\.0\.lr\n.*finite"),
        ({"param_groups": [{"pattern": "*", "weight_decay": -1}]}, r"param_groups\.0\.weight_decay\n.*greater than"),
        ({"param_groups": [{"pattern": ""}]}, r"param_groups\.0\.pattern\n.*at least 1 character"),
        ({"param_groups": [{"patern": "*"}]}, r"ParamGroup has no field 'patern'; did you mean 'pattern'"),
        ({"param_groups": [{"pattern": "*", "lr": "fast"}]}, r"param_groups\.0\.lr\n.*valid number"),
        ({"param_groups": "*"}, r"param_groups\n.*valid tuple"),
        ({"param_groups": [SLOW, SLOW]}, "two param_groups are called 'embedding'; give each a name of its own"),
        ({"no_decay": "bias"}, r"no_decay\n.*'bias_and_scale'"),
        ({"parameters": []}, r"parameters\n.*at least 1 item"),
        (
            {"optimizer_cls": Rprop, "param_groups": [SLOW]},
            "Rprop has no weight_decay, which the group 'embedding' sets",
        ),
        (
            {"optimizer_cls": Rprop, "no_decay": "bias_and_scale"},
            "Rprop has no weight_decay, which the group 'no_decay",
        ),
    ],
)
def test_what_cannot_work_is_refused_at_construction(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**fields)


class Plain(SGD):
    """A user's optimizer; what its groups may set is known when it is built."""

    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)
        del self.defaults["weight_decay"]


def test_an_option_that_a_users_optimizer_lacks_is_refused_when_it_is_built() -> None:
    with pytest.raises(ConfigurationError, match="Plain has no weight_decay, which the group 'embedding' sets; leave"):
        built(Potential(), optimizer_cls=Plain, param_groups=[SLOW])


def test_groups_need_names() -> None:
    with pytest.raises(ConfigurationTypeError, match="param_groups go by name; build them from iter_qualified_named_"):
        OptimizerConfig(param_groups=[SLOW]).build(Potential().parameters())


# Weight decay -------------------------------------------------------------------------------------------------------


def test_no_decay_for_what_has_fewer_than_two_dimensions() -> None:
    model = Potential()
    optimizer = built(model, lr=1e-3, weight_decay=0.1, no_decay="bias_and_scale")
    vectors = ["shift", "layers.0.bias", "layers.1.weight", "layers.1.bias", "layers.2.bias"]
    assert contents(optimizer, model) == {
        "default": ["embedding.weight", "layers.0.weight", "layers.2.weight"],
        "default/no_decay": vectors,
    }
    assert options(optimizer) == {"default": (1e-3, 0.1), "default/no_decay": (1e-3, 0.0)}
    without_names, _ = OptimizerConfig(no_decay="bias_and_scale").build(model.parameters())
    assert [len(group["params"]) for group in without_names.param_groups] == [3, 5]


def test_no_decay_holds_inside_every_group() -> None:
    model = Potential()
    groups = [SLOW, ParamGroup(pattern="*.layers.2.*", name="readout", lr=1e-2, weight_decay=0.5)]
    optimizer = built(model, lr=1e-3, weight_decay=0.1, param_groups=groups, no_decay="bias_and_scale")
    assert options(optimizer) == {
        "default": (1e-3, 0.1),
        "default/no_decay": (1e-3, 0.0),
        "embedding": (1e-4, 0.0),
        "readout": (1e-2, 0.5),
        "readout/no_decay": (1e-2, 0.0),
    }


@pytest.mark.parametrize("zero_gradient", [None, torch.zeros_like])
def test_decay_by_formula(zero_gradient: Callable[[Any], Any] | None) -> None:
    """AdamW without a gradient's pull: w (1 - lr wd) per step; a parameter without a gradient stays."""
    model = nn.Linear(2, 1)
    groups = [ParamGroup(pattern="*.bias", lr=0.5, weight_decay=0.2)]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = built(model, lr=0.1, weight_decay=0.3, param_groups=groups)
    for parameter in model.parameters():
        parameter.grad = zero_gradient(parameter) if zero_gradient else None
    for _ in range(3):
        step_optimizers([optimizer])
    kept = {"weight": (1 - 0.1 * 0.3) ** 3, "bias": (1 - 0.5 * 0.2) ** 3} if zero_gradient else {}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name] * kept.get(name, 1.0))


def test_b17_frozen_parameters_are_in_no_group() -> None:
    model = Potential()
    model.embedding.requires_grad_(False)
    model.layers[0].requires_grad_(False)
    optimizer = built(model, param_groups=[SLOW], no_decay="bias_and_scale")
    held = [name for names in contents(optimizer, model).values() for name in names]
    assert sorted(held) == ["layers.1.bias", "layers.1.weight", "layers.2.bias", "layers.2.weight", "shift"]
    assert "embedding" not in contents(optimizer, model)


def test_a_filter_leaves_parameters_out_of_groups_but_patterns_may_name_them() -> None:
    model = Potential()
    configs = {"main": [OptimizerConfig(param_groups=[SLOW])]}
    ((optimizer, _),) = setup_optimizers(model, configs, allowed_parameter_names={"main.shift"})["main"]
    assert contents(optimizer, model) == {"default": ["shift"]}


# Recipes ------------------------------------------------------------------------------------------------------------


def through_json(config: OptimizerConfig) -> OptimizerConfig:
    return OptimizerConfig.from_spec(create_model_spec_from_json(json.loads(config.to_spec().model_dump_json())))


rate = st.none() | st.floats(0, 10)
group = st.builds(
    ParamGroup,
    pattern=st.text("ab*.?[]", min_size=1),
    name=st.none() | st.text("xyz", min_size=1),
    lr=rate,
    weight_decay=rate,
)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(group, max_size=3, unique_by=lambda each: each.label),
    st.sampled_from([None, "bias_and_scale"]),
    st.none() | st.lists(st.text("ab*", min_size=1), min_size=1, max_size=2),
)
def test_any_recipe_comes_back_equal(groups: list[ParamGroup], no_decay: Any, parameters: Any) -> None:
    config = OptimizerConfig(lr=0.1, param_groups=groups, no_decay=no_decay, parameters=parameters)
    assert through_json(config) == config


def test_a_recipe_without_groups_is_one_of_the_reference() -> None:
    form = OptimizerConfig(lr=0.1).to_spec().model_dump()
    assert not {"param_groups", "no_decay", "parameters"} & set(form)
    grouped = OptimizerConfig(param_groups=[SLOW]).to_spec().model_dump()
    assert grouped["param_groups"] == [
        {"pattern": "*.embedding.*", "name": "embedding", "lr": 1e-4, "weight_decay": 0.0}
    ]


# Several optimizers on one model (B-26) -------------------------------------------------------------------------------


def test_configs_that_do_not_choose_hold_everything_each() -> None:
    model = Potential()
    pairs = setup_optimizers(model, {"main": [OptimizerConfig(), OptimizerConfig(optimizer_cls=SGD)]})["main"]
    for optimizer, _ in pairs:
        assert optimizer.param_groups[0]["params"] == list(model.parameters())


def test_configs_that_choose_divide_the_parameters() -> None:
    model = Potential()
    configs = [
        OptimizerConfig(optimizer_cls=torch.optim.Muon, parameters=["*.layers.0.weight", "*.layers.2.weight"]),
        OptimizerConfig(
            optimizer_cls=SGD, parameters="*.layers.*", scheduler_cls=StepLR, scheduler_kwargs={"step_size": 1}
        ),
        OptimizerConfig(param_groups=[SLOW]),
    ]
    (muon, _), (sgd, schedule), (adamw, _) = setup_optimizers(model, {"main": configs})["main"]
    assert muon.param_groups[0]["params"] == [model.layers[0].weight, model.layers[2].weight]
    held = [model.layers[0].bias, *model.layers[1].parameters(), model.layers[2].bias]
    assert sgd.param_groups[0]["params"] == held
    assert schedule is not None
    assert contents(adamw, model) == {"default": ["shift"], "embedding": ["embedding.weight"]}
    assert (type(muon), type(sgd), type(adamw)) == (torch.optim.Muon, SGD, AdamW)


@pytest.mark.parametrize(
    ("choices", "error", "message"),
    [
        (
            ["*.layer.*"],
            UnknownNameError,
            r"optimizer_configs\['main'\]\[0\]\.parameters: the pattern '\*\.layer\.\*' ma",
        ),
        (
            ["*.layers.*"],
            ConfigurationError,
            r"2 parameters that train belong to no optimizer, such as 'main\.shift'; a",
        ),
        (
            ["*", "*.shift"],
            ConfigurationError,
            r"\['main'\]\[1\] has no parameter to train: what its globs match is fro",
        ),
        (["*.shift", "*", None], ConfigurationError, r"\['main'\]\[2\] has no parameter to train"),
    ],
)
def test_choices_that_do_not_divide_are_refused(choices: list[Any], error: type, message: str) -> None:
    configs = [OptimizerConfig(parameters=choice) for choice in choices]
    with pytest.raises(error, match=message):
        setup_optimizers(Potential(), {"main": configs})


def test_frozen_parameters_may_be_left_over() -> None:
    model = Potential()
    model.embedding.requires_grad_(False)
    model.shift.requires_grad_(False)
    ((optimizer, _),) = setup_optimizers(model, {"main": [OptimizerConfig(parameters="*.layers.*")]})["main"]
    assert optimizer.param_groups[0]["params"] == list(model.layers.parameters())
