"""Converting files and stores to a Zarr store of structures in eV and A."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

import torch

from nvalchemi_lightning.data.conversion.job import Advance, Existing, Job, finish, read_all
from nvalchemi_lightning.data.conversion.parts import checked_fractions
from nvalchemi_lightning.data.conversion.provenance import OmittedFrame
from nvalchemi_lightning.data.conversion.record import Record
from nvalchemi_lightning.data.conversion.targets import publish
from nvalchemi_lightning.data.sources.dialect import Dialect
from nvalchemi_lightning.data.sources.early_keys import check_early
from nvalchemi_lightning.data.sources.opening import OnError, open_source
from nvalchemi_lightning.data.sources.source import Source
from nvalchemi_lightning.data.store.layout import ZarrWriteConfig
from nvalchemi_lightning.errors import ConfigurationError, LabelNotFoundError, UnknownNameError, nearest

__all__ = ["Conversion", "convert"]

PathLike: TypeAlias = "str | os.PathLike[str]"
SourcePaths: TypeAlias = "PathLike | Sequence[PathLike] | Mapping[PathLike, Dialect]"
Value = TypeVar("Value")


@dataclass(frozen=True)
class Conversion:
    """What a conversion did.

    Attributes
    ----------
    stores : dict of str to int
        Path of each store to the number of structures that were written to it.
    labels : dict of str to int
        Label to the number of structures that have it.
    omitted : tuple of OmittedFrame
        Frames that were left out.
    numbers : tuple of str
        Names of numbers in the files that were not stored.
    """

    stores: dict[str, int]
    labels: dict[str, int]
    omitted: tuple[OmittedFrame, ...]
    numbers: tuple[str, ...]

    @property
    def structures(self) -> int:
        """Structures that were written."""
        return sum(self.stores.values())


def convert(
    sources: SourcePaths,
    target: PathLike,
    dialect: Dialect | None = None,
    *,
    format: str | None = None,  # noqa: A002  ASE's name for it
    dtype: Literal["float32", "float64"] = "float32",
    on_error: OnError = "raise",
    existing: Existing = "refuse",
    resume: bool = False,
    split: Mapping[str, float] | Sequence[float] | None = None,
    split_by: str | None = None,
    seed: int = 0,
    config: ZarrWriteConfig | None = None,
    advance: Advance | None = None,
) -> Conversion:
    """Convert files and stores to a store, or to one for each part of a split.

    Parameters
    ----------
    sources : path, sequence of paths, or mapping of path to Dialect
        What to convert, see :func:`~nvalchemi_lightning.data.open_source`; a mapping gives each its own dialect.
    target : str or PathLike
        The store to make. Parts are beside it: ``data.zarr`` becomes ``data_train.zarr`` and ``data_val.zarr``.
    dialect : Dialect, optional
        What labels are called and their units, for all sources; default: ASE's names and units.
    format : str, optional
        ASE's name of the format of the files; default: ASE finds out.
    dtype : {"float32", "float64"}, default "float32"
        Dtype of positions, cells, forces and other labels. Energies are float64 in any case.
    on_error : {"raise", "skip"}, default "raise"
        Whether a frame that cannot be read ends the conversion, or is left out.
    existing : {"refuse", "append", "overwrite"}, default "refuse"
        What to do with a store that is there. It is replaced, or appended to, at the end and in one step.
    resume : bool, default False
        Go on where an interrupted conversion stopped, if there is one. Otherwise it starts anew.
    split : sequence or mapping of float, optional
        Two or three fractions that add up to 1, for train, val and test; or name to fraction. Structures are drawn at
        random; sizes are exact, and the same seed gives the same parts.
    split_by : str, optional
        Name of what the files call the part of a structure, such as ``"split"``; instead of ``split``.
    seed : int, default 0
        Seed of ``split``.
    config : ZarrWriteConfig, optional
        Chunks and codecs of the store; default: blocks of 4096 structures, which is what an interruption costs.
    advance : callable, optional
        Called with the number of structures that were read since the last call.

    Returns
    -------
    Conversion
        What was written and left out.

    Raises
    ------
    FileNotFoundError
        If a source does not exist, or there is no store to append to.
    FileExistsError
        If the target exists.
    DataError
        If a frame cannot be read; names file, frame and field.
    LabelNotFoundError
        If a key is in no frame, or a file has no labels but something that looks like them.
    ConfigurationError
        If options contradict each other or the files, or a conversion cannot go on.

    Notes
    -----
    Structures are read one at a time and written in blocks to ``.<target>.partial`` beside the target, which is moved
    to its place at the end. An interrupted conversion leaves it there for ``resume``.
    """
    _check_choice("on_error", on_error, ("raise", "skip"))
    _check_choice("existing", existing, ("refuse", "append", "overwrite"))
    _check_choice("dtype", dtype, ("float32", "float64"))
    job = Job(
        target=Path(target),
        sources=_opened(sources, dialect, format, getattr(torch, dtype)),
        format=format,
        dtype=dtype,
        existing=existing,
        split=None if split is None else checked_fractions(split),
        split_by=split_by,
        seed=seed,
        config=config if config is not None else ZarrWriteConfig(block_size=4096),
    )
    record = _begun(job, resume)
    if not record.stores:
        try:
            read_all(job, record, on_error, advance)
            finish(job, record)
        except (ConfigurationError, LabelNotFoundError, FileExistsError):  # Going on would end here again.
            shutil.rmtree(job.folder)
            raise
        finally:
            if not Record.lies_in(job.folder):
                shutil.rmtree(job.folder, ignore_errors=True)
    publish(job.folder, record)
    numbers = sorted({name for found in record.findings for name in found["numbers"]} - job.kept)
    return Conversion(record.stores, record.labelled, tuple(record.omitted), tuple(numbers))


def _begun(job: Job, resume: bool) -> Record:
    """Return the record of an unfinished conversion, or of one that begins, in an empty folder."""
    record = job.new_record()
    if resume and Record.lies_in(job.folder):
        return record.resumed(job.folder)
    job.check()
    check_early(job.sources)
    shutil.rmtree(job.folder, ignore_errors=True)
    job.folder.mkdir(parents=True)
    return record


def _check_choice(option: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UnknownNameError(f"{option} must be one of {', '.join(known)}, got {value!r}{nearest(str(value), known)}")


def _opened(sources: SourcePaths, dialect: Dialect | None, format_name: str | None, dtype: torch.dtype) -> list[Source]:
    if isinstance(sources, Mapping) and dialect is not None:
        raise ConfigurationError("give one dialect for all sources, or a mapping of path to dialect, not both")
    if isinstance(sources, (str, os.PathLike)):
        sources = [sources]
    pairs = sources.items() if isinstance(sources, Mapping) else [(path, dialect) for path in sources]
    opened = [open_source(path, own, format=format_name, dtype=dtype) for path, own in pairs]
    if not opened:
        raise ConfigurationError("there is nothing to convert: sources is empty")
    return opened
