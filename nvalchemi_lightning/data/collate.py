"""Joining structures and batches into one: the union of their fields, with missing labels as NaN."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from nvalchemi_lightning.data.elements import standard_masses
from nvalchemi_lightning.data.fields import CORE_FIELDS, FIELDS, Level
from nvalchemi_lightning.data.layout import Parts
from nvalchemi_lightning.data.segments import Segments
from nvalchemi_lightning.data.select import index_dtype, move_matrix
from nvalchemi_lightning.errors import DataError

__all__ = ["Piece", "fill_rows", "join", "wrap_levels"]


class Piece(Protocol):
    """What can be joined: an ``AtomicData`` or a ``Batch``."""

    _levels: Mapping[str, Level]
    __dict__: dict[str, Any]
    atomic_numbers: Tensor

    @property
    def num_nodes(self) -> int: ...  # noqa: D102

    def _sizes(self, level: Level) -> list[int]: ...


def join(pieces: Sequence[Piece], exclude: Collection[str] = ()) -> Parts:
    """Concatenate the fields of all pieces.

    Parameters
    ----------
    pieces : sequence of AtomicData or Batch
        At least one, on one device.
    exclude : collection of str
        Names to leave out.

    Returns
    -------
    Parts
        With every field that some piece has. Atom indices (``neighbor_list``, ``neighbor_matrix``) count through the
        joined atoms.

    Raises
    ------
    DataError
        If there are no pieces, a piece lacks a field that has no missing value, or fields do not fit together.
    """
    if not pieces:
        raise DataError("cannot make a batch of no structures: the list is empty")
    for name in CORE_FIELDS:
        if name in exclude:
            raise DataError(f"a batch cannot be without {name!r}: take it out of exclude_keys")
    levels = {name: level for name, level in _union(pieces).items() if name not in exclude}
    fields = {name: _concatenate(name, level, pieces) for name, level in levels.items()}
    device = fields["positions"].device
    nodes = Segments.from_sizes([size for piece in pieces for size in piece._sizes("node")], device)
    edges = None
    if "edge" in levels.values():
        edges = Segments.from_sizes([size for piece in pieces for size in piece._sizes("edge")], device)
    return Parts.checked(fields, levels, nodes, edges)


def wrap_levels(
    given: Mapping[Level, Mapping[str, Tensor]],
    num_nodes_per_graph: Tensor | Sequence[int],
    num_edges_per_graph: Tensor | Sequence[int] | None,
) -> Parts:
    """Combine tensors that are concatenated already; see ``Batch.from_levels``.

    Raises
    ------
    DataError
        If a field has the wrong number of rows, a name appears on two levels, or a core field is absent.
    """
    for name in CORE_FIELDS:
        if name not in given["node"]:
            raise DataError(f"a batch cannot be without {name!r}: it is not among the node fields")
    fields = {name: value for values in given.values() for name, value in values.items()}
    levels = {name: level for level, values in given.items() for name in values}
    if len(fields) < sum(map(len, given.values())):
        twice = sorted(name for name in fields if sum(name in values for values in given.values()) > 1)
        raise DataError(f"fields on more than one level: {twice}")
    device = fields["positions"].device
    nodes = Segments.from_counts(num_nodes_per_graph, device)
    edges = None if num_edges_per_graph is None else Segments.from_counts(num_edges_per_graph, device)
    return Parts.checked(fields, levels, nodes, edges)


def _union(pieces: Sequence[Piece]) -> Mapping[str, Level]:
    first = pieces[0]._levels
    # Structures with the same fields usually share one mapping, or have equal ones.
    others = [piece._levels for piece in pieces if piece._levels is not first and piece._levels != first]
    if not others:
        return first
    union = dict(first)
    for levels in others:
        for name, level in levels.items():
            if union.setdefault(name, level) != level:
                raise DataError(f"{name!r} is on the level {union[name]!r} in one sample and {level!r} in another")
    return union


def _concatenate(name: str, level: Level, pieces: Sequence[Piece]) -> Tensor:
    found = [piece.__dict__.get(name) for piece in pieces]
    values = [value for value in found if value is not None]
    if len(values) < len(pieces):
        like = values[0]
        values = [
            fill_rows(name, level, piece, like, index) if value is None else value
            for index, (piece, value) in enumerate(zip(pieces, found, strict=True))
        ]
    if name == "neighbor_matrix":
        return _join_matrices(values, pieces)
    if name == "neighbor_matrix_shifts":
        return torch.cat(_widened(values, 0))
    try:
        joined = torch.cat(values)
    except RuntimeError as error:
        raise DataError(_misfit(name, values, error)) from error
    return joined + _edge_offsets(values, pieces, joined) if name == "neighbor_list" else joined


def fill_rows(name: str, level: Level, piece: Piece, like: Tensor, index: int) -> Tensor:
    """Return what stands in for a field that a structure or batch lacks.

    Parameters
    ----------
    name, level : str
        The field.
    piece : AtomicData or Batch
        What lacks it.
    like : Tensor
        The field elsewhere: gives dtype, device and the shape of a row.
    index : int
        Position of the piece, for the message.

    Raises
    ------
    DataError
        If nothing can stand in for it.
    """
    field = FIELDS.get(name)
    missing = ("nan" if like.is_floating_point() else "refuse") if field is None else field.missing
    if missing == "refuse":
        raise DataError(_no_fill(name, level, like, index))
    if missing == "mass":
        return standard_masses(piece.atomic_numbers, like.dtype)
    rows = sum(piece._sizes(level))
    return like.new_full((rows, *like.shape[1:]), float("nan") if missing == "nan" else 0)


def _no_fill(name: str, level: Level, like: Tensor, index: int) -> str:
    if level == "edge":
        return (
            f"sample {index} has no {name!r} but others do; build neighbor lists for all samples, "
            f"or after batching, or leave the edge fields out with exclude_keys"
        )
    return (
        f"sample {index} has no {name!r} but others do, and {like.dtype} has no value for 'missing'; "
        f"give it to all samples, store it as a floating field, or leave it out with exclude_keys"
    )


def _misfit(name: str, values: Sequence[Tensor], error: RuntimeError) -> str:
    first = values[0]
    for index, value in enumerate(values):
        if value.device != first.device:
            return f"{name!r} of sample {index} is on {value.device}, but that of sample 0 on {first.device}"
        if value.shape[1:] != first.shape[1:]:
            rows = f"rows of shape {tuple(value.shape[1:])}, but {tuple(first.shape[1:])} in sample 0"
            return f"{name!r} of sample {index} has {rows}"
    return f"{name!r} of the samples does not fit together: {error}"


def _node_starts(pieces: Sequence[Piece]) -> list[int]:
    starts, total = [], 0
    for piece in pieces:
        starts.append(total)
        total += piece.num_nodes
    return starts


def _edge_offsets(values: Sequence[Tensor], pieces: Sequence[Piece], like: Tensor) -> Tensor:
    starts = torch.tensor(_node_starts(pieces), dtype=index_dtype(like), device=like.device)
    return Segments.from_sizes([value.shape[0] for value in values], like.device).spread(starts).unsqueeze(1)


def _join_matrices(values: Sequence[Tensor], pieces: Sequence[Piece]) -> Tensor:
    total = sum(piece.num_nodes for piece in pieces)
    moved = [
        move_matrix(value, start, piece.num_nodes, total)
        for value, piece, start in zip(values, pieces, _node_starts(pieces), strict=True)
    ]
    return torch.cat(_widened(moved, total))


def _widened(values: Sequence[Tensor], pad: int) -> list[Tensor]:
    """Pad the columns (axis 1) to the widest."""
    width = max(value.shape[1] for value in values)
    return [
        torch.cat([value, value.new_full((value.shape[0], width - value.shape[1], *value.shape[2:]), pad)], 1)
        for value in values
    ]
