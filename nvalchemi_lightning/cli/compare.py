"""``nvalchemi-lightning compare``: what differs between two runs."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nvalchemi_lightning.cli.output import show_json, show_line, show_table

if TYPE_CHECKING:
    from nvalchemi_lightning.checkpoint.comparison import ComparedModel, Comparison

__all__ = ["compare"]

_FEW = 5


def compare(
    a: Annotated[Path, typer.Argument(help="A folder of checkpoints, a name in it, a .ckpt or a recipe (.json).")],
    b: Annotated[Path, typer.Argument(help="Another one.")],
    index_a: Annotated[int, typer.Option("--index-a", min=-1, help="Which checkpoint of A; -1 is the newest.")] = -1,
    index_b: Annotated[int, typer.Option("--index-b", min=-1, help="Which checkpoint of B; -1 is the newest.")] = -1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what differs between two runs: recipe, provenance, counters, validation and weights.

    Exit code 1 if anything that both have does, as diff and cmp do.
    """
    from nvalchemi_lightning.checkpoint.comparison import compare_runs

    found = compare_runs(a, b, index_a=index_a, index_b=index_b)
    if as_json:
        models = {name: _form(model) for name, model in found.models.items()}
        show_json({**dataclasses.asdict(found), "models": models, "equal": found.equal})
    else:
        _show(found)
    if not found.equal:
        raise typer.Exit(1)


def _form(model: ComparedModel) -> dict[str, Any]:
    finite = math.isfinite(model.max_difference)
    return {**dataclasses.asdict(model), "max_difference": model.max_difference if finite else "inf"}


def _show(found: Comparison) -> None:
    if found.differences:
        rows = [(one.section, one.name, _text(one.a), _text(one.b)) for one in found.differences]
        show_table(["section", "what", "a", "b"], rows)
        show_line()
    for name, model in found.models.items():
        show_line(f"weights of {name}: {_described(model)}")
    for reason in found.not_compared:
        show_line(f"not compared: {reason}")
    show_line("equal" if found.equal else "different")


def _described(model: ComparedModel) -> str:
    if model.equal:
        return "equal"
    largest = [] if model.tensor is None else [f"differ by up to {model.max_difference:.3g} ({model.tensor})"]
    more = len(model.mismatches) - _FEW
    return "; ".join([*largest, *model.mismatches[:_FEW], *([f"and {more} more"] if more > 0 else [])])


def _text(value: Any) -> str:
    return "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
