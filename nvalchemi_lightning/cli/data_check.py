"""``nvalchemi-lightning data check``: what would spoil a training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nvalchemi_lightning.cli.dialect_options import dialect_options
from nvalchemi_lightning.cli.output import progress, show_json, show_line, show_table

if TYPE_CHECKING:
    from nvalchemi_lightning.data import CheckedSet, CheckReport, Dialect, Finding

__all__ = ["check"]


@dialect_options
def check(
    dialect: Dialect,
    sources: Annotated[list[Path], typer.Argument(metavar="SOURCE", help="Files or stores to train on.")],
    against: Annotated[
        list[Path] | None,
        typer.Option("--against", metavar="OTHER", help="A held-out file or store; give it once for each."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 for warnings too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Look for what would spoil a training, within each set and between sets.

    Exit code 1 if there is an error: training would not be sensible.
    """
    from nvalchemi_lightning.data import check as run

    with progress("checking", None) as advance:
        report = run(*sources, against=against or (), dialect=dialect, on_structure=advance)
    if as_json:
        show_json(report.as_dict())
    else:
        _show(report)
    if not report.is_sensible(strict=strict):
        raise typer.Exit(1)


def _show(report: CheckReport) -> None:
    show_table(
        ["set", "for", "structures", "atoms", "elements", "labels"],
        [_described(one) for one in report.sets],
    )
    for finding in report:
        show_line()
        _show_finding(finding)
    show_line()
    show_line(", ".join(_counted(report.count(severity), severity) for severity in ("error", "warning", "note")))


def _described(one: CheckedSet) -> list[object]:
    use = "held out" if one.held_out else "training"
    labels = ", ".join(f"{name} {count}" for name, count in one.labels.items())
    return [one.source, use, one.structures, one.atoms, " ".join(one.elements), labels]


def _show_finding(finding: Finding) -> None:
    structures = f" ({_counted(finding.count, 'structure')})" if finding.count else ""
    show_line(f"{finding.severity}: {finding.source}: {finding.message}{structures} [{finding.check}]")
    for place in finding.places:
        show_line(f"  {str(place).removeprefix(f'{finding.source}: ')}")
    if finding.count > len(finding.places):
        show_line(f"  and {finding.count - len(finding.places)} more")
    show_line(f"  {finding.advice}")


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
