"""Weights of loss terms, each a number or a schedule: what they may be, and what they are at a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import TypeGuard

from nvalchemi_lightning.errors import ConfigurationError, ConfigurationTypeError
from nvalchemi_lightning.losses.schedules import LossWeightSchedule, ProductWeight

__all__ = ["Weight", "check_weights", "is_weight", "multiply_weights", "normalized", "resolve_weight"]

Weight = float | LossWeightSchedule


def is_weight(value: object) -> TypeGuard[Weight]:
    """Return whether a value can weight a term: a real number (not a bool) or a schedule."""
    return (isinstance(value, Real) and not isinstance(value, bool)) or isinstance(value, LossWeightSchedule)


def check_weights(weights: Sequence[Weight | None] | None, number: int) -> list[Weight]:
    """Return one weight per component; None stands for 1.

    Raises
    ------
    ConfigurationError
        If there are not ``number`` of them.
    ConfigurationTypeError
        If one is neither a number nor a schedule.
    """
    given = [None] * number if weights is None else list(weights)
    if len(given) != number:
        raise ConfigurationError(f"got {len(given)} weights for {number} components; give one weight each")
    return [_check_weight(weight, i) for i, weight in enumerate(given)]


def multiply_weights(left: Weight, right: Weight) -> Weight:
    """Multiply two weights: a number where both are numbers, else a schedule."""
    if isinstance(left, float) and isinstance(right, float):
        return left * right
    if left == 1.0:
        return right
    return left if right == 1.0 else ProductWeight(left, right)


def resolve_weight(weight: Weight, name: str, step: int, epoch: int | None) -> float:
    """Return the value of a weight at a step and epoch.

    Raises
    ------
    ConfigurationError
        If it is not finite, or counts in epochs and there is none.
    ConfigurationTypeError
        If a schedule fails with a ``TypeError``, or returns something else than a number.
    """
    value = weight if isinstance(weight, float) else _call_schedule(weight, name, step, epoch)
    if not math.isfinite(value):
        raise ConfigurationError(f"the weight of {name} is not finite: {value} at step={step}, epoch={epoch}")
    return float(value)


def normalized(raw: Sequence[float], names: Sequence[str], step: int, epoch: int | None) -> list[float]:
    """Divide weights by their sum.

    Raises
    ------
    ConfigurationError
        If the sum is not finite and positive.
    """
    total = sum(raw)
    if not (math.isfinite(total) and total > 0.0):
        raise ConfigurationError(
            f"weights cannot be normalized: sum is not strictly positive (sum={total}) for "
            f"{dict(zip(names, raw, strict=True))} at step={step}, epoch={epoch}. "
            "Set normalize_weights=False, or give a term a weight above 0"
        )
    return [weight / total for weight in raw]


def _check_weight(weight: Weight | None, i: int) -> Weight:
    if weight is None:
        return 1.0
    if not is_weight(weight):
        hint = "; a schedule is a callable with per_epoch and to_spec()" if callable(weight) else ""
        raise ConfigurationTypeError(
            f"weights[{i}] must be a float or LossWeightSchedule; got {type(weight).__name__}{hint}"
        )
    return weight if isinstance(weight, LossWeightSchedule) else float(weight)


def _call_schedule(schedule: LossWeightSchedule, name: str, step: int, epoch: int | None) -> float:
    if schedule.per_epoch and epoch is None:
        raise ConfigurationError(
            f"the weight schedule of {name} counts in epochs (per_epoch=True); pass epoch= to the call"
        )
    contract = f"the weight of {name} does not satisfy the LossWeightSchedule contract"
    try:
        value: object = schedule(step, 0 if epoch is None else epoch)
    except TypeError as error:
        raise ConfigurationTypeError(f"{contract}: {type(schedule).__name__}(step, epoch) failed: {error}") from error
    if not isinstance(value, Real):
        raise ConfigurationTypeError(f"{contract}: it must return a float; got {type(value).__name__}")
    return float(value)
