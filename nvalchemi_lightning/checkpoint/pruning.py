"""Removing checkpoints from a folder."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from nvalchemi_lightning.checkpoint.checking import quick_problem
from nvalchemi_lightning.checkpoint.layout import existing_indices, indices, record_file, state_files, strategy_file
from nvalchemi_lightning.checkpoint.lock import sole_writer
from nvalchemi_lightning.checkpoint.places import require_no_links
from nvalchemi_lightning.checkpoint.reading import latest_index, recorded_metrics
from nvalchemi_lightning.errors import ConfigurationError, UnknownNameError, nearest

__all__ = ["best_index", "prune", "prune_checkpoints", "recorded_best", "retain"]


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
    with sole_writer(root):
        found = None if best is None else best_index(root, best)
        return _remove(root, {*indices(root)[-(last or 1) :], *(() if found is None else (found,))})


def prune_checkpoints(
    root: str | Path, *, keep_last: int | None = None, keep_best: str | None = None, dry_run: bool = False
) -> list[int]:
    """Remove checkpoints of a folder but the newest few and the best.

    Parameters
    ----------
    root : str or Path
        The folder. Nothing else may write to it meanwhile.
    keep_last : int, optional
        How many of the newest stay; those that are not complete do not count. With ``keep_best`` alone it is 1.
    keep_best : str, optional
        A number of the validation summary, such as ``"total_loss"``: the checkpoint with the smallest stays too.
    dry_run : bool
        Remove nothing.

    Returns
    -------
    list of int
        What was, or would be, removed.

    Raises
    ------
    ConfigurationError
        If neither or a number below 1 is given.
    UnknownNameError
        If no checkpoint has recorded ``keep_best``.
    FileNotFoundError
        If the folder holds no checkpoints.
    """
    root = Path(root)
    if keep_last is None and keep_best is None:
        raise ConfigurationError("say which checkpoints stay: keep_last, keep_best or both")
    if keep_last is not None and keep_last < 1:
        raise ConfigurationError(f"keep_last must be at least 1; got {keep_last}")
    complete = [index for index in existing_indices(root) if quick_problem(root, index) is None]
    best = [] if keep_best is None else [recorded_best(root, keep_best)]
    keep = {*complete[-(keep_last or 1) :], *best, latest_index(root)}
    return sorted(set(indices(root)) - keep) if dry_run else prune(root, keep)


def recorded_best(root: Path, metric: str) -> int:
    """Return what `best_index` returns, or refuse a metric that nothing has recorded.

    Raises
    ------
    UnknownNameError
        If no checkpoint has it; it lists what there is.
    """
    best = best_index(root, metric)
    if best is None:
        known = sorted({name for index in indices(root) for name in recorded_metrics(root, index)})
        raise UnknownNameError(
            f"no checkpoint of {root} has recorded {metric!r}; recorded are {', '.join(known) or 'none'}"
            f"{nearest(metric, known)}"
        )
    return best


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

    Raises
    ------
    StoreError
        If a folder inside ``root`` is a link; nothing is removed then.

    Notes
    -----
    What makes an index count goes first, so a crash leaves no checkpoint that looks whole and is not.
    """
    with sole_writer(root):
        return _remove(root, keep)


def _remove(root: Path, keep: Collection[int]) -> list[int]:
    removed = sorted(set(indices(root)) - {*keep, latest_index(root)})
    names = [name for index in removed for name in _files_in_order(root, index)]
    require_no_links(root, names)
    for name in names:
        (root / name).unlink(missing_ok=True)
    return removed


def _files_in_order(root: Path, index: int) -> list[str]:
    first = [record_file(index), strategy_file(index)]
    return [*first, *sorted(state_files(root, index).difference(first))]
