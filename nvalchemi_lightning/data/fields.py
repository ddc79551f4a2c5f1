"""The one table of fields: level, shape, dtype and what stands in for a value that a structure lacks.

Validation, collation, storage and documentation derive from :data:`FIELDS`. Letters: V atoms, E edges, B graphs,
K neighbors, A attributes, H features. Units by convention: eV, A, amu, e.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Literal, TypeAlias

import torch

__all__ = ["CORE_FIELDS", "FIELDS", "LEVELS", "Field", "Level", "known_levels", "level_of"]

Level: TypeAlias = Literal["node", "edge", "system"]
Kind: TypeAlias = Literal["float", "int", "bool", "number"]
Missing: TypeAlias = Literal["nan", "zero", "mass", "refuse"]

LEVELS: tuple[Level, ...] = ("node", "edge", "system")
CORE_FIELDS = ("positions", "atomic_numbers")

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_INTS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_DTYPES: Mapping[Kind, frozenset[torch.dtype]] = {
    "float": _FLOATS,
    "int": _INTS,
    "bool": frozenset({torch.bool}),
    "number": _FLOATS | _INTS,
}
_LEADING: Mapping[Level, str] = {"node": "V", "edge": "E", "system": "1"}


@dataclass(frozen=True)
class Field:
    """What one field of a structure looks like.

    Attributes
    ----------
    name : str
        Attribute name on ``AtomicData`` and ``Batch``.
    level : {"node", "edge", "system"}
        Whether a row belongs to an atom, an edge or a whole structure.
    row : tuple of int or str
        Shape of one row; a letter is a free size.
    kind : {"float", "int", "bool", "number"}
        Accepted dtypes; "number" is float or int.
    meaning : str
        Meaning and unit.
    missing : {"nan", "zero", "mass", "refuse"}
        What collation writes for a structure without the field while others have it: NaN (an unknown label), zeros,
        the standard atomic masses, or nothing: it refuses.
    has_default : bool
        Whether reading the unset attribute gives that same value; it is then neither stored nor collated.
    """

    name: str
    level: Level
    row: tuple[int | str, ...]
    kind: Kind
    meaning: str
    missing: Missing = "nan"
    has_default: bool = False

    @cached_property
    def dtypes(self) -> frozenset[torch.dtype]:
        """Accepted dtypes."""
        return _DTYPES[self.kind]

    @cached_property
    def shape(self) -> str:
        """Shape in one structure with letters, such as ``"(V, 3)"``."""
        sizes = ", ".join(str(size) for size in (_LEADING[self.level], *self.row))
        return f"({sizes})" if self.row else f"({sizes},)"

    def fits(self, shape: tuple[int, ...], rows: int | None) -> bool:
        """Say whether a tensor of this shape can hold the field; None leaves the number of rows free."""
        # The plain comparison settles most fields and costs a fraction of the other.
        wanted = (rows, *self.row)
        return shape == wanted or (
            len(shape) == len(wanted)
            and all(size == want for size, want in zip(shape, wanted, strict=True) if isinstance(want, int))
        )


_TABLE = (
    Field("positions", "node", (3,), "float", "Cartesian positions [A]", "refuse"),
    Field("atomic_numbers", "node", (), "int", "nuclear charges, 1 to 118", "refuse"),
    Field("atomic_masses", "node", (), "float", "masses [amu]; default: standard atomic masses", "mass", True),
    Field("atom_categories", "node", (), "int", "role of the atom in a simulation; default: 0", "zero", True),
    Field("velocities", "node", (3,), "float", "velocities; default: 0", "zero", True),
    Field("momenta", "node", (3,), "float", "momenta"),
    Field("forces", "node", (3,), "float", "forces, -dE/dr [eV/A]"),
    Field("charges", "node", (), "float", "partial charges [e]"),
    Field("kinetic_energies", "node", (1,), "float", "kinetic energies [eV]"),
    Field("node_alpha_spins", "node", (1,), "float", "spin-up populations"),
    Field("node_beta_spins", "node", (1,), "float", "spin-down populations"),
    Field("node_attrs", "node", ("A",), "float", "attributes, such as a one-hot element"),
    Field("node_embeddings", "node", ("H",), "float", "learned features"),
    Field("neighbor_matrix", "node", ("K",), "int", "atom indices of neighbors, padded with V", "refuse"),
    Field("neighbor_matrix_shifts", "node", ("K", 3), "number", "lattice images of those neighbors", "refuse"),
    Field("num_neighbors", "node", (), "int", "filled columns of neighbor_matrix", "refuse"),
    Field("neighbor_list", "edge", (2,), "int", "atom indices (source i, target j)", "refuse"),
    Field("neighbor_list_shifts", "edge", (3,), "number", "lattice images S: r_ij = r_j - r_i + S @ cell", "zero"),
    Field("shifts", "edge", (3,), "float", "Cartesian shifts S @ cell [A]", "zero"),
    Field("edge_embeddings", "edge", ("H",), "float", "learned features", "refuse"),
    Field("energy", "system", (1,), "float", "total energy [eV]"),
    Field("cell", "system", (3, 3), "float", "lattice vectors a, b, c as rows [A]", "zero"),
    Field("pbc", "system", (3,), "bool", "periodicity along a, b, c", "zero"),
    Field("stress", "system", (3, 3), "float", "dE/dstrain / volume, positive under tension [eV/A^3]"),
    Field("virial", "system", (3, 3), "float", "-dE/dstrain [eV]"),
    Field("dipole", "system", (3,), "float", "dipole moment [e A]"),
    Field("charge", "system", (1,), "float", "total charge [e]"),
    Field("spin", "system", (1,), "float", "total spin"),
    Field("graph_alpha_spins", "system", (1,), "float", "spin-up electrons"),
    Field("graph_embeddings", "system", ("H",), "float", "learned features"),
)

FIELDS: Mapping[str, Field] = MappingProxyType({field.name: field for field in _TABLE})


def level_of(name: str, custom: Mapping[str, Level] | None = None) -> Level:
    """Return the level of a field: from ``custom``, else from the table, else "system"."""
    if custom is not None and name in custom:
        return custom[name]
    return FIELDS[name].level if name in FIELDS else "system"


@lru_cache(maxsize=1024)
def _levels_of(names: tuple[str, ...]) -> dict[str, Level]:
    return {name: level_of(name) for name in names}


def known_levels(names: Iterable[str]) -> dict[str, Level]:
    """Return name to level for fields of the table; the same object for the same names, so never change it."""
    return _levels_of(tuple(names))
