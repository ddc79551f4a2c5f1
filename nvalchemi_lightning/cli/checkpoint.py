"""``nvalchemi-lightning checkpoint``: the commands about checkpoints, one file each."""

from __future__ import annotations

import typer

from nvalchemi_lightning.cli.checkpoint_export import export
from nvalchemi_lightning.cli.checkpoint_inspect import inspect
from nvalchemi_lightning.cli.checkpoint_ls import ls
from nvalchemi_lightning.cli.checkpoint_prune import prune
from nvalchemi_lightning.cli.checkpoint_verify import verify

__all__ = ["app"]

app = typer.Typer(help="List, verify, inspect, export and prune checkpoints.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """List, verify, inspect, export and prune checkpoints."""


app.command("export")(export)
app.command("inspect")(inspect)
app.command("ls")(ls)
app.command("prune")(prune)
app.command("verify")(verify)
