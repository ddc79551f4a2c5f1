"""What a conversion is to do, and the doing of it up to finished stores that only have to be moved to their places."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nvalchemi_lightning.data.conversion.blocks import read_blocks
from nvalchemi_lightning.data.conversion.parts import part_path, random_parts
from nvalchemi_lightning.data.conversion.provenance import (
    OmittedFrame,
    Provenance,
    SourceRecord,
    origin_array,
    write_provenance,
)
from nvalchemi_lightning.data.conversion.record import Fingerprint, Record
from nvalchemi_lightning.data.conversion.targets import append_to, check_appendable, check_free, make_parts
from nvalchemi_lightning.data.conversion.writer import STORE, BlockWriter
from nvalchemi_lightning.data.sources.dialect import Dialect
from nvalchemi_lightning.data.sources.findings import Findings
from nvalchemi_lightning.data.sources.opening import OnError
from nvalchemi_lightning.data.sources.source import Source
from nvalchemi_lightning.data.store.layout import ZarrWriteConfig, open_store
from nvalchemi_lightning.errors import ConfigurationError, DataError

__all__ = ["Advance", "Existing", "Job", "finish", "read_all"]

Existing: TypeAlias = Literal["refuse", "append", "overwrite"]
Advance: TypeAlias = Callable[[int], object]


@dataclass(frozen=True)
class Job:
    """What is to be converted, and to what; see :func:`nvalchemi_lightning.data.convert`."""

    target: Path
    sources: list[Source]
    format: str | None
    dtype: str
    existing: Existing
    split: dict[str, float] | None
    split_by: str | None
    seed: int
    config: ZarrWriteConfig

    @property
    def folder(self) -> Path:
        """Where everything lies until it is finished."""
        return self.target.with_name(f".{self.target.name}.partial")

    @property
    def dialects(self) -> list[Dialect]:
        """The dialects of the sources, each once."""
        return list({source.dialect.model_dump_json(): source.dialect for source in self.sources}.values())

    @property
    def names(self) -> list[str]:
        """What messages call the sources."""
        return [source.name for source in self.sources]

    @property
    def kept(self) -> set[str]:
        """Names of numbers that are kept."""
        return {key for dialect in self.dialects for key in dialect.keep}

    def new_record(self) -> Record:
        """Return the record of nothing done."""
        options: dict[str, Any] = {"target": str(self.target), "split": self.split}
        options |= {name: getattr(self, name) for name in ("format", "dtype", "existing", "split_by", "seed")}
        options["dialects"] = [source.dialect.model_dump(mode="json") for source in self.sources]
        findings = [Findings().to_json() for _ in self.dialects]
        return Record(options=options, sources=[Fingerprint.of(name) for name in self.names], findings=findings)

    def check(self) -> None:
        """Refuse what cannot work, before anything is read."""
        divided = self.split is not None or self.split_by is not None
        if self.split is not None and self.split_by is not None:
            raise ConfigurationError("split and split_by are two ways to divide the structures; give one of them")
        if divided and self.existing == "append":
            raise ConfigurationError("structures are divided or appended, not both; append to each part by itself")
        if self.existing == "append":
            check_appendable(self.target, np.dtype(self.dtype))
        elif self.existing == "refuse":
            check_free([part_path(self.target, name) for name in self.split or ()] if divided else [self.target])


def read_all(job: Job, record: Record, on_error: OnError, advance: Advance | None) -> None:
    """Read the sources from where the record is, and write their structures to one store.

    Raises
    ------
    DataError
        If a frame cannot be read, or none could be.
    LabelNotFoundError
        If a source has no label but something that looks like one.
    ConfigurationError
        If a dialect speaks of what no structure has.
    """
    writer = BlockWriter(job.folder, record, job.names, job.split_by, job.config)
    while record.source < len(job.sources):
        _read_source(job, record, writer, on_error, advance)
    writer.flush()
    if not record.structures:
        raise DataError(f"no structure could be read; the first reason: {record.omitted[0].reason}")
    for dialect, found in zip(job.dialects, record.findings, strict=True):
        names = [source.name for source in job.sources if source.dialect == dialect]
        Findings.from_json(found).check_options(dialect, ", ".join(names))


def _read_source(job: Job, record: Record, writer: BlockWriter, on_error: OnError, advance: Advance | None) -> None:
    number, source = record.source, job.sources[record.source]
    before = record.current

    for block in read_blocks(source, record.frame, writer.room):
        if block.skips and on_error == "raise":
            raise block.skips[0].reason
        writer.add(number, block)
        if advance is not None:
            advance(len(block.frames))
        omitted = [OmittedFrame(source=number, frame=skip.number, reason=str(skip.reason)) for skip in block.skips]
        record.omitted += omitted
        if not writer.room():
            record.frame = block.next_frame
            record.current = _merged(before, source.findings)
            writer.flush()
    found = _merged(before, source.findings)
    Findings.from_json(found).check_labels(source.dialect, source.name)
    place = job.dialects.index(source.dialect)
    record.findings[place] = _merged(record.findings[place], Findings.from_json(found))
    record.source, record.frame, record.current = number + 1, 0, None


def _merged(noted: dict[str, Any] | None, more: Findings) -> dict[str, Any]:
    found = Findings() if noted is None else Findings.from_json(noted)
    found.merge(more)
    return found.to_json()


def finish(job: Job, record: Record) -> None:
    """Make of what was read the stores that were asked for.

    Raises
    ------
    FileExistsError
        If there is something in the place of one.
    ConfigurationError
        If a part would be empty, or cannot be named.
    """
    if job.existing == "append":
        append_to(job.target, job.folder, record, _provenance(job, record), job.config)
        record.stores = {str(job.target): record.structures}
    else:
        parts = _parts(job, record)
        places = {name: part_path(job.target, name) for name in parts} if parts else {"": job.target}
        if job.existing == "refuse":
            check_free(places.values())
        if parts:
            make_parts(job.folder, parts, _provenance(job, record), job.config)
        else:
            write_provenance(open_store(job.folder / STORE, "r+"), _provenance(job, record))
        record.publishing = {name: str(path) for name, path in places.items()}
        record.stores = {str(path): len(parts.get(name, range(record.structures))) for name, path in places.items()}
    record.save(job.folder)


def _parts(job: Job, record: Record) -> dict[str, NDArray[np.int64]]:
    """Return name to the numbers of the structures of each part; nothing where they stay together."""
    if job.split is not None:
        return random_parts(record.structures, job.split, job.seed)
    if job.split_by is None:
        return {}
    numbers = origin_array(job.folder / STORE, "part")
    return {name: np.flatnonzero(numbers == number) for number, name in enumerate(record.parts)}


def _provenance(job: Job, record: Record) -> Provenance:
    sources = [
        SourceRecord(
            name=source.name,
            size=found.size,
            format=job.format,
            dialect=source.dialect.model_dump(mode="json", exclude_defaults=True),
        )
        for source, found in zip(job.sources, record.sources, strict=True)
    ]
    return Provenance(version=version("nvalchemi-lightning"), sources=tuple(sources), omitted=tuple(record.omitted))
