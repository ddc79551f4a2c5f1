"""Energy terms: one number per graph, total or per atom."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nvalchemi_lightning.errors import DataError
from nvalchemi_lightning.losses.base import ReductionContext
from nvalchemi_lightning.losses.checks import DTypePolicy
from nvalchemi_lightning.losses.labelled import LabelledLoss, check_delta, huber, masked_difference
from nvalchemi_lightning.losses.metadata import atoms_per_graph
from nvalchemi_lightning.losses.reductions import Reduction, masked_sums, per_sample_column

__all__ = ["EnergyHuberLoss", "EnergyMAELoss", "EnergyMSELoss"]


class _EnergyLoss(LabelledLoss):
    requires_eval_grad = False

    # Whether a graph of N atoms weighs N in the mean of per-atom errors.
    atom_weighted = True

    def __init__(
        self,
        *,
        target_key: str,
        prediction_key: str,
        per_atom: bool,
        ignore_nonfinite: bool,
        dtype_policy: DTypePolicy,
    ) -> None:
        super().__init__(
            target_key=target_key,
            prediction_key=prediction_key,
            ignore_nonfinite=ignore_nonfinite,
            dtype_policy=dtype_policy,
        )
        self.per_atom = per_atom

    def check_shape(self, pred: Tensor) -> None:
        """Refuse anything but one energy per graph."""
        if pred.ndim != 1 and (pred.ndim != 2 or pred.shape[1] != 1):
            raise DataError(
                f"{type(self).__name__} needs one energy per graph, shape (B, 1) or (B,); got {tuple(pred.shape)}"
            )

    def normalize(self, pred: Tensor, target: Tensor, **metadata: Any) -> tuple[Tensor, Tensor, ReductionContext]:
        """Divide both energies by the number of atoms if ``per_atom``."""
        pred, target, ctx = super().normalize(pred, target, **metadata)
        if self.per_atom:
            atoms = atoms_per_graph(metadata, pred, "per-atom energy loss")
            pred, target = pred / atoms, target / atoms
            if self.atom_weighted:
                ctx["weights"] = atoms
        return pred, target, ctx

    def sums(self, residual: Tensor, valid: Tensor, ctx: ReductionContext, **metadata: Any) -> Reduction:
        """Sum over graphs; the count is of graphs, or of their atoms where those are the weights."""
        if "weights" in ctx:
            return super().sums(residual, valid, ctx, **metadata)
        return masked_sums(residual, valid, per_sample_column(residual))


class EnergyMSELoss(_EnergyLoss):
    """Mean squared energy error.

    With r the error of a graph and N its atoms: the mean of r^2 over graphs [eV^2], or with ``per_atom`` the mean of
    (r / N)^2 with weights N, which is sum(r^2 / N) / sum(N) [eV^2 / atom^2].

    Parameters
    ----------
    target_key, prediction_key : str
        Where a composition finds label and prediction, shape (B, 1) or (B,) [eV].
    per_atom : bool
        Compare energies per atom, which needs ``num_nodes_per_graph``. Default False: total energies, so that large
        structures dominate a mixed data set.
    ignore_nonfinite : bool
        Leave NaN and infinite labels out. Default False: they propagate.
    dtype_policy : {"strict", "prediction_to_target", "target_to_prediction"}
        What to do when prediction and label differ in dtype. Default ``"strict"``: an error.
    """

    def __init__(
        self,
        *,
        target_key: str = "energy",
        prediction_key: str = "predicted_energy",
        per_atom: bool = False,
        ignore_nonfinite: bool = False,
        dtype_policy: DTypePolicy = "strict",
    ) -> None:
        super().__init__(
            target_key=target_key,
            prediction_key=prediction_key,
            per_atom=per_atom,
            ignore_nonfinite=ignore_nonfinite,
            dtype_policy=dtype_policy,
        )

    def compute_residual(self, pred: Tensor, target: Tensor, valid: Tensor) -> Tensor:
        """Return the squared error of each graph."""
        return masked_difference(pred, target, valid).square()


class EnergyMAELoss(_EnergyLoss):
    """Mean absolute energy error.

    With r the error of a graph and N its atoms: the mean of abs(r / N) with weights N, which is
    sum(abs(r)) / sum(N) [eV / atom], or without ``per_atom`` the mean of abs(r) over graphs [eV].

    Parameters
    ----------
    target_key, prediction_key : str
        Where a composition finds label and prediction, shape (B, 1) or (B,) [eV].
    per_atom : bool
        Compare energies per atom, which needs ``num_nodes_per_graph``. Default True.
    ignore_nonfinite : bool
        Leave NaN and infinite labels out. Default True.
    dtype_policy : {"strict", "prediction_to_target", "target_to_prediction"}
        What to do when prediction and label differ in dtype. Default ``"strict"``: an error.
    """

    def __init__(
        self,
        *,
        target_key: str = "energy",
        prediction_key: str = "predicted_energy",
        per_atom: bool = True,
        ignore_nonfinite: bool = True,
        dtype_policy: DTypePolicy = "strict",
    ) -> None:
        super().__init__(
            target_key=target_key,
            prediction_key=prediction_key,
            per_atom=per_atom,
            ignore_nonfinite=ignore_nonfinite,
            dtype_policy=dtype_policy,
        )

    def compute_residual(self, pred: Tensor, target: Tensor, valid: Tensor) -> Tensor:
        """Return the absolute error of each graph."""
        return masked_difference(pred, target, valid).abs()


class EnergyHuberLoss(_EnergyLoss):
    """Mean Huber loss of the energy error: quadratic below ``delta``, linear above.

    With ``per_atom`` the error is r / N; unlike in the other energy terms every graph then weighs the same.

    Parameters
    ----------
    target_key, prediction_key : str
        Where a composition finds label and prediction, shape (B, 1) or (B,) [eV].
    per_atom : bool
        Compare energies per atom, which needs ``num_nodes_per_graph``. Default True.
    delta : float
        Where the linear part begins [eV / atom, or eV], finite and positive. Default 0.01.
    ignore_nonfinite : bool
        Leave NaN and infinite labels out. Default True.
    dtype_policy : {"strict", "prediction_to_target", "target_to_prediction"}
        What to do when prediction and label differ in dtype. Default ``"strict"``: an error.
    """

    atom_weighted = False

    def __init__(
        self,
        *,
        target_key: str = "energy",
        prediction_key: str = "predicted_energy",
        per_atom: bool = True,
        delta: float = 0.01,
        ignore_nonfinite: bool = True,
        dtype_policy: DTypePolicy = "strict",
    ) -> None:
        super().__init__(
            target_key=target_key,
            prediction_key=prediction_key,
            per_atom=per_atom,
            ignore_nonfinite=ignore_nonfinite,
            dtype_policy=dtype_policy,
        )
        self.delta = check_delta(delta, "EnergyHuberLoss")

    def compute_residual(self, pred: Tensor, target: Tensor, valid: Tensor) -> Tensor:
        """Return the Huber loss of each graph."""
        return huber(masked_difference(pred, target, valid), self.delta)
