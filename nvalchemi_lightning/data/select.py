"""Taking structures out of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from nvalchemi_lightning.data.fields import FIELDS, Level
from nvalchemi_lightning.data.segments import Segments
from nvalchemi_lightning.errors import DataError

__all__ = ["GraphIndexError", "Index", "graph_numbers", "select_graphs", "split_graphs"]

Index: TypeAlias = int | slice | Sequence[int] | Sequence[bool] | Tensor


class GraphIndexError(DataError, IndexError):
    """An index that names no structure of a batch."""


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
    if isinstance(index, slice):
        numbers = list(range(count))[index]
    else:
        numbers = _listed(index, count)
    if not numbers:
        raise GraphIndexError(f"the index selects none of the {count} graphs")
    for number in numbers:
        if not -count <= number < count:
            raise GraphIndexError(f"graph {number} does not exist: there are {count}")
    return [number % count for number in numbers]


def _listed(index: int | Sequence[int] | Sequence[bool] | Tensor, count: int) -> list[int]:
    if isinstance(index, int):
        return [index]
    chosen = torch.as_tensor(index).reshape(-1)
    if chosen.dtype == torch.bool:
        if len(chosen) != count:
            raise GraphIndexError(f"the mask has {len(chosen)} entries, but there are {count} graphs")
        chosen = chosen.nonzero().reshape(-1)
    elif len(chosen) and (chosen.is_floating_point() or chosen.is_complex()):
        raise GraphIndexError(f"graphs are indexed by integers or a mask, got {chosen.dtype}")
    numbers: list[int] = chosen.tolist()
    return numbers


def select_graphs(
    fields: Mapping[str, Tensor],
    levels: Mapping[str, Level],
    nodes: Segments,
    edges: Segments | None,
    graphs: list[int],
) -> tuple[dict[str, Tensor], Segments, Segments | None]:
    """Copy the rows of some graphs.

    Parameters
    ----------
    fields, levels : mapping
        Tensors of the batch and their levels.
    nodes, edges : Segments or None
        How atoms and edges divide among graphs.
    graphs : list of int
        Which graphs, from :func:`graph_numbers`.

    Returns
    -------
    tuple
        Fields, atoms and edges of the selection; atom indices count through the selected atoms.
    """
    order = torch.tensor(graphs, device=nodes.counts.device)
    new_nodes = nodes.select(graphs)
    new_edges = None if edges is None else edges.select(graphs)
    rows: dict[Level, Tensor] = {"node": nodes.rows(order, new_nodes), "system": order}
    if edges is not None and new_edges is not None:
        rows["edge"] = edges.rows(order, new_edges)
    chosen = {name: fields[name].index_select(0, rows[level]) for name, level in levels.items()}
    moved = new_nodes.ptr[:-1] - nodes.ptr[order]
    if "neighbor_list" in chosen and new_edges is not None:
        chosen["neighbor_list"] += new_edges.spread(moved).unsqueeze(1)
    if "neighbor_matrix" in chosen:
        spread = new_nodes.spread(moved).unsqueeze(1)
        chosen["neighbor_matrix"] = move_matrix(chosen["neighbor_matrix"], spread, nodes.total, new_nodes.total)
    return chosen, new_nodes, new_edges


def move_matrix(matrix: Tensor, offset: Tensor | int, pad: int, new_pad: int) -> Tensor:
    """Add to the atom indices of a neighbor matrix and replace its padding, which are the values from ``pad`` up."""
    return torch.where(matrix >= pad, new_pad, matrix + offset).to(matrix.dtype)


def split_graphs(
    fields: Mapping[str, Tensor], levels: Mapping[str, Level], nodes: Segments, edges: Segments | None
) -> list[dict[str, Tensor]]:
    """Divide a batch into the fields of each structure, as views where the numbers need no change.

    A floating field that is NaN throughout a structure is a missing label: that structure does not get it. Neither
    does a structure get a cell of zeros when it is not periodic either.
    """
    ones = [1] * len(nodes)
    sizes = {"node": nodes.sizes, "system": ones, "edge": ones if edges is None else edges.sizes}
    pieces = {name: torch.split(fields[name], sizes[level]) for name, level in levels.items()}
    absent = {name: _missing(name, fields[name], parts) for name, parts in pieces.items()}
    starts = nodes.ptr.tolist()
    graphs = []
    for graph in range(len(nodes)):
        single = {name: parts[graph] for name, parts in pieces.items() if graph not in absent[name]}
        graphs.append(_rebased(_without_empty_cell(single), starts[graph], nodes.sizes[graph], nodes.total))
    return graphs


def _missing(name: str, whole: Tensor, parts: Sequence[Tensor]) -> frozenset[int]:
    """Return the graphs in which a label is NaN throughout."""
    field = FIELDS.get(name)
    is_label = whole.is_floating_point() and (field is None or field.missing == "nan")
    # One look at the whole tensor spares one at each structure in the usual case.
    if not is_label or not whole.isnan().any():
        return frozenset()
    return frozenset(graph for graph, part in enumerate(parts) if part.isnan().all())


def _without_empty_cell(single: dict[str, Tensor]) -> dict[str, Tensor]:
    cell, pbc = single.get("cell"), single.get("pbc")
    if cell is None or cell.any() or (pbc is not None and pbc.any()):
        return single
    return {name: value for name, value in single.items() if name not in ("cell", "pbc")}


def _rebased(single: dict[str, Tensor], start: int, size: int, total: int) -> dict[str, Tensor]:
    if "neighbor_list" in single:
        single["neighbor_list"] = single["neighbor_list"] - start
    if "neighbor_matrix" in single:
        single["neighbor_matrix"] = move_matrix(single["neighbor_matrix"], -start, total, size)
    return single
