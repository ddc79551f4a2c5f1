"""One structure: atoms, cell and labels as named tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from nvalchemi_lightning.data import checks
from nvalchemi_lightning.data.compare import differences
from nvalchemi_lightning.data.edge_cutoff import CUTOFF
from nvalchemi_lightning.data.fields import FIELDS, Level, known_levels, level_of
from nvalchemi_lightning.data.holder import FieldHolder
from nvalchemi_lightning.errors import ConfigurationError, DataError, UnknownNameError

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["AtomicData"]


class AtomicData(FieldHolder):
    """One structure.

    Parameters
    ----------
    positions : Tensor
        Cartesian positions, floating, shape (V, 3) [A].
    atomic_numbers : Tensor
        Nuclear charges, integers from 1 to 118, shape (V,).
    info : mapping of str to Tensor, optional
        Anything else about the structure; neither batched nor stored.
    **fields : Tensor or None
        Other fields of :data:`nvalchemi_lightning.data.fields.FIELDS`, such as ``energy`` (1, 1) [eV], ``forces``
        (V, 3) [eV/A], ``stress`` (1, 3, 3) [eV/A^3], ``cell`` (1, 3, 3) [A], ``pbc`` (1, 3) or ``neighbor_list``
        (E, 2). None means absent.

    Raises
    ------
    DataError
        If a tensor has a wrong shape, dtype, size or device, if positions or cell are not finite, if a label is
        infinite, or if a periodic direction lacks a lattice vector.
    UnknownNameError
        If a field is not in the table; the message gives the nearest one.

    Notes
    -----
    Floating fields are cast to the dtype of the positions, so energies of float32 structures are float32. A subclass
    that names fields in ``precision_preserving_keys`` keeps those as they are given.

    A NaN in a label means that the value is missing. An absent field of the table reads as None, except that
    ``atomic_masses`` reads as the standard masses, and ``velocities`` and ``atom_categories`` as zeros that cannot be
    written in place.

    Assigning to an attribute is checked like the constructor. Assigning ``neighbor_list`` begins a new set of edges:
    the other edge fields belonged to the old one and are removed.
    """

    precision_preserving_keys: ClassVar[frozenset[str]] = frozenset()
    """Names of fields that keep their own floating dtype instead of that of the positions."""

    info: dict[str, Tensor]

    def __init__(
        self,
        positions: Tensor,
        atomic_numbers: Tensor,
        *,
        info: Mapping[str, Tensor] | None = None,
        **fields: Tensor | None,
    ) -> None:
        given = {"positions": positions, "atomic_numbers": atomic_numbers}
        given |= {name: value for name, value in fields.items() if value is not None}
        state = self.__dict__
        state.update(checks.check_structure(given, self.precision_preserving_keys))
        state["_levels"] = known_levels(given)
        state["info"] = checks.checked_info(info) if info else {}

    @classmethod
    def unchecked(cls, fields: Mapping[str, Tensor], levels: Mapping[str, Level] | None = None) -> Self:
        """Wrap tensors that are right already, without checks, casts or copies.

        Parameters
        ----------
        fields : mapping of str to Tensor
            ``positions``, ``atomic_numbers`` and any other fields.
        levels : mapping of str to {"node", "edge", "system"}, optional
            Levels of fields outside the table; those not named belong to the system.
        """
        if levels is None:
            return cls._build(fields, known_levels(fields), info={})
        return cls._build(fields, {name: level_of(name, levels) for name in fields}, info={})

    @property
    def num_graphs(self) -> int:
        """Number of structures, which is 1."""
        return 1

    @property
    def num_edges(self) -> int:
        """Number of edges E; 0 without edge fields."""
        rows = self._edge_rows()
        return 0 if rows is None else rows

    def _edge_rows(self) -> int | None:
        return next((self.__dict__[name].shape[0] for name, at in self._levels.items() if at == "edge"), None)

    @property
    def node_properties(self) -> dict[str, Tensor]:
        """The fields that have one row per atom."""
        return self._at("node")

    @property
    def edge_properties(self) -> dict[str, Tensor]:
        """The fields that have one row per edge."""
        return self._at("edge")

    @property
    def system_properties(self) -> dict[str, Tensor]:
        """The fields that have one row."""
        return self._at("system")

    def _default(self, name: str) -> Tensor | None:
        return self._readable_default(name) if FIELDS[name].has_default else None

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field after the checks of the constructor; None removes it."""
        if name.startswith("_"):
            self.__dict__[name] = value
        elif name == "info":
            self.__dict__[name] = checks.checked_info(value)
        elif name not in FIELDS and name not in self._levels:
            raise UnknownNameError(checks.unknown_field(name))
        elif value is None:
            if name in self._levels:
                delattr(self, name)
        elif name in FIELDS:
            self._assign(name, value)
        else:
            checks.check_custom(name, value, self._sizes(self._levels[name])[0], self.positions)
            self.__dict__[name] = value

    def _assign(self, name: str, value: Tensor) -> None:
        field = FIELDS[name]
        edges = None if name == "neighbor_list" else self._edge_rows()
        sizes: dict[Level, int | None] = {"node": self.num_nodes, "edge": edges, "system": 1}
        keep = name in self.precision_preserving_keys or name == "positions"
        checked = checks.check_field(field, value, sizes, self.positions, keep)
        if name == "positions" and value.dtype != self.dtype:
            raise DataError(f"positions are {self.dtype} and cannot become {value.dtype}; use to(dtype={value.dtype})")
        if name in ("cell", "pbc"):
            self._check_cell({"cell": self.cell, "pbc": self.pbc, name: checked})
        if name == "neighbor_list":
            self._drop(self._at("edge"))
            self.__dict__.pop(CUTOFF, None)
        self._store(name, checked, field.level)

    def _check_cell(self, fields: Mapping[str, Tensor | None]) -> None:
        # Assigning one after the other leaves a moment with pbc but no cell.
        if fields["cell"] is not None:
            checks.check_cell(fields["cell"], fields["pbc"])

    def _sizes(self, level: Level) -> list[int]:
        if level == "node":
            return [self.positions.shape[0]]
        return [self.num_edges if level == "edge" else 1]

    def add_node_property(self, name: str, value: Tensor) -> None:
        """Add a field of your own with one row per atom, shape (V, ...).

        Raises
        ------
        ConfigurationError
            If the name is taken.
        DataError
            If the value has another number of rows.
        """
        self._add(name, value, "node")

    def add_edge_property(self, name: str, value: Tensor) -> None:
        """Add a field of your own with one row per edge, shape (E, ...); set ``neighbor_list`` first.

        Raises
        ------
        ConfigurationError
            If the name is taken.
        DataError
            If the value has another number of rows.
        """
        self._add(name, value, "edge")

    def add_system_property(self, name: str, value: Tensor) -> None:
        """Add a field of your own that belongs to the whole structure, shape (1, ...).

        Raises
        ------
        ConfigurationError
            If the name is taken.
        DataError
            If the value has another number of rows.
        """
        self._add(name, value, "system")

    def _add(self, name: str, value: Tensor, level: Level) -> None:
        if name in FIELDS:
            raise ConfigurationError(f"{name!r} is a field of the table: assign it, data.{name} = ...")
        from nvalchemi_lightning.data.batch import Batch

        for owner in (type(self), Batch):
            checks.check_free_name(owner, name)
        if self._levels.get(name, level) != level:
            raise ConfigurationError(f"{name!r} is already a field on the level {self._levels[name]!r}")
        checks.check_custom(name, value, self._sizes(level)[0], self.positions)
        self._store(name, value, level)

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> Self:
        new = super()._mapped(change)
        new.__dict__["info"] = {key: change(value) for key, value in self.info.items()}
        return new

    def __eq__(self, other: object) -> bool:
        """Compare all fields exactly; a field reads as missing (NaN, no cell) where only the other has it."""
        if not isinstance(other, AtomicData):
            return NotImplemented
        return not differences(self, other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Show the fields with their shapes."""
        shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in self)
        return f"{type(self).__name__}({shapes})"

    @classmethod
    def from_atoms(
        cls,
        atoms: Atoms,
        energy_key: str | None = "energy",
        forces_key: str | None = "forces",
        stress_key: str | None = "stress",
        virials_key: str | None = "virials",
        dipole_key: str | None = "dipole",
        charges_key: str | None = "charges",
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        z_table: Iterable[int] | None = None,
    ) -> Self:
        """Convert an ASE structure; see :func:`nvalchemi_lightning.data.ase.from_atoms`."""
        from nvalchemi_lightning.data.ase import from_atoms

        keys = {
            "energy": energy_key,
            "forces": forces_key,
            "stress": stress_key,
            "virial": virials_key,
            "dipole": dipole_key,
            "charges": charges_key,
        }
        return from_atoms(cls, atoms, keys, device=device, dtype=dtype, z_table=z_table)

    def to_atoms(self) -> Atoms:
        """Convert to an ASE structure; see :func:`nvalchemi_lightning.data.ase.to_atoms`."""
        from nvalchemi_lightning.data.ase import to_atoms

        return to_atoms(self)
