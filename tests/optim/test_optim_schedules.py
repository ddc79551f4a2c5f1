"""Schedules in closed form, and what every schedule owes a run: exact resume, safe state, a recipe."""

from __future__ import annotations

import io
import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as torch_schedules
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from nvalchemi_lightning.errors import ConfigurationError
from nvalchemi_lightning.optim import (
    CosineThenConstant,
    FactorSchedule,
    OptimizerConfig,
    ParamGroup,
    WarmupCosine,
    iter_qualified_named_parameters,
    step_lr_schedulers,
    step_metric_schedulers,
)
from nvalchemi_lightning.specs import create_model_spec, create_model_spec_from_json


def halved(step: int) -> float:
    return 0.5**step


SCHEDULES: dict[str, tuple[type[LRScheduler], dict[str, Any]]] = {
    "WarmupCosine": (WarmupCosine, {"warmup_steps": 3, "total_steps": 9, "min_factor": 0.1}),
    "CosineThenConstant": (CosineThenConstant, {"cosine_steps": 5, "constant_factor": 0.3, "min_factor": 0.01}),
    "StepLR": (torch_schedules.StepLR, {"step_size": 2, "gamma": 0.7}),
    "MultiStepLR": (torch_schedules.MultiStepLR, {"milestones": [2, 5], "gamma": 0.3}),
    "ConstantLR": (torch_schedules.ConstantLR, {"factor": 0.3, "total_iters": 4}),
    "LinearLR": (torch_schedules.LinearLR, {"start_factor": 0.1, "total_iters": 6}),
    "ExponentialLR": (torch_schedules.ExponentialLR, {"gamma": 0.9}),
    "PolynomialLR": (torch_schedules.PolynomialLR, {"total_iters": 7, "power": 2.0}),
    "CosineAnnealingLR": (torch_schedules.CosineAnnealingLR, {"T_max": 5, "eta_min": 1e-3}),
    "CosineAnnealingWarmRestarts": (torch_schedules.CosineAnnealingWarmRestarts, {"T_0": 3, "T_mult": 2}),
    "OneCycleLR": (torch_schedules.OneCycleLR, {"max_lr": 0.5, "total_steps": 12}),
    "CyclicLR": (torch_schedules.CyclicLR, {"base_lr": 0.1, "max_lr": 0.5, "step_size_up": 3}),
    "LambdaLR": (torch_schedules.LambdaLR, {"lr_lambda": halved}),
    "MultiplicativeLR": (torch_schedules.MultiplicativeLR, {"lr_lambda": halved}),
    "ReduceLROnPlateau": (ReduceLROnPlateau, {"patience": 1, "factor": 0.5, "cooldown": 1}),
    "SequentialLR": (
        torch_schedules.SequentialLR,
        {
            "schedulers": [
                create_model_spec(torch_schedules.LinearLR, start_factor=0.1, total_iters=3),
                create_model_spec(torch_schedules.ExponentialLR, gamma=0.5),
            ],
            "milestones": [3],
        },
    ),
    "ChainedScheduler": (
        torch_schedules.ChainedScheduler,
        {
            "schedulers": [
                create_model_spec(torch_schedules.ConstantLR, factor=0.5, total_iters=2),
                create_model_spec(WarmupCosine, warmup_steps=2, total_steps=9),
            ]
        },
    ),
}

STEPS = 12


def config(name: str) -> OptimizerConfig:
    scheduler_cls, kwargs = SCHEDULES[name]
    return OptimizerConfig(
        optimizer_cls=SGD,
        lr=0.2,
        optimizer_kwargs={"momentum": 0.9},
        scheduler_cls=scheduler_cls,
        scheduler_kwargs=kwargs,
    )


def built(of: OptimizerConfig) -> tuple[Optimizer, LRScheduler]:
    optimizer, scheduler = of.build([nn.Parameter(torch.zeros(1))])
    assert scheduler is not None
    return optimizer, scheduler


def advance(optimizer: Optimizer, scheduler: LRScheduler, start: int, stop: int) -> list[float]:
    """Return the learning rate that every step is taken with."""
    rates = []
    for step in range(start, stop):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        step_lr_schedulers([scheduler])
        step_metric_schedulers([scheduler], [None], {"total_loss": math.cos(step)})
    return rates


