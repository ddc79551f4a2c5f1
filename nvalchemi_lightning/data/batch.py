"""Several structures as one: concatenated tensors that know where each structure begins."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from nvalchemi_lightning.data.atomic_data import AtomicData, check_free_name
from nvalchemi_lightning.data.collate import join
from nvalchemi_lightning.data.fields import CORE_FIELDS, FIELDS, LEVELS, Level, level_of
from nvalchemi_lightning.data.holder import FieldHolder
from nvalchemi_lightning.data.segments import Segments
from nvalchemi_lightning.data.select import Index, graph_numbers, select_graphs, split_graphs
from nvalchemi_lightning.errors import ConfigurationError, DataError

__all__ = ["Batch"]


class Batch(FieldHolder):
    """Several structures in concatenated tensors.

    Made by :meth:`from_data_list`, or by :meth:`from_levels` from tensors that are concatenated already.

    Notes
    -----
    ``batch.forces`` and ``batch["forces"]`` give the same tensor: node fields have shape (V, ...), edge fields (E, ...)
    and system fields (B, ...) for V atoms, E edges and B structures. An absent field raises AttributeError, except
    that ``atomic_masses`` reads as the standard masses, and ``velocities`` and ``atom_categories`` as zeros that
    cannot be written in place.

    ``batch_idx``, ``batch_ptr`` and ``edge_ptr`` are int64, so they index and scatter without a cast.

    ``neighbor_list`` counts through all atoms of the batch, and its rows are grouped by structure. Assigning it begins
    a new set of edges: the other edge fields belonged to the old one and are removed, so assign them afterwards.

    Assigning to a field of the table, or to a field that is there, takes the tensor as it is (no cast or copy) after a
    check of its shape. Another name becomes a system field and needs B rows.
    """

    _nodes: Segments
    _edge_segments: Segments | None
    _rows: Mapping[Level, int | None]

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
        """
        if not data_list:
            raise DataError("cannot make a batch of no structures: the list is empty")
        pieces = [
            data if isinstance(data, AtomicData) else AtomicData.unchecked(data, field_levels) for data in data_list
        ]
        batch = cls._join(pieces, exclude_keys)
        return batch if device is None or batch.device == torch.device(device) else batch.to(device)

    @classmethod
    def _join(cls, pieces: Sequence[AtomicData | Batch], exclude: Collection[str] = ()) -> Self:
        for name in CORE_FIELDS:
            if name in exclude:
                raise DataError(f"a batch cannot be without {name!r}: take it out of exclude_keys")
        fields, levels = join(pieces, exclude)
        device = fields["positions"].device
        nodes = Segments.from_sizes([size for piece in pieces for size in piece._sizes("node")], device)
        edges = None
        if "edge" in levels.values():
            edges = Segments.from_sizes([size for piece in pieces for size in piece._sizes("edge")], device)
        return cls._assemble(fields, levels, nodes, edges)

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
        for name in CORE_FIELDS:
            if name not in node:
                raise DataError(f"a batch cannot be without {name!r}: it is not among the node fields")
        device = node["positions"].device
        nodes = Segments.from_counts(num_nodes_per_graph, device)
        edges = None if num_edges_per_graph is None else Segments.from_counts(num_edges_per_graph, device)
        fields = {name: value for values in given.values() for name, value in values.items()}
        levels = {name: level for level, values in given.items() for name in values}
        if len(fields) < sum(map(len, given.values())):
            raise DataError(f"a field is on two levels: {sorted(node)}, {sorted(edge or {})}, {sorted(system or {})}")
        return cls._assemble(fields, levels, nodes, edges)

    @classmethod
    def _assemble(
        cls, fields: Mapping[str, Tensor], levels: Mapping[str, Level], nodes: Segments, edges: Segments | None
    ) -> Self:
        edge_rows = next((fields[name].shape[0] for name, level in levels.items() if level == "edge"), None)
        rows: dict[Level, int | None] = {"node": nodes.total, "edge": edge_rows, "system": len(nodes)}
        for name, level in levels.items():
            if fields[name].shape[0] != rows[level]:
                raise DataError(f"{name!r} has {fields[name].shape[0]} rows, but the {level} level has {rows[level]}")
        if edges is not None and (edges.total != (edge_rows or 0) or len(edges) != len(nodes)):
            raise DataError(
                f"num_edges_per_graph adds up to {edges.total} edges of {len(edges)} graphs, "
                f"but there are {edge_rows or 0} edges and {len(nodes)} graphs"
            )
        return cls._build(fields, levels, _nodes=nodes, _edge_segments=edges if edge_rows is not None else None, _rows=rows)

    @property
    def num_graphs(self) -> int:
        """Number of structures B."""
        return len(self._nodes)

    batch_size = num_graphs

    def __len__(self) -> int:
        """Return the number of structures B."""
        return len(self._nodes)

    @property
    def num_edges(self) -> int:
        """Number of edges E; 0 without edge fields."""
        return self._rows["edge"] or 0

    @property
    def num_nodes_per_graph(self) -> Tensor:
        """Atoms of each structure, int64, shape (B,)."""
        return self._nodes.counts

    @property
    def num_edges_per_graph(self) -> Tensor:
        """Edges of each structure, int64, shape (B,)."""
        edges = self._edges
        return torch.zeros_like(self._nodes.counts) if edges is None else edges.counts

    @property
    def num_nodes_list(self) -> list[int]:
        """Atoms of each structure as Python integers."""
        return list(self._nodes.sizes)

    @property
    def num_edges_list(self) -> list[int]:
        """Edges of each structure as Python integers."""
        return list(self._sizes("edge"))

    @property
    def max_num_nodes(self) -> int:
        """Atoms of the largest structure."""
        return max(self._nodes.sizes)

    @property
    def batch_idx(self) -> Tensor:
        """Structure of each atom, int64, shape (V,)."""
        return self._nodes.index

    @property
    def batch_ptr(self) -> Tensor:
        """First atom of each structure and V, int64, shape (B + 1,)."""
        return self._nodes.ptr

    @property
    def edge_ptr(self) -> Tensor:
        """First edge of each source atom and E, int64, shape (V + 1,), for a ``neighbor_list`` sorted by source."""
        sources = self._field("neighbor_list")[:, 0].long()
        return torch.nn.functional.pad(torch.bincount(sources, minlength=self.num_nodes).cumsum(0), (1, 0))

    @property
    def keys(self) -> dict[str, set[str]]:
        """Names of the fields that are set, by level: "node", "edge", "system"."""
        return {level: set(self._at(level)) for level in LEVELS}

    @property
    def level_keys(self) -> dict[str, set[str]]:
        """Names of the fields that are set, by storage level: "atoms", "edges", "system"."""
        keys = self.keys
        return {"atoms": keys["node"], "edges": keys["edge"], "system": keys["system"]}

    def _sizes(self, level: Level) -> list[int]:
        if level == "node":
            return self._nodes.sizes
        edges = self._edges
        return [0] * len(self) if edges is None else edges.sizes

    @property
    def _edges(self) -> Segments | None:
        """How the edges divide among the structures; counted when first needed after ``neighbor_list`` was assigned."""
        if self._edge_segments is None and self._rows["edge"] is not None:
            self.__dict__["_edge_segments"] = self._counted_edges()
        return self._edge_segments

    def _counted_edges(self) -> Segments:
        graphs = self.batch_idx[self._field("neighbor_list")[:, 0].long()]
        if (graphs[1:] < graphs[:-1]).any():
            raise DataError("the rows of neighbor_list are not grouped by structure; sort them by their first column")
        return Segments.from_counts(torch.bincount(graphs, minlength=len(self)), self.device)

    def _default(self, name: str) -> Tensor | None:
        if FIELDS[name].has_default:
            return self._readable_default(name)
        raise self._absent(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field; see the notes of the class."""
        level = self._levels.get(name)
        if level is None or name == "neighbor_list":
            self._introduce(name, value)
            return
        self._check_value(name, value, level)
        self.__dict__[name] = value

    def _check_value(self, name: str, value: object, level: Level) -> None:
        if not isinstance(value, Tensor):
            raise DataError(f"{name!r} must be a torch.Tensor, got {type(value).__name__}")
        shape, rows = value.shape, self._rows[level]
        field = FIELDS.get(name)
        if not shape or shape[0] != rows or (field is not None and not field.fits(shape[1:])):
            raise DataError(self._wrong_rows(name, tuple(shape), level))

    def _wrong_rows(self, name: str, shape: tuple[int, ...], level: Level) -> str:
        rows = self._rows[level]
        if rows is None:
            return f"assign neighbor_list before {name!r}: the batch has no edges yet"
        row = ", ".join(str(size) for size in FIELDS[name].row) if name in FIELDS else "..."
        hint = "" if name in self._levels or name in FIELDS else '; use add_key(..., level="node") for values per atom'
        return f"length mismatch: {name!r} must have shape ({rows}, {row}) on the {level} level, got {shape}{hint}"

    def _introduce(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            self.__dict__[name] = value
            return
        check_free_name(type(self), name)
        if name == "neighbor_list":
            self._begin_edges(value)
            return
        level = level_of(name)
        self._check_value(name, value, level)
        self._store(name, value, level)

    def _begin_edges(self, neighbor_list: object) -> None:
        if not isinstance(neighbor_list, Tensor) or neighbor_list.ndim != 2 or neighbor_list.shape[1] != 2:
            shape = tuple(neighbor_list.shape) if isinstance(neighbor_list, Tensor) else type(neighbor_list).__name__
            raise DataError(f"neighbor_list must be a tensor of shape (E, 2), got {shape}")
        self._drop(self._at("edge"))
        self.__dict__["_rows"] = {**self._rows, "edge": neighbor_list.shape[0]}
        self.__dict__["_edge_segments"] = None
        self._store("neighbor_list", neighbor_list, "edge")

    def __delattr__(self, name: str) -> None:
        """Remove a field."""
        if name in CORE_FIELDS:
            raise DataError(f"a batch cannot be without {name!r}")
        super().__delattr__(name)

    def _drop(self, names: Iterable[str]) -> None:
        super()._drop(names)
        if "edge" not in self._levels.values():
            self.__dict__["_rows"] = {**self._rows, "edge": None}
            self.__dict__["_edge_segments"] = None

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
            If the name is taken.
        DataError
            If the number of tensors, or of rows in one of them, is wrong.
        """
        if key in self._levels and not overwrite:
            raise ConfigurationError(f"{key!r} is already a field of this batch; pass overwrite=True to replace it")
        check_free_name(type(self), key)
        if self._levels.get(key, level) != level or level_of(key, {key: level}) != level:
            raise ConfigurationError(f"{key!r} belongs to the level {self._levels[key]!r}, not {level!r}")
        sizes = [1] * len(self) if level == "system" else self._sizes(level)
        if len(values) != len(sizes):
            raise DataError(f"add_key({key!r}) needs one tensor per structure: {len(sizes)}, got {len(values)}")
        for graph, (value, size) in enumerate(zip(values, sizes, strict=True)):
            if not value.ndim or value.shape[0] != size:
                raise DataError(f"{key!r} of structure {graph} needs {size} row(s), got shape {tuple(value.shape)}")
        joined = torch.cat(list(values))
        self._store(key, joined, level)

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
        if isinstance(index, int):
            return self.get_data(index)
        return self.index_select(index)

    def __setitem__(self, name: str, value: Tensor) -> None:
        """Set a field, as by attribute."""
        setattr(self, name, value)

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
        gone = set(self._droppable(drop))
        levels = {name: level for name, level in self._levels.items() if name not in gone}
        graphs = graph_numbers(index, len(self))
        fields, nodes, edges = select_graphs(self.__dict__, levels, self._nodes, self._edges, graphs)
        return self._assemble(fields, levels, nodes, edges)

    def get_data(self, index: int) -> AtomicData:
        """Return one structure, copied; a label that is NaN throughout is absent."""
        return self.index_select(index).to_data_list()[0]

    def to_data_list(self) -> list[AtomicData]:
        """Return all structures, whose tensors share memory with the batch where they can.

        A label that is NaN throughout a structure is absent there, and so is a cell of zeros without periodicity:
        the opposite of what :meth:`from_data_list` fills in.
        """
        custom = {name: level for name, level in self._levels.items() if name not in FIELDS}
        singles = split_graphs(self.__dict__, self._levels, self._nodes, self._edges)
        return [AtomicData.unchecked(single, custom) for single in singles]

    def append(self, other: Batch | AtomicData) -> None:
        """Add structures at the end, in place; fields and missing labels as in :meth:`from_data_list`.

        Raises
        ------
        DataError
            As for :meth:`from_data_list`; this batch is then unchanged.
        """
        joined = self._join([self, other])
        self.__dict__.update(joined.__dict__)

    def to(
        self,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
    ) -> Self:
        """Return a copy on a device, with its floating fields in a dtype; see :meth:`FieldHolder.to`."""
        new = super().to(device, dtype, non_blocking)
        new.__dict__["_nodes"] = self._nodes.to(device, non_blocking)
        if self._edge_segments is not None:
            new.__dict__["_edge_segments"] = self._edge_segments.to(device, non_blocking)
        return new

    def __repr__(self) -> str:
        """Show the numbers of structures, atoms and edges, and the fields with their shapes."""
        shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in self)
        counts = f"{len(self)} structures, {self.num_nodes} atoms, {self.num_edges} edges"
        return f"{type(self).__name__}({counts}: {shapes})"
