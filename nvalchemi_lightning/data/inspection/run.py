"""Looking at a data set: how many structures of what size and kind, which labels they have, how they are stored."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nvalchemi_lightning.data.batch import Batch
from nvalchemi_lightning.data.fields import Level
from nvalchemi_lightning.data.inspection.blocks import read_blocks
from nvalchemi_lightning.data.inspection.report import Inspection, described, summarized
from nvalchemi_lightning.data.inspection.stores import inspect_store
from nvalchemi_lightning.data.inspection.tally import Block, Tally

__all__ = ["inspect_data"]


def inspect_data(source: str | os.PathLike[str] | Iterable[Batch]) -> Inspection:
    """Look at a data set, in one pass.

    Parameters
    ----------
    source : str, PathLike, or iterable of Batch
        A Zarr store, of which pointers and labels alone are read; a file of structures; or batches.

    Raises
    ------
    FileNotFoundError
        If there is nothing at the path.
    StoreError
        If it is not a store of structures, or a damaged one.
    DataError
        If there are no structures, or one cannot be read.
    """
    if not isinstance(source, (str, os.PathLike)):
        return _inspect(source, "the structures")
    if Path(source).is_dir():
        return inspect_store(source)
    return _inspect(read_blocks(source), str(source), bytes=Path(source).stat().st_size)


def _inspect(blocks: Iterable[Batch], name: str, **more: Any) -> Inspection:
    tally = Tally()
    shapes: dict[str, tuple[Level, str, tuple[int, ...]]] = {}
    for batch in blocks:
        tally.add(Block.of(batch))
        for field, value in batch:
            dtype = str(value.dtype).removeprefix("torch.")
            shapes.setdefault(field, (batch.field_levels[field], dtype, tuple(value.shape[1:])))
    return summarized(tally, name, {field: described(tally, field, *shape) for field, shape in shapes.items()}, **more)
