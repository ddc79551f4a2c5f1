"""A structure as a file has it: arrays, and labels under the file's names, before units and checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nvalchemi_lightning.data.feeding.structure_weights import notice_weights
from nvalchemi_lightning.data.fields import FIELDS
from nvalchemi_lightning.errors import DataError, LabelNotFoundError, nearest

__all__ = [
    "DEFAULT_KEYS",
    "FROM_VOIGT",
    "RawStructure",
    "are_symmetric",
    "info_numbers",
    "label_fields",
    "number_names",
    "structure_fields",
    "symmetric_matrix",
    "total_charge",
]

DEFAULT_KEYS: Mapping[str, str] = {
    "energy": "energy",
    "forces": "forces",
    "stress": "stress",
    "virial": "virials",
    "dipole": "dipole",
    "charges": "charges",
}
"""Label to the name under which it is looked for unless another is given."""

FROM_VOIGT = (0, 5, 4, 5, 1, 3, 4, 3, 2)
"""Entries of xx, yy, zz, yz, xz, xy that make up a 3x3 matrix, row by row."""

_MAX_ASYMMETRY = 0.01
"""Largest difference between transposed stress entries, as a part of the largest entry, that passes as rounding."""

_MAX_CHARGE_ROUNDING = 1e-2
"""Largest distance [e] of the sum of the partial charges from a whole number."""


class RawStructure(NamedTuple):
    """A structure as a file has it.

    Attributes
    ----------
    numbers, positions : ndarray
        Atomic numbers, shape (V,), and positions, shape (V, 3).
    cell, pbc : ndarray
        Lattice vectors as rows, shape (3, 3), zero where there are none, and which of them are periodic, shape (3,).
    info, arrays, results : mapping of str to object
        What it says by name: of the structure, of its atoms, and of either as the results of a calculator.
    """

    numbers: NDArray[np.integer]
    positions: NDArray[np.float64]
    cell: NDArray[np.float64]
    pbc: NDArray[np.bool_]
    info: Mapping[str, Any]
    arrays: Mapping[str, Any]
    results: Mapping[str, Any]

    @property
    def places(self) -> tuple[Mapping[str, Any], ...]:
        """Where names are."""
        return self.info, self.arrays, self.results

    def value(self, label: str, key: str) -> Any:
        """Return what lies under a key, None where nothing does: per atom or per structure first, then results."""
        own = self.arrays if FIELDS[label].level == "node" else self.info
        value = own.get(key)
        return self.results.get(key) if value is None else value

    def find(self, label: str, key: str) -> NDArray[np.float64] | None:
        """Return the numbers under a key; None where a default key is absent or all numbers are NaN."""
        value = self.value(label, key)
        if value is not None:
            values = _numbers(label, key, value)
            return None if np.isnan(values).all() else values
        if key != DEFAULT_KEYS[label]:
            raise LabelNotFoundError(self._not_found(label, key))
        return None

    def _not_found(self, label: str, key: str) -> str:
        places = {"info": self.info, "arrays": self.arrays, "calculator results": self.results}
        hint = nearest(key, [name for place in places.values() for name in place])
        found = "; ".join(f"{where}: {', '.join(sorted(place)) or 'nothing'}" for where, place in places.items())
        return f"no {label} under the key {key!r}{hint} ({found})"


def structure_fields(raw: RawStructure, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return what is not a label: positions in ``dtype``, numbers, cell, pbc and masses."""
    fields = {
        "positions": torch.tensor(raw.positions, dtype=dtype),
        "atomic_numbers": torch.tensor(raw.numbers, dtype=torch.int32),
    }
    if raw.pbc.any():
        fields["cell"] = torch.tensor(raw.cell).unsqueeze(0)
        fields["pbc"] = torch.tensor(raw.pbc).unsqueeze(0)
    if "masses" in raw.arrays:
        fields["atomic_masses"] = torch.tensor(raw.arrays["masses"])
    return fields


def label_fields(raw: RawStructure, keys: Mapping[str, str | None]) -> dict[str, Tensor]:
    """Return the labels under the keys as float64 tensors in the shapes of the table of fields.

    Raises
    ------
    LabelNotFoundError
        If a key other than the default is not found.
    DataError
        If a label is not numbers, or not in the shape that it should have.
    """
    found = {label: raw.find(label, key) for label, key in keys.items() if key is not None}
    labels = {label: values for label, values in found.items() if values is not None}
    charge = total_charge(raw.info.get("charge"), labels.get("charges"))
    for label in labels.keys() & _SHAPERS.keys():
        labels[label] = _SHAPERS[label](label, labels[label])
    fields = {label: torch.tensor(values) for label, values in labels.items()}
    if charge is not None:
        fields["charge"] = torch.tensor([[charge]], dtype=torch.float64)
    return fields


