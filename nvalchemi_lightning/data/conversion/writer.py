"""Writing the structures of a conversion in blocks, each with a record that says how to go on after it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from nvalchemi_lightning.data.atomic_data import AtomicData
from nvalchemi_lightning.data.batch import Batch
from nvalchemi_lightning.data.conversion.blocks import Block
from nvalchemi_lightning.data.conversion.provenance import write_origins
from nvalchemi_lightning.data.conversion.record import Record
from nvalchemi_lightning.data.sources.dialect import Dialect
from nvalchemi_lightning.data.sources.raw_structure import info_numbers
from nvalchemi_lightning.data.store.append import Appender
from nvalchemi_lightning.data.store.arrays import create_store
from nvalchemi_lightning.data.store.layout import ZarrWriteConfig, open_store
from nvalchemi_lightning.errors import DataError

__all__ = ["STORE", "BlockWriter"]

STORE = "store"
"""Folder of the store inside that of an unfinished conversion."""

_LABELS = tuple(Dialect().keys)


class BlockWriter:
    """Writes structures in blocks; what a block wrote counts when its record does.

    Parameters
    ----------
    folder : Path
        Folder of the conversion; a store in it is cut to what the record says, otherwise a new one is made.
    record : Record
        How far the conversion has come; kept up to date.
    names : list of str
        What messages call the sources.
    part_key : str or None
        What a file calls the part that a structure belongs to.
    config : ZarrWriteConfig
        Chunks, codecs and the size of blocks.
    """

    def __init__(
        self, folder: Path, record: Record, names: list[str], part_key: str | None, config: ZarrWriteConfig
    ) -> None:
        self._folder = folder
        self._record = record
        self._names = names
        self._part_key = part_key
        self._config = config
        self._group = _group(folder / STORE, record, config)
        self._appender = Appender(self._group, "the store", config)
        self._data: list[AtomicData | Batch] = []
        self._origins: list[tuple[int, int]] = []
        self._parts: list[int] = []

    def add(self, source: int, block: Block) -> None:
        """Take the structures of some frames of a source; they are written by :meth:`flush`."""
        if self._part_key is not None:
            for frame, info in zip(block.frames, block.infos, strict=True):
                self._parts.append(self._part(source, frame, info, self._part_key))
        self._origins += [(source, frame) for frame in block.frames]
        self._data += block.data

    def room(self) -> int:
        """Return how many structures are missing from a complete block."""
        return self._config.block_size - len(self._origins)

    def flush(self) -> None:
        """Write what has been taken, and the record; nothing where no structure has been read yet."""
        if self._origins:
            self._write()
        if self._record.structures:
            self._record.save(self._folder)

    def _write(self) -> None:
        record = self._record
        try:
            batch = Batch._joined(self._data)
            self._appender.add(batch)
        except DataError as error:
            ends = self._origins[0], self._origins[-1]
            first, last = (f"frame {frame} of {self._names[source]}" for source, frame in ends)
            raise type(error)(f"from {first} to {last}: {error}") from error
        origins = dict(zip(("source", "frame"), np.array(self._origins).T, strict=True))
        if self._part_key is not None:
            origins["part"] = np.array(self._parts)
        write_origins(self._group, record.structures, origins, self._config)
        self._appender.commit()
        record.structures += len(self._origins)
        for label in _LABELS:
            record.labelled[label] = record.labelled.get(label, 0) + _labelled(batch, label)
        self._data, self._origins, self._parts = [], [], []

    def _part(self, source: int, frame: int, info: Mapping[str, Any], key: str) -> int:
        name = _part_name(info, key)
        if name is None:
            raise DataError(f"{self._names[source]}: frame {frame} has no {key!r} that names its part")
        if name not in self._record.parts:
            self._record.parts.append(name)
        return self._record.parts.index(name)


def _group(store: Path, record: Record, config: ZarrWriteConfig) -> zarr.Group:
    if not store.exists():
        return create_store(store, config)
    group = open_store(store, "r+")
    group.attrs["num_samples"] = record.structures
    return group


def _labelled(batch: Batch, label: str) -> int:
    """Return how many structures have a label that is not missing throughout."""
    if label not in batch:
        return 0
    values = batch[label]
    known = ~values.isnan().reshape(len(values), -1).all(dim=1).numpy()
    if batch.field_levels[label] == "node":
        known = np.logical_or.reduceat(known, batch.batch_ptr[:-1].numpy())
    return int(known.sum())


def _part_name(info: Mapping[str, Any], key: str) -> str | None:
    value = info.get(key)
    if isinstance(value, str):
        return value
    number = info_numbers({key: value}, {}).get(key)
    return str(number.item()) if number is not None and number.numel() == 1 else None
