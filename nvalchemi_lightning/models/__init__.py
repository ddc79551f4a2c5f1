"""Potentials, and what the package expects of one."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nvalchemi_lightning.errors import nearest

if TYPE_CHECKING:
    from nvalchemi_lightning.models.base import BaseModelMixin as BaseModelMixin
    from nvalchemi_lightning.models.base import ModelConfig as ModelConfig
    from nvalchemi_lightning.models.base import NeighborConfig as NeighborConfig
    from nvalchemi_lightning.models.base import NeighborListFormat as NeighborListFormat
    from nvalchemi_lightning.models.demo import DemoModel as DemoModel
    from nvalchemi_lightning.models.demo import DemoModelWrapper as DemoModelWrapper
    from nvalchemi_lightning.models.isolated_atoms import isolated_atom_energies as isolated_atom_energies
    from nvalchemi_lightning.models.painn import PaiNN as PaiNN
    from nvalchemi_lightning.models.statistics import AtomicStatistics as AtomicStatistics
    from nvalchemi_lightning.models.statistics import ElementStatistics as ElementStatistics

_HOMES = {
    "AtomicStatistics": "statistics",
    "BaseModelMixin": "base",
    "DemoModel": "demo",
    "DemoModelWrapper": "demo",
    "ElementStatistics": "statistics",
    "ModelConfig": "base",
    "NeighborConfig": "base",
    "NeighborListFormat": "base",
    "PaiNN": "painn",
    "isolated_atom_energies": "isolated_atoms",
}
"""Public name to module. A module is imported when a name of it is first used."""

__all__ = [*_HOMES]  # noqa: PLE0604  the keys are the public names


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{nearest(name, _HOMES)}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names."""
    return list(__all__)
