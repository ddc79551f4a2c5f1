"""Modes, frozen parameters, devices and wrappers: a run leaves everything as it found it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

import nvalchemi_lightning.runtime
from nvalchemi_lightning.errors import ConfigurationError, UnknownNameError
from nvalchemi_lightning.runtime import (
    eval_configured_models,
    evaluating,
    freeze_unconfigured_models,
    iter_qualified_named_parameters,
    move_to_devices,
    named_models,
    rehome_optimizer_state,
    train_configured_models,
    trainable_parameters,
    unwrap_model,
)


class StopError(Exception):
    """Ends a block early."""


class Merging(nn.Module):
    """Like an adapter: merges its weights in eval mode and splits them again in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.merged = False

    def train(self, mode: bool = True) -> Merging:
        self.merged = not mode
        return super().train(mode)


class Owner(nn.Module):
    """A model that merely has an attribute ``module``."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(1, 1)


def tree() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2), nn.Dropout()), nn.Linear(2, 1))


def modes(module: nn.Module) -> list[bool]:
    return [m.training for m in module.modules()]


def flags(module: nn.Module) -> list[bool]:
    return [p.requires_grad for p in module.parameters()]


@pytest.fixture
def models() -> dict[str, nn.Module]:
    return {"student": tree(), "teacher": tree()}


# Modes --------------------------------------------------------------------------------------------------------------


def switch(name: str, model: nn.Module) -> AbstractContextManager[None]:
    return {
        "evaluating": lambda: evaluating(model),
        "eval": lambda: eval_configured_models(model, {"main"}),
        "train": lambda: train_configured_models(model, {"main"}),
        "freeze": lambda: freeze_unconfigured_models(model, {}),
    }[name]()


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(["evaluating", "eval", "train", "freeze"]),
    chosen=st.lists(st.booleans(), min_size=6, max_size=6),
    grads=st.lists(st.booleans(), min_size=6, max_size=6),
    fails=st.booleans(),
)
def test_every_submodule_and_parameter_is_restored(
    name: str, chosen: list[bool], grads: list[bool], fails: bool
) -> None:
    model = tree()
    for module, mode in zip(model.modules(), chosen, strict=True):
        module.training = mode
    for parameter, flag in zip(model.parameters(), grads, strict=True):
        parameter.requires_grad_(flag)
    try:
        with switch(name, model):
            if fails:
                raise StopError
    except StopError:
        pass
    assert modes(model) == chosen
    assert flags(model) == grads


def test_evaluating_and_eval_configured_models_reach_the_whole_tree(models: dict[str, nn.Module]) -> None:
    with evaluating(models["student"]):
        assert not any(modes(models["student"]))
    with eval_configured_models(models, {"student"}):
        assert not any(modes(models["student"]))
        assert all(modes(models["teacher"]))


def test_a_model_in_eval_mode_trains_throughout(models: dict[str, nn.Module]) -> None:
    models["student"].eval()
    models["teacher"].eval()
    with train_configured_models(models, ["student"]):
        assert all(modes(models["student"]))
        assert not any(modes(models["teacher"]))
    assert not any(modes(models["student"]))


def test_a_frozen_batch_norm_stays_in_eval_mode_while_its_model_trains() -> None:
    model = tree()
    model[1].eval()
    with train_configured_models(model, {"main"}):
        assert model.training
        assert not model[1][0].training
    assert not model[1][0].training


def test_what_a_module_does_on_switching_is_undone_too() -> None:
    model = nn.Sequential(Merging(), nn.Linear(1, 1))
    with evaluating(model):
        assert model[0].merged
    assert not model[0].merged


# Frozen parameters --------------------------------------------------------------------------------------------------


def test_models_without_an_optimizer_are_frozen_and_evaluated(models: dict[str, nn.Module]) -> None:
    models["teacher"][0].bias.requires_grad_(False)
    before = flags(models["teacher"])
    with freeze_unconfigured_models(models, {"student": []}):
        assert not any(flags(models["teacher"]))
        assert not any(modes(models["teacher"]))
        assert all(flags(models["student"]))
        assert all(modes(models["student"]))
    assert flags(models["teacher"]) == before


def test_a_parameter_shared_with_a_model_that_trains_is_not_frozen(models: dict[str, nn.Module]) -> None:
    models["teacher"][0] = models["student"][0]
    with freeze_unconfigured_models(nn.ModuleDict(models), {"student"}):
        assert models["student"][0].weight.requires_grad
        assert not models["teacher"][2].weight.requires_grad


def test_filters_choose_by_qualified_name(models: dict[str, nn.Module]) -> None:
    student = models["student"]
    student[2].weight.requires_grad_(False)
    student[0].bias.requires_grad_(False)
    before = {name: p.requires_grad for name, p in iter_qualified_named_parameters(models)}
    with trainable_parameters(
        models,
        trainable=frozenset({"student.0.weight", "student.0.bias"}),
        forced=frozenset({"student.2.weight", "teacher.0.weight"}),
    ):
        on = {name for name, p in iter_qualified_named_parameters(models) if p.requires_grad}
        assert on == {"student.0.weight", "student.2.weight", "teacher.0.weight"}
    assert {name: p.requires_grad for name, p in iter_qualified_named_parameters(models)} == before


def test_without_filters_nothing_changes_and_an_empty_filter_freezes_all() -> None:
    model = tree()
    with trainable_parameters(model):
        assert all(flags(model))
    with trainable_parameters(model, trainable=frozenset()):
        assert not any(flags(model))
    assert all(flags(model))


@pytest.mark.parametrize("role", ["trainable", "forced"])
def test_a_name_that_fits_no_parameter_is_refused_before_anything_changes(role: str) -> None:
    model = tree()
    names = frozenset({"main.0.weight", "main.2.wieght"})
    with (
        pytest.raises(UnknownNameError, match=r"no parameter is called 'main.2.wieght'; did you mean 'main.2.weight'"),
        trainable_parameters(model, **{role: names}),
    ):
        pytest.fail("entered")
    assert all(flags(model))


def test_a_parameter_that_cannot_train_leaves_the_others_as_they_were() -> None:
    model = nn.Linear(1, 1)
    model.register_parameter("count", nn.Parameter(torch.zeros(1, dtype=torch.int64), requires_grad=False))
    with (
        pytest.raises(RuntimeError, match="floating point"),
        trainable_parameters(model, trainable=frozenset(), forced=frozenset({"main.count"})),
    ):
        pytest.fail("entered")
    assert flags(model) == [True, True, False]


# Names and wrappers -------------------------------------------------------------------------------------------------


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_wrappers_are_removed_from_models_and_names() -> None:
    model = nn.Linear(1, 1)
    compiled = torch.compile(model, backend="eager")
    for wrapped in (model, DistributedDataParallel(model), DataParallel(model), compiled, DataParallel(compiled)):
        assert unwrap_model(wrapped) is model
        assert [name for name, _ in iter_qualified_named_parameters(wrapped)] == ["main.weight", "main.bias"]


def test_a_model_that_owns_a_module_is_not_a_wrapper() -> None:
    model = Owner()
    assert unwrap_model(model) is model
    assert next(iter_qualified_named_parameters({"x": model}))[0] == "x.module.weight"


def test_unwrapping_does_not_import_the_compiler() -> None:
    code = (
        "import sys, torch.nn as nn\nfrom nvalchemi_lightning.runtime import unwrap_model\n"
        "unwrap_model(nn.Linear(1, 1))\nprint('torch._dynamo.eval_frame' in sys.modules)"
    )
    root = Path(nvalchemi_lightning.runtime.__file__).parents[1]
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_named_models(models: dict[str, nn.Module]) -> None:
    assert named_models(models) == models
    assert named_models(nn.ModuleDict(models)) == models
    assert list(named_models(models["student"])) == ["main"]


# Devices ------------------------------------------------------------------------------------------------------------


def device_types(models: dict[str, nn.Module]) -> list[str]:
    return [next(model.parameters()).device.type for model in models.values()]


def test_one_device_serves_all_models_and_several_go_one_each(models: dict[str, nn.Module]) -> None:
    move_to_devices(models, ["meta"])
    assert device_types(models) == ["meta", "meta"]
    fresh = {"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)}
    move_to_devices(nn.ModuleDict(fresh), [torch.device("cpu"), "meta"])
    assert device_types(fresh) == ["cpu", "meta"]


@pytest.mark.parametrize(
    ("make", "count", "match"),
    [
        (tree, 2, r"got 2 devices for 1 models \(main\); give one device, or one per model"),
        (lambda: {"a": tree(), "b": tree()}, 3, r"got 3 devices for 2 models \(a, b\)"),
        (lambda: {"a": tree()}, 0, "got 0 devices for 1 models"),
    ],
)
def test_a_wrong_number_of_devices_is_refused(make: Callable[[], Any], count: int, match: str) -> None:
    models = make()
    with pytest.raises(ConfigurationError, match=match):
        move_to_devices(models, ["meta"] * count)
    assert all(p.device.type == "cpu" for _, p in iter_qualified_named_parameters(models))


class Pair(NamedTuple):
    a: torch.Tensor
    b: list[Any]


@pytest.mark.parametrize(
    ("group", "step_device"), [({}, "cpu"), ({"capturable": True}, "meta"), ({"fused": True}, "meta")]
)
def test_optimizer_state_follows_its_parameter(group: dict[str, bool], step_device: str) -> None:
    here, there = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, device="meta"))
    optimizer = torch.optim.SGD([here, there], lr=0.1)
    optimizer.param_groups[0].update(group)
    one = torch.ones(1)
    optimizer.state[there] = {
        "step": torch.tensor(1.0),
        "nested": {"x": [one, (one, 3)], "pair": Pair(one, [one])},
        "count": 4,
    }
    optimizer.state[here] = {"step": torch.tensor(2.0), "average": one}
    rehome_optimizer_state(optimizer)
    state = optimizer.state[there]
    assert state["step"].device.type == step_device
    assert state["nested"]["x"][0].device.type == "meta"
    assert state["nested"]["x"][1][0].device.type == "meta"
    assert state["nested"]["x"][1][1] == 3
    assert isinstance(state["nested"]["pair"], Pair)
    assert state["nested"]["pair"].b[0].device.type == "meta"
    assert state["count"] == 4
    assert optimizer.state[here]["average"] is one


def test_an_optimizer_without_state_stays_without() -> None:
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(1))])
    rehome_optimizer_state(optimizer)
    assert not optimizer.state
