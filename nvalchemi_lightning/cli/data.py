"""``nvalchemi-lightning data``: the commands about structures and stores, one file each."""

from __future__ import annotations

import typer

from nvalchemi_lightning.cli.data_check import check
from nvalchemi_lightning.cli.data_convert import convert
from nvalchemi_lightning.cli.data_inspect import inspect
from nvalchemi_lightning.cli.data_repair import repair
from nvalchemi_lightning.cli.data_stats import stats

__all__ = ["app"]

app = typer.Typer(help="Convert, inspect and check structures and stores.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Convert, inspect and check structures and stores."""


app.command("check")(check)
app.command("convert")(convert)
app.command("inspect")(inspect)
app.command("repair")(repair)
app.command("stats")(stats)