def _numbers(label: str, key: str, value: object) -> NDArray[np.float64]:
    try:
        return np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"{label} under the key {key!r} is not numbers: {value!r:.80}") from error


def _scalar(label: str, values: NDArray[np.float64]) -> NDArray[np.float64]:
    if values.size != 1:
        raise DataError(f"{label} must be one number, got shape {values.shape}")
    return values.reshape(1, 1)


def _vector(label: str, values: NDArray[np.float64]) -> NDArray[np.float64]:
    if values.size != 3:
        raise DataError(f"{label} must be three numbers, got shape {values.shape}")
    return values.reshape(1, 3)


def symmetric_matrix(label: str, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a symmetric matrix, shape (1, 3, 3), from any of the three usual ways to write it.

    Raises
    ------
    DataError
        If the numbers are not one.
    """
    if values.shape == (6,):
        values = values[list(FROM_VOIGT)]
    if values.shape not in ((9,), (3, 3), (1, 3, 3)):
        raise DataError(f"{label} must have shape (3, 3), (9,) or (6,), got {values.shape}")
    matrix = values.reshape(1, 3, 3)
    if not are_symmetric(matrix).all():
        raise DataError(
            f"{label} is not symmetric, transposed entries differ by {_asymmetries(matrix)[0]:.3g}: "
            f"{matrix[0].tolist()}; nine numbers are a symmetric matrix, six are xx, yy, zz, yz, xz, xy unless another "
            "order is given"
        )
    return matrix


def are_symmetric(matrices: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Say which of the matrices, shape (B, 3, 3), are symmetric but for rounding."""
    largest = np.nanmax(np.abs(matrices), axis=(1, 2), initial=0.0)
    passes: NDArray[np.bool_] = ~(_asymmetries(matrices) > _MAX_ASYMMETRY * largest)
    return passes


def _asymmetries(matrices: NDArray[np.float64]) -> NDArray[np.float64]:
    with np.errstate(invalid="ignore"):  # Infinite numbers are refused later, with their place.
        differences = np.abs(matrices - matrices.transpose(0, 2, 1))
    found: NDArray[np.float64] = np.nanmax(differences, axis=(1, 2), initial=0.0)
    return found


_SHAPERS = {"energy": _scalar, "dipole": _vector, "stress": symmetric_matrix, "virial": symmetric_matrix}


def total_charge(given: object, partial: NDArray[np.float64] | None) -> float | None:
    """Return the total charge [e] that is given, else that of the partial charges; None where neither is known.

    Raises
    ------
    DataError
        If it is not a whole number.
    """
    if given is not None:
        if isinstance(given, bool | np.bool_) or not isinstance(given, int | float | np.number):
            raise DataError(f"info['charge'] must be a whole number, got {given!r:.80}")
        return _whole(float(given), 0.0, "info['charge']")
    if partial is None or np.isnan(partial).any():
        return None
    return _whole(float(partial.sum()), _MAX_CHARGE_ROUNDING, "the sum of the partial charges")


def _whole(value: float, tolerance: float, what: str) -> float:
    if not np.isfinite(value) or abs(value - round(value)) > tolerance:
        raise DataError(f"{what} must be a whole number, got {value}; set atoms.info['charge'] to the total charge")
    return float(round(value))


def info_numbers(info: Mapping[str, Any], keys: Mapping[str, str | None]) -> dict[str, Tensor]:
    """Return the numbers in ``atoms.info`` that are not labels; text and flags stay behind."""
    numbers = {}
    for key in number_names(info, keys):
        array = _array(info[key])
        numbers[key] = torch.tensor(array.astype(array.dtype.newbyteorder("=")))
    return numbers


def number_names(info: Mapping[str, Any], keys: Mapping[str, str | None]) -> list[str]:
    """Return the names in ``atoms.info`` of numbers that are not labels; gives notice of those that are weights."""
    taken = {"charge", *keys.values()}
    names = [
        key
        for key, value in info.items()
        if key not in taken and not isinstance(value, str) and _array(value).dtype.kind in "iuf"
    ]
    notice_weights(names)
    return names


def _array(value: object) -> NDArray[Any]:
    try:
        return np.asarray(value)
    except ValueError:  # Nested lists of unequal lengths are not an array, so not numbers to keep either.
        return np.empty(0, dtype=object)
