"""Converting ASE structures to :class:`AtomicData` and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nvalchemi_lightning.data.atomic_data import AtomicData
from nvalchemi_lightning.data.fields import FIELDS
from nvalchemi_lightning.data.structure_weights import notice_weights
from nvalchemi_lightning.errors import DataError, LabelNotFoundError, nearest

if TYPE_CHECKING:
    from ase import Atoms

Data = TypeVar("Data", bound=AtomicData)

__all__ = ["DEFAULT_KEYS", "from_atoms", "to_atoms"]

DEFAULT_KEYS: Mapping[str, str] = {
    "energy": "energy",
    "forces": "forces",
    "stress": "stress",
    "virial": "virials",
    "dipole": "dipole",
    "charges": "charges",
}
"""Label to the name under which it is looked for unless another is given."""

_FROM_VOIGT = (0, 5, 4, 5, 1, 3, 4, 3, 2)
"""Entries of xx, yy, zz, yz, xz, xy that make up a 3x3 matrix, row by row."""

_FROM_MATRIX = (0, 4, 8, 5, 2, 1)
"""Entries of a 3x3 matrix, row by row, that make up xx, yy, zz, yz, xz, xy."""

_MAX_ASYMMETRY = 0.01
"""Largest difference between transposed stress entries, as a part of the largest entry, that passes as rounding."""

_MAX_CHARGE_ROUNDING = 1e-2
"""Largest distance [e] of the sum of the partial charges from a whole number."""


class LabelPlaces(NamedTuple):
    """The places in which ASE keeps labels."""

    info: Mapping[str, Any]
    arrays: Mapping[str, Any]
    results: Mapping[str, Any]

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


def from_atoms(
    cls: type[Data],
    atoms: Atoms,
    keys: Mapping[str, str | None],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    z_table: Iterable[int] | None = None,
) -> Data:
    """Convert an ASE structure.

    Parameters
    ----------
    cls : type
        ``AtomicData`` or a class derived from it.
    atoms : ase.Atoms
        The structure. Labels of atoms are looked for in ``atoms.arrays``, others in ``atoms.info``, and both then in
        ``atoms.calc.results``, where ASE puts those it recognises in a file.
    keys : mapping of str to (str or None)
        Label to the key it is stored under; None leaves the label out. A key other than the default
        (:data:`DEFAULT_KEYS`) must be there.
    device : torch.device or str, default "cpu"
        Where the tensors go.
    dtype : torch.dtype, default torch.float32
        Floating dtype; fields in ``cls.precision_preserving_keys`` are float64.
    z_table : iterable of int, optional
        Atomic numbers in the order of the columns of ``node_attrs``, a one-hot encoding.

    Returns
    -------
    AtomicData
        Without cell and pbc when no direction is periodic. Stress keeps its sign (positive under tension, as in ASE)
        and may be given as 3x3, as 9 numbers or in Voigt order xx, yy, zz, yz, xz, xy. A label that is NaN throughout
        is absent. ``charge`` comes from ``atoms.info["charge"]``, else from the sum of the partial charges. Other
        numbers in ``atoms.info`` become ``info``. Masses are stored only where ``atoms`` has its own.

    Raises
    ------
    LabelNotFoundError
        If a key other than the default is not found; the message lists what there is.
    DataError
        If the structure or a label is invalid, or the calculator's results belong to another geometry. The message
        begins with the chemical formula.
    """
    try:
        fields = structure_fields(atoms, dtype) | label_fields(label_places(atoms), keys)
        if z_table is not None:
            fields["node_attrs"] = _one_hot(atoms.numbers, tuple(z_table))
        data = cls(**fields, info=info_numbers(atoms.info, keys))
    except DataError as error:
        formula = f"{atoms.symbols.formula:hill}" or "no atoms"
        raise type(error)(f"{formula}: {error}") from error
    return data if torch.device(device) == data.device else data.to(device)


def structure_fields(atoms: Atoms, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return what is not a label: positions in ``dtype``, numbers, cell, pbc and masses."""
    fields = {
        "positions": torch.tensor(atoms.positions, dtype=dtype),
        "atomic_numbers": torch.tensor(atoms.numbers, dtype=torch.int32),
    }
    if atoms.pbc.any():
        fields["cell"] = torch.tensor(atoms.cell.array).unsqueeze(0)
        fields["pbc"] = torch.tensor(atoms.pbc).unsqueeze(0)
    if "masses" in atoms.arrays:
        fields["atomic_masses"] = torch.tensor(atoms.arrays["masses"])
    return fields


def label_places(atoms: Atoms) -> LabelPlaces:
    """Return where to look for labels.

    Raises
    ------
    DataError
        If the calculator's results belong to another geometry.
    """
    results = {} if atoms.calc is None else atoms.calc.results
    measured = getattr(atoms.calc, "atoms", None)
    if results and measured is not None and not _same_geometry(measured, atoms):
        raise DataError(
            "the structure changed after its calculator was attached, so the calculator's results are not its labels; "
            "compute them again, or copy those that still hold to atoms.info and atoms.arrays and set atoms.calc = None"
        )
    return LabelPlaces(atoms.info, atoms.arrays, results)


def _same_geometry(one: Atoms, two: Atoms) -> bool:
    return (
        np.array_equal(one.numbers, two.numbers)
        and np.array_equal(one.positions, two.positions, equal_nan=True)
        and np.array_equal(one.cell.array, two.cell.array, equal_nan=True)
        and np.array_equal(one.pbc, two.pbc)
    )


