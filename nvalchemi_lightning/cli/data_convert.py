"""``nvalchemi-lightning data convert``: files of structures to a Zarr store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from nvalchemi_lightning.cli.dialect_options import dialect_options
from nvalchemi_lightning.cli.output import progress, show_json, show_line, show_table
from nvalchemi_lightning.errors import ConfigurationError

if TYPE_CHECKING:
    from nvalchemi_lightning.data import Conversion, Dialect

__all__ = ["convert"]

_REASONS = 10
"""Reasons for leaving frames out that are shown; the store keeps all of them."""


@dialect_options
def convert(
    dialect: Dialect,
    sources: Annotated[list[Path], typer.Argument(help="Files that ASE reads, databases of ASE, or Zarr stores.")],
    target: Annotated[Path, typer.Argument(help="The store to make.")],
    file_format: Annotated[str | None, typer.Option("--format", help="ASE's name of the format of the files.")] = None,
    dtype: Annotated[
        Literal["float32", "float64"], typer.Option(help="Of positions and labels; energies are float64.")
    ] = "float32",
    split: Annotated[
        str | None, typer.Option(help="Fractions for parts at random: 0.9,0.1 (train, val) or train=0.9,test=0.1.")
    ] = None,
    split_by: Annotated[str | None, typer.Option(help="What the files call the part of a structure.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of --split.")] = 0,
    append: Annotated[bool, typer.Option("--append", help="Add to the store that is there.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there, at the end.")] = False,
    on_error: Annotated[
        Literal["raise", "skip"], typer.Option(help="Whether to stop at a frame that cannot be read, or leave it out.")
    ] = "raise",
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an interrupted conversion stopped.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Convert files of structures to a Zarr store in eV and A."""
    from nvalchemi_lightning.data import convert as convert_sources

    if append and overwrite:
        raise ConfigurationError("--append and --overwrite are two things to do with what is there; choose one")
    with _saying_how_to_go_on(), progress("converting", None) as advance:
        done = convert_sources(
            sources,
            target,
            dialect,
            format=file_format,
            dtype=dtype,
            on_error=on_error,
            existing="append" if append else "overwrite" if overwrite else "refuse",
            resume=resume,
            split=None if split is None else _fractions(split),
            split_by=split_by,
            seed=seed,
            advance=advance,
        )
    if as_json:
        show_json(_as_json(done))
    else:
        _show(done)


@contextmanager
def _saying_how_to_go_on() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as stop:
        typer.echo("interrupted; the same command with --resume goes on where it stopped", err=True)
        raise typer.Exit(1) from stop


def _fractions(text: str) -> dict[str, float] | list[float]:
    """Return the fractions in ``0.9,0.1`` or ``train=0.9,val=0.1``."""
    words = text.split(",")
    try:
        if "=" not in text:
            return [float(word) for word in words]
        pairs = [word.partition("=") for word in words]
        return {name.strip(): float(fraction) for name, _, fraction in pairs}
    except ValueError as error:
        raise ConfigurationError(f"--split must be like 0.9,0.1 or train=0.9,val=0.1, got {text!r}") from error


def _as_json(done: Conversion) -> dict[str, object]:
    return {**asdict(done), "omitted": [frame.model_dump() for frame in done.omitted]}


def _show(done: Conversion) -> None:
    show_table(["store", "structures"], list(done.stores.items()))
    show_line()
    known = {label: count for label, count in done.labels.items() if count}
    show_table(["label", "structures"], list(known.items()) or [("none", 0)])
    if done.numbers:
        show_line()
        show_line(f"not stored: {', '.join(done.numbers)} (--keep NAME keeps a number)")
    if done.omitted:
        show_line()
        show_line(f"left out: {len(done.omitted)} frames that cannot be read")
        for frame in done.omitted[:_REASONS]:
            show_line(f"  {frame.reason}")
        if len(done.omitted) > _REASONS:
            show_line(f"  and {len(done.omitted) - _REASONS} more; the store lists them all")
