"""Many structures as files have them to one batch in eV and A, much faster than one by one.

What is refused here is translated one by one: that finds which structure is at fault, or that none is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nvalchemi_lightning.data.batch import Batch
from nvalchemi_lightning.data.checks import check_cell, check_field
from nvalchemi_lightning.data.fields import FIELDS, Level
from nvalchemi_lightning.data.sources.dialect import Dialect
from nvalchemi_lightning.data.sources.raw_structure import FROM_VOIGT, RawStructure, are_symmetric, total_charge
from nvalchemi_lightning.errors import DataError

__all__ = ["translate_block"]

_MATRICES = ("stress", "virial")


class _Labelled(NamedTuple):
    """A structure, and label to what lies under its key."""

    raw: RawStructure
    labels: Mapping[str, Any]


def translate_block(
    raws: Sequence[RawStructure], labels: Sequence[Mapping[str, Any]], dialect: Dialect, dtype: torch.dtype
) -> Batch:
    """Return the batch of all structures.

    Parameters
    ----------
    raws : sequence of RawStructure
        The structures.
    labels : sequence of mapping of str to object
        Label to what lies under its key, for each of them.
    dialect : Dialect
        The units of the labels; what it keeps is left out.
    dtype : torch.dtype
        Floating dtype; the energy is float64 in any case.

    Raises
    ------
    DataError
        If a structure or a label is invalid, or written in a way that only single structures are read in.
    """
    alike: dict[object, list[int]] = {}
    for number, (raw, found) in enumerate(zip(raws, labels, strict=True)):
        kind = (*found, "masses" in raw.arrays, True in raw.pbc.tolist())
        alike.setdefault(kind, []).append(number)
    batches = [
        _translate_alike([_Labelled(raws[number], labels[number]) for number in numbers], dialect, dtype)
        for numbers in alike.values()
    ]
    if len(batches) == 1:
        return batches[0]
    order = np.argsort(np.concatenate([*alike.values()]))
    return Batch._joined(batches).index_select(order.tolist())


def _translate_alike(block: Sequence[_Labelled], dialect: Dialect, dtype: torch.dtype) -> Batch:
    """Return the batch of structures that have the same labels, and a cell or not."""
    fields = _structure_fields(block) | _label_fields(block, dialect)
    if dialect.length_factor != 1.0:
        for name in fields.keys() & {"positions", "cell"}:
            fields[name] *= dialect.length_factor
    _virial_to_stress(fields)
    if "energy" in fields and (fields["energy"].abs() > torch.finfo(dtype).max).any():
        raise DataError("an energy is too large")
    positions = fields["positions"] = fields["positions"].to(dtype)
    sizes: dict[Level, int | None] = {"node": len(positions), "edge": None, "system": len(block)}
    checked: dict[str, dict[str, Tensor]] = {"node": {}, "system": {}}
    for name, value in fields.items():
        field = FIELDS[name]
        checked[field.level][name] = check_field(field, value, sizes, positions, name == "energy")
    check_cell(checked["system"].get("cell"), checked["system"].get("pbc"))
    return Batch.from_levels(
        node=checked["node"],
        system=checked["system"],
        num_nodes_per_graph=[len(raw.numbers) for raw, _ in block],
    )


def _structure_fields(block: Sequence[_Labelled]) -> dict[str, Tensor]:
    first = block[0].raw
    fields = {
        "positions": _atom_rows("positions", block, [raw.positions for raw, _ in block]),
        "atomic_numbers": _atom_rows("atomic_numbers", block, [raw.numbers for raw, _ in block]).to(torch.int32),
    }
    if first.pbc.any():
        fields["cell"] = torch.from_numpy(np.stack([raw.cell for raw, _ in block]))
        fields["pbc"] = torch.from_numpy(np.stack([raw.pbc for raw, _ in block]))
    if "masses" in first.arrays:
        fields["atomic_masses"] = _atom_rows("atomic_masses", block, [raw.arrays["masses"] for raw, _ in block])
    return fields


def _atom_rows(name: str, block: Sequence[_Labelled], values: Sequence[NDArray[Any]]) -> Tensor:
    row = FIELDS[name].row
    for (raw, _), value in zip(block, values, strict=True):
        if value.shape != (len(raw.numbers), *row) or not len(value):
            raise DataError(f"{name} has shape {value.shape}")
    return torch.from_numpy(np.concatenate(values))


def _label_fields(block: Sequence[_Labelled], dialect: Dialect) -> dict[str, Tensor]:
    fields = {label: _values(label, block, dialect) for label in block[0].labels}
    charges = [total_charge(raw.info.get("charge"), _charges(labels)) for raw, labels in block]
    for label, values in fields.items():
        if dialect.factors[label] != 1.0:
            values.mul_(dialect.factors[label])
    if dialect.energy_per_atom and "energy" in fields:
        fields["energy"] *= torch.tensor([[len(raw.numbers)] for raw, _ in block])
    if any(charge is not None for charge in charges):
        known = [np.nan if charge is None else charge for charge in charges]
        fields["charge"] = torch.tensor(known, dtype=torch.float64).unsqueeze(1)
    return {label: values for label, values in fields.items() if not values.isnan().all()}


def _values(label: str, block: Sequence[_Labelled], dialect: Dialect) -> Tensor:
    """Return the float64 values of a label in the shape of the table of fields."""
    given = [labels[label] for _, labels in block]
    try:
        if FIELDS[label].level == "node":
            return _atom_rows(label, block, [np.asarray(value, dtype=np.float64) for value in given])
        values = np.array(given, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"{label} is not numbers of one shape") from error
    if label in _MATRICES:
        values = _matrices(label, block, values, dialect)
    row = [size for size in FIELDS[label].row if isinstance(size, int)]
    if values.size != len(block) * math.prod(row):
        raise DataError(f"{label} has shape {values.shape[1:]}")
    return torch.from_numpy(values.reshape(-1, *row))


def _matrices(
    label: str, block: Sequence[_Labelled], values: NDArray[np.float64], dialect: Dialect
) -> NDArray[np.float64]:
    key = dialect.keys[label] or ""
    if values.shape[1:] == (6,):
        orders = {FROM_VOIGT if raw.info.get(key) is None else dialect.matrix_places for raw, _ in block}
        if len(orders) == 1:
            values = values[:, orders.pop()]
    if values.shape[1:] not in ((9,), (3, 3)):
        raise DataError(f"{label} has shape {values.shape[1:]}")
    matrices = values.reshape(-1, 3, 3)
    if not are_symmetric(matrices).all():
        raise DataError(f"{label} is not symmetric")
    return matrices


def _charges(labels: Mapping[str, Any]) -> NDArray[np.float64] | None:
    charges = labels.get("charges")
    return None if charges is None else np.asarray(charges, dtype=np.float64)


def _virial_to_stress(fields: dict[str, Tensor]) -> None:
    if "virial" not in fields or "cell" not in fields:
        return
    volumes = fields["cell"].det().abs()
    if "stress" in fields or not (volumes > 0.0).all():
        raise DataError("some virials may stay, others become a stress")
    fields["stress"] = fields.pop("virial") / -volumes.reshape(-1, 1, 1)
