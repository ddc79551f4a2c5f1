"""Checks of the values of one structure: shapes, dtypes, sizes, finite numbers, periodic cells."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set

import torch
from torch import Tensor

from nvalchemi_lightning.data.elements import MAX_ATOMIC_NUMBER
from nvalchemi_lightning.data.fields import FIELDS, Field, Level
from nvalchemi_lightning.errors import ConfigurationError, DataError, UnknownNameError, nearest

__all__ = [
    "check_cell",
    "check_custom",
    "check_field",
    "check_free_name",
    "check_row_shape",
    "check_structure",
    "checked_info",
    "unknown_field",
]

_MIN_INDEPENDENCE = 1e-5
"""Periodic lattice vectors below it count as dependent; the roundings of float32 are below, real cells far above."""


def check_structure(given: Mapping[str, object], keep: Set[str]) -> dict[str, Tensor]:
    """Check all fields of a structure and cast the floating ones.

    Parameters
    ----------
    given : mapping of str to Tensor
        Fields of the table, ``positions`` and ``atomic_numbers`` among them.
    keep : set of str
        Names of fields that keep their own floating dtype.

    Returns
    -------
    dict of str to Tensor
        The fields, floating ones in the dtype of the positions.

    Raises
    ------
    DataError
        If a value is not what the table says, or sizes disagree.
    UnknownNameError
        If a name is not in the table.
    """
    positions = given["positions"]
    if not isinstance(positions, Tensor):
        raise DataError(_no_tensor("positions", positions))
    if positions.ndim != 2:
        raise DataError(_wrong_shape(FIELDS["positions"], positions, None))
    sizes: dict[Level, int | None] = {"node": positions.shape[0], "edge": None, "system": 1}
    if positions.shape[0] == 0:
        raise DataError("a structure needs at least one atom, but positions has shape (0, 3)")
    checked = {}
    for name, value in given.items():
        field = FIELDS.get(name)
        if field is None:
            raise UnknownNameError(unknown_field(name))
        checked[name] = check_field(field, value, sizes, positions, name in keep)
        if field.level == "edge":
            sizes["edge"] = checked[name].shape[0]
    check_cell(checked.get("cell"), checked.get("pbc"))
    return checked


def unknown_field(name: str) -> str:
    """Return the message about a name that is not in the table."""
    return (
        f"{name!r} is not a field{nearest(name, FIELDS)}; a field of your own is added with "
        f"add_node_property, add_edge_property or add_system_property"
    )


def check_field(
    field: Field, value: object, sizes: Mapping[Level, int | None], positions: Tensor, keep_dtype: bool
) -> Tensor:
    """Check one value against the table and return it, cast to the dtype of the positions unless ``keep_dtype``.

    Raises
    ------
    DataError
        If the type, shape, dtype, device or a number is wrong.
    """
    if not isinstance(value, Tensor):
        raise DataError(_no_tensor(field.name, value))
    rows = sizes[field.level]
    if not field.fits(value.shape, rows):
        raise DataError(_wrong_shape(field, value, rows))
    if value.dtype not in field.dtypes:
        raise DataError(f"{field.name} must have a dtype of kind {field.kind}, got {value.dtype}")
    if value.device != positions.device:
        raise DataError(f"{field.name} is on {value.device} but positions is on {positions.device}; move one of them")
    if value.dtype != positions.dtype and not keep_dtype and value.is_floating_point():
        cast = value.to(positions.dtype)
        _check_numbers(field, cast, value, positions.shape[0])
        return cast
    _check_numbers(field, value, value, positions.shape[0])
    return value


def _check_numbers(field: Field, value: Tensor, given: Tensor, num_nodes: int) -> None:
    if value.is_floating_point():
        # A finite sum proves finite terms and is much cheaper than looking at each.
        total = value if value.numel() == 1 else value.sum()
        if not math.isfinite(total.item()):
            _check_finite(field, value.detach(), given.detach())
    elif field.name == "atomic_numbers":
        _check_range(field, value, 1, MAX_ATOMIC_NUMBER, "an element")
    elif field.name == "neighbor_list" and value.shape[0]:
        _check_range(field, value, 0, num_nodes - 1, "an atom of this structure")


def _check_finite(field: Field, value: Tensor, given: Tensor) -> None:
    may_be_nan = field.missing == "nan"
    bad = value.isinf() if may_be_nan else ~value.isfinite()
    if not bad.any():
        return
    row = int(bad.nonzero()[0][0])
    holds = f"{field.name} holds {given[row].tolist()} at row {row}"
    if given[bad].isfinite().all():
        raise DataError(f"{holds}, too large for {value.dtype}; give float64 positions or correct the unit")
    raise DataError(f"{holds}; it must be finite" + (" (NaN would mean a missing value)" if may_be_nan else ""))


def _check_range(field: Field, value: Tensor, low: int, high: int, what: str) -> None:
    least, most = torch.aminmax(value)
    if least.item() >= low and most.item() <= high:
        return
    bad = (value < low) | (value > high)
    row = int(bad.nonzero()[0][0])
    raise DataError(f"{field.name} holds {value[row].tolist()} at row {row}: not {what} ({low} to {high})")


def _no_tensor(name: str, value: object) -> str:
    return f"{name} must be a torch.Tensor, got {type(value).__name__}; use torch.as_tensor(...)"


def _wrong_shape(field: Field, value: Tensor, rows: int | None) -> str:
    letter = field.shape[1]
    with_size = f" with {letter} = {rows}" if rows is not None and letter != "1" else ""
    first = 1 if letter == "1" else rows
    target = tuple(size for size in (first, *field.row) if isinstance(size, int))
    fixable = len(target) == 1 + len(field.row) and math.prod(target) == value.numel()
    hint = f"; use {field.name}.reshape{target}" if fixable else ""
    return f"{field.name} must have shape {field.shape}{with_size}, got {tuple(value.shape)}{hint}"


def check_custom(name: str, value: object, rows: int, like: Tensor) -> None:
    """Check a field outside the table: a tensor with ``rows`` rows on the device of ``like``.

    Raises
    ------
    DataError
        If it is not.
    """
    if not isinstance(value, Tensor):
        raise DataError(_no_tensor(name, value))
    if not value.ndim or value.shape[0] != rows:
        raise DataError(f"{name} must have {rows} row(s) on this level, got shape {tuple(value.shape)}")
    if value.device != like.device:
        raise DataError(f"{name} is on {value.device} but positions is on {like.device}; move one of them")


def checked_info(info: Mapping[str, object]) -> dict[str, Tensor]:
    """Return a copy of ``info`` whose values are tensors.

    Raises
    ------
    DataError
        If one is not.
    """
    checked = {}
    for name, value in info.items():
        if not isinstance(value, Tensor):
            raise DataError(_no_tensor(f"info[{name!r}]", value))
        checked[name] = value
    return checked


def check_row_shape(name: str, value: object, level: Level, rows: int | None) -> None:
    """Check that a value can be a field of a batch: a tensor with ``rows`` rows of the right shape.

    Raises
    ------
    DataError
        If it is not, or the level has no rows yet (None).
    """
    if not isinstance(value, Tensor):
        raise DataError(_no_tensor(name, value))
    field = FIELDS.get(name)
    if rows is None:
        raise DataError(f"assign neighbor_list before {name!r}: there are no edges yet")
    if field is not None and value.dtype not in field.dtypes:
        raise DataError(f"{name} must have a dtype of kind {field.kind}, got {value.dtype}")
    if value.shape[:1] != (rows,) if field is None else not field.fits(value.shape, rows):
        row = "..." if field is None else ", ".join(str(size) for size in field.row)
        hint = "; values per atom are added with add_key(...)" if field is None and level == "system" else ""
        raise DataError(
            f"length mismatch: {name!r} must have shape ({rows}, {row}) on the {level} level, "
            f"got {tuple(value.shape)}{hint}"
        )


def check_free_name(owner: type, name: str) -> None:
    """Refuse a name for a field that the class uses itself, or that is private.

    Raises
    ------
    ConfigurationError
        If it does.
    """
    if name.startswith("_") or name == "info" or hasattr(owner, name) or not name.isidentifier():
        raise ConfigurationError(f"{name!r} cannot be the name of a field; choose another")


def check_cell(cell: Tensor | None, pbc: Tensor | None) -> None:
    """Check that the lattice vectors of the periodic directions exist and are independent, in every structure.

    Left-handed cells are fine, and so are zero vectors in directions that are not periodic.

    Raises
    ------
    DataError
        If a periodic direction has no vector, or the vectors are dependent.
    """
    if pbc is None:
        return
    lattices = [None] * len(pbc) if cell is None else cell.tolist()
    for lattice, periodic in zip(lattices, pbc.tolist(), strict=True):
        if any(periodic):
            _check_lattice(lattice, periodic)


def _check_lattice(lattice: list[list[float]] | None, periodic: list[bool]) -> None:
    if lattice is None:
        raise DataError(f"pbc is {periodic} but there is no cell; give cell, shape (1, 3, 3), or leave pbc out")
    vectors = [vector for vector, along in zip(lattice, periodic, strict=True) if along]
    if _independence(vectors) < _MIN_INDEPENDENCE:
        raise DataError(
            f"the lattice vectors of the periodic directions are zero or linearly dependent: "
            f"cell = {lattice}, pbc = {periodic}"
        )


def _independence(vectors: list[list[float]]) -> float:
    """Return the length, area or volume that vectors span as a fraction of what perpendicular ones would span."""
    product = math.prod(math.hypot(*vector) for vector in vectors)
    if product == 0.0 or len(vectors) == 1:
        return float(product != 0.0)
    (ax, ay, az), (bx, by, bz) = vectors[:2]
    normal = (ay * bz - az * by, az * bx - ax * bz, ax * by - ay * bx)
    if len(vectors) == 2:
        return math.hypot(*normal) / product
    cx, cy, cz = vectors[2]
    return abs(normal[0] * cx + normal[1] * cy + normal[2] * cz) / product
