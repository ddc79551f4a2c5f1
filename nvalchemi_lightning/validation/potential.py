"""The errors of a potential that every validation pass reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from nvalchemi_lightning.metrics import (
    EnergyMAE,
    EnergyRMSE,
    ErrorMetric,
    ForcesMAE,
    ForcesRMSE,
    StressMAE,
    StressRMSE,
)

__all__ = ["POTENTIAL_METRICS", "PotentialMetrics"]

POTENTIAL_METRICS = tuple(f"{name}_{kind}" for name in ("energy", "forces", "stress") for kind in ("mae", "rmse"))
"""The names of all errors that a pass may report."""


class PotentialMetrics:
    """Errors of energy per atom, forces and stress, for what is both predicted and labelled.

    Parameters
    ----------
    device : torch.device
        Where sums and counts are kept.
    """

    def __init__(self, device: torch.device) -> None:
        self._metrics: dict[str, tuple[ErrorMetric, ...]] = {
            "energy": (EnergyMAE(), EnergyRMSE()),
            "forces": (ForcesMAE(), ForcesRMSE()),
            "stress": (StressMAE(), StressRMSE()),
        }
        for metrics in self._metrics.values():
            for metric in metrics:
                metric.to(device)

    def update(self, predictions: Mapping[str, Tensor], batch: Any) -> None:
        """Take in a batch; a property that is not predicted under its own name, or not labelled, is left out."""
        for name, metrics in self._metrics.items():
            prediction, label = predictions.get(f"predicted_{name}"), getattr(batch, name, None)
            if prediction is not None and label is not None and prediction.shape == label.shape:
                for metric in metrics:
                    metric.update(prediction, label, batch.num_nodes_per_graph)

    def compute(self, sum_over_ranks: Callable[[Tensor], Tensor] | None = None) -> dict[str, float]:
        """Return the errors by name, such as ``"forces_mae"``, the same on every rank.

        Parameters
        ----------
        sum_over_ranks : callable, optional
            Sums a tensor over all ranks.

        Returns
        -------
        dict of str to float
            ``energy_mae`` and ``energy_rmse`` [eV/atom], ``forces_mae`` and ``forces_rmse`` [eV/A], ``stress_mae`` and
            ``stress_rmse`` [eV/A^3]; absent where nothing was labelled.
        """
        every = [(name, metric) for name, metrics in self._metrics.items() for metric in metrics]
        sums = torch.stack([torch.stack((metric.total, metric.count)) for _, metric in every])
        sums = (sums if sum_over_ranks is None else sum_over_ranks(sums)).cpu()
        errors = {}
        for (name, metric), (total, count) in zip(every, sums, strict=True):
            if count > 0:
                mean = total / count
                kind = "rmse" if metric.root_mean_square else "mae"
                errors[f"{name}_{kind}"] = float(mean.sqrt() if metric.root_mean_square else mean)
        return errors