def label_fields(places: LabelPlaces, keys: Mapping[str, str | None]) -> dict[str, Tensor]:
    """Return the labels under the keys as float64 tensors in the shapes of the table of fields.

    Raises
    ------
    LabelNotFoundError
        If a key other than the default is not found.
    DataError
        If a label is not numbers, or not in the shape that it should have.
    """
    found = {label: places.find(label, key) for label, key in keys.items() if key is not None}
    labels = {label: values for label, values in found.items() if values is not None}
    charge = _charge(places.info.get("charge"), labels.get("charges"))
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
        values = values[list(_FROM_VOIGT)]
    if values.shape not in ((9,), (3, 3), (1, 3, 3)):
        raise DataError(f"{label} must have shape (3, 3), (9,) or (6,), got {values.shape}")
    matrix = values.reshape(3, 3)
    with np.errstate(invalid="ignore"):  # Infinite numbers are refused later, with their place.
        asymmetry = np.nanmax(np.abs(matrix - matrix.T), initial=0.0)
    if asymmetry > _MAX_ASYMMETRY * np.nanmax(np.abs(matrix), initial=0.0):
        raise DataError(
            f"{label} is not symmetric, transposed entries differ by {asymmetry:.3g}: {matrix.tolist()}; nine numbers "
            "are a symmetric matrix, six are xx, yy, zz, yz, xz, xy unless another order is given"
        )
    return matrix.reshape(1, 3, 3)


_SHAPERS = {"energy": _scalar, "dipole": _vector, "stress": symmetric_matrix, "virial": symmetric_matrix}


def _charge(given: object, partial: NDArray[np.float64] | None) -> float | None:
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


def _one_hot(numbers: NDArray[Any], z_table: tuple[int, ...]) -> Tensor:
    unknown = sorted(set(numbers.tolist()) - set(z_table))
    if unknown:
        raise DataError(f"atomic numbers {unknown} are not in z_table {z_table}")
    return torch.tensor(numbers[:, None] == np.array(z_table)[None, :], dtype=torch.float64)


def info_numbers(info: Mapping[str, Any], keys: Mapping[str, str | None]) -> dict[str, Tensor]:
    """Return the numbers in ``atoms.info`` that are not labels; text and flags stay behind."""
    numbers = {}
    for key, value in info.items():
        array = _array(value)
        if key != "charge" and key not in keys.values() and array.dtype.kind in "iuf":
            numbers[key] = torch.tensor(array.astype(array.dtype.newbyteorder("=")))
    notice_weights(numbers)
    return numbers


def _array(value: object) -> NDArray[Any]:
    try:
        return np.asarray(value)
    except ValueError:  # Nested lists of unequal lengths are not an array, so not numbers to keep either.
        return np.empty(0, dtype=object)


def to_atoms(data: AtomicData) -> Atoms:
    """Convert a structure to ASE.

    Parameters
    ----------
    data : AtomicData
        The structure, on any device.

    Returns
    -------
    ase.Atoms
        With a ``SinglePointCalculator`` that holds energy, forces, stress (Voigt order), dipole and partial charges,
        as far as they are set; ``virials`` (3x3), ``charge`` and the numbers of ``data.info`` in ``atoms.info``; fields
        of your own in ``atoms.arrays`` (per atom) and ``atoms.info`` (per structure). Edges, velocities and spins stay
        behind.

    Raises
    ------
    ImportError
        If ASE is not installed.
    """
    try:
        from ase import Atoms
        from ase.calculators.singlepoint import SinglePointCalculator
    except ImportError as error:
        raise ImportError('to_atoms needs ASE: pip install "nvalchemi-lightning[ase]"') from error
    fields = {name: value.detach().cpu().numpy() for name, value in data}
    optional = {
        "cell": fields["cell"][0] if "cell" in fields else None,
        "pbc": fields["pbc"][0] if "pbc" in fields else None,
        "masses": fields.get("atomic_masses"),
    }
    atoms = Atoms(numbers=fields["atomic_numbers"], positions=fields["positions"], **optional)
    atoms.info.update({key: value.detach().cpu().numpy() for key, value in data.info.items()})
    atoms.info.update({key: _plain(values[0]) for key, values in _info_fields(data, fields).items()})
    for name in data.node_properties.keys() - FIELDS.keys():
        atoms.arrays[name] = fields[name]
    results = _results(fields)
    if results:
        untyped: Any = SinglePointCalculator
        atoms.calc = untyped(atoms, **results)
    return atoms


def _results(fields: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Return what a calculator would, without labels that are missing."""
    known = {name: values for name, values in fields.items() if _is_known(values)}
    results: dict[str, Any] = {name: known[name] for name in ("forces", "charges") if name in known}
    if "energy" in known:
        results["energy"] = known["energy"].item()
    if "stress" in known:
        results["stress"] = known["stress"].reshape(9)[list(_FROM_MATRIX)]
    if "dipole" in known:
        results["dipole"] = known["dipole"][0]
    return results


def _info_fields(data: AtomicData, fields: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the fields that go to ``atoms.info``, under the names they have there."""
    names = {"virial": DEFAULT_KEYS["virial"], "charge": "charge"}
    names |= {name: name for name in data.system_properties.keys() - FIELDS.keys()}
    return {key: fields[name] for name, key in names.items() if name in fields and _is_known(fields[name])}


def _is_known(values: NDArray[Any]) -> bool:
    return values.dtype.kind != "f" or not np.isnan(values).all()


def _plain(values: NDArray[Any]) -> Any:
    """Return a lone number as a Python number, which files can hold."""
    return values.item() if values.size == 1 else values
