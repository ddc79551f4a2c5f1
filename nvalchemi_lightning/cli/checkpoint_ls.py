"""``nvalchemi-lightning checkpoint ls``: what checkpoints a folder holds."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nvalchemi_lightning.cli.output import show_json, show_table, size_text

if TYPE_CHECKING:
    from nvalchemi_lightning.checkpoint.listing import ListedCheckpoint

__all__ = ["ls"]

_USUAL = "total_loss"


def ls(
    root: Annotated[Path, typer.Argument(help="A folder of checkpoints.")],
    metric: Annotated[
        str | None, typer.Option("--metric", help="A number of the validation; the smallest is marked as the best.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with all numbers of the validations.")] = False,
) -> None:
    """List the checkpoints of a folder. Tensors are not read: see verify for that."""
    from nvalchemi_lightning.checkpoint.listing import list_checkpoints
    from nvalchemi_lightning.checkpoint.pruning import best_index, recorded_best

    found = list_checkpoints(root)
    best = best_index(root, _USUAL) if metric is None else recorded_best(root, metric)
    if as_json:
        show_json([{**dataclasses.asdict(one), "best": one.index == best} for one in found])
        return
    shown = metric or _USUAL
    columns = ["index", "step", "epoch", shown, "", "weights", "size", "written by", "state"]
    show_table(columns, [_row(one, shown, one.index == best) for one in found])


def _row(one: ListedCheckpoint, metric: str, is_best: bool) -> list[object]:
    weights = ", ".join(dict.fromkeys(kind for kinds in one.weights.values() for kind in kinds))
    mark, state = "best" if is_best else "", one.problem or "complete"
    value = one.metrics.get(metric)
    return [one.index, one.step, one.epoch, value, mark, weights, size_text(one.size), one.written_by, state]
