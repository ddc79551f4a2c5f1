"""What the built-in terms share: their keys, missing labels, and the difference of prediction and label."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from nvalchemi_lightning.errors import ConfigurationError, DataError
from nvalchemi_lightning.losses.base import BaseLossFunction, ReductionContext, label_mask
from nvalchemi_lightning.losses.checks import DTypePolicy
from nvalchemi_lightning.losses.reductions import widen

__all__ = ["LabelledLoss", "check_delta", "huber", "masked_difference"]


class LabelledLoss(BaseLossFunction):
    """A term that compares one prediction with one label.

    Parameters
    ----------
    target_key, prediction_key : str
        Where a composition finds label and prediction.
    ignore_nonfinite : bool
        Leave NaN and infinite labels out instead of letting them propagate.
    dtype_policy : {"strict", "prediction_to_target", "target_to_prediction"}
        What to do when prediction and label differ in dtype.
    """

    def __init__(
        self, *, target_key: str, prediction_key: str, ignore_nonfinite: bool, dtype_policy: DTypePolicy
    ) -> None:
        super().__init__(dtype_policy=dtype_policy)
        self.target_key = target_key
        self.prediction_key = prediction_key
        self.ignore_nonfinite = ignore_nonfinite

    def validate(self, pred: Tensor, target: Tensor) -> None:
        """Refuse a pair that differs in dtype or shape, is not of floating point, or has the wrong shape."""
        if pred.dtype is not target.dtype or pred.shape != target.shape:
            super().validate(pred, target)
        if not pred.dtype.is_floating_point:
            raise DataError(f"{type(self).__name__} needs floating point tensors; got {pred.dtype}")
        self.check_shape(pred)

    @abstractmethod
    def check_shape(self, pred: Tensor) -> None:
        """Refuse a prediction of the wrong shape with a ``DataError``."""

    def normalize(self, pred: Tensor, target: Tensor, **metadata: Any) -> tuple[Tensor, Tensor, ReductionContext]:
        """Cast to at least float32, so that neither squares nor sums overflow in half precision."""
        if pred.dtype is not torch.float32:
            pred, target = widen(pred), widen(target)
        return pred, target, ReductionContext()

    def mask(self, pred: Tensor, target: Tensor, ctx: ReductionContext, **metadata: Any) -> Tensor:
        """Leave out missing labels, and with ``ignore_nonfinite`` every label that is not finite."""
        return torch.isfinite(target) if self.ignore_nonfinite else label_mask(target, metadata)


def masked_difference(pred: Tensor, target: Tensor, valid: Tensor) -> Tensor:
    """Return prediction minus target, zero where invalid.

    The selection comes right after the subtraction, whose gradient does not depend on the values: a NaN on either
    side of an invalid entry reaches neither the loss nor its gradient.
    """
    return torch.where(valid, pred - target, 0.0)


def huber(difference: Tensor, delta: float) -> Tensor:
    """Return r^2 / 2 where abs(r) < delta, delta (abs(r) - delta / 2) elsewhere."""
    return torch.nn.functional.huber_loss(difference, torch.zeros_like(difference), reduction="none", delta=delta)


def check_delta(delta: float, loss_name: str) -> float:
    """Return the width of the quadratic part as a float, or raise ``ConfigurationError``."""
    width = float(delta)
    if not (math.isfinite(width) and width > 0):
        raise ConfigurationError(f"{loss_name}: delta must be finite and positive; got {delta!r}")
    return width
