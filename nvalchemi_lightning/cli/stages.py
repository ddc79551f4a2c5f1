"""``nvalchemi-lightning stages``: the stages of a run, in general or as a job file resolves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from nvalchemi_lightning.cli.output import show_json, show_line, show_table

__all__ = ["stages"]


def stages(
    job: Annotated[Path | None, typer.Argument(help="A job file (JSON), whose hooks are put in order.")] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    trust: Annotated[list[str] | None, typer.Option(help="A package whose hook classes may be looked at.")] = None,
) -> None:
    """Show the stages of a training run, and who acts there.

    Without a file: when each stage fires and what hooks find there. With one: its hooks in the order in which they
    are called. Hooks of other packages are never built.
    """
    if job is None:
        _show_table(as_json=as_json)
        return
    from nvalchemi_lightning.job_hooks import job_lifecycle
    from nvalchemi_lightning.specs import trust as trust_packages

    trust_packages(*trust or ())
    lifecycle, unknown = job_lifecycle(_read(job))
    if as_json:
        show_json({**lifecycle.data(), "stages_unknown": unknown})
        return
    show_table(("stage", "fires", "owner", "hooks, in order"), lifecycle.rows())
    show_line(f"validation: {lifecycle.validation}")
    for path in unknown:
        show_line(f'not shown: {path}, whose stages the file does not tell (add "stages", or --trust its package)')


def _show_table(*, as_json: bool) -> None:
    from nvalchemi_lightning.stages import STAGES

    columns = ("stage", "fires", "frequency counts", "new in the context")
    rows = [(info.stage.name, info.fires, info.counted_by, info.available) for info in STAGES.values()]
    if as_json:
        show_json([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        show_table(columns, rows)


def _read(path: Path) -> object:
    from nvalchemi_lightning.errors import ConfigurationError

    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{path} is no JSON: {error}") from error
