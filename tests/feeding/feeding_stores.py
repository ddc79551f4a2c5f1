"""What is in a store, and stores that an operation was interrupted in."""

from __future__ import annotations

from nvalchemi_lightning.data import AtomicDataZarrReader
from nvalchemi_lightning.data.store.layout import ZarrWriteConfig

SMALL_CHUNKS = ZarrWriteConfig(chunk_bytes=64, block_size=3)


def fields_of(data) -> dict[str, list]:
    """Return the values of a structure."""
    return {name: value.tolist() for name, value in data}


def contents(path, **options) -> list[dict[str, list]]:
    """Return the values of every structure of a store."""
    reader = AtomicDataZarrReader(path, **options)
    return [fields_of(data) for data in reader.read_batch(range(len(reader))).to_data_list()] if len(reader) else []
