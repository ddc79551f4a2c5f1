"""The transform that computes neighbor lists ahead of training."""

from __future__ import annotations

from typing import TypeVar

from nvalchemi_lightning.data.atomic_data import AtomicData
from nvalchemi_lightning.data.batch import Batch
from nvalchemi_lightning.data.edge_assignment import assign_edges
from nvalchemi_lightning.neighbors import check_cutoff, neighbor_list

__all__ = ["NeighborListTransform"]

Data = TypeVar("Data", AtomicData, Batch)


class NeighborListTransform:
    """Add ``neighbor_list`` and ``neighbor_list_shifts`` to a structure or a batch.

    Parameters
    ----------
    cutoff : float
        Largest distance [A].

    Raises
    ------
    ConfigurationError
        If the cutoff is not a positive, finite number.

    Examples
    --------
    Edges computed once, for data that stay in memory::

        InMemoryDataset(structures, prepare=[NeighborListTransform(5.0)])

    Edges kept in a store::

        AtomicDataZarrWriter("edges.zarr").write(map(NeighborListTransform(5.0), structures))

    Edges computed whenever a structure is read, by the workers of the loader::

        Dataset(reader, transforms=[NeighborListTransform(5.0)])

    Notes
    -----
    A model uses the edges that a batch brings. A ``NeighborListHook`` would replace them, so leave it out. The cutoff
    is noted on the result and in the store: a model with a larger one refuses the edges.

    A batch of nvalchemi-toolkit is changed in place.

    A transform that moves atoms afterwards, unless it moves all of a structure alike, makes the edges wrong.
    """

    def __init__(self, cutoff: float) -> None:
        check_cutoff(cutoff)
        self.cutoff = cutoff

    def __call__(self, data: Data) -> Data:
        """Return a new object that shares all tensors with ``data`` and has edges; edges that it had are replaced."""
        changed = data.contiguous()
        assign_edges(changed, *neighbor_list(data, self.cutoff), self.cutoff)
        return changed
