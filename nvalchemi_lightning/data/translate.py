"""ASE structures in a dialect of labels to :class:`AtomicData` in eV and A."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from nvalchemi_lightning.data.ase import LabelPlaces, info_numbers, label_fields, label_places, structure_fields
from nvalchemi_lightning.data.atomic_data import AtomicData
from nvalchemi_lightning.data.dialect import Dialect
from nvalchemi_lightning.data.findings import Findings
from nvalchemi_lightning.errors import DataError

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["ExactEnergies", "Translator", "six_to_matrix", "text_of"]


class ExactEnergies(AtomicData):
    """A structure whose energy is float64 whatever the positions are: totals of -1e6 eV need the digits."""

    precision_preserving_keys: ClassVar[frozenset[str]] = frozenset({"energy"})


class Translator:
    """Turns ASE structures into structures in eV and A.

    Parameters
    ----------
    dialect : Dialect
        What labels are called and their units.
    dtype : torch.dtype
        Floating dtype; the energy is float64 in any case.
    findings : Findings
        Gathers what the structures have.
    converted_by : str or None
        Name of a format whose numbers ASE converts when it reads them; None if they are those of the file.
    """

    def __init__(self, dialect: Dialect, dtype: torch.dtype, findings: Findings, converted_by: str | None) -> None:
        self.dialect = dialect
        self.findings = findings
        self._dtype = dtype
        self._converted_by = converted_by

    def __call__(self, atoms: Atoms) -> AtomicData:
        """Return the structure.

        Raises
        ------
        DataError
            If the structure or a label is invalid, or units are given for numbers that ASE has converted.
        """
        places = label_places(atoms)
        present = {label: key for label, key in self._keys() if places.value(label, key) is not None}
        self.findings.note(places, present, len(atoms))
        if self._converted_by is not None:
            self._check_converted(places, present)
        fields = structure_fields(atoms, torch.float64) | self._labels(places, present, len(atoms))
        self._scale_lengths(fields)
        _virial_to_stress(fields)
        _check_range(fields["positions"], fields.get("energy"), self._dtype)
        fields["positions"] = fields["positions"].to(self._dtype)
        info = info_numbers(atoms.info, self.dialect.keys)
        data = ExactEnergies(**fields, info=info)
        self.findings.numbers.update(info)
        for key in self.dialect.keep:
            _keep(data, key, atoms.info.get(key))
        data._text = {key: value for key, value in atoms.info.items() if isinstance(value, str)}
        return data

    def _keys(self) -> list[tuple[str, str]]:
        return [(label, key) for label, key in self.dialect.keys.items() if key is not None]

    def _labels(self, places: LabelPlaces, present: Mapping[str, str], atoms: int) -> dict[str, Tensor]:
        info = dict(places.info)
        for label in ("stress", "virial"):
            if present.get(label) in info:
                info[present[label]] = six_to_matrix(info[present[label]], self.dialect)
        keys = {label: present.get(label) for label in self.dialect.keys}
        labels = label_fields(places._replace(info=info), keys)
        for label in labels.keys() & self.dialect.factors.keys():
            labels[label] *= self.dialect.factors[label]
        if self.dialect.energy_per_atom and "energy" in labels:
            labels["energy"] *= atoms
        return labels

    def _scale_lengths(self, fields: dict[str, Tensor]) -> None:
        for name in ("positions", "cell"):
            if name in fields:
                fields[name] *= self.dialect.length_factor

    def _check_converted(self, places: LabelPlaces, present: Mapping[str, str]) -> None:
        given = [
            option for label, key in present.items() if key in places.results for option in _given(self.dialect, label)
        ]
        if self.dialect.length_factor != 1.0:
            given.append("length_unit")
        if given:
            raise DataError(
                f"{given[0]}={getattr(self.dialect, given[0])!r} cannot be: ASE has converted what it read from "
                f"{self._converted_by} to eV and A in its own sign and order; leave it out"
            )


def _given(dialect: Dialect, label: str) -> list[str]:
    order = dialect.stress_order != Dialect().stress_order and label == "stress"
    return [*dialect.given(label), *(["stress_order"] if order else [])]


def text_of(data: AtomicData) -> Mapping[str, str]:
    """Return what a file says in words about a structure that was read from it, such as ``config_type``.

    Words are neither collated nor stored; a structure from elsewhere has none.
    """
    words: Mapping[str, str] = getattr(data, "_text", {})
    return words


def six_to_matrix(value: Any, dialect: Dialect) -> Any:
    """Return six numbers in the order of a dialect as a matrix, shape (3, 3); anything else as it is."""
    array = np.asarray(value)
    return array[list(dialect.matrix_places)].reshape(3, 3) if array.shape == (6,) else value


def _virial_to_stress(fields: dict[str, Tensor]) -> None:
    if "virial" in fields and "stress" not in fields and "cell" in fields:
        volume = fields["cell"].det().abs().item()
        if volume > 0.0:
            fields["stress"] = fields.pop("virial") / -volume


def _check_range(positions: Tensor, energy: Tensor | None, dtype: torch.dtype) -> None:
    """Refuse what could be stored as float64, but would be infinite in training."""
    limit = torch.finfo(dtype).max
    if energy is not None and energy.isfinite().all() and energy.abs().item() > limit:
        raise DataError(f"energy is {energy.item():g} eV, too large for {dtype}; correct the unit")


def _keep(data: AtomicData, key: str, value: Any) -> None:
    if value is None:
        return
    try:
        row = torch.tensor(np.asarray(value, dtype=np.float64)).reshape(1, -1)
    except (TypeError, ValueError) as error:
        raise DataError(f"{key!r} is not a number but {value!r:.80}; only numbers can be kept") from error
    data.add_system_property(key, row)
