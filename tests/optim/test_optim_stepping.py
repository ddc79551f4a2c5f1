"""Building the optimizers of a run, zeroing and stepping."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from nvalchemi_lightning.errors import ConfigurationError, ConfigurationTypeError, LabelNotFoundError, UnknownNameError
from nvalchemi_lightning.optim import (
    OptimizerConfig,
    setup_optimizers,
    step_lr_schedulers,
    step_metric_schedulers,
    step_optimizers,
    zero_gradients,
)


def held(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def plateau(patience: int = 0, **kwargs: Any) -> tuple[torch.optim.Optimizer, ReduceLROnPlateau]:
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    return optimizer, ReduceLROnPlateau(optimizer, patience=patience, factor=0.5, **kwargs)


@pytest.fixture
def models() -> dict[str, nn.Module]:
    return {"student": nn.Linear(2, 2), "teacher": nn.Linear(2, 2)}


@pytest.mark.parametrize("as_module", [False, True])
def test_optimizers_are_built_per_model_in_order(models: dict[str, nn.Module], as_module: bool) -> None:
    built = setup_optimizers(
        nn.ModuleDict(models) if as_module else models,
        {
            "teacher": [OptimizerConfig(lr=0.1)],
            "student": [
                OptimizerConfig(optimizer_cls=SGD, scheduler_cls=StepLR, scheduler_kwargs={"step_size": 1}),
                OptimizerConfig(),
            ],
        },
    )
    assert list(built) == ["teacher", "student"]
    (sgd, steps), (adamw, none) = built["student"]
    assert (type(sgd), type(steps), type(adamw), none) == (SGD, StepLR, AdamW, None)
    assert held(sgd) == held(adamw) == list(models["student"].parameters())
    assert held(built["teacher"][0][0]) == list(models["teacher"].parameters())


def test_one_bare_model_is_main() -> None:
    model = nn.Linear(1, 1)
    assert held(setup_optimizers(model, {"main": [OptimizerConfig()]})["main"][0][0]) == list(model.parameters())


def test_the_filter_and_requires_grad_both_decide(models: dict[str, nn.Module]) -> None:
    student = models["student"]
    configs = {"student": [OptimizerConfig()]}
    allowed = setup_optimizers(models, configs, allowed_parameter_names={"student.weight", "teacher.bias"})
    assert held(allowed["student"][0][0]) == [student.weight]
    student.weight.requires_grad_(False)
    assert held(setup_optimizers(models, configs)["student"][0][0]) == [student.bias]


def test_b17_weight_decay_leaves_frozen_parameters_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ((optimizer, _),) = setup_optimizers(model, {"main": [OptimizerConfig(lr=0.1, weight_decay=0.1)]})["main"]
    for _ in range(10):
        zero_gradients([optimizer])
        model(torch.ones(4, 2)).sum().backward()
        step_optimizers([optimizer])
    after = model.state_dict()
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert changed == {"2.weight", "2.bias"}
    assert len(optimizer.state) == 2


@pytest.mark.parametrize(
    ("key", "match"),
    [
        (
            "studnet",
            r"has key 'studnet', not present in models; did you mean 'student'\?; available model keys: \['stud",
        ),
        ("main", r"has key 'main', not present in models; available model keys: \['student', 'teacher'\]"),
    ],
)
def test_an_unknown_model_is_refused(models: dict[str, nn.Module], key: str, match: str) -> None:
    with pytest.raises(UnknownNameError, match=match):
        setup_optimizers(models, {key: [OptimizerConfig()]})


def test_a_model_without_trainable_parameters_is_refused(models: dict[str, nn.Module]) -> None:
    models["student"].requires_grad_(False)
    with pytest.raises(
        ConfigurationError, match=r"'student' has no trainable parameters \(requires_grad=True\)\. Unfree"
    ):
        setup_optimizers(models, {"student": [OptimizerConfig()]})
    with pytest.raises(ConfigurationError, match=r"\(requires_grad=True after optimizer parameter filtering\)"):
        setup_optimizers(models, {"teacher": [OptimizerConfig()]}, allowed_parameter_names=["teacher.scale"])


def test_zeroing_drops_the_gradients() -> None:
    weight = torch.ones(1, requires_grad=True)
    weight.grad = torch.ones(1)
    zero_gradients([SGD([weight])])
    assert weight.grad is None


def test_time_based_schedulers_step_and_the_others_wait() -> None:
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    _, metric_driven = plateau()
    step_optimizers([optimizer])
    step_lr_schedulers(iter([None, scheduler, metric_driven]))
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert metric_driven.last_epoch == 0


def test_b51_each_metric_scheduler_steps_once_per_validation_with_its_own_metric() -> None:
    first, first_schedule = plateau()
    second, second_schedule = plateau(mode="max")
    third, third_schedule = plateau()
    other = StepLR(SGD([torch.zeros(1, requires_grad=True)]), step_size=1)
    adapters = [None, "score", lambda summary: summary["total_loss"] - 1, "ignored"]
    for total, score in ((2.0, torch.tensor(1.0)), (2.0, torch.tensor(3.0))):
        step_metric_schedulers(
            [first_schedule, second_schedule, third_schedule, other], adapters, {"total_loss": total, "score": score}
        )
    assert [s.last_epoch for s in (first_schedule, second_schedule, third_schedule)] == [2, 2, 2]
    assert [o.param_groups[0]["lr"] for o in (first, second, third)] == [0.5, 1.0, 0.5]
    assert other.last_epoch == 0


def test_a_missing_metric_names_what_there_is_and_steps_nothing() -> None:
    _, one = plateau()
    _, two = plateau()
    with pytest.raises(
        LabelNotFoundError, match=r"'total_los' not found in validation summary; did you mean"
    ) as caught:
        step_metric_schedulers([one, two], [None, "total_los"], {"total_loss": 1.0})
    assert isinstance(caught.value, KeyError)
    assert "available keys: ['total_loss']" in str(caught.value)
    assert one.last_epoch == 0


@pytest.mark.parametrize("value", [None, "low", torch.ones(2), [1.0]])
def test_a_metric_that_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(ConfigurationTypeError, match="the scheduler metric 'total_loss' must be a number, got"):
        step_metric_schedulers([plateau()[1]], [None], {"total_loss": value})


def test_schedulers_and_adapters_must_match() -> None:
    with pytest.raises(ConfigurationError, match="got 1 schedulers but 2 metric adapters; give one each"):
        step_metric_schedulers([None], [None, None], {})
