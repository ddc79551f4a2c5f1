"""Counts and offsets of a batch, all derived from its layout."""

from __future__ import annotations

import torch
from torch import Tensor

from nvalchemi_lightning.data.fields import LEVELS, Level
from nvalchemi_lightning.data.holder import FieldHolder
from nvalchemi_lightning.data.layout import Layout

__all__ = ["Counts"]


class Counts(FieldHolder):
    """The read-only quantities of a batch that say where each structure begins; not to be used by itself.

    They are int64, so they index and scatter without a cast. Each is computed when first read.
    """

    _layout: Layout

    @property
    def num_graphs(self) -> int:
        """Number of structures B."""
        return len(self._layout.nodes)

    @property
    def batch_size(self) -> int:
        """Number of structures B."""
        return len(self._layout.nodes)

    def __len__(self) -> int:
        """Return the number of structures B."""
        return len(self._layout.nodes)

    @property
    def num_edges(self) -> int:
        """Number of edges E; 0 without edge fields."""
        return self._layout.rows["edge"] or 0

    @property
    def num_nodes_per_graph(self) -> Tensor:
        """Atoms of each structure, int64, shape (B,)."""
        return self._layout.nodes.counts

    @property
    def num_edges_per_graph(self) -> Tensor:
        """Edges of each structure, int64, shape (B,)."""
        edges = self._layout.edges
        return torch.zeros_like(self._layout.nodes.counts) if edges is None else edges.counts

    @property
    def num_nodes_list(self) -> list[int]:
        """Atoms of each structure as Python integers."""
        return list(self._layout.nodes.sizes)

    @property
    def num_edges_list(self) -> list[int]:
        """Edges of each structure as Python integers."""
        return list(self._layout.sizes("edge"))

    @property
    def max_num_nodes(self) -> int:
        """Atoms of the largest structure."""
        return max(self._layout.nodes.sizes)

    @property
    def batch_idx(self) -> Tensor:
        """Structure of each atom, int64, shape (V,)."""
        return self._layout.nodes.index

    @property
    def batch_ptr(self) -> Tensor:
        """First atom of each structure, then V, int64, shape (B + 1,)."""
        return self._layout.nodes.ptr

    @property
    def edge_ptr(self) -> Tensor:
        """First edge of each source atom, then E, int64, shape (V + 1,), for a ``neighbor_list`` sorted by source.

        Raises
        ------
        LabelNotFoundError
            If there is no ``neighbor_list``.
        """
        sources = self._field("neighbor_list")[:, 0].long()
        return torch.nn.functional.pad(torch.bincount(sources, minlength=self.num_nodes).cumsum(0), (1, 0))

    @property
    def keys(self) -> dict[str, set[str]]:
        """Names of the fields that are set, by level: "node", "edge", "system"."""
        return {level: set(self._at(level)) for level in LEVELS}

    @property
    def level_keys(self) -> dict[str, set[str]]:
        """Names of the fields that are set, by storage level: "atoms", "edges", "system"."""
        return dict(zip(("atoms", "edges", "system"), self.keys.values(), strict=True))

    def _sizes(self, level: Level) -> list[int]:
        return self._layout.sizes(level)
