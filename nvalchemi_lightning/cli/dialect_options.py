"""The options of commands that read files: what these call their labels, and in which units, sign and order."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from nvalchemi_lightning.errors import AlchemiError, ConfigurationError

if TYPE_CHECKING:
    from nvalchemi_lightning.data import Dialect

__all__ = ["OPTIONS", "dialect_options"]

_KEYS = "What the files call their labels; 'none' leaves one out"
_UNITS = "Units, sign and order of the labels in the files"

OPTIONS: Mapping[str, tuple[Any, str, str]] = {
    "energy_key": (str, "Energy (default: energy)", _KEYS),
    "forces_key": (str, "Forces (default: forces)", _KEYS),
    "stress_key": (str, "Stress (default: stress)", _KEYS),
    "virial_key": (str, "Virial, from which the stress is computed (default: virials)", _KEYS),
    "dipole_key": (str, "Dipole moment (default: dipole)", _KEYS),
    "charges_key": (str, "Partial charges (default: charges)", _KEYS),
    "keep": (list[str], "Another number of each structure to keep as a field; can be repeated", _KEYS),
    "energy_unit": (str, "eV, meV, Ha, mHa, Ry, kcal/mol, kJ/mol (default: eV)", _UNITS),
    "energy_per_atom": (bool, "The energy is divided by the number of atoms", _UNITS),
    "force_unit": (str, "Unit of energy / unit of length, such as Ha/Bohr (default: eV/A)", _UNITS),
    "length_unit": (str, "Of positions and cells: A, Bohr, nm, pm (default: A)", _UNITS),
    "stress_unit": (str, "GPa, kbar, ..., or unit of energy / unit of length^3 (default: eV/A^3)", _UNITS),
    "stress_sign": (
        Literal["ase", "vasp"],
        "ase: positive under tension; vasp: under compression (default: ase)",
        _UNITS,
    ),
    "stress_order": (
        str,
        "Of six numbers: ase (xx yy zz yz xz xy), vasp (xx yy zz xy yz zx), other (default: ase)",
        _UNITS,
    ),
    "virial_unit": (str, "A unit of energy (default: eV)", _UNITS),
    "dipole_unit": (str, "e*A, e*Bohr, Debye (default: e*A)", _UNITS),
}
"""Option of a dialect to its type, help and panel on the command line."""


def dialect_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of a dialect; it receives them as the argument ``dialect``.

    Parameters
    ----------
    command : callable
        A command with a parameter ``dialect``.
    """
    # The class itself is imported when a command runs, so that --help stays light.
    hints = get_type_hints(command, localns={"Dialect": object}, include_extras=True)
    own = [
        parameter.replace(annotation=hints[name])
        for name, parameter in inspect.signature(command).parameters.items()
        if name != "dialect"
    ]

    @wraps(command)
    def run(**values: Any) -> None:
        given = {name: values.pop(name) for name in OPTIONS}
        command(dialect=_dialect(given), **values)

    parameters = [*own, *(_parameter(name) for name in OPTIONS)]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _parameter(name: str) -> inspect.Parameter:
    kind, text, panel = OPTIONS[name]
    option = typer.Option(f"--{name.replace('_', '-')}", help=text, rich_help_panel=panel)
    default, annotation = (False, bool) if kind is bool else (None, kind | None)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[annotation, option]
    )


def _dialect(given: Mapping[str, Any]) -> Dialect:
    """Return the dialect that was asked for.

    Raises
    ------
    AlchemiError
        If there is no such dialect; pydantic's report has many lines.
    """
    from pydantic import ValidationError

    from nvalchemi_lightning.data import Dialect

    said: dict[str, Any] = {name: None if value == "none" else value for name, value in given.items() if value}
    try:
        return Dialect(**said)
    except ValidationError as error:
        first = error.errors()[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, AlchemiError):
            raise cause from error
        raise ConfigurationError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
