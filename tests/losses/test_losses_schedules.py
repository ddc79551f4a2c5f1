"""Weight schedules: values, refusals, products and specs."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from nvalchemi_lightning.losses import (
    BaseWeightSchedule,
    ConstantWeight,
    CosineWeight,
    LinearWeight,
    LossWeightSchedule,
    PiecewiseWeight,
)
from nvalchemi_lightning.losses.base import _BaseWeightSchedule
from nvalchemi_lightning.losses.schedules import ProductWeight
from nvalchemi_lightning.losses.weights import multiply_weights
from nvalchemi_lightning.specs import create_model_spec_from_json

SCHEDULES = [
    ConstantWeight(value=2.5),
    LinearWeight(start=0.2, end=1.0, num_steps=10),
    CosineWeight(start=1.0, end=0.1, num_steps=10, per_epoch=True),
    PiecewiseWeight(boundaries=(4, 10), values=(0.0, 0.5, 1.0)),
    ProductWeight(2.0, ProductWeight(LinearWeight(start=0, end=1, num_steps=4), ConstantWeight(value=3.0))),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_spec_round_trip(schedule: Any) -> None:
    assert isinstance(schedule, LossWeightSchedule)
    form = schedule.to_spec().model_dump()
    rebuilt = create_model_spec_from_json(form).build()
    assert rebuilt == schedule
    assert [rebuilt(step, step) for step in range(12)] == [schedule(step, step) for step in range(12)]


@pytest.mark.parametrize("cls", [LinearWeight, CosineWeight])
def test_ramps_start_end_and_stay(cls: type[Any]) -> None:
    schedule = cls(start=2.0, end=1.0, num_steps=8)
    assert [schedule(step, 0) for step in (-1, 0, 8, 99)] == [2.0, 2.0, 1.0, 1.0]
    assert schedule(4, 0) == pytest.approx(1.5)
    expected = 1.75 if cls is LinearWeight else 2.0 - (1.0 - math.cos(math.pi / 4)) / 2
    assert schedule(2, 0) == pytest.approx(expected)


def test_staircase_is_left_closed() -> None:
    schedule = PiecewiseWeight(boundaries=(4, 10), values=(0.0, 0.5, 1.0))
    assert [schedule(step, 0) for step in (0, 3, 4, 9, 10)] == [0.0, 0.0, 0.5, 0.5, 1.0]


def test_per_epoch_counts_epochs() -> None:
    schedule = PiecewiseWeight(boundaries=(1,), values=(0.0, 1.0), per_epoch=True)
    assert schedule(100, 0) == 0.0
    assert schedule(0, 1) == 1.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nonfinite_values_are_refused_b8(value: float) -> None:
    with pytest.raises(ValidationError, match="finite"):
        ConstantWeight(value=value)
    with pytest.raises(ValidationError, match="finite"):
        LinearWeight(start=0.0, end=value, num_steps=3)
    with pytest.raises(ValidationError, match="finite"):
        PiecewiseWeight(boundaries=(), values=(value,))


def test_unknown_keywords_name_the_nearest_b8() -> None:
    with pytest.raises(ValidationError, match=r"LinearWeight has no argument 'num_step'; did you mean 'num_steps'\?"):
        LinearWeight(start=0.0, end=1.0, num_step=3)
    with pytest.raises(ValidationError, match=r"ConstantWeight has no argument 'zzz' \(arguments: per_epoch, value\)"):
        ConstantWeight(value=1.0, zzz=3)


@pytest.mark.parametrize("cls", [LinearWeight, CosineWeight])
def test_ramps_need_a_length(cls: type[Any]) -> None:
    with pytest.raises(ValidationError, match="greater than 0"):
        cls(start=0.0, end=1.0, num_steps=0)


@pytest.mark.parametrize("boundaries", [(3, 3), (4, 2), (-1,)])
def test_boundaries_must_increase(boundaries: tuple[int, ...]) -> None:
    with pytest.raises(ValidationError, match="boundaries must be non-negative and strictly increasing; got"):
        PiecewiseWeight(boundaries=boundaries, values=(1.0,) * (len(boundaries) + 1))


def test_one_value_more_than_boundaries() -> None:
    with pytest.raises(ValidationError, match="one entry more than boundaries; got 2 values for 2 boundaries"):
        PiecewiseWeight(boundaries=(1, 2), values=(1.0, 2.0))


def test_schedules_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        ConstantWeight(value=1.0).value = 2.0
    with pytest.raises(AttributeError, match="cannot assign to field"):
        ProductWeight(1.0, 2.0).left = 2.0


def test_products() -> None:
    ramp = LinearWeight(start=0.0, end=1.0, num_steps=4)
    assert multiply_weights(2.0, 3.0) == 6.0
    assert multiply_weights(1.0, ramp) is ramp
    assert multiply_weights(ramp, 1.0) is ramp
    product = multiply_weights(2.0, ramp)
    assert isinstance(product, ProductWeight)
    assert product(2, 0) == 1.0
    assert not product.per_epoch
    assert ProductWeight(ramp, ConstantWeight(value=1.0, per_epoch=True)).per_epoch


def test_a_schedule_of_ones_own() -> None:
    class Square(BaseWeightSchedule):
        scale: float

        def at(self, index: int) -> float:
            return self.scale * index**2

    assert _BaseWeightSchedule is BaseWeightSchedule
    assert Square(scale=2.0)(3, 0) == 18.0
    assert Square(scale=2.0, per_epoch=True)(0, 2) == 8.0
    with pytest.raises(TypeError, match="abstract"):
        BaseWeightSchedule()


def test_a_callable_without_to_spec_is_no_schedule() -> None:
    class Bare:
        per_epoch = False

        def __call__(self, step: int, epoch: int) -> float:
            return 1.0

    assert not isinstance(Bare(), LossWeightSchedule)
