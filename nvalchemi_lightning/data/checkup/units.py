"""Which unit explains that numbers are off by a factor."""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from types import MappingProxyType

from nvalchemi_lightning.data.sources.units import Quantity, unit_factor

__all__ = ["unit_hint"]

_USUAL: Mapping[Quantity, tuple[str, ...]] = MappingProxyType(
    {
        "energy": ("kcal/mol", "kJ/mol", "Ha", "Ry"),
        "force": ("kcal/mol/A", "kJ/mol/A", "kJ/mol/nm", "Ha/Bohr", "Ry/Bohr"),
        "stress": ("GPa", "kbar", "Pa"),
    }
)


def unit_hint(quantity: Quantity, factor: float, within: float) -> str:
    """Return a unit that explains the size of numbers, or ``""``.

    Parameters
    ----------
    quantity : {"energy", "force", "stress"}
        What the numbers are.
    factor : float
        What they are by what they would be in eV and A, positive.
    within : float
        By what ratio the factor may be off that of the unit.
    """
    misses = {unit: abs(log(factor * unit_factor(quantity, unit))) for unit in _USUAL[quantity]}
    unit = min(misses, key=lambda name: misses[name])
    return unit if misses[unit] < log(within) else ""
