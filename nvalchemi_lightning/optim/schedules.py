"""Learning-rate schedules in closed form: the rate is a function of the number of executed steps alone."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nvalchemi_lightning.errors import ConfigurationError

__all__ = ["CosineThenConstant", "FactorSchedule", "WarmupCosine"]


class FactorSchedule(LRScheduler, ABC):
    """Base of the schedules: every group's initial learning rate times one factor.

    Nothing is accumulated from step to step, so a run that is resumed has the rates of one that was not
    interrupted, bit for bit. The state holds numbers only.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Whose groups are driven.
    last_epoch : int
        As in torch: -1 (default) begins.
    """

    @abstractmethod
    def factor(self, step: int) -> float:
        """Return the factor after so many executed steps, that is, for the step that follows them."""

    def get_lr(self) -> list[Any]:
        """Return the learning rate of every group."""
        factor = self.factor(self.last_epoch)
        return [rate * factor for rate in self.base_lrs]


class WarmupCosine(FactorSchedule):
    """Rise linearly, then fall by a half cosine, then stay.

    With W warm-up steps of T in total, and m the minimum, the factor after t executed steps is::

        (t + 1) / (W + 1)                                          t < W
        m + (1 - m) (1 + cos(pi (t - W) / (T - W))) / 2       W <= t < T
        m                                                     T <= t

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Whose groups are driven.
    warmup_steps : int
        W >= 0. The first step is taken at 1 / (W + 1) of the full rate, step W + 1 at the full rate.
    total_steps : int
        T > W, in executed optimizer steps; usually the length of the run.
    min_factor : float
        m in [0, 1]; default 0.
    last_epoch : int
        As in torch: -1 (default) begins.

    Raises
    ------
    ConfigurationError
        If a number is out of its range.

    References
    ----------
    Cosine without restarts: I. Loshchilov and F. Hutter, SGDR, ICLR 2017, equation 5.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_steps: int,
        total_steps: int,
        min_factor: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        if not 0 <= warmup_steps < total_steps:
            raise ConfigurationError(
                f"WarmupCosine needs 0 <= warmup_steps < total_steps; got {warmup_steps} and {total_steps}"
            )
        _require_factor("WarmupCosine", "min_factor", min_factor)
        self.warmup_steps, self.total_steps, self.min_factor = warmup_steps, total_steps, min_factor
        super().__init__(optimizer, last_epoch)

    def factor(self, step: int) -> float:
        """Return the factor after so many executed steps."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        return _cosine(step - self.warmup_steps, self.total_steps - self.warmup_steps, self.min_factor)


class CosineThenConstant(FactorSchedule):
    """Fall by a half cosine, then train on at one rate: the two stages of many potentials.

    With C steps of cosine down to m, and k the constant, the factor after t executed steps is::

        m + (1 - m) (1 + cos(pi t / C)) / 2        t < C
        k                                     C <= t

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Whose groups are driven.
    cosine_steps : int
        C >= 1, in executed optimizer steps.
    constant_factor : float
        k in (0, 1]; where averaged weights are kept, larger than m, so that they average over something.
    min_factor : float
        m in [0, 1]; default 0.
    last_epoch : int
        As in torch: -1 (default) begins.

    Raises
    ------
    ConfigurationError
        If a number is out of its range.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        cosine_steps: int,
        constant_factor: float,
        min_factor: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        if cosine_steps < 1:
            raise ConfigurationError(f"CosineThenConstant needs cosine_steps >= 1; got {cosine_steps}")
        _require_factor("CosineThenConstant", "min_factor", min_factor)
        if not 0 < constant_factor <= 1:
            raise ConfigurationError(f"CosineThenConstant needs constant_factor in (0, 1]; got {constant_factor}")
        self.cosine_steps, self.constant_factor, self.min_factor = cosine_steps, constant_factor, min_factor
        super().__init__(optimizer, last_epoch)

    def factor(self, step: int) -> float:
        """Return the factor after so many executed steps."""
        if step < self.cosine_steps:
            return _cosine(step, self.cosine_steps, self.min_factor)
        return self.constant_factor


def _cosine(step: int, steps: int, lowest: float) -> float:
    share = min(step / steps, 1.0)
    return lowest + (1.0 - lowest) * (1.0 + math.cos(math.pi * share)) / 2.0


def _require_factor(schedule: str, name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ConfigurationError(f"{schedule} needs {name} in [0, 1]; got {value}")
