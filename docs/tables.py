"""Write the documentation's tables from the ones that the package works with."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvalchemi_lightning.data.checkup.table import CHECKS, Check
from nvalchemi_lightning.data.fields import FIELDS, Field
from nvalchemi_lightning.stages import STAGES, StageInfo

if TYPE_CHECKING:
    from sphinx.application import Sphinx

STAGE_HEADINGS = ("stage", "when it fires", "dispatched by", "`frequency` counts", "new in the context")
FIELD_HEADINGS = ("field", "level", "shape", "type", "meaning", "if only other structures have it")
CHECK_HEADINGS = ("check", "severity", "it finds", "needs", "what to do")
FILLED_WITH = {"nan": "NaN", "zero": "0", "mass": "standard masses", "refuse": "an error"}


def stage_row(info: StageInfo) -> tuple[str, ...]:
    """Return the cells of one stage."""
    return (f"`{info.stage.name}`", info.fires, f"`{info.dispatched_by}`", info.counted_by, info.available)


def field_row(field: Field) -> tuple[str, ...]:
    """Return the cells of one field."""
    return (f"`{field.name}`", field.level, field.shape, field.kind, field.meaning, FILLED_WITH[field.missing])


def check_row(check: Check) -> tuple[str, ...]:
    """Return the cells of one check."""
    return (f"`{check.name}`", check.severity, check.title, ", ".join(sorted(check.needs)), check.advice)


def table(headings: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    lines = [headings, ("---",) * len(headings), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def write(app: Sphinx) -> None:
    """Write the files below ``_generated`` that pages include."""
    target = Path(app.srcdir) / "_generated"
    target.mkdir(exist_ok=True)
    (target / "stages.md").write_text(table(STAGE_HEADINGS, map(stage_row, STAGES.values())), encoding="utf-8")
    (target / "fields.md").write_text(table(FIELD_HEADINGS, map(field_row, FIELDS.values())), encoding="utf-8")
    (target / "checks.md").write_text(table(CHECK_HEADINGS, map(check_row, CHECKS)), encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True}
