"""The summary of a validation pass: exact sums and counts in float64.

The value of every component is the sum of its numerators over the sum of its denominators, so it does not depend
on how the structures were cut into batches or spread over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from nvalchemi_lightning.errors import DataError

__all__ = ["SummaryAccumulator"]

_COLUMNS = 4  # numerator, denominator, weighted per-sample sum, number of samples


class SummaryAccumulator:
    """Add up the losses of a pass.

    Parameters
    ----------
    weights : mapping of str to float
        Effective weight of every loss component, the same on every rank.
    device : torch.device
        Where the sums are kept; nothing is synchronized before `summary`.
    """

    def __init__(self, weights: Mapping[str, float], device: torch.device) -> None:
        self._weights = dict(weights)
        self._components = tuple(weights)
        # The last row counts batches and structures.
        self._sums = torch.zeros(len(self._components) + 1, _COLUMNS, dtype=torch.float64, device=device)
        self._raw_weights: dict[str, float] = {}

    def update(self, losses: Mapping[str, Any], num_graphs: int) -> None:
        """Add one batch.

        Parameters
        ----------
        losses : mapping
            Structured output of the composed loss.
        num_graphs : int
            Structures in the batch.
        """
        sums, counts = losses["per_component_sum"], losses["per_component_count"]
        samples = losses["per_component_sample"]
        for row, name in enumerate(self._components):
            self._sums[row, 0] += sums[name].detach()
            self._sums[row, 1] += counts[name]
            if name in samples:
                self._sums[row, 2] += samples[name].sum(dtype=torch.float64)
                self._sums[row, 3] += samples[name].numel()
        self._sums[-1, 0] += 1
        self._sums[-1, 1] += num_graphs
        self._raw_weights = dict(losses["per_component_raw_weight"])

    def summary(self, name: str, reduce: Callable[[Tensor], Tensor] | None = None) -> dict[str, Any]:
        """Return the summary of the pass, the same on every rank.

        Parameters
        ----------
        name : str
            Name of the pass.
        reduce : callable, optional
            Sums a tensor over all ranks.

        Raises
        ------
        DataError
            If no rank evaluated a batch.
        """
        sums = (self._sums if reduce is None else reduce(self._sums)).cpu()
        num_batches = int(sums[-1, 0])
        if num_batches == 0:
            raise DataError("validation_data produced no batches.")
        values, per_sample, sample_counts, counts = {}, {}, {}, {}
        total = torch.zeros((), dtype=torch.float64)
        for component, (numerator, denominator, sample_sum, samples) in zip(self._components, sums, strict=False):
            counts[component] = float(denominator)
            labelled = denominator > 0
            values[component] = numerator / denominator.clamp(min=1) if labelled else torch.full_like(total, torch.nan)
            if labelled:
                total = total + self._weights[component] * values[component]
            if samples:
                per_sample[component] = sample_sum / samples
                sample_counts[component] = int(samples)
        return {
            "name": name,
            "total_loss": total,
            "per_component_unweighted": values,
            "per_component_count": counts,
            "per_component_weight": self._weights,
            "per_component_raw_weight": self._raw_weights,
            "per_component_sample": per_sample,
            "per_component_sample_count": sample_counts,
            "num_batches": num_batches,
            "num_structures": int(sums[-1, 1]),
            "distributed_reduced": reduce is not None,
        }
