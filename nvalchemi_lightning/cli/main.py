"""The command ``nvalchemi-lightning``: its groups, and how it ends.

A command returns, or raises what the library raises; this module turns that into a line and an exit code.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from nvalchemi_lightning.cli import checkpoint, compare, data, stages
from nvalchemi_lightning.errors import AlchemiError

__all__ = ["DID_NOT_WORK", "WRONG_INPUT", "main"]

DID_NOT_WORK = 1
"""Exit code of a command whose input was understood but which failed, or found what it should complain about."""

WRONG_INPUT = 2
"""Exit code of a command whose arguments or files are not what they must be."""

app = typer.Typer(
    name="nvalchemi-lightning",
    help="Train interatomic potentials, and look after their data.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(data.app, name="data")
app.command(name="compare")(compare.compare)
app.command(name="stages")(stages.stages)


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Hold the options that every command has; :func:`main` reads them, wherever they stand."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Parameters
    ----------
    arguments : sequence of str, optional
        What follows the name of the command; default: the arguments of the process.

    Returns
    -------
    int
        0: it worked; 1: it did not; 2: the input is wrong.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    words = [word for word in given if word != "--debug"]
    try:
        app(words, prog_name="nvalchemi-lightning")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else DID_NOT_WORK
    except (AlchemiError, OSError, ImportError) as error:
        if "--debug" in given:
            traceback.print_exc()
        sys.stderr.write(f"error: {_line(error)}\n")
        return WRONG_INPUT if _is_wrong_input(error) else DID_NOT_WORK
    return 0


def _line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _is_wrong_input(error: Exception) -> bool:
    """Whether the user can mend it by other arguments or files; a full disk or a bug is something else."""
    return isinstance(error, (ValueError, TypeError, KeyError, FileNotFoundError, FileExistsError, IsADirectoryError))
