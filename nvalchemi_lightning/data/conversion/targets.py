"""Where the structures of a conversion go: one store, several parts, or behind those that a store has."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nvalchemi_lightning.data.batch import Batch
from nvalchemi_lightning.data.conversion.provenance import (
    Provenance,
    origin_array,
    provenance_of,
    write_origins,
    write_provenance,
)
from nvalchemi_lightning.data.conversion.record import Record
from nvalchemi_lightning.data.conversion.writer import STORE
from nvalchemi_lightning.data.store.layout import (
    ZarrWriteConfig,
    committed_samples,
    open_store,
    stored_array,
    stored_fields,
)
from nvalchemi_lightning.data.store.reader import AtomicDataZarrReader
from nvalchemi_lightning.data.store.writer import AtomicDataZarrWriter
from nvalchemi_lightning.errors import ConfigurationError, DataError

__all__ = ["append_to", "check_appendable", "check_free", "make_parts", "publish"]


def check_free(paths: Iterable[Path]) -> None:
    """Refuse to write where something is.

    Raises
    ------
    FileExistsError
        If there is.
    """
    for path in paths:
        if path.exists():
            raise FileExistsError(f"{path} exists; append to it, overwrite it, or choose another path")


def check_appendable(target: Path, dtype: np.dtype[np.floating]) -> None:
    """Refuse to append where digits would be lost, before anything is read.

    Raises
    ------
    FileNotFoundError
        If there is no store.
    DataError
        If the store has a smaller dtype.
    """
    group = open_store(target, "r")
    fields = stored_fields(group, str(target))
    for name, wanted in {"positions": dtype, "forces": dtype, "energy": np.dtype(np.float64)}.items():
        if name not in fields:
            continue
        stored = stored_array(group, fields[name].path, str(target)).dtype
        if not np.can_cast(wanted, stored, "safe"):
            raise DataError(
                f"{target} stores {name} as {stored}, but they are converted to {wanted}, which would lose digits; "
                "convert the store and the files together into a new one"
            )


def part_folder(folder: Path, name: str) -> Path:
    """Return where the store of a part lies in the folder of a conversion."""
    return folder / f"part-{name}"


def make_parts(
    folder: Path, parts: dict[str, NDArray[np.int64]], provenance: Provenance, config: ZarrWriteConfig
) -> None:
    """Write a store for each part beside that of the conversion."""
    origins = _origins(folder / STORE)
    for name, indices in parts.items():
        store = part_folder(folder, name)
        shutil.rmtree(store, ignore_errors=True)
        AtomicDataZarrWriter(store, config).write(_blocks(folder / STORE, indices, config.block_size))
        group = open_store(store, "r+")
        write_origins(group, 0, {key: values[indices] for key, values in origins.items()}, config)
        write_provenance(group, provenance)


def _origins(store: Path) -> dict[str, NDArray[np.int64]]:
    return {name: origin_array(store, name) for name in ("source", "frame")}


def _blocks(store: Path, indices: NDArray[np.int64], size: int) -> Iterator[Batch]:
    reader = AtomicDataZarrReader(store)
    for start in range(0, len(indices), size):
        yield reader.read_batch(indices[start : start + size])


def append_to(target: Path, folder: Path, record: Record, provenance: Provenance, config: ZarrWriteConfig) -> None:
    """Write the structures of a conversion behind those of a store, once, however often it is interrupted.

    Raises
    ------
    ConfigurationError
        If something else was written to the store in the meantime.
    """
    group = open_store(target, "r+")
    known = provenance_of(group) or provenance.model_copy(update={"sources": (), "omitted": ()})
    has = committed_samples(group, str(target))
    if record.appended_to is None:
        record.appended_to = has, len(known.sources)
        record.save(folder)
    before, sources_before = record.appended_to
    if has == before:
        everything = np.arange(record.structures)
        AtomicDataZarrWriter(target, config).append(_blocks(folder / STORE, everything, config.block_size))
    elif has != before + record.structures:
        raise ConfigurationError(
            f"{target} has {has} structures but had {before} when the conversion began; start anew, without resume"
        )
    origins = _origins(folder / STORE)
    origins["source"] += sources_before
    write_origins(group, before, origins, config)
    write_provenance(open_store(target, "r+"), provenance.after(known, sources_before))


def publish(folder: Path, record: Record) -> None:
    """Move finished stores to their places and remove the folder; what is there is replaced."""
    for name, place in record.publishing.items():
        target = Path(place)
        made = part_folder(folder, name) if name else folder / STORE
        if not made.exists():
            continue  # It was moved before the conversion was interrupted.
        if target.exists():
            target.rename(made.with_name(f"old-{made.name}"))
        made.rename(target)
    shutil.rmtree(folder)
