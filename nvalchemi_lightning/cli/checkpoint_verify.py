"""``nvalchemi-lightning checkpoint verify``: whether checkpoints are damaged."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from nvalchemi_lightning.cli.output import show_json, show_line

__all__ = ["verify"]


def verify(
    path: Annotated[Path, typer.Argument(help="A folder of checkpoints, step_K, epoch_K or final in it, or a .ckpt.")],
    index: Annotated[int | None, typer.Option("--index", min=0, help="Only this checkpoint. Default: all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: every file, and what is wrong with it.")] = False,
) -> None:
    """Read every file of checkpoints, and say which ones are damaged.

    Exit code 1 if any is.
    """
    from nvalchemi_lightning.checkpoint.checking import verify_checkpoints

    found = verify_checkpoints(path, index)
    damaged = [one for one in found if one.problem is not None]
    if as_json:
        show_json([dataclasses.asdict(one) for one in found])
    else:
        for one in damaged:
            show_line(f"{one.file} {one.problem}")
        checkpoints = len({one.index for one in found if one.index is not None})
        of = f" of {checkpoints} checkpoint{'s' * (checkpoints != 1)}" if checkpoints else ""
        show_line(f"{len(found)} file{'s' * (len(found) != 1)}{of}: {len(damaged)} damaged")
    if damaged:
        raise typer.Exit(1)
