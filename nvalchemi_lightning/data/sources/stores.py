"""Zarr stores as sources of structures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nvalchemi_lightning.data.atomic_data import AtomicData
from nvalchemi_lightning.data.edge_cutoff import reaching
from nvalchemi_lightning.data.fields import FIELDS, Level
from nvalchemi_lightning.data.sources.dialect import Dialect
from nvalchemi_lightning.data.sources.findings import Findings
from nvalchemi_lightning.data.sources.source import Frame, Source, naming
from nvalchemi_lightning.data.sources.translate import ExactEnergies
from nvalchemi_lightning.data.store.layout import edges_reach, open_store
from nvalchemi_lightning.data.store.reader import AtomicDataZarrReader
from nvalchemi_lightning.errors import ConfigurationError

__all__ = ["StoreSource"]

_BLOCK = 256
"""Structures that are read from the store at a time."""

_ADDERS = {
    "node": AtomicData.add_node_property,
    "edge": AtomicData.add_edge_property,
    "system": AtomicData.add_system_property,
}


class StoreSource(Source):
    """A Zarr store; deleted structures are passed over.

    Parameters
    ----------
    path : Path
        The store.
    dialect : Dialect
        The default one: names and units of a store are fixed.
    dtype : torch.dtype
        Floating dtype of the structures.

    Raises
    ------
    StoreError
        If it is not a store of structures.
    ConfigurationError
        If another dialect is given.
    """

    def __init__(self, path: Path, dialect: Dialect, dtype: torch.dtype) -> None:
        if dialect != Dialect():
            raise ConfigurationError(f"{path} is a store, whose names and units are fixed; leave keys and units out")
        self.name = str(path)
        self.dialect = dialect
        self.findings = Findings()
        self._reader = AtomicDataZarrReader(path)
        self._reach = edges_reach(open_store(path, "r"))
        self._dtype = dtype

    def frames(self, start: int = 0) -> Iterator[Frame]:
        """Yield the structures whose physical index is ``start`` or more."""
        self.findings = Findings()
        levels = self._reader.field_levels
        for first in range(0, len(self._reader), _BLOCK):
            block = range(first, min(first + _BLOCK, len(self._reader)))
            for tensors, origin in self._reader.read_many(list(block)):
                number = int(origin["physical_index"])
                if number >= start:
                    yield Frame(number, partial(self._read, number, tensors, levels))

    def _read(self, number: int, tensors: Mapping[str, Tensor], levels: Mapping[str, Level]) -> AtomicData:
        known: dict[str, Any] = {name: value for name, value in tensors.items() if name in FIELDS}
        known["positions"] = known["positions"].to(self._dtype)
        with naming(self.name, number):
            data = ExactEnergies(**known)
            for name in tensors.keys() - known.keys():
                _ADDERS[levels[name]](data, name, tensors[name])
        self.findings.note_fields(data)
        return reaching(data, self._reach) if "neighbor_list" in data else data
