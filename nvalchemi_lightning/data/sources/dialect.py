"""What a file calls its labels, and in which units, sign and order it gives them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from nvalchemi_lightning.data.sources.units import Quantity, unit_factor
from nvalchemi_lightning.errors import ConfigurationError
from nvalchemi_lightning.strict_model import StrictModel

__all__ = ["LABEL_OPTIONS", "Dialect"]

Key: TypeAlias = str | None

_ORDERS = {"ase": "xx yy zz yz xz xy", "vasp": "xx yy zz xy yz zx"}
_COMPONENTS = {"xx": 0, "yy": 4, "zz": 8, "yz": 5, "zy": 5, "xz": 2, "zx": 2, "xy": 1, "yx": 1}
"""Component to its place in the upper triangle of a 3x3 matrix, row by row."""


def _checked_order(order: str) -> str:
    names = _ORDERS.get(order, order).replace(",", " ").lower().split()
    if sorted(_COMPONENTS.get(name, -1) for name in names) != sorted(set(_COMPONENTS.values())):
        raise ConfigurationError(
            f"stress_order must be 'ase' ({_ORDERS['ase']}), 'vasp' ({_ORDERS['vasp']}) or the six components in the "
            f"file's order, got {order!r}"
        )
    return " ".join(names)


def _checked_unit(quantity: Quantity) -> AfterValidator:
    def check(unit: str) -> str:
        unit_factor(quantity, unit)
        return unit

    return AfterValidator(check)


class Dialect(StrictModel):
    """What a file calls its labels, and in which units, sign and order it gives them.

    The defaults are ASE's names and units. Nothing is guessed: what is not said here is taken as it stands.

    Attributes
    ----------
    energy_key, forces_key, stress_key, virial_key, dipole_key, charges_key : str or None
        Name of the label in the file: per atom among the columns, otherwise in the comment line. None leaves the label
        out. Defaults: "energy", "forces", "stress", "virials", "dipole", "charges".
    energy_unit, force_unit, length_unit, stress_unit, virial_unit, dipole_unit : str
        Units of the file, see :data:`~nvalchemi_lightning.data.sources.units.UNITS`. Defaults: eV, eV/A, A, eV/A^3,
        eV, e*A.
    energy_per_atom : bool, default False
        Whether the energy is divided by the number of atoms.
    stress_sign : {"ase", "vasp"}, default "ase"
        "ase": positive under tension. "vasp": positive under compression.
    stress_order : str, default "xx yy zz yz xz xy"
        Order of a stress or virial that is given as six numbers: "ase" (the default), "vasp" (xx yy zz xy yz zx), or
        six components. Nine numbers are a matrix, row by row.
    keep : tuple of str, default ()
        Other numbers in the comment line to keep as fields of each structure.

    Raises
    ------
    pydantic.ValidationError
        If a unit or an option does not exist (the message gives the nearest one), or options contradict each other.

    Notes
    -----
    A virial, -dE/dstrain, becomes a stress, -virial / volume, where a structure has a cell and no stress of its own.
    """

    model_config = ConfigDict(frozen=True)

    energy_key: Key = "energy"
    forces_key: Key = "forces"
    stress_key: Key = "stress"
    virial_key: Key = "virials"
    dipole_key: Key = "dipole"
    charges_key: Key = "charges"
    energy_unit: Annotated[str, _checked_unit("energy")] = "eV"
    energy_per_atom: bool = False
    force_unit: Annotated[str, _checked_unit("force")] = "eV/A"
    length_unit: Annotated[str, _checked_unit("length")] = "A"
    stress_unit: Annotated[str, _checked_unit("stress")] = "eV/A^3"
    stress_sign: Literal["ase", "vasp"] = "ase"
    stress_order: Annotated[str, AfterValidator(_checked_order)] = _ORDERS["ase"]
    virial_unit: Annotated[str, _checked_unit("energy")] = "eV"
    dipole_unit: Annotated[str, _checked_unit("dipole")] = "e*A"
    keep: tuple[Annotated[str, Field(min_length=1)], ...] = ()

    @model_validator(mode="after")
    def _check_labels(self) -> Dialect:
        for label in self.keys:
            for option in self.given(label):
                if self.keys[label] is None:
                    raise ConfigurationError(f"{option} says how to read {label}, but {label}_key=None leaves it out")
        taken = [key for key in self.keys.values() if key is not None]
        twice = sorted({key for key in [*taken, *self.keep] if [*taken, *self.keep].count(key) > 1})
        if twice:
            raise ConfigurationError(f"a key can be used once, but {', '.join(map(repr, twice))} is used twice")
        return self

    @cached_property
    def keys(self) -> Mapping[str, str | None]:
        """Label to its key."""
        return MappingProxyType({label: getattr(self, f"{label}_key") for label in _LABELS})

    @cached_property
    def factors(self) -> Mapping[str, float]:
        """Label to what it is multiplied by."""
        sign = -1.0 if self.stress_sign == "vasp" else 1.0
        return MappingProxyType(
            {
                "energy": unit_factor("energy", self.energy_unit),
                "forces": unit_factor("force", self.force_unit),
                "stress": sign * unit_factor("stress", self.stress_unit),
                "virial": unit_factor("energy", self.virial_unit),
                "dipole": unit_factor("dipole", self.dipole_unit),
                "charges": 1.0,
            }
        )

    @cached_property
    def length_factor(self) -> float:
        """What positions and cells are multiplied by."""
        return unit_factor("length", self.length_unit)

    @cached_property
    def matrix_places(self) -> tuple[int, ...]:
        """Which of the six numbers stands at each of the nine places of the matrix, row by row."""
        places = [_COMPONENTS[name] for name in self.stress_order.split()]
        upper = [(0, 1, 2), (1, 4, 5), (2, 5, 8)]
        return tuple(places.index(place) for row in upper for place in row)

    def given(self, label: str) -> list[str]:
        """Return the options about units, sign and order of a label that differ from ASE's conventions."""
        fields = type(self).model_fields
        return sorted(name for name in LABEL_OPTIONS[label] if getattr(self, name) != fields[name].default)


_LABELS = ("energy", "forces", "stress", "virial", "dipole", "charges")

LABEL_OPTIONS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "energy": frozenset({"energy_unit", "energy_per_atom"}),
        "forces": frozenset({"force_unit"}),
        "stress": frozenset({"stress_unit", "stress_sign"}),
        "virial": frozenset({"virial_unit"}),
        "dipole": frozenset({"dipole_unit"}),
        "charges": frozenset(),
    }
)
"""Label to the options that say how to read it alone; ``stress_order`` is about stress and virial."""