# What every schedule owes (table) -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
def test_resumed_at_any_step_the_rates_are_those_of_the_uninterrupted_run(name: str) -> None:
    """B09, B112: also of a plateau schedule, whose state is its best metric and its count of bad ones."""
    straight = advance(*built(config(name)), 0, STEPS)
    assert len(set(straight)) > 1
    for stop in range(STEPS):
        optimizer, scheduler = built(config(name))
        advance(optimizer, scheduler, 0, stop)
        stored = io.BytesIO()
        torch.save({"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}, stored)
        stored.seek(0)
        state = torch.load(stored, weights_only=True)
        again, schedule = built(config(name))
        again.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["scheduler"])
        assert advance(again, schedule, stop, STEPS) == straight[stop:]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_comes_back_from_json(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from nvalchemi_lightning.specs import trust

    monkeypatch.setattr(sys.modules["nvalchemi_lightning.specs.trust"], "_added", {})
    trust(__name__)
    form = json.loads(config(name).to_spec().model_dump_json())
    again = OptimizerConfig.from_spec(create_model_spec_from_json(form))
    assert advance(*built(again), 0, STEPS) == advance(*built(config(name)), 0, STEPS)


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - {"OneCycleLR", "CyclicLR"}))
def test_groups_keep_the_ratio_of_their_rates(name: str) -> None:
    """A schedule drives every group from its own rate; a plateau schedule halves each."""
    model = nn.Linear(1, 1)
    groups = (ParamGroup(pattern="*.bias", lr=0.02),)
    optimizer, scheduler = (
        config(name).model_copy(update={"param_groups": groups}).build(iter_qualified_named_parameters(model))
    )
    assert scheduler is not None
    for step in range(4):
        slow, fast = (group["lr"] for group in reversed(optimizer.param_groups))
        if name != "CosineAnnealingLR":  # its eta_min is an absolute rate
            assert slow == pytest.approx(fast / 10)
        assert slow < fast
        advance(optimizer, scheduler, step, step + 1)


# Closed forms -------------------------------------------------------------------------------------------------------


def test_warm_up_and_cosine_by_hand() -> None:
    """Two steps of warm-up, four of cosine: 1/3, 2/3, then (1 + cos(pi k / 4)) / 2."""
    optimizer, scheduler = built(
        OptimizerConfig(
            optimizer_cls=SGD,
            lr=1.0,
            scheduler_cls=WarmupCosine,
            scheduler_kwargs={"warmup_steps": 2, "total_steps": 6},
        )
    )
    half = math.sqrt(0.5)
    expected = [1 / 3, 2 / 3, 1.0, (1 + half) / 2, 0.5, (1 - half) / 2, 0.0, 0.0]
    assert advance(optimizer, scheduler, 0, 8) == pytest.approx(expected, abs=1e-15)


def test_cosine_and_constant_by_hand() -> None:
    """Cosine from 1 to 0.2 in two steps, then 0.4."""
    optimizer, scheduler = built(
        OptimizerConfig(
            optimizer_cls=SGD,
            lr=1.0,
            scheduler_cls="nvalchemi_lightning.optim.CosineThenConstant",
            scheduler_kwargs={"cosine_steps": 2, "constant_factor": 0.4, "min_factor": 0.2},
        )
    )
    assert advance(optimizer, scheduler, 0, 4) == pytest.approx([1.0, 0.6, 0.4, 0.4], abs=1e-15)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[type[FactorSchedule], dict[str, Any]]:
    factor = st.floats(0, 1)
    if draw(st.booleans()):
        warmup = draw(st.integers(0, 20))
        total = warmup + draw(st.integers(1, 30))
        return WarmupCosine, {"warmup_steps": warmup, "total_steps": total, "min_factor": draw(factor)}
    constant = draw(st.floats(0.01, 1))
    cosine = draw(st.integers(1, 30))
    return CosineThenConstant, {"cosine_steps": cosine, "constant_factor": constant, "min_factor": draw(factor)}


@settings(deadline=None, max_examples=60)
@given(schedules(), st.integers(0, 60), st.floats(1e-6, 10))
def test_stepping_is_the_closed_form(
    schedule: tuple[type[FactorSchedule], dict[str, Any]], steps: int, lr: float
) -> None:
    cls, kwargs = schedule
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    scheduler = cls(optimizer, **kwargs)
    rates = advance(optimizer, scheduler, 0, steps)
    assert rates == [lr * scheduler.factor(step) for step in range(steps)]
    assert optimizer.param_groups[0]["lr"] == lr * scheduler.factor(steps)
    assert all(0 <= scheduler.factor(step) <= 1 for step in range(steps))


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 20), st.integers(1, 30), st.floats(0, 1))
def test_warm_up_rises_and_cosine_falls(warmup: int, cosine: int, lowest: float) -> None:
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    total = warmup + cosine
    factors = [WarmupCosine(optimizer, warmup, total, lowest).factor(step) for step in range(total + 2)]
    assert factors[: warmup + 1] == sorted(factors[: warmup + 1])
    assert factors[0] > 0
    assert factors[warmup] == 1.0
    assert factors[warmup:] == sorted(factors[warmup:], reverse=True)
    assert factors[total:] == [lowest, lowest]


