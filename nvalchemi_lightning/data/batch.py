"""Several structures as one: concatenated tensors that know where each structure begins."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from nvalchemi_lightning.data.atomic_data import AtomicData
from nvalchemi_lightning.data.checks import check_free_name, check_row_shape
from nvalchemi_lightning.data.collate import join, wrap_levels
from nvalchemi_lightning.data.counts import Counts
from nvalchemi_lightning.data.edge_cutoff import CUTOFF, reaching_like
from nvalchemi_lightning.data.fields import FIELDS, Level, level_of
from nvalchemi_lightning.data.layout import Layout, Parts
from nvalchemi_lightning.data.origins import SampleOrigin
from nvalchemi_lightning.data.select import GraphSlicer, Index, graph_numbers, select_graphs
from nvalchemi_lightning.errors import ConfigurationError, ConfigurationTypeError, DataError

__all__ = ["Batch"]


class Batch(Counts):
    """Several structures in concatenated tensors.

    Made by :meth:`from_data_list`, or by :meth:`from_levels` from tensors that are concatenated already.

    Notes
    -----
    ``batch.forces`` and ``batch["forces"]`` give the same tensor: node fields have shape (V, ...), edge fields (E, ...)
    and system fields (B, ...) for V atoms, E edges and B structures. An absent field raises AttributeError, except
    that ``atomic_masses`` reads as the standard masses, and ``velocities`` and ``atom_categories`` as zeros that
    cannot be written in place.

    ``neighbor_list`` counts through all atoms of the batch, and its rows are grouped by structure. Assigning it begins
    a new set of edges: the other edge fields belonged to the old one and are removed, so assign them afterwards.

    Assigning to a field of the table, or to a field that is there, takes the tensor as it is (no cast or copy) after a
    check of its shape. Another name becomes a system field and needs B rows. Names that begin with an underscore hold
    anything; ``to`` and ``clone`` keep them.
    """

    @classmethod
    def from_data_list(
        cls,
        data_list: Sequence[AtomicData | Mapping[str, Tensor]],
        device: torch.device | str | None = None,
        *,
        exclude_keys: Collection[str] = (),
        field_levels: Mapping[str, Level] | None = None,
    ) -> Self:
        """Join structures.

        Parameters
        ----------
        data_list : sequence of AtomicData or mapping of str to Tensor
            At least one structure. Mappings are taken without checks.
        device : torch.device, str or None, default None
            Where to; None stays.
        exclude_keys : collection of str
            Fields to leave out.
        field_levels : mapping of str to {"node", "edge", "system"}, optional
            Levels of fields of your own in mappings; those not named belong to the system.

        Returns
        -------
        Batch
            With every field that some structure has. Where a structure lacks it: a floating field becomes NaN (an
            unknown label), the cell zeros, pbc False, velocities and categories zeros, masses the standard ones.

        Raises
        ------
        DataError
            If the list is empty, if a structure lacks an edge field or an integer field of your own that others have,
            or if fields do not fit together.
        ConfigurationTypeError
            If something in the list is not a structure.
        """
        pieces = [
            data if isinstance(data, AtomicData) else _wrapped(index, data, field_levels)
            for index, data in enumerate(data_list)
        ]
        batch = cls._joined(pieces, exclude_keys)
        return batch if device is None or batch.device == torch.device(device) else batch.to(device)

    @classmethod
    def from_levels(
        cls,
        *,
        node: Mapping[str, Tensor],
        edge: Mapping[str, Tensor] | None = None,
        system: Mapping[str, Tensor] | None = None,
        num_nodes_per_graph: Tensor | Sequence[int],
        num_edges_per_graph: Tensor | Sequence[int] | None = None,
    ) -> Self:
        """Wrap tensors that are concatenated already: no copies, and no checks but the number of rows.

        Parameters
        ----------
        node, edge, system : mapping of str to Tensor
            Fields with V, E and B rows; ``positions`` and ``atomic_numbers`` among the first. ``neighbor_list`` counts
            through all atoms, and its rows are grouped by structure.
        num_nodes_per_graph, num_edges_per_graph : Tensor or sequence of int
            Atoms and edges of each structure, B integers. Without the second, edges are counted from
            ``neighbor_list`` when needed.

        Raises
        ------
        DataError
            If a field has the wrong number of rows, a name appears on two levels, or a core field is absent.
        """
        given: dict[Level, Mapping[str, Tensor]] = {"node": node, "edge": edge or {}, "system": system or {}}
        return cls._from_parts(wrap_levels(given, num_nodes_per_graph, num_edges_per_graph))

    @property
    def origins(self) -> tuple[SampleOrigin, ...]:
        """Where each structure comes from, as the loader noted it; empty for a batch from elsewhere."""
        noted: tuple[SampleOrigin, ...] = self.__dict__.get("_origins", ())
        return noted if len(noted) == len(self) else ()

    @classmethod
    def _joined(cls, pieces: Sequence[Batch | AtomicData], exclude: Collection[str] = ()) -> Self:
        return reaching_like(cls._from_parts(join(pieces, exclude)), pieces)

    @classmethod
    def _from_parts(cls, parts: Parts) -> Self:
        return cls._build(parts.fields, parts.levels, _layout=parts.layout)

    def _parts(self) -> Parts:
        return Parts(self.__dict__, self._levels, self._layout)

    def _default(self, name: str) -> Tensor | None:
        if FIELDS[name].has_default:
            return self._readable_default(name)
        raise self._absent(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field; see the notes of the class."""
        level = self._levels.get(name)
        if level is None or name == "neighbor_list":
            self._introduce(name, value)
        else:
            check_row_shape(name, value, level, self._layout.rows[level])
            self.__dict__[name] = value

    def _introduce(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            self.__dict__[name] = value
            return
        check_free_name(type(self), name)
        level = level_of(name)
        if name == "neighbor_list":
            check_row_shape(name, value, level, value.shape[0] if isinstance(value, Tensor) and value.ndim else 0)
            self._drop(self._at("edge"))
            self.__dict__["_layout"] = Layout(self._layout.nodes, value.shape[0], neighbor_list=value)
            self.__dict__.pop(CUTOFF, None)
        else:
            check_row_shape(name, value, level, self._layout.rows[level])
        self._store(name, value, level)

    def __setitem__(self, name: str, value: Tensor) -> None:
        """Set a field, as by attribute."""
        setattr(self, name, value)

    def _drop(self, names: Iterable[str]) -> None:
        super()._drop(names)
        if "edge" not in self._levels.values():
            self.__dict__["_layout"] = Layout(self._layout.nodes)

    def add_key(self, key: str, values: Sequence[Tensor], level: Level = "node", overwrite: bool = False) -> None:
        """Add a field from one tensor per structure.

        Parameters
        ----------
        key : str
            Name of the field.
        values : sequence of Tensor
            B tensors, whose rows are atoms, edges or (one row) the structure.
        level : {"node", "edge", "system"}, default "node"
            What a row belongs to.
        overwrite : bool, default False
            Replace a field of that name.

        Raises
        ------
        ConfigurationError
            If the name is taken or belongs to another level.
        DataError
            If the number of tensors, or the shape of one of them, is wrong.
        """
        if key in self._levels and not overwrite:
            raise ConfigurationError(f"{key!r} is already a field of this batch; pass overwrite=True to replace it")
        check_free_name(type(self), key)
        home = self._levels.get(key, FIELDS[key].level if key in FIELDS else level)
        if home != level:
            raise ConfigurationError(f"{key!r} belongs to the level {home!r}, not {level!r}")
        sizes = self._layout.sizes(level)
        if len(values) != len(sizes):
            raise DataError(f"add_key({key!r}) needs one tensor per structure: {len(sizes)}, got {len(values)}")
        for value, size in zip(values, sizes, strict=True):
            check_row_shape(key, value, level, size)
        self._store(key, torch.cat(list(values)), level)

    def __getitem__(self, index: str | Index) -> Any:
        """Return a field by its name, a structure by its number, or a batch of several structures.

        Raises
        ------
        LabelNotFoundError
            If there is no such field.
        GraphIndexError
            If there is no such structure, or none is selected.
        """
        if isinstance(index, str):
            return self._field(index)
        return self.get_data(int(index)) if isinstance(index, int | np.integer) else self.index_select(index)

    def index_select(self, index: Index, *, drop: Iterable[str] = ()) -> Self:
        """Return a batch of some structures, copied, in the order asked for.

        Parameters
        ----------
        index : int, slice, sequence of int, mask or Tensor
            Which structures; repeated and negative numbers are fine.
        drop : iterable of str
            Fields to leave out.

        Raises
        ------
        GraphIndexError
            If a structure does not exist, or none is selected.
        UnknownNameError
            If a name in ``drop`` is not a field that is set.
        """
        gone = self._droppable(drop)
        parts = self._parts()._replace(levels={name: at for name, at in self._levels.items() if name not in gone})
        return reaching_like(self._from_parts(select_graphs(parts, graph_numbers(index, len(self)))), [self])

    def get_data(self, index: int) -> AtomicData:
        """Return one structure, as :meth:`to_data_list` does.

        Raises
        ------
        GraphIndexError
            If there is no such structure.
        """
        (graph,) = graph_numbers(index, len(self))
        single = AtomicData.unchecked(GraphSlicer(self._parts()).one(graph), self._custom_levels())
        return reaching_like(single, [self])

    def to_data_list(self) -> list[AtomicData]:
        """Return all structures, whose tensors share memory with the batch where they can.

        A label that is NaN throughout a structure is absent there, and so is a cell of zeros without periodicity:
        the opposite of what :meth:`from_data_list` fills in.
        """
        custom = self._custom_levels()
        return [
            reaching_like(AtomicData.unchecked(single, custom), [self]) for single in GraphSlicer(self._parts()).all()
        ]

    def _custom_levels(self) -> dict[str, Level] | None:
        # Without fields of one's own the structures share one mapping of levels.
        return {name: level for name, level in self._levels.items() if name not in FIELDS} or None

    def append(self, other: Batch | AtomicData) -> None:
        """Add structures at the end, in place; fields and missing labels as in :meth:`from_data_list`.

        Raises
        ------
        DataError
            As for :meth:`from_data_list`; this batch is then unchanged.
        """
        joined = self._joined([self, other])
        self.__dict__.pop(CUTOFF, None)
        self.__dict__.update(joined.__dict__)

    def to(
        self,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
    ) -> Self:
        """Return a copy on a device, with its floating fields in a dtype; see :meth:`FieldHolder.to`."""
        new = super().to(device, dtype, non_blocking)
        new.__dict__["_layout"] = self._layout.to(device, non_blocking)
        return new

    def __repr__(self) -> str:
        """Show the numbers of structures, atoms and edges, and the fields with their shapes."""
        shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in self)
        counts = f"{len(self)} structures, {self.num_nodes} atoms, {self.num_edges} edges"
        return f"{type(self).__name__}({counts}: {shapes})"


def _wrapped(index: int, data: object, levels: Mapping[str, Level] | None) -> AtomicData:
    if isinstance(data, Mapping):
        return AtomicData.unchecked(data, levels)
    raise ConfigurationTypeError(
        f"sample {index} must be an AtomicData or a mapping of names to tensors, got {type(data).__name__}"
    )
