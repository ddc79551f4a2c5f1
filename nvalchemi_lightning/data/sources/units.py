"""Units of labels in files, and their factors to eV, A and e.

Fundamental constants are those of CODATA 2014 (Mohr, Newell, Taylor, Rev. Mod. Phys. 88, 035009), the set that ASE
uses: a file that ASE converts and one that is converted here give the same number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, TypeAlias

from nvalchemi_lightning.errors import UnknownNameError, nearest

__all__ = ["UNITS", "Quantity", "unit_factor"]

Quantity: TypeAlias = Literal["energy", "length", "force", "stress", "dipole"]

_HARTREE = 27.211386024367243
_BOHR = 0.5291772105638411
_COULOMB = 1 / 1.6021766208e-19
_LIGHT_SPEED = 299792458.0
_JOULE_PER_MOL = _COULOMB / 6.022140857e23
_PASCAL = _COULOMB * 1e-30

_ENERGY = {
    "eV": 1.0,
    "meV": 1e-3,
    "Ha": _HARTREE,
    "mHa": 1e-3 * _HARTREE,
    "Ry": 0.5 * _HARTREE,
    "kcal/mol": 4184.0 * _JOULE_PER_MOL,
    "kJ/mol": 1e3 * _JOULE_PER_MOL,
}
_LENGTH = {"A": 1.0, "Bohr": _BOHR, "nm": 10.0, "pm": 0.01}
_PRESSURE = {"GPa": 1e9, "MPa": 1e6, "Pa": 1.0, "Mbar": 1e11, "kbar": 1e8, "bar": 1e5}

UNITS: Mapping[Quantity, Mapping[str, float]] = {
    "energy": _ENERGY,
    "length": _LENGTH,
    "force": {f"{energy}/{length}": _ENERGY[energy] / _LENGTH[length] for energy in _ENERGY for length in _LENGTH},
    "stress": {
        f"{energy}/{length}^3": _ENERGY[energy] / _LENGTH[length] ** 3 for energy in _ENERGY for length in _LENGTH
    }
    | {name: pascal * _PASCAL for name, pascal in _PRESSURE.items()},
    "dipole": {"e*A": 1.0, "e*Bohr": _BOHR, "Debye": 1e-11 / _LIGHT_SPEED * _COULOMB},
}
"""Quantity to unit to what one of it is in eV, A, eV/A, eV/A^3 or e*A."""

_SPELLINGS = {
    **dict.fromkeys(("Å", "Ang", "ang", "Angstrom", "angstrom"), "A"),
    **dict.fromkeys(("bohr", "a0"), "Bohr"),
    **dict.fromkeys(("hartree", "Hartree", "Eh"), "Ha"),
    **dict.fromkeys(("rydberg", "Rydberg"), "Ry"),
    **dict.fromkeys(("debye", "D"), "Debye"),
    "ev": "eV",
    "kB": "kbar",
}


def unit_factor(quantity: Quantity, unit: str) -> float:
    """Return what one of a unit is in eV, A, eV/A, eV/A^3 or e*A.

    Parameters
    ----------
    quantity : {"energy", "length", "force", "stress", "dipole"}
        What is measured.
    unit : str
        A name in :data:`UNITS`, such as ``"kcal/mol/A"``; usual other spellings of its parts are understood
        (``"hartree/bohr"``, ``"eV/Å^3"``). Upper and lower case differ: meV is not MeV.

    Raises
    ------
    UnknownNameError
        If there is no such unit; the message gives the nearest one.
    """
    parts = re.split(r"([/*^])", unit.replace(" ", "").replace("**", "^"))
    name = "".join(_SPELLINGS.get(part, part) for part in parts)
    known = UNITS[quantity]
    if name not in known:
        raise UnknownNameError(
            f"{unit!r} is not a unit of {quantity}{nearest(name, known)} (known: {', '.join(known)})"
        )
    return known[name]
