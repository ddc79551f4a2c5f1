"""Sums, counts and means over atoms and graphs, accumulated in float32 or wider."""

from __future__ import annotations

from operator import index
from typing import NamedTuple

import torch
from torch import Tensor

from nvalchemi_lightning.errors import ConfigurationError, DataError

__all__ = [
    "Reduction",
    "frobenius_mse",
    "graph_balanced_mean",
    "graph_means",
    "masked_mean",
    "masked_sums",
    "mean_of_graphs",
    "missing_metadata",
    "per_graph_mean",
    "per_graph_sum",
    "per_sample_column",
    "row_means",
    "weighted_sums",
    "widen",
]


class Reduction(NamedTuple):
    """A mean whose two halves are still apart.

    Parameters
    ----------
    numerator : Tensor
        The sum, on the graph.
    denominator : Tensor
        What the sum is divided by: a count of entries or graphs, or a sum of weights.
    per_sample : Tensor, optional
        The loss of each graph, shape (B,).
    """

    numerator: Tensor
    denominator: Tensor
    per_sample: Tensor | None = None

    @property
    def value(self) -> Tensor:
        """Numerator over denominator, the latter at least 1."""
        return self.numerator / self.denominator.clamp_min(1)


def widen(values: Tensor) -> Tensor:
    """Cast to float32 unless the dtype is that wide already."""
    if values.dtype is torch.float32 or values.dtype is torch.float64:
        return values
    return values.to(torch.promote_types(values.dtype, torch.float32))


def weighted_sums(residual: Tensor, valid: Tensor, weights: Tensor | None) -> Reduction:
    """Sum the residual over valid entries, and the weights (1 where None) over the same entries.

    Parameters
    ----------
    residual : Tensor
        Loss of each entry. With shape (B,) or (B, 1) it is the loss of each graph, too.
    valid : Tensor
        Bool, True where an entry counts.
    weights : Tensor or None
        Weights that expand to the shape of the residual.
    """
    residual = widen(residual)
    weight = valid if weights is None else widen(valid * weights.expand_as(residual))
    return Reduction((residual * weight).sum(), weight.sum(), per_sample_column(residual))


def masked_sums(residual: Tensor, valid: Tensor, per_sample: Tensor | None = None) -> Reduction:
    """Sum a residual that is already wide, and zero at invalid entries, and count the valid ones."""
    return Reduction(residual.sum(), valid.count_nonzero(), per_sample)


def per_sample_column(residual: Tensor) -> Tensor | None:
    """Return a residual of shape (B,) or (B, 1) as the loss of each graph; None for other shapes."""
    if residual.ndim == 2 and residual.shape[1] == 1:
        return residual.squeeze(1)
    return residual if residual.ndim == 1 else None


