"""``nvalchemi-lightning checkpoint export``: the weights of a model as a file of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nvalchemi_lightning.cli.output import show_line

__all__ = ["export"]


def export(
    path: Annotated[Path, typer.Argument(help="A folder of checkpoints, step_K, epoch_K or final in it, or a .ckpt.")],
    target: Annotated[Path, typer.Argument(help="The file to write, such as potential.pt.")],
    model: Annotated[str | None, typer.Option("--model", help="Which model, if there are several.")] = None,
    averaged: Annotated[bool, typer.Option("--averaged", help="Take the averaged weights.")] = False,
    index: Annotated[int, typer.Option("--index", min=-1, help="Which checkpoint; -1 is the newest.")] = -1,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that exists.")] = False,
) -> None:
    """Write the weights of one model to a file that torch.load(..., weights_only=True) reads."""
    from nvalchemi_lightning.checkpoint.exporting import export_weights

    export_weights(path, target, model=model, index=index, averaged=averaged, overwrite=overwrite)
    show_line(f"{target}: {'averaged' if averaged else 'raw'} weights")
