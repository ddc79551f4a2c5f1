"""Taking structures out of a batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from nvalchemi_lightning.data.fields import FIELDS, Level
from nvalchemi_lightning.data.layout import Parts
from nvalchemi_lightning.data.segments import Segments
from nvalchemi_lightning.errors import DataError

__all__ = ["GraphIndexError", "GraphSlicer", "Index", "graph_numbers", "index_dtype", "move_matrix", "select_graphs"]

Index: TypeAlias = int | slice | Sequence[int] | Sequence[bool] | Tensor


class GraphIndexError(DataError, IndexError):
    """An index that names no structure."""


def graph_numbers(index: Index, count: int) -> list[int]:
    """Turn an index into non-negative graph numbers.

    Parameters
    ----------
    index : int, slice, sequence of int, sequence of bool, or Tensor
        Which graphs; negative numbers count from the end; booleans are a mask of length ``count``.
    count : int
        Number of graphs B.

    Returns
    -------
    list of int
        In the order asked for, repeated where asked for twice; never empty.

    Raises
    ------
    GraphIndexError
        If nothing is selected, a number is out of range or a mask has another length.
    """
    numbers = list(range(count))[index] if isinstance(index, slice) else _listed(index, count)
    if not numbers:
        raise GraphIndexError(f"the index selects none of the {count} structures")
    for number in numbers:
        if not -count <= number < count:
            raise GraphIndexError(f"structure {number} does not exist: there are {count}")
    return [number % count for number in numbers]


def _listed(index: int | Sequence[int] | Sequence[bool] | Tensor, count: int) -> list[int]:
    if isinstance(index, int):
        return [index]
    chosen = torch.as_tensor(index).reshape(-1)
    if chosen.dtype == torch.bool:
        if len(chosen) != count:
            raise GraphIndexError(f"the mask has {len(chosen)} entries, but there are {count} structures")
        chosen = chosen.nonzero().reshape(-1)
    elif len(chosen) and (chosen.is_floating_point() or chosen.is_complex()):
        raise GraphIndexError(f"structures are indexed by integers or a mask, got {chosen.dtype}")
    numbers: list[int] = chosen.tolist()
    return numbers


def select_graphs(parts: Parts, graphs: list[int]) -> Parts:
    """Copy the rows of some graphs.

    Parameters
    ----------
    parts : Parts
        Of the batch.
    graphs : list of int
        Which graphs, from :func:`graph_numbers`.

    Returns
    -------
    Parts
        Of the selection; atom indices count through the selected atoms.
    """
    nodes, edges = parts.layout.nodes, parts.layout.edges
    order = torch.tensor(graphs, device=nodes.counts.device)
    new_nodes = nodes.select(graphs)
    new_edges = None if edges is None else edges.select(graphs)
    rows: dict[Level, Tensor] = {"node": nodes.rows(order, new_nodes), "system": order}
    if edges is not None and new_edges is not None:
        rows["edge"] = edges.rows(order, new_edges)
    fields = {name: parts.fields[name].index_select(0, rows[level]) for name, level in parts.levels.items()}
    if "neighbor_list" in fields and new_edges is not None:
        fields["neighbor_list"] += new_edges.spread(new_nodes.ptr[:-1] - nodes.ptr[order]).unsqueeze(1)
    if "neighbor_matrix" in fields:
        moved = new_nodes.spread(new_nodes.ptr[:-1] - nodes.ptr[order]).unsqueeze(1)
        fields["neighbor_matrix"] = move_matrix(fields["neighbor_matrix"], moved, nodes.total, new_nodes.total)
    has_edges = "edge" in parts.levels.values()
    return Parts.checked(fields, parts.levels, new_nodes, new_edges if has_edges else None)


def move_matrix(matrix: Tensor, offset: Tensor | int, pad: int, new_pad: int) -> Tensor:
    """Add to the atom indices of a neighbor matrix and replace its padding, which are the values from ``pad`` up."""
    wide = matrix.to(index_dtype(matrix))
    return torch.where(wide >= pad, new_pad, wide + offset).to(wide.dtype)


def index_dtype(indices: Tensor) -> torch.dtype:
    """Return the dtype for indices into a whole batch: small integers grow to int32, others stay."""
    return torch.promote_types(indices.dtype, torch.int32)


class GraphSlicer:
    """Takes single structures out of a batch as views, except where atom indices have to change.

    A floating field that is NaN throughout a structure is a missing label: that structure does not get it. Neither
    does a structure get a cell of zeros when it is not periodic either.
    """

    def __init__(self, parts: Parts) -> None:
        self._fields = {name: parts.fields[name] for name in parts.levels}
        self._levels = parts.levels
        self._layout = parts.layout
        self._labels = [name for name, value in self._fields.items() if _is_label(name, value)]

    def one(self, graph: int) -> dict[str, Tensor]:
        """Return the fields of one structure."""
        nodes, edges = self._layout.nodes, self._layout.edges
        bounds = {"node": _bounds(nodes, graph), "system": slice(graph, graph + 1)}
        if edges is not None:
            bounds["edge"] = _bounds(edges, graph)
        single = {name: self._fields[name][bounds[level]] for name, level in self._levels.items()}
        return self._finished(single, self._labels, bounds["node"].start, "cell" not in self._fields)

    def all(self) -> list[dict[str, Tensor]]:
        """Return the fields of every structure."""
        parts = [torch.split(self._fields[name], self._layout.sizes(level)) for name, level in self._levels.items()]
        # One look at a whole field spares one at each structure in the usual case that nothing is missing.
        labels = [name for name in self._labels if math.isnan(self._fields[name].sum().item())]
        cell = self._fields.get("cell")
        all_cells = cell is None or bool(cell.flatten(1).any(1).all())
        return [
            self._finished(dict(zip(self._levels, values, strict=True)), labels, start, all_cells)
            for *values, start in zip(*parts, self._layout.nodes.ptr.tolist()[:-1], strict=True)
        ]

    def _finished(
        self, single: dict[str, Tensor], labels: Sequence[str], start: int, has_cell: bool
    ) -> dict[str, Tensor]:
        for name in labels:
            if single[name].numel() and single[name].isnan().all():
                del single[name]
        if not has_cell and _without_cell(single):
            single = {name: value for name, value in single.items() if name not in ("cell", "pbc")}
        if "neighbor_list" in single:
            single["neighbor_list"] = single["neighbor_list"] - start
        if "neighbor_matrix" in single:
            size = single["positions"].shape[0]
            single["neighbor_matrix"] = move_matrix(single["neighbor_matrix"], -start, self._layout.nodes.total, size)
        return single


def _bounds(segments: Segments, graph: int) -> slice:
    start, stop = segments.ptr[graph : graph + 2].tolist()
    return slice(start, stop)


def _is_label(name: str, value: Tensor) -> bool:
    return value.is_floating_point() and (name not in FIELDS or FIELDS[name].missing == "nan")


def _without_cell(single: Mapping[str, Tensor]) -> bool:
    cell, pbc = single.get("cell"), single.get("pbc")
    return cell is not None and not cell.any() and (pbc is None or not pbc.any())
