"""Converting ASE structures to :class:`AtomicData` and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nvalchemi_lightning.data.atomic_data import AtomicData
from nvalchemi_lightning.data.fields import FIELDS
from nvalchemi_lightning.data.sources.raw_structure import (
    DEFAULT_KEYS,
    RawStructure,
    info_numbers,
    label_fields,
    structure_fields,
)
from nvalchemi_lightning.errors import DataError

if TYPE_CHECKING:
    from ase import Atoms

Data = TypeVar("Data", bound=AtomicData)

__all__ = ["DEFAULT_KEYS", "from_atoms", "to_atoms"]

_FROM_MATRIX = (0, 4, 8, 5, 2, 1)
"""Entries of a 3x3 matrix, row by row, that make up xx, yy, zz, yz, xz, xy."""


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
        raw = raw_structure(atoms)
        fields = structure_fields(raw, dtype) | label_fields(raw, keys)
        if z_table is not None:
            fields["node_attrs"] = _one_hot(atoms.numbers, tuple(z_table))
        data = cls(**fields, info=info_numbers(atoms.info, keys))
    except DataError as error:
        formula = f"{atoms.symbols.formula:hill}" or "no atoms"
        raise type(error)(f"{formula}: {error}") from error
    return data if torch.device(device) == data.device else data.to(device)


def raw_structure(atoms: Atoms) -> RawStructure:
    """Return what a structure of ASE holds.

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
    return RawStructure(atoms.numbers, atoms.positions, atoms.cell.array, atoms.pbc, atoms.info, atoms.arrays, results)


def _same_geometry(one: Atoms, two: Atoms) -> bool:
    return (
        np.array_equal(one.numbers, two.numbers)
        and np.array_equal(one.positions, two.positions, equal_nan=True)
        and np.array_equal(one.cell.array, two.cell.array, equal_nan=True)
        and np.array_equal(one.pbc, two.pbc)
    )


def _one_hot(numbers: NDArray[Any], z_table: tuple[int, ...]) -> Tensor:
    unknown = sorted(set(numbers.tolist()) - set(z_table))
    if unknown:
        raise DataError(f"atomic numbers {unknown} are not in z_table {z_table}")
    return torch.tensor(numbers[:, None] == np.array(z_table)[None, :], dtype=torch.float64)


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
