"""What there is to say about a data set: its structures, their labels, and how they are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from nvalchemi_lightning.data.elements import SYMBOLS
from nvalchemi_lightning.data.fields import Level
from nvalchemi_lightning.data.inspection.size_range import SizeRange
from nvalchemi_lightning.data.inspection.tally import Tally, is_label
from nvalchemi_lightning.errors import DataError

__all__ = ["ElementReport", "FieldReport", "Inspection", "StorageReport", "described", "summarized"]


@dataclass(frozen=True)
class StorageReport:
    """How the array of a field is stored.

    Attributes
    ----------
    chunk_rows : int
        Rows of a chunk, the smallest piece that can be read.
    codec : str
        How a chunk is compressed; "none" where it is not.
    bytes : int
        What it takes.
    """

    chunk_rows: int
    codec: str
    bytes: int


@dataclass(frozen=True)
class FieldReport:
    """What is there of one field.

    Attributes
    ----------
    level : {"node", "edge", "system"}
        What a row belongs to.
    dtype : str
        Type of its numbers.
    row : tuple of int
        Shape of a row.
    complete, partial : int or None
        Structures that have all of the label, and that have it in part; None for a field that is no label.
    storage : StorageReport or None
        How it is stored, if it is in a store.
    """

    level: Level
    dtype: str
    row: tuple[int, ...]
    complete: int | None
    partial: int | None
    storage: StorageReport | None = None


@dataclass(frozen=True)
class ElementReport:
    """How much there is of an element: structures that have it, and its atoms."""

    structures: int
    atoms: int


@dataclass(frozen=True)
class Inspection:
    """What a data set is.

    Attributes
    ----------
    source : str
        Its path, or what else it is called.
    structures, deleted, atoms, edges : int
        How many there are; deleted structures count nowhere else.
    sizes : SizeRange
        Atoms of the smallest, the middle and the largest structure.
    elements : mapping of str to ElementReport
        By symbol, in the order of atomic numbers.
    periodicity : mapping of str to int
        Structures that are ``molecules``, ``wires``, ``slabs`` and ``bulk``: periodic in 0, 1, 2 and 3 directions.
    fields : mapping of str to FieldReport
        By name.
    provenance : mapping or None
        What a conversion noted about origin and units.
    bytes : int
        What the arrays of a store, or a file, take; 0 for structures in memory.
    """

    source: str
    structures: int
    deleted: int
    atoms: int
    edges: int
    sizes: SizeRange
    elements: Mapping[str, ElementReport]
    periodicity: Mapping[str, int]
    fields: Mapping[str, FieldReport]
    provenance: Mapping[str, Any] | None = None
    bytes: int = 0


PERIODICITY = ("molecules", "wires", "slabs", "bulk")
"""What structures are called by the number of their periodic directions."""


def described(
    tally: Tally, name: str, level: Level, dtype: str, row: tuple[int, ...], storage: StorageReport | None = None
) -> FieldReport:
    """Return the report on a field."""
    label = dtype == "bfloat16" or is_label(name, np.dtype(dtype))
    return FieldReport(
        level=level,
        dtype=dtype,
        row=row,
        complete=tally.complete[name] if label else None,
        partial=tally.partial[name] if label else None,
        storage=storage,
    )


def summarized(
    tally: Tally, source: str, fields: Mapping[str, FieldReport], deleted: int = 0, **more: Any
) -> Inspection:
    """Return the report on all that was counted.

    Raises
    ------
    DataError
        If there were no structures.
    """
    if not tally.sizes:
        raise DataError(f"{source} holds no structures" + (f"; {deleted} are deleted" if deleted else ""))
    present = np.flatnonzero(tally.atoms).tolist()
    return Inspection(
        source=source,
        structures=tally.sizes.total(),
        deleted=deleted,
        atoms=int(tally.atoms.sum()),
        edges=tally.edges,
        sizes=SizeRange.of(tally.sizes),
        elements={
            SYMBOLS[number]: ElementReport(int(tally.structures[number]), int(tally.atoms[number]))
            for number in present
        },
        periodicity={kind: tally.periodic[directions] for directions, kind in enumerate(PERIODICITY)},
        fields=fields,
        **more,
    )
