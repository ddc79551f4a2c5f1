"""``nvalchemi-lightning data repair``: mend a store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nvalchemi_lightning.cli.output import show_json, show_line

if TYPE_CHECKING:
    from nvalchemi_lightning.data import StoreProblem

__all__ = ["repair"]


def repair(
    store: Annotated[Path, typer.Argument(help="The Zarr store.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Report only.")] = False,
    fill_short: Annotated[
        bool,
        typer.Option("--fill-short", help="Take a field that lacks rows to be that of the first structures."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Look for everything that may be wrong with a store, and mend what can be mended.

    Exit code 1 if something is wrong afterwards.
    """
    from nvalchemi_lightning.data import repair_store

    report = repair_store(store, dry_run=dry_run, fill_short=fill_short)
    if as_json:
        groups = {"repaired": report.repaired, "remaining": report.remaining}
        problems = {name: [_as_json(problem) for problem in group] for name, group in groups.items()}
        show_json({"store": report.store, "dry_run": report.is_dry_run, "sound": report.is_sound, **problems})
    else:
        show_line(str(report))
    if not report.is_sound:
        raise typer.Exit(1)


def _as_json(problem: StoreProblem) -> dict[str, str]:
    return {"where": problem.where, "what": problem.what, "remedy": problem.remedy}
