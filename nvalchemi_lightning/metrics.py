"""Errors in physical units, exact for any division into batches and any number of processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from nvalchemi_lightning.errors import DataError

__all__ = [
    "EnergyMAE",
    "EnergyRMSE",
    "ErrorMetric",
    "ForcesMAE",
    "ForcesRMSE",
    "StressMAE",
    "StressRMSE",
]


class ErrorMetric(Metric):
    """Base of the metrics: the mean over all labelled numbers of an error.

    Kept are a sum and a count in float64, so the value does not depend on how the structures were batched, and
    processes are reduced by adding theirs up. A label of NaN is missing and not counted; a prediction of NaN where
    there is a label makes the value NaN.

    Attributes
    ----------
    unit : str
        Unit of the value.
    per_atom : bool
        Whether numbers are divided by the atoms of their structure.
    root_mean_square : bool
        Whether errors are squared before the mean, and its root taken; absolute errors otherwise.
    count : Tensor
        Labelled numbers so far.
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    unit: str
    per_atom: bool = False
    root_mean_square: bool = False
    total: Tensor
    count: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_state("total", default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, prediction: Tensor, target: Tensor, num_nodes_per_graph: Tensor | None = None) -> None:
        """Take in a batch.

        Parameters
        ----------
        prediction, target : Tensor
            Numbers of the same shape: energies (B, 1) [eV], forces (V, 3) [eV/A] or stress (B, 3, 3) [eV/A^3].
        num_nodes_per_graph : Tensor, optional
            Atoms of each structure, shape (B,); required for errors per atom.

        Raises
        ------
        DataError
            If the shapes differ, or the number of atoms is missing.
        """
        if prediction.shape != target.shape:
            raise DataError(
                f"{type(self).__name__} needs a prediction and a target of the same shape, "
                f"got {tuple(prediction.shape)} and {tuple(target.shape)}"
            )
        error = prediction.detach().double() - target.detach().double()
        if self.per_atom:
            error = error / self._atoms(num_nodes_per_graph, error)
        labelled = ~target.isnan()
        size = error.square() if self.root_mean_square else error.abs()
        # A cast of the surrounding module may have reached the states.
        self.total = self.total.double() + size.where(labelled, 0.0).sum()
        self.count = self.count.double() + labelled.sum()

    def _atoms(self, num_nodes_per_graph: Tensor | None, error: Tensor) -> Tensor:
        if num_nodes_per_graph is None or num_nodes_per_graph.shape != error.shape[:1]:
            given = None if num_nodes_per_graph is None else tuple(num_nodes_per_graph.shape)
            raise DataError(
                f"{type(self).__name__} divides by the number of atoms; give num_nodes_per_graph of shape "
                f"({error.shape[0]},), got {given}"
            )
        return num_nodes_per_graph.view(-1, *[1] * (error.ndim - 1))

    def compute(self) -> Tensor:
        """Return the error, float64; NaN when nothing was labelled."""
        mean = self.total / self.count
        return mean.sqrt() if self.root_mean_square else mean


class EnergyMAE(ErrorMetric):
    """Mean absolute error of the energy per atom [eV/atom]."""

    unit = "eV/atom"
    per_atom = True


class EnergyRMSE(ErrorMetric):
    """Root mean square error of the energy per atom [eV/atom]."""

    unit = "eV/atom"
    per_atom = True
    root_mean_square = True


class ForcesMAE(ErrorMetric):
    """Mean absolute error of the force components [eV/A]."""

    unit = "eV/A"


class ForcesRMSE(ErrorMetric):
    """Root mean square error of the force components [eV/A]."""

    unit = "eV/A"
    root_mean_square = True


class StressMAE(ErrorMetric):
    """Mean absolute error of the nine stress components [eV/A^3]."""

    unit = "eV/A^3"


class StressRMSE(ErrorMetric):
    """Root mean square error of the nine stress components [eV/A^3]."""

    unit = "eV/A^3"
    root_mean_square = True
