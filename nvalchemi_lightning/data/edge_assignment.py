"""Giving batches and structures their edges."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from nvalchemi_lightning.data.edge_cutoff import reaching

__all__ = ["assign_edges"]


def assign_edges(data: Any, edges: Tensor, shifts: Tensor, cutoff: float) -> None:
    """Replace the edges of a batch or structure, in place, and note how far they reach.

    Parameters
    ----------
    data : Batch or AtomicData
        Of this package or of nvalchemi-toolkit.
    edges : Tensor
        Pairs of atoms, sorted by structure, shape (E, 2).
    shifts : Tensor
        Lattice image of the second atom of each pair, shape (E, 3).
    cutoff : float
        Largest distance of the edges [A].
    """
    if hasattr(data, "set_level"):
        _replace_level(data, edges, shifts)
    else:
        data.neighbor_list, data.neighbor_list_shifts = edges, shifts
    reaching(data, cutoff)


def _replace_level(batch: Any, edges: Tensor, shifts: Tensor) -> None:
    # A batch of nvalchemi-toolkit takes another number of edges only together with those of every structure.
    storage = import_module("nvalchemi.data.level_storage").SegmentedLevelStorage
    sizes = torch.bincount(batch.batch_idx[edges[:, 0]], minlength=batch.num_graphs).to(torch.int32)
    values = {"neighbor_list": edges, "neighbor_list_shifts": shifts}
    batch.set_level("edges", storage(data=values, device=batch.device, segment_lengths=sizes))
