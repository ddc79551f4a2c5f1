"""What commands print: tables for people, plain lines for pipes, JSON for scripts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

__all__ = ["Advance", "progress", "show_json", "show_line", "show_table", "size_text"]


class Advance(Protocol):
    """Tells a progress bar how much more is done."""

    def __call__(self, amount: int = 1) -> None:
        """Add ``amount``."""


def show_line(text: str = "") -> None:
    """Print a line."""
    sys.stdout.write(f"{text}\n")


def show_json(value: Any) -> None:
    """Print a value as JSON, indented; what JSON cannot hold must have been converted before."""
    show_line(json.dumps(value, indent=2, allow_nan=False))


def show_table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None) -> None:
    """Print a table: drawn on a terminal, otherwise lines whose columns are aligned by two or more spaces.

    Parameters
    ----------
    columns : sequence of str
        Heads of the columns.
    rows : iterable of sequence
        A value per column. Numbers are aligned to the right; None is an empty cell.
    title : str, optional
        A line above.
    """
    table = [list(row) for row in rows]
    cells = [[_text(value) for value in row] for row in table]
    right = [all(isinstance(row[place], (int, float)) for row in table) for place in range(len(columns))]
    if sys.stdout.isatty():
        _draw(columns, cells, right, title)
        return
    if title is not None:
        show_line(title)
    for line in _aligned([list(columns), *cells], right):
        show_line(line)


def size_text(count: float) -> str:
    """Return a number of bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _draw(columns: Sequence[str], cells: list[list[str]], right: list[bool], title: str | None) -> None:
    table = Table(title=title, title_justify="left")
    for name, numeric in zip(columns, right, strict=True):
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in cells:
        table.add_row(*row)
    Console(markup=False, highlight=False).print(table)


def _aligned(rows: list[list[str]], right: list[bool]) -> Iterator[str]:
    widths = [max(len(row[place]) for row in rows) for place in range(len(right))]
    for row in rows:
        padded = [
            cell.rjust(width) if numeric else cell.ljust(width)
            for cell, width, numeric in zip(row, widths, right, strict=True)
        ]
        yield "  ".join(padded).rstrip()


@contextmanager
def progress(what: str, total: int | None) -> Iterator[Advance]:
    """Show a bar on standard error while a block runs, if that is a terminal, and remove it at the end.

    Parameters
    ----------
    what : str
        What is being done.
    total : int or None
        How much there is to do; None if that is not known.
    """
    console = Console(stderr=True)
    columns: Mapping[bool, tuple[Any, ...]] = {
        True: (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()),
        False: (TextColumn("{task.completed}"), TimeElapsedColumn()),
    }
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        *columns[total is not None],
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task(what, total=total)
        yield lambda amount=1: bar.advance(task, amount)