@pytest.mark.parametrize(
    ("cls", "kwargs", "message"),
    [
        (WarmupCosine, {"warmup_steps": 5, "total_steps": 5}, "needs 0 <= warmup_steps < total_steps; got 5 and 5"),
        (WarmupCosine, {"warmup_steps": -1, "total_steps": 5}, "got -1 and 5"),
        (WarmupCosine, {"warmup_steps": 1, "total_steps": 5, "min_factor": 1.5}, r"min_factor in \[0, 1\]; got 1.5"),
        (CosineThenConstant, {"cosine_steps": 0, "constant_factor": 0.5}, "needs cosine_steps >= 1; got 0"),
        (CosineThenConstant, {"cosine_steps": 1, "constant_factor": 0.0}, r"constant_factor in \(0, 1\]; got 0.0"),
        (
            CosineThenConstant,
            {"cosine_steps": 1, "constant_factor": 0.5, "min_factor": -0.1},
            r"CosineThenConstant needs min_factor in \[0, 1\]; got -0.1",
        ),
    ],
)
def test_numbers_out_of_range_are_refused_with_the_config(cls: type, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        cls(SGD([torch.zeros(1, requires_grad=True)]), **kwargs)
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(scheduler_cls=cls, scheduler_kwargs=kwargs)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"scheduler_cls": torch_schedules.StepLR, "scheduler_kwargs": {"step_size": 0}},
            r"StepLR does not take \{'st",
        ),
        ({"scheduler_cls": torch_schedules.CosineAnnealingLR, "scheduler_kwargs": {"T_max": 0}}, "does not take"),
        (
            {"scheduler_cls": torch_schedules.OneCycleLR, "scheduler_kwargs": {"max_lr": 0.1}},
            "OneCycleLR does not take .*You must define either total_steps",
        ),
        (
            {"scheduler_cls": ReduceLROnPlateau, "scheduler_kwargs": {"factor": 1.0}},
            "ReduceLROnPlateau does not take .*Factor should be < 1.0",
        ),
        (
            {"scheduler_cls": WarmupCosine, "scheduler_kwargs": {"warmup_steps": 1}},
            "scheduler_kwargs for WarmupCosine: missing a required argument: 'total_steps'",
        ),
        (
            {"scheduler_cls": WarmupCosine, "scheduler_kwargs": {"warm_up": 1, "total_steps": 2}},
            r"Invalid scheduler kwargs for WarmupCosine: \['warm_up'\]; did you mean 'warmup_steps'",
        ),
    ],
)
def test_a_schedule_that_would_fail_in_its_first_step_is_refused_with_the_config(
    kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**kwargs)


def test_a_schedule_of_the_users_own_is_a_factor() -> None:
    class Halving(FactorSchedule):
        def factor(self, step: int) -> float:
            return 0.5**step

    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=0.8)
    assert advance(optimizer, Halving(optimizer), 0, 3) == [0.8, 0.4, 0.2]
    with pytest.raises(TypeError, match="abstract"):
        FactorSchedule(optimizer)  # type: ignore[abstract]


class Grumpy(torch_schedules.ConstantLR):
    """A user's schedule that must not be built on trial."""

    def __init__(self, optimizer: Optimizer) -> None:
        raise AssertionError


def test_a_schedule_of_the_users_own_is_not_tried() -> None:
    assert OptimizerConfig(scheduler_cls=Grumpy).scheduler_cls is Grumpy


def test_a_schedule_that_overwrites_the_rates_of_groups_is_refused() -> None:
    groups = [ParamGroup(pattern="*.bias", lr=0.01)]
    kwargs: dict[str, Any] = {"max_lr": 0.1, "total_steps": 5}
    cycle = {"scheduler_cls": torch_schedules.OneCycleLR, "scheduler_kwargs": kwargs}
    named = list(iter_qualified_named_parameters(nn.Linear(1, 1)))
    message = (
        r"OneCycleLR sets one learning rate for all groups.*as lists with a value for each of \['default', '\*\.bias'\]"
    )
    with pytest.raises(ConfigurationError, match=message):
        OptimizerConfig(lr=0.1, param_groups=groups, **cycle).build(named)
    kwargs["max_lr"] = [0.1, 0.01]
    optimizer, _ = OptimizerConfig(lr=0.1, param_groups=groups, **cycle).build(named)
    assert [group["max_lr"] for group in optimizer.param_groups] == [0.1, 0.01]
