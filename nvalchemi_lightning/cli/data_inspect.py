"""``nvalchemi-lightning data inspect``: what a data set is."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nvalchemi_lightning.cli.output import show_json, show_line, show_table, size_text

if TYPE_CHECKING:
    from nvalchemi_lightning.data.inspection.report import FieldReport, Inspection

__all__ = ["inspect"]

_FEW = 5


def inspect(
    source: Annotated[Path, typer.Argument(help="A Zarr store, or a file of structures.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a data set is: sizes, elements, which structures have which label, how it is stored."""
    from nvalchemi_lightning.data.inspection.run import inspect_data

    found = inspect_data(source)
    if as_json:
        show_json(dataclasses.asdict(found))
        return
    _show_summary(found)
    show_line()
    show_table(
        ["element", "structures", "atoms"],
        [(symbol, element.structures, element.atoms) for symbol, element in found.elements.items()],
    )
    show_line()
    _show_fields(found)


def _show_summary(found: Inspection) -> None:
    deleted = f" ({found.deleted} more are deleted)" if found.deleted else ""
    show_line(f"{found.source}: {found.structures} structures{deleted}, {found.atoms} atoms, {found.edges} edges")
    sizes = found.sizes
    show_line(f"atoms in a structure: {sizes.smallest} to {sizes.largest}, median {sizes.median:g}")
    kinds = [f"{count} {kind}" for kind, count in found.periodicity.items() if count]
    show_line(f"periodicity: {', '.join(kinds)}")
    show_line(f"on disk: {size_text(found.bytes)}")
    for key, value in (found.provenance or {}).items():
        show_line(f"{key}: {_noted(value)}")


def _noted(value: object) -> str:
    """Return what a conversion noted as text: names of things that have one, the number of many."""
    if isinstance(value, dict):
        return (
            str(value["name"]) if "name" in value else ", ".join(f"{key} {_noted(part)}" for key, part in value.items())
        )
    if isinstance(value, list):
        return ", ".join(map(_noted, value)) or "none" if len(value) <= _FEW else str(len(value))
    return str(value)


def _show_fields(found: Inspection) -> None:
    fields = found.fields.items()
    columns = ["field", "of a", "type", "row", "complete", "partial"]
    rows = [_described(name, field) for name, field in fields]
    stored = [field.storage for _, field in fields if field.storage is not None]
    if stored:
        columns += ["chunk rows", "codec", "size"]
        rows = [
            [*row, storage.chunk_rows, storage.codec, size_text(storage.bytes)]
            for row, storage in zip(rows, stored, strict=True)
        ]
    show_table(columns, rows)


def _described(name: str, field: FieldReport) -> list[object]:
    owner = {"node": "atom", "edge": "edge", "system": "structure"}[field.level]
    row = "x".join(map(str, field.row)) or "1"
    return [name, owner, field.dtype, row, field.complete, field.partial]
