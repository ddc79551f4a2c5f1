"""How the rows of all levels divide among the graphs of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from nvalchemi_lightning.data.fields import Level
from nvalchemi_lightning.data.segments import Segments
from nvalchemi_lightning.errors import DataError

__all__ = ["Layout", "Parts"]


class Layout:
    """Numbers of rows on each level, and to which graph they belong; never changes.

    Parameters
    ----------
    nodes : Segments
        Atoms of each graph.
    edge_rows : int or None
        Number of edges E; None without edge fields.
    edges : Segments or None
        Edges of each graph; None where they are to be counted from ``neighbor_list`` when first needed.
    neighbor_list : Tensor or None
        What to count, shape (E, 2).
    """

    __slots__ = ("_edges", "_neighbor_list", "nodes", "rows")

    def __init__(
        self,
        nodes: Segments,
        edge_rows: int | None = None,
        edges: Segments | None = None,
        neighbor_list: Tensor | None = None,
    ) -> None:
        self.nodes = nodes
        self.rows: Mapping[Level, int | None] = {"node": nodes.total, "edge": edge_rows, "system": len(nodes)}
        self._edges = edges
        self._neighbor_list = neighbor_list

    @property
    def edges(self) -> Segments | None:
        """Edges of each graph; None without edge fields.

        Raises
        ------
        DataError
            If the edges have to be counted, and hold wrong indices or are not grouped by graph.
        """
        if self._edges is None and self._neighbor_list is not None:
            self._edges = _count_edges(self._neighbor_list, self.nodes)
            self._neighbor_list = None
        return self._edges

    def without_neighbor_list(self) -> Layout:
        """Return this layout without the tensor that it may still have to count."""
        return Layout(self.nodes, self.rows["edge"], self._edges)

    def with_neighbor_list(self, fields: Mapping[str, Tensor]) -> Layout:
        """Return this layout, with the tensor to count where the edges are not counted yet."""
        if self._edges is not None or "neighbor_list" not in fields:
            return self
        return Layout(self.nodes, self.rows["edge"], neighbor_list=fields["neighbor_list"])

    def sizes(self, level: Level) -> list[int]:
        """Return the rows of each graph on a level; not to be changed."""
        if level == "node":
            return self.nodes.sizes
        if level == "system":
            return [1] * len(self.nodes)
        return [0] * len(self.nodes) if self.edges is None else self.edges.sizes

    def to(self, device: torch.device | str | int | None, non_blocking: bool) -> Layout:
        """Return this layout on a device; the object itself when already there."""
        nodes = self.nodes.to(device, non_blocking)
        if nodes is self.nodes:
            return self
        edges = None if self.edges is None else self.edges.to(device, non_blocking)
        return Layout(nodes, self.rows["edge"], edges)


def _count_edges(neighbor_list: Tensor, nodes: Segments) -> Segments:
    if neighbor_list.shape[0] and not 0 <= int(neighbor_list.min()) <= int(neighbor_list.max()) < nodes.total:
        raise DataError(f"neighbor_list holds indices that are no atoms of the batch (0 to {nodes.total - 1})")
    graphs = nodes.index[neighbor_list[:, 0].long()]
    if (graphs[1:] < graphs[:-1]).any():
        raise DataError("the rows of neighbor_list are not grouped by structure; sort them by their first column")
    return Segments.from_counts(torch.bincount(graphs, minlength=len(nodes)), neighbor_list.device)


class Parts(NamedTuple):
    """What a batch consists of."""

    fields: Mapping[str, Tensor]
    levels: Mapping[str, Level]
    layout: Layout

    @classmethod
    def checked(
        cls,
        fields: Mapping[str, Tensor],
        levels: Mapping[str, Level],
        nodes: Segments,
        edges: Segments | None,
    ) -> Parts:
        """Combine parts whose numbers of rows agree; edges that are None are counted when needed.

        Raises
        ------
        DataError
            If the numbers of rows disagree.
        """
        edge_rows = next((fields[name].shape[0] for name, level in levels.items() if level == "edge"), None)
        if edges is not None and (edges.total, len(edges)) != (edge_rows or 0, len(nodes)):
            raise DataError(
                f"num_edges_per_graph adds up to {edges.total} edges of {len(edges)} graphs, "
                f"but there are {edge_rows or 0} edges and {len(nodes)} graphs"
            )
        if edge_rows is None:
            edges = None
        elif edges is None and "neighbor_list" not in fields:
            raise DataError("edge fields without neighbor_list need num_edges_per_graph")
        layout = Layout(nodes, edge_rows, edges, fields.get("neighbor_list") if edges is None else None)
        for name, level in levels.items():
            rows = fields[name].shape[0]
            if rows != layout.rows[level]:
                raise DataError(f"{name!r} has {rows} rows, but the {level} level has {layout.rows[level]}")
        return cls(fields, levels, layout)