def row_means(residual: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Average the valid entries of each row of a residual that is zero at invalid entries.

    Returns
    -------
    tuple of Tensor
        Mean and number of valid entries of each row, both shape (B,).
    """
    total, counts = _row_sums(residual, valid)
    return total / counts.clamp_min(1), counts


def graph_means(residual: Tensor, valid: Tensor, batch_idx: Tensor, num_graphs: int | Tensor) -> tuple[Tensor, Tensor]:
    """Average the valid entries of each graph.

    Parameters
    ----------
    residual, valid : Tensor
        Loss of each entry, wide and zero where invalid, and what is valid, both shape (V, ...).
    batch_idx : Tensor
        Graph of each atom, shape (V,).
    num_graphs : int or 0-d Tensor
        Number of graphs B.

    Returns
    -------
    tuple of Tensor
        Mean and number of valid entries of each graph, both shape (B,).
    """
    graph_of, graphs = _graph_index(residual, batch_idx), _positive(num_graphs)
    total, count = (residual, valid.to(residual.dtype)) if residual.ndim == 1 else _row_sums(residual, valid)
    counts = count.new_zeros(graphs).scatter_add(0, graph_of, count)
    return total.new_zeros(graphs).scatter_add(0, graph_of, total) / counts.clamp_min(1), counts


def mean_of_graphs(means: Tensor, counts: Tensor, *, labelled_only: bool) -> Reduction:
    """Sum per-graph means, and count the graphs.

    Parameters
    ----------
    means, counts : Tensor
        Mean (zero for a graph without a valid entry) and number of valid entries of each graph, both shape (B,).
    labelled_only : bool
        Count only graphs with at least one valid entry.
    """
    graphs = counts.count_nonzero() if labelled_only else counts.new_full((), len(counts), dtype=torch.int64)
    return Reduction(means.sum(), graphs, means)


def graph_balanced_mean(
    residual: Tensor, valid: Tensor, batch_idx: Tensor | None, num_graphs: int | Tensor | None, *, loss_name: str
) -> tuple[Tensor, Tensor]:
    """Average the valid entries of each graph, then the graphs.

    Parameters
    ----------
    residual, valid : Tensor
        Loss of each entry and what is valid, both shape (V, ...).
    batch_idx : Tensor
        Graph of each atom, shape (V,).
    num_graphs : int or 0-d Tensor
        Number of graphs B.
    loss_name : str
        For messages.

    Returns
    -------
    tuple of Tensor
        The scalar, and the mean of each graph, shape (B,). A graph without a valid entry has mean 0 and is counted.

    Raises
    ------
    ConfigurationError
        If ``batch_idx`` or ``num_graphs`` is None.
    DataError
        If the shapes do not fit.
    """
    if batch_idx is None or num_graphs is None:
        raise missing_metadata(loss_name, "batch_idx" if batch_idx is None else "num_graphs")
    means, _ = graph_means(_zero_invalid(residual, valid, loss_name), valid, batch_idx, num_graphs)
    return means.mean(), means


def masked_mean(
    residual: Tensor,
    valid: Tensor,
    *,
    graph_balanced: bool,
    batch_idx: Tensor | None = None,
    num_graphs: int | Tensor | None = None,
    batch: object = None,
    loss_name: str = "masked_mean",
) -> tuple[Tensor, Tensor | None]:
    """Average the valid entries, over all atoms or graph by graph.

    Parameters
    ----------
    residual, valid : Tensor
        Loss of each entry and what is valid, both shape (V, ...).
    graph_balanced : bool
        Every graph weighs the same (True) or every entry does (False).
    batch_idx, num_graphs, batch
        Graph metadata, needed where ``graph_balanced``; ``batch`` is an object that has the other two as attributes.
    loss_name : str
        For messages.

    Returns
    -------
    tuple
        The scalar, and the mean of each graph, shape (B,), or None where the mean is global.
    """
    if graph_balanced:
        batch_idx = getattr(batch, "batch_idx", None) if batch_idx is None else batch_idx
        num_graphs = getattr(batch, "num_graphs", None) if num_graphs is None else num_graphs
        return graph_balanced_mean(residual, valid, batch_idx, num_graphs, loss_name=loss_name)
    return masked_sums(_zero_invalid(residual, valid, loss_name), valid).value, None


def per_graph_sum(values: Tensor, batch_idx: Tensor, num_graphs: int | Tensor | None = None) -> Tensor:
    """Sum over the atoms of each graph.

    Parameters
    ----------
    values : Tensor
        One entry per atom, shape (V, ...).
    batch_idx : Tensor
        Graph of each atom, shape (V,).
    num_graphs : int or 0-d Tensor, optional
        Number of graphs B; trusted, not checked against ``batch_idx``. Default: the largest index plus 1, which
        waits for the device.

    Returns
    -------
    Tensor
        Shape (B, ...), float32 or wider.

    Raises
    ------
    DataError
        If ``batch_idx`` does not fit ``values``, ``num_graphs`` is not positive, or it is left out and there are no
        atoms.
    """
    graph_of = _graph_index(values, batch_idx)
    graphs = _infer_graphs(graph_of) if num_graphs is None else _positive(num_graphs)
    values = widen(values)
    if values.ndim > 1:
        graph_of = graph_of.reshape(-1, *[1] * (values.ndim - 1)).expand_as(values)
    return values.new_zeros(graphs, *values.shape[1:]).scatter_add(0, graph_of, values)


def per_graph_mean(values: Tensor, batch_idx: Tensor, num_graphs: int | Tensor | None = None) -> Tensor:
    """Average over the atoms of each graph; an empty graph gives 0. Arguments as in ``per_graph_sum``."""
    total = per_graph_sum(values, batch_idx, num_graphs)
    counts = per_graph_sum(torch.ones_like(batch_idx), batch_idx, total.shape[0]).clamp_min(1)
    return total / counts.reshape(-1, *[1] * (total.ndim - 1))


def frobenius_mse(pred: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared entry of each matrix difference.

    Parameters
    ----------
    pred, target : Tensor
        Matrices, shape (B, ..., M, N).

    Returns
    -------
    Tensor
        Mean over the last two dimensions, shape (B, ...), float32 or wider.

    Raises
    ------
    DataError
        If the shapes differ or have fewer than three dimensions.
    """
    if pred.shape != target.shape or pred.ndim < 3:
        raise DataError(
            "frobenius_mse needs two tensors of the same shape (B, M, N); "
            f"got {tuple(pred.shape)} and {tuple(target.shape)}"
        )
    return (widen(pred) - widen(target)).square().mean((-2, -1))


def missing_metadata(loss_name: str, name: str) -> ConfigurationError:
    """Return the error for graph metadata that a call lacks."""
    return ConfigurationError(f"{loss_name} requires {name}=... metadata. Pass {name}= or batch= to the call.")


def _zero_invalid(residual: Tensor, valid: Tensor, name: str) -> Tensor:
    if residual.shape != valid.shape:
        raise DataError(
            f"{name}: residual and valid must have the same shape; got {tuple(residual.shape)} and {tuple(valid.shape)}"
        )
    return widen(residual).masked_fill(~valid, 0.0)


def _graph_index(values: Tensor, batch_idx: Tensor) -> Tensor:
    if batch_idx.ndim != 1 or batch_idx.dtype.is_floating_point or batch_idx.dtype is torch.bool:
        raise DataError(
            f"batch_idx must be a 1-D integer tensor, one graph index per atom; got shape {tuple(batch_idx.shape)}, "
            f"{batch_idx.dtype}"
        )
    if values.shape[:1] != batch_idx.shape:
        raise DataError(f"batch_idx has {len(batch_idx)} entries, but the values have shape {tuple(values.shape)}")
    return batch_idx.to(values.device, torch.int64)


def _infer_graphs(graph_of: Tensor) -> int:
    if graph_of.numel() == 0:
        raise DataError("num_graphs cannot be inferred from an empty batch_idx; pass num_graphs=")
    return int(graph_of.max()) + 1


def _positive(num_graphs: int | Tensor) -> int:
    graphs = index(num_graphs)
    if graphs <= 0:
        raise DataError(f"num_graphs must be positive; got {graphs}")
    return graphs


def _row_sums(residual: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    if residual.ndim > 2:
        residual, valid = residual.flatten(1), valid.flatten(1)
    # Counts of the residual's own dtype: a division of unlike dtypes takes twice the time.
    return residual.sum(1), valid.sum(1, dtype=residual.dtype)
