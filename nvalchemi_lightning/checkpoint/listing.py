"""What checkpoints a folder holds, at a glance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvalchemi_lightning.checkpoint.checking import quick_problem
from nvalchemi_lightning.checkpoint.layout import (
    as_object,
    existing_indices,
    record_file,
    saved_counts,
    state_files,
    strategy_file,
)
from nvalchemi_lightning.checkpoint.reading import read_record, recorded_metrics
from nvalchemi_lightning.errors import StoreError

__all__ = ["ListedCheckpoint", "list_checkpoints", "writer_of"]

_REFERENCE = "nvalchemi-toolkit"


@dataclass(frozen=True)
class ListedCheckpoint:
    """A checkpoint of a folder.

    Attributes
    ----------
    index : int
        Its number.
    step, epoch : int or None
        Executed steps and completed epochs; None where no strategy wrote it.
    metrics : dict of str to float
        The validation of these weights; empty if there was none.
    size : int
        Of its files [bytes].
    weights : dict of str to list of str
        By model ``"raw"``, and ``"averaged"`` if there are such too; empty where that was not noted.
    written_by : str or None
        Product and version; None if that is damaged.
    written : str or None
        When (UTC), if that was noted.
    problem : str or None
        Why it cannot be loaded; None if nothing speaks against it. Tensors are not read for this, see
        `verify_checkpoints`.
    """

    index: int
    step: int | None
    epoch: int | None
    metrics: dict[str, float]
    size: int
    weights: dict[str, list[str]]
    written_by: str | None
    written: str | None
    problem: str | None


def list_checkpoints(root: str | Path) -> list[ListedCheckpoint]:
    """Return the checkpoints of a folder, oldest first; no tensors are read.

    Parameters
    ----------
    root : str or Path
        The folder.

    Raises
    ------
    FileNotFoundError
        If it holds none.
    """
    root = Path(root)
    return [_listed(root, index) for index in existing_indices(root)]


def _listed(root: Path, index: int) -> ListedCheckpoint:
    counts = saved_counts(root / strategy_file(index))
    files = [*state_files(root, index), record_file(index)]
    try:
        record = read_record(root, index)
        writer = writer_of(record)
    except StoreError:
        record, writer = None, None
    noted = as_object(record)
    return ListedCheckpoint(
        index=index,
        step=counts.get("step_count"),
        epoch=counts.get("epoch_count"),
        metrics=recorded_metrics(root, index),
        size=sum(path.stat().st_size for path in map(root.joinpath, files) if path.is_file()),
        weights=as_object(noted.get("weights")),
        written_by=writer,
        written=as_object(noted.get("provenance")).get("written"),
        problem=quick_problem(root, index),
    )


def writer_of(record: Mapping[str, Any] | None) -> str:
    """Return product and version that wrote a checkpoint: the reference leaves no record."""
    return _REFERENCE if record is None else f"nvalchemi-lightning {record.get('version')}"
