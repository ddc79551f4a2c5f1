"""Removing checkpoints from a folder."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from nvalchemi_lightning.checkpoint.layout import indices, record_file, state_files, strategy_file
from nvalchemi_lightning.checkpoint.reading import latest_index, recorded_metrics

__all__ = ["best_index", "prune", "retain"]


def best_index(root: Path, metric: str) -> int | None:
    """Return the checkpoint whose metric is the smallest, the newest of several, or None if none has recorded it.

    Parameters
    ----------
    root : Path
        The folder of checkpoints.
    metric : str
        The name of a number of the validation summary.
    """
    found = {index: recorded_metrics(root, index) for index in indices(root)}
    values = {index: metrics[metric] for index, metrics in found.items() if metric in metrics}
    return min(values, key=lambda index: (values[index], -index), default=None)


def retain(root: Path, last: int | None, best: str | None) -> list[int]:
    """Remove all checkpoints but the newest few and the best.

    Parameters
    ----------
    root : Path
        The folder of checkpoints.
    last : int or None
        How many of the newest stay; None with ``best`` is 1, and without it all.
    best : str or None
        The name of a number of the validation summary, the smallest of which stays.

    Returns
    -------
    list of int
        What was removed.
    """
    if last is None and best is None:
        return []
    found = None if best is None else best_index(root, best)
    return prune(root, {*indices(root)[-(last or 1) :], *(() if found is None else (found,))})


def prune(root: Path, keep: Collection[int]) -> list[int]:
    """Remove all checkpoints but some; the newest always stays.

    Parameters
    ----------
    root : Path
        The folder of checkpoints.
    keep : collection of int
        Indices that stay.

    Returns
    -------
    list of int
        What was removed.

    Notes
    -----
    What makes an index count goes first, so a crash leaves no checkpoint that looks whole and is not.
    """
    removed = sorted(set(indices(root)) - {*keep, latest_index(root)})
    for index in removed:
        files = state_files(root, index)
        for name in (record_file(index), strategy_file(index), *sorted(files)):
            (root / name).unlink(missing_ok=True)
    return removed
