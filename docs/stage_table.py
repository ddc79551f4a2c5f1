"""Write the table of stages from the one the package works with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvalchemi_lightning.stages import STAGES, StageInfo

if TYPE_CHECKING:
    from sphinx.application import Sphinx

HEADINGS = ("stage", "when it fires", "dispatched by", "`frequency` counts", "new in the context")


def row(info: StageInfo) -> tuple[str, ...]:
    """Return the cells of one stage."""
    return (f"`{info.stage.name}`", info.fires, f"`{info.dispatched_by}`", info.counted_by, info.available)


def table() -> str:
    """Return the Markdown table of all stages in loop order."""
    rows = [HEADINGS, ("---",) * len(HEADINGS), *(row(info) for info in STAGES.values())]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def write(app: Sphinx) -> None:
    """Write ``_generated/stages.md``, which the stages page includes."""
    target = Path(app.srcdir) / "_generated" / "stages.md"
    target.parent.mkdir(exist_ok=True)
    target.write_text(table(), encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True}
