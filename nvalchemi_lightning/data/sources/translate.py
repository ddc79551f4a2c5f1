"""Structures in a dialect of labels to :class:`AtomicData` in eV and A."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from nvalchemi_lightning.data.atomic_data import AtomicData
from nvalchemi_lightning.data.batch import Batch
from nvalchemi_lightning.data.sources.dialect import Dialect
from nvalchemi_lightning.data.sources.findings import Findings
from nvalchemi_lightning.data.sources.raw_structure import (
    RawStructure,
    info_numbers,
    label_fields,
    number_names,
    structure_fields,
)
from nvalchemi_lightning.data.sources.translate_block import translate_block
from nvalchemi_lightning.errors import DataError

__all__ = ["ExactEnergies", "Translator", "six_to_matrix"]


_PLAIN = Dialect()


class ExactEnergies(AtomicData):
    """A structure whose energy is float64 whatever the positions are: totals of -1e6 eV need the digits."""

    precision_preserving_keys: ClassVar[frozenset[str]] = frozenset({"energy"})


class Translator:
    """Turns structures as files have them into structures in eV and A.

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

    def __call__(self, raw: RawStructure) -> AtomicData:
        """Return the structure.

        Raises
        ------
        DataError
            If the structure or a label is invalid, or units are given for numbers that ASE has converted.
        """
        dialect = self.dialect
        labelled = self._labelled(raw)
        present = {label: key for label, key in dialect.keys.items() if key is not None and label in labelled}
        self.findings.note(raw, present)
        if self._converted_by is not None:
            self._check_converted(raw, present)
        fields = structure_fields(raw, torch.float64) | self._labels(raw, present)
        if dialect.length_factor != 1.0:
            for name in fields.keys() & {"positions", "cell"}:
                fields[name] *= dialect.length_factor
        _virial_to_stress(fields)
        _check_range(fields.get("energy"), self._dtype)
        fields["positions"] = fields["positions"].to(self._dtype)
        info = info_numbers(raw.info, dialect.keys)
        self.findings.numbers.update(info)
        data = ExactEnergies(**fields, info=info)
        for key in dialect.keep:
            _keep(data, key, raw.info.get(key))
        return data

    def block(self, raws: Sequence[RawStructure]) -> Batch | None:
        """Return the batch of several structures; None where they have to be translated one by one."""
        if self.dialect.keep:
            return None
        labels = [self._labelled(raw) for raw in raws]
        try:
            if self._converted_by is not None:
                for raw, present in zip(raws, labels, strict=True):
                    self._check_converted(raw, present)
            batch = translate_block(raws, labels, self.dialect, self._dtype)
        except DataError:  # Which of them is at fault will be found one by one.
            return None
        for raw, present in zip(raws, labels, strict=True):
            self.findings.note(raw, present)
            self.findings.numbers.update(number_names(raw.info, self.dialect.keys))
        return batch

    def _labelled(self, raw: RawStructure) -> dict[str, Any]:
        """Return label to what lies under its key, for the labels that are there."""
        values = {label: raw.value(label, key) for label, key in self.dialect.keys.items() if key is not None}
        return {label: value for label, value in values.items() if value is not None}

    def _labels(self, raw: RawStructure, present: Mapping[str, str]) -> dict[str, Tensor]:
        labels = label_fields(_with_matrices(raw, present, self.dialect), present)
        for label in present.keys() & labels.keys():
            factor = self.dialect.factors[label]
            if factor != 1.0:
                labels[label] *= factor
        if self.dialect.energy_per_atom and "energy" in labels:
            labels["energy"] *= len(raw.numbers)
        return labels

    def _check_converted(self, raw: RawStructure, present: Iterable[str]) -> None:
        read = [label for label in present if self.dialect.keys[label] in raw.results]
        given = [option for label in read for option in _given(self.dialect, label)]
        if self.dialect.length_factor != 1.0:
            given.append("length_unit")
        if given:
            raise DataError(
                f"{given[0]}={getattr(self.dialect, given[0])!r} cannot be: ASE has converted what it read from "
                f"{self._converted_by} to eV and A in its own sign and order; leave it out"
            )


def _given(dialect: Dialect, label: str) -> list[str]:
    order = dialect.stress_order != _PLAIN.stress_order and label == "stress"
    return [*dialect.given(label), *(["stress_order"] if order else [])]


def _with_matrices(raw: RawStructure, present: Mapping[str, str], dialect: Dialect) -> RawStructure:
    """Return the structure with a stress or virial of six numbers as a matrix in the order of the dialect."""
    keys = [present[label] for label in ("stress", "virial") if present.get(label) in raw.info]
    if not keys:
        return raw
    matrices = {key: six_to_matrix(raw.info[key], dialect) for key in keys}
    return raw._replace(info={**raw.info, **matrices})


def six_to_matrix(value: Any, dialect: Dialect) -> Any:
    """Return six numbers in the order of a dialect as a matrix, shape (3, 3); anything else as it is."""
    array = np.asarray(value)
    return array[list(dialect.matrix_places)].reshape(3, 3) if array.shape == (6,) else value


def _virial_to_stress(fields: dict[str, Tensor]) -> None:
    if "virial" in fields and "stress" not in fields and "cell" in fields:
        volume = fields["cell"].det().abs().item()
        if volume > 0.0:
            fields["stress"] = fields.pop("virial") / -volume


def _check_range(energy: Tensor | None, dtype: torch.dtype) -> None:
    """Refuse what could be stored as float64, but would be infinite in training."""
    if energy is not None and torch.finfo(dtype).max < abs(energy.item()) < math.inf:
        raise DataError(f"energy is {energy.item():g} eV, too large for {dtype}; correct the unit")


def _keep(data: AtomicData, key: str, value: Any) -> None:
    if value is None:
        return
    try:
        row = torch.tensor(np.asarray(value, dtype=np.float64)).reshape(1, -1)
    except (TypeError, ValueError) as error:
        raise DataError(f"{key!r} is not a number but {value!r:.80}; only numbers can be kept") from error
    data.add_system_property(key, row)
