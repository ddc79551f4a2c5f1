"""Writing the structures of a conversion in blocks, each with a record that says how to go on after it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import zarr

from nvalchemi_lightning.data.atomic_data import AtomicData
from nvalchemi_lightning.data.batch import Batch
from nvalchemi_lightning.data.conversion_record import Record
from nvalchemi_lightning.data.dialect import Dialect
from nvalchemi_lightning.data.provenance import write_origins
from nvalchemi_lightning.data.translate import text_of
from nvalchemi_lightning.data.zarr_append import Appender
from nvalchemi_lightning.data.zarr_arrays import create_store
from nvalchemi_lightning.data.zarr_layout import ZarrWriteConfig, open_store
from nvalchemi_lightning.errors import DataError

__all__ = ["STORE", "BlockWriter", "Piece"]

STORE = "store"
"""Folder of the store inside that of an unfinished conversion."""

_LABELS = tuple(Dialect().keys)


class Piece(NamedTuple):
    """A structure, and where it came from."""

    source: int
    frame: int
    data: AtomicData


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
        self._pending: list[Piece] = []
        self._parts: list[int] = []

    def add(self, piece: Piece) -> None:
        """Take a structure; it is written by :meth:`flush`."""
        if self._part_key is not None:
            self._parts.append(self._part(piece, self._part_key))
        self._pending.append(piece)

    @property
    def full(self) -> bool:
        """Whether a block is complete."""
        return len(self._pending) >= self._config.block_size

    def flush(self) -> None:
        """Write what has been taken, and the record; nothing where no structure has been read yet."""
        if self._pending:
            self._write()
        if self._record.structures:
            self._record.save(self._folder)

    def _write(self) -> None:
        record, pieces = self._record, self._pending
        try:
            batch = Batch.from_data_list([piece.data for piece in pieces])
            self._appender.add(batch)
        except DataError as error:
            ends = [f"frame {piece.frame} of {self._names[piece.source]}" for piece in (pieces[0], pieces[-1])]
            raise type(error)(f"from {ends[0]} to {ends[1]}: {error}") from error
        origins = {name: np.array([getattr(piece, name) for piece in pieces]) for name in ("source", "frame")}
        if self._part_key is not None:
            origins["part"] = np.array(self._parts)
        write_origins(self._group, record.structures, origins, self._config)
        self._appender.commit()
        record.structures += len(pieces)
        for label in _LABELS:
            record.labelled[label] = record.labelled.get(label, 0) + _labelled(batch, label)
        self._pending, self._parts = [], []

    def _part(self, piece: Piece, key: str) -> int:
        name = _part_name(piece.data, key)
        if name is None:
            raise DataError(f"{self._names[piece.source]}: frame {piece.frame} has no {key!r} that names its part")
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


def _part_name(data: AtomicData, key: str) -> str | None:
    if key in text_of(data):
        return text_of(data)[key]
    number = data.info.get(key)
    return str(number.item()) if number is not None and number.numel() == 1 else None
