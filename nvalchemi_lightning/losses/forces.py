"""Force terms: one vector per atom, dense (V, 3) or padded (B, V_max, 3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nvalchemi_lightning.errors import DataError
from nvalchemi_lightning.losses.base import ReductionContext
from nvalchemi_lightning.losses.checks import DTypePolicy
from nvalchemi_lightning.losses.labelled import LabelledLoss, check_delta, huber, masked_difference
from nvalchemi_lightning.losses.metadata import node_mask, require
from nvalchemi_lightning.losses.reductions import Reduction, graph_means, masked_sums, mean_of_graphs, row_means

__all__ = ["ForceHuberLoss", "ForceL2NormLoss", "ForceMSELoss"]


class _ForceLoss(LabelledLoss):
    requires_eval_grad = True

    # Dimensions of the residual of dense forces; padded ones have one more.
    dense_ndim = 2

    def __init__(
        self,
        *,
        target_key: str,
        prediction_key: str,
        normalize_by_atom_count: bool,
        ignore_nonfinite: bool,
        dtype_policy: DTypePolicy,
    ) -> None:
        super().__init__(
            target_key=target_key,
            prediction_key=prediction_key,
            ignore_nonfinite=ignore_nonfinite,
            dtype_policy=dtype_policy,
        )
        self.normalize_by_atom_count = normalize_by_atom_count

    def check_shape(self, pred: Tensor) -> None:
        """Refuse anything but one vector per atom, dense or padded."""
        if pred.ndim not in (2, 3) or pred.shape[-1] != 3:
            raise DataError(
                f"{type(self).__name__} needs forces of shape (V, 3), or padded (B, V_max, 3); got {tuple(pred.shape)}"
            )

    def mask(self, pred: Tensor, target: Tensor, ctx: ReductionContext, **metadata: Any) -> Tensor:
        """Leave out missing labels and padding."""
        valid = super().mask(pred, target, ctx, **metadata)
        if target.ndim == 2:
            return valid
        return valid & node_mask(metadata, target, "padded force loss").unsqueeze(-1)

    def sums(self, residual: Tensor, valid: Tensor, ctx: ReductionContext, **metadata: Any) -> Reduction:
        """Sum per-graph means and count graphs, or sum entries and count those."""
        if residual.ndim > self.dense_ndim:
            means, counts = row_means(residual, valid)
        elif self.normalize_by_atom_count:
            graph_of, graphs = require(metadata, "batch_idx", self), require(metadata, "num_graphs", self)
            means, counts = graph_means(residual, valid, graph_of, graphs)
        else:
            return masked_sums(residual, valid)
        if self.normalize_by_atom_count:
            return mean_of_graphs(means, counts, labelled_only=metadata.get("missing_is_nan", False))
        return masked_sums(residual, valid, means)


class ForceMSELoss(_ForceLoss):
    """Mean squared force component error [eV^2 / A^2].

    Parameters
    ----------
    target_key, prediction_key : str
        Where a composition finds label and prediction, shape (V, 3) or padded (B, V_max, 3) [eV/A].
    normalize_by_atom_count : bool
        Average over the components of each graph, then over graphs, which needs ``batch_idx`` and ``num_graphs`` for
        dense forces. Default True. False: over all components of the batch. Padded forces need
        ``num_nodes_per_graph`` either way.
    ignore_nonfinite : bool
        Leave NaN and infinite components out. Default False: they propagate.
    dtype_policy : {"strict", "prediction_to_target", "target_to_prediction"}
        What to do when prediction and label differ in dtype. Default ``"strict"``: an error.

    Notes
    -----
    A graph without a valid component contributes 0 and counts as a graph, except where ``missing_is_nan`` says that
    it has no label.
    """

    def __init__(
        self,
        *,
        target_key: str = "forces",
        prediction_key: str = "predicted_forces",
        normalize_by_atom_count: bool = True,
        ignore_nonfinite: bool = False,
        dtype_policy: DTypePolicy = "strict",
    ) -> None:
        super().__init__(
            target_key=target_key,
            prediction_key=prediction_key,
            normalize_by_atom_count=normalize_by_atom_count,
            ignore_nonfinite=ignore_nonfinite,
            dtype_policy=dtype_policy,
        )

    def compute_residual(self, pred: Tensor, target: Tensor, valid: Tensor) -> Tensor:
        """Return the squared error of each component."""
        return masked_difference(pred, target, valid).square()


class ForceHuberLoss(ForceMSELoss):
    """Mean Huber loss of the force components: quadratic below ``delta``, linear above.

    Parameters
    ----------
    target_key, prediction_key : str
        Where a composition finds label and prediction, shape (V, 3) or padded (B, V_max, 3) [eV/A].
    normalize_by_atom_count : bool
        Average over the components of each graph, then over graphs. Default False: over all components of the batch.
    delta : float
        Where the linear part begins [eV/A], finite and positive. Default 0.01.
    ignore_nonfinite : bool
        Leave NaN and infinite components out. Default True.
    dtype_policy : {"strict", "prediction_to_target", "target_to_prediction"}
        What to do when prediction and label differ in dtype. Default ``"strict"``: an error.
    """

    def __init__(
        self,
        *,
        target_key: str = "forces",
        prediction_key: str = "predicted_forces",
        normalize_by_atom_count: bool = False,
        delta: float = 0.01,
        ignore_nonfinite: bool = True,
        dtype_policy: DTypePolicy = "strict",
    ) -> None:
        super().__init__(
            target_key=target_key,
            prediction_key=prediction_key,
            normalize_by_atom_count=normalize_by_atom_count,
            ignore_nonfinite=ignore_nonfinite,
            dtype_policy=dtype_policy,
        )
        self.delta = check_delta(delta, "ForceHuberLoss")

    def compute_residual(self, pred: Tensor, target: Tensor, valid: Tensor) -> Tensor:
        """Return the Huber loss of each component."""
        return huber(masked_difference(pred, target, valid), self.delta)


class ForceL2NormLoss(_ForceLoss):
    """Mean length of the force error vector [eV/A].

    An atom counts only if all three components of its label do. The gradient at an error of exactly zero is zero.

    Parameters
    ----------
    target_key, prediction_key : str
        Where a composition finds label and prediction, shape (V, 3) or padded (B, V_max, 3) [eV/A].
    normalize_by_atom_count : bool
        Average over the atoms of each graph, then over graphs. Default True. False: over all atoms of the batch.
    ignore_nonfinite : bool
        Leave out atoms with a NaN or infinite component. Default True.
    dtype_policy : {"strict", "prediction_to_target", "target_to_prediction"}
        What to do when prediction and label differ in dtype. Default ``"strict"``: an error.
    """

    dense_ndim = 1

    def __init__(
        self,
        *,
        target_key: str = "forces",
        prediction_key: str = "predicted_forces",
        normalize_by_atom_count: bool = True,
        ignore_nonfinite: bool = True,
        dtype_policy: DTypePolicy = "strict",
    ) -> None:
        super().__init__(
            target_key=target_key,
            prediction_key=prediction_key,
            normalize_by_atom_count=normalize_by_atom_count,
            ignore_nonfinite=ignore_nonfinite,
            dtype_policy=dtype_policy,
        )

    def mask(self, pred: Tensor, target: Tensor, ctx: ReductionContext, **metadata: Any) -> Tensor:
        """Leave out padding and atoms of which any component is missing."""
        return super().mask(pred, target, ctx, **metadata).all(-1)

    def compute_residual(self, pred: Tensor, target: Tensor, valid: Tensor) -> Tensor:
        """Return the length of the error vector of each atom."""
        length: Tensor = torch.linalg.vector_norm(masked_difference(pred, target, valid.unsqueeze(-1)), dim=-1)
        return length
