"""Loss weights that change with the step or the epoch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Protocol, Self, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field, model_validator

from nvalchemi_lightning.errors import ConfigurationError, UnknownNameError, nearest
from nvalchemi_lightning.specs import BaseSpec, create_model_spec

__all__ = [
    "BaseWeightSchedule",
    "ConstantWeight",
    "CosineWeight",
    "LinearWeight",
    "LossWeightSchedule",
    "PiecewiseWeight",
    "ProductWeight",
]

Finite = Annotated[float, Field(allow_inf_nan=False)]


@runtime_checkable
class LossWeightSchedule(Protocol):
    """A loss weight as a function of step and epoch.

    ``ComposedLossFunction`` calls it at every step; a plain class with these three members will do.
    """

    @property
    def per_epoch(self) -> bool:
        """Whether the schedule reads the epoch; a call of the composition must then give one."""
        ...

    def __call__(self, step: int, epoch: int) -> float:
        """Return the weight at a step (executed updates so far) and epoch, both counted from 0."""
        ...

    def to_spec(self) -> BaseSpec:
        """Return what rebuilds the schedule from a checkpoint or job file."""
        ...


class BaseWeightSchedule(BaseModel, ABC):
    """Base of the built-in schedules: frozen, and strict about its keywords.

    Parameters
    ----------
    per_epoch : bool
        Count in epochs instead of steps. Default False.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    per_epoch: bool = False

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keywords(cls, data: Any) -> Any:
        for name in data if isinstance(data, dict) else ():
            if name not in cls.model_fields:
                valid = ", ".join(cls.model_fields)
                hint = nearest(str(name), cls.model_fields)
                raise UnknownNameError(f"{cls.__name__} has no argument {name!r}{hint} (arguments: {valid})")
        return data

    def __call__(self, step: int, epoch: int) -> float:
        """Return the weight at a step and epoch, both counted from 0."""
        return self.at(epoch if self.per_epoch else step)

    @abstractmethod
    def at(self, index: int) -> float:
        """Return the weight at an index, the step or (``per_epoch``) the epoch."""

    def to_spec(self) -> BaseSpec:
        """Return what rebuilds the schedule."""
        return create_model_spec(type(self), **dict(self))


class ConstantWeight(BaseWeightSchedule):
    """The same weight always.

    Parameters
    ----------
    value : float
        The weight.
    """

    value: Finite

    def at(self, index: int) -> float:
        """Return the weight at an index."""
        return self.value


class _Ramp(BaseWeightSchedule):
    start: Finite
    end: Finite
    num_steps: int = Field(gt=0)

    def at(self, index: int) -> float:
        """Return the weight at an index."""
        if index <= 0:
            return self.start
        if index >= self.num_steps:
            return self.end
        return self.start + (self.end - self.start) * self.progress(index / self.num_steps)

    @abstractmethod
    def progress(self, fraction: float) -> float:
        """Map the fraction of the ramp that has passed to the fraction of the way made, both in 0..1."""


class LinearWeight(_Ramp):
    """A straight line from ``start`` to ``end``, then constant.

    Parameters
    ----------
    start, end : float
        Weight at index 0 and from index ``num_steps`` on.
    num_steps : int
        Length of the line in steps (or epochs), at least 1.
    """

    def progress(self, fraction: float) -> float:
        """Return the fraction itself."""
        return fraction


class CosineWeight(_Ramp):
    """Half a cosine wave from ``start`` to ``end``, then constant.

    Parameters
    ----------
    start, end : float
        Weight at index 0 and from index ``num_steps`` on.
    num_steps : int
        Length of the half wave in steps (or epochs), at least 1.
    """

    def progress(self, fraction: float) -> float:
        """Return ``(1 - cos(pi fraction)) / 2``."""
        return (1.0 - math.cos(math.pi * fraction)) / 2.0


class PiecewiseWeight(BaseWeightSchedule):
    """A staircase: ``values[i]`` holds from ``boundaries[i - 1]`` (included) to ``boundaries[i]`` (excluded).

    Parameters
    ----------
    boundaries : tuple of int
        Where the weight changes: not negative, strictly increasing.
    values : tuple of float
        The weights, one more than there are boundaries.
    """

    boundaries: tuple[int, ...]
    values: tuple[Finite, ...]

    @model_validator(mode="after")
    def _check(self) -> Self:
        steps = self.boundaries
        if any(b < 0 for b in steps) or any(a >= b for a, b in pairwise(steps)):
            raise ConfigurationError(f"boundaries must be non-negative and strictly increasing; got {steps}")
        if len(self.values) != len(steps) + 1:
            raise ConfigurationError(
                f"values must have one entry more than boundaries; got {len(self.values)} values for "
                f"{len(steps)} boundaries"
            )
        return self

    def at(self, index: int) -> float:
        """Return the weight at an index."""
        return self.values[bisect_right(self.boundaries, index)]


@dataclass(frozen=True)
class ProductWeight:
    """The product of two weights, each a number or a schedule; ``2.0 * (schedule * term)`` makes one.

    Parameters
    ----------
    left, right : float or LossWeightSchedule
        The factors.
    """

    left: float | LossWeightSchedule
    right: float | LossWeightSchedule

    @property
    def per_epoch(self) -> bool:
        """Whether either factor counts in epochs."""
        return any(getattr(factor, "per_epoch", False) for factor in (self.left, self.right))

    def __call__(self, step: int, epoch: int) -> float:
        """Return the product at a step and epoch."""
        left, right = (w if isinstance(w, int | float) else w(step, epoch) for w in (self.left, self.right))
        return left * right

    def to_spec(self) -> BaseSpec:
        """Return what rebuilds the product."""
        left, right = (w if isinstance(w, int | float) else w.to_spec() for w in (self.left, self.right))
        return create_model_spec(ProductWeight, left=left, right=right)
