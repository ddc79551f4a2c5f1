"""Stress terms: one 3x3 tensor per graph."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nvalchemi_lightning.errors import DataError
from nvalchemi_lightning.losses.base import ReductionContext
from nvalchemi_lightning.losses.checks import DTypePolicy
from nvalchemi_lightning.losses.labelled import LabelledLoss, check_delta, huber, masked_difference
from nvalchemi_lightning.losses.reductions import Reduction, mean_of_graphs, row_means

__all__ = ["StressHuberLoss", "StressMSELoss"]

_VOIGT_HINT = (
    "; for Voigt components (xx, yy, zz, yz, xz, xy) use stress[:, [0, 5, 4, 5, 1, 3, 4, 3, 2]].reshape(-1, 3, 3)"
)


class StressMSELoss(LabelledLoss):
    """Mean squared stress component error, over the components of each graph, then over graphs [eV^2 / A^6].

    Stress is intensive: nothing is divided by the number of atoms.

    Parameters
    ----------
    target_key, prediction_key : str
        Where a composition finds label and prediction, shape (B, 3, 3) [eV/A^3].
    ignore_nonfinite : bool
        Leave NaN and infinite components out. Default False: they propagate.
    dtype_policy : {"strict", "prediction_to_target", "target_to_prediction"}
        What to do when prediction and label differ in dtype. Default ``"strict"``: an error.

    Notes
    -----
    A graph without a valid component contributes 0 and counts as a graph, except where ``missing_is_nan`` says that
    it has no label.
    """

    requires_eval_grad = True

    def __init__(
        self,
        *,
        target_key: str = "stress",
        prediction_key: str = "predicted_stress",
        ignore_nonfinite: bool = False,
        dtype_policy: DTypePolicy = "strict",
    ) -> None:
        super().__init__(
            target_key=target_key,
            prediction_key=prediction_key,
            ignore_nonfinite=ignore_nonfinite,
            dtype_policy=dtype_policy,
        )

    def check_shape(self, pred: Tensor) -> None:
        """Refuse anything but one 3x3 tensor per graph."""
        if pred.ndim != 3 or pred.shape[1:] != (3, 3):
            hint = _VOIGT_HINT if pred.ndim and pred.shape[-1] == 6 else ""
            raise DataError(f"{type(self).__name__} needs stress of shape (B, 3, 3); got {tuple(pred.shape)}{hint}")

    def compute_residual(self, pred: Tensor, target: Tensor, valid: Tensor) -> Tensor:
        """Return the squared error of each component."""
        return masked_difference(pred, target, valid).square()

    def sums(self, residual: Tensor, valid: Tensor, ctx: ReductionContext, **metadata: Any) -> Reduction:
        """Sum per-graph means and count graphs."""
        means, counts = row_means(residual, valid)
        return mean_of_graphs(means, counts, labelled_only=metadata.get("missing_is_nan", False))


class StressHuberLoss(StressMSELoss):
    """Mean Huber loss of the stress components: quadratic below ``delta``, linear above.

    Parameters
    ----------
    target_key, prediction_key : str
        Where a composition finds label and prediction, shape (B, 3, 3) [eV/A^3].
    delta : float
        Where the linear part begins [eV/A^3], finite and positive. Default 0.01.
    ignore_nonfinite : bool
        Leave NaN and infinite components out. Default True.
    dtype_policy : {"strict", "prediction_to_target", "target_to_prediction"}
        What to do when prediction and label differ in dtype. Default ``"strict"``: an error.
    """

    def __init__(
        self,
        *,
        target_key: str = "stress",
        prediction_key: str = "predicted_stress",
        delta: float = 0.01,
        ignore_nonfinite: bool = True,
        dtype_policy: DTypePolicy = "strict",
    ) -> None:
        super().__init__(
            target_key=target_key,
            prediction_key=prediction_key,
            ignore_nonfinite=ignore_nonfinite,
            dtype_policy=dtype_policy,
        )
        self.delta = check_delta(delta, "StressHuberLoss")

    def compute_residual(self, pred: Tensor, target: Tensor, valid: Tensor) -> Tensor:
        """Return the Huber loss of each component."""
        return huber(masked_difference(pred, target, valid), self.delta)
