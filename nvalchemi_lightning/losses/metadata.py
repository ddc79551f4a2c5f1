"""Graph metadata of a loss call: which atoms belong to which graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nvalchemi_lightning.errors import ConfigurationTypeError, DataError
from nvalchemi_lightning.losses.reductions import missing_metadata

__all__ = ["METADATA", "atoms_per_graph", "find", "node_mask", "require"]

METADATA = ("batch_idx", "num_graphs", "num_nodes_per_graph")
"""What a loss call may need to know about the batch besides predictions and targets."""


def find(metadata: Mapping[str, Any], name: str) -> Any:
    """Return an entry of the call's metadata, else the attribute of ``batch=``, else None."""
    value = metadata.get(name)
    return getattr(metadata.get("batch"), name, None) if value is None else value


def require(metadata: Mapping[str, Any], name: str, user: object) -> Any:
    """Return what ``find`` does.

    Raises
    ------
    ConfigurationError
        If that is None; the message names ``user``, a string or the term itself.
    """
    value = find(metadata, name)
    if value is None:
        raise missing_metadata(user if isinstance(user, str) else type(user).__name__, name)
    return value


def atoms_per_graph(metadata: Mapping[str, Any], energies: Tensor, loss_name: str) -> Tensor:
    """Return the number of atoms of each graph, at least 1, shaped, placed and typed like the energies.

    Raises
    ------
    ConfigurationError
        If the call gives no ``num_nodes_per_graph``.
    DataError
        If it does not have one entry per graph.
    """
    counts = _nodes(metadata, loss_name)
    if counts.ndim == 2:
        counts = counts.sum(-1)
    if counts.shape != energies.shape[:1]:
        raise DataError(
            f"{loss_name}: num_nodes_per_graph gives {tuple(counts.shape)} counts for {energies.shape[0]} energies"
        )
    return counts.to(energies.device, energies.dtype).clamp_min(1).reshape(energies.shape)


def node_mask(metadata: Mapping[str, Any], padded: Tensor, loss_name: str) -> Tensor:
    """Return which rows of a padded (B, V_max, ...) tensor are atoms, shape (B, V_max).

    Raises
    ------
    ConfigurationError
        If the call gives no ``num_nodes_per_graph``.
    DataError
        If it is neither (B,) counts nor a (B, V_max) mask.
    """
    nodes = _nodes(metadata, loss_name).to(padded.device)
    if nodes.shape == padded.shape[:2]:
        return nodes.bool()
    if nodes.shape != padded.shape[:1]:
        raise DataError(
            f"{loss_name}: num_nodes_per_graph must be (B,) counts or a (B, V_max) mask for tensors of shape "
            f"{tuple(padded.shape)}; got shape {tuple(nodes.shape)}"
        )
    return torch.arange(padded.shape[1], device=padded.device) < nodes.unsqueeze(-1)


def _nodes(metadata: Mapping[str, Any], loss_name: str) -> Tensor:
    nodes = require(metadata, "num_nodes_per_graph", loss_name)
    if not isinstance(nodes, Tensor):
        raise ConfigurationTypeError(
            f"{loss_name}: num_nodes_per_graph must be a tensor; got {type(nodes).__name__}. "
            "Pass torch.tensor(counts) with one count per graph"
        )
    return nodes
