"""``nvalchemi-lightning data``: the commands about structures and stores, one file each."""

from __future__ import annotations

import typer

__all__ = ["app"]

app = typer.Typer(help="Convert, inspect and check structures and stores.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Convert, inspect and check structures and stores."""
