"""``nvalchemi-lightning checkpoint prune``: remove old checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nvalchemi_lightning.cli.output import show_line

__all__ = ["prune"]


def prune(
    root: Annotated[Path, typer.Argument(help="A folder of checkpoints that nothing writes to now.")],
    keep_last: Annotated[int | None, typer.Option("--keep-last", min=1, help="How many of the newest stay.")] = None,
    keep_best: Annotated[
        str | None, typer.Option("--keep-best", metavar="METRIC", help="The checkpoint with the smallest stays too.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
) -> None:
    """Remove checkpoints of a folder but the newest complete ones and the best."""
    from nvalchemi_lightning.checkpoint.layout import indices
    from nvalchemi_lightning.checkpoint.pruning import prune_checkpoints

    before = indices(root)
    removed = prune_checkpoints(root, keep_last=keep_last, keep_best=keep_best, dry_run=dry_run)
    show_line(f"{'would remove' if dry_run else 'removed'}: {_listed(removed)}")
    show_line(f"{'would keep' if dry_run else 'kept'}: {_listed([one for one in before if one not in removed])}")


def _listed(found: list[int]) -> str:
    return ", ".join(map(str, found)) or "none"
