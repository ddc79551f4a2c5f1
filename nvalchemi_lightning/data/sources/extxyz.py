"""Extended XYZ files, one frame at a time: a damaged frame is that frame's error, not the file's."""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache, lru_cache
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from nvalchemi_lightning.data.ase import raw_structure
from nvalchemi_lightning.data.sources.dialect import Dialect
from nvalchemi_lightning.data.sources.extxyz_comment import parse_comment
from nvalchemi_lightning.data.sources.raw_structure import RawStructure, symmetric_matrix
from nvalchemi_lightning.data.sources.translate import six_to_matrix
from nvalchemi_lightning.errors import DataError

__all__ = ["frame_comments", "frame_texts", "is_extxyz", "parse_frame"]

_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}

_SIX = re.compile(r'((?<!\S)(?:stress|virial)=)"\s*(\S+(?:\s+\S+){5})\s*"')
"""A stress or virial of six numbers under the names for which ASE demands nine."""

_PLAIN_COLUMNS = re.compile(r"species:S:1:pos:R:3((?::(?!species:|pos:|Z:|initial_charges:)[^:]+:R:[1-9]\d*)*)")
"""Columns of an element, a position and other numbers."""

_POSITIONS_ONLY = "species:S:1:pos:R:3"

_RESULTS = ("energy", "free_energy", "stress", "dipole", "magmom")
"""Names of the structure that ASE takes for results of a calculator."""


def is_extxyz(path: Path) -> bool:
    """Say whether the name of a file is that of an extended XYZ file."""
    plain = path.with_suffix("") if path.suffix in _OPENERS else path
    return plain.suffix in (".xyz", ".extxyz")


def _opened(path: Path) -> TextIO:
    opened: TextIO = _OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8")
    return opened


def frame_texts(path: Path) -> Iterator[str]:
    """Yield the text of each frame; blank lines between frames are passed over.

    Raises
    ------
    DataError
        If a frame does not begin with its number of atoms, or ends too early.
    """
    with _opened(path) as file:
        line = file.readline()
        while line:
            if line.isspace():
                line = file.readline()
                continue
            atoms = _atoms(line)
            lines = [line, *islice(file, atoms + 1)]
            if len(lines) < atoms + 2:
                raise DataError(f"the file ends after {max(len(lines) - 2, 0)} of {atoms} atoms")
            line = file.readline()
            while line.lstrip().startswith("VEC"):  # Lattice vectors may follow the atoms.
                lines.append(line)
                line = file.readline()
            yield "".join(lines)


def frame_comments(path: Path) -> Iterator[str]:
    """Yield the comment line of each frame, up to the first that is damaged."""
    try:
        for text in frame_texts(path):
            yield text.split("\n", 2)[1]
    except (DataError, OSError, EOFError, ValueError, lzma.LZMAError, zlib.error):
        return


def _atoms(line: str) -> int:
    if line.startswith("\ufeff"):
        raise DataError("the file begins with a byte-order mark; save it as UTF-8 without one")
    try:
        count = int(line)
    except ValueError:
        count = -1
    if count < 0:
        raise DataError(
            f"expected the number of atoms, got {line.strip()[:60]!r}; the frame before may have another number of "
            "atoms than it says"
        )
    return count


def parse_frame(text: str, dialect: Dialect) -> RawStructure:
    """Return what a frame says, with a stress or virial of six numbers as a matrix in the order of the dialect.

    Frames whose columns are an element and numbers are read here, which is faster; all others by ASE.

    Raises
    ------
    DataError
        If the stress is not symmetric, or an atom has too few columns.
    KeyError
        If there is no such element.
    ValueError
        If something is not a number.
    """
    head, comment, rows = text.split("\n", 2)

    def parse(line: str) -> dict[str, Any]:
        if "stress=" in line or "virial=" in line:
            line = _SIX.sub(lambda match: _nine(match, dialect), line)
        info = parse_comment(line)
        stress = info.get("stress")
        if stress is not None and not np.isnan(stress).all():  # ASE would take the upper triangle.
            info["stress"] = symmetric_matrix("stress", stress)[0]
        return info

    info = parse(comment)
    names = _names(info.get("Properties", _POSITIONS_ONLY))
    words = rows.split()
    if names is None or isinstance(info.get("pbc"), str) or len(words) != int(head) * (1 + sum(names.values())):
        return _parsed_by_ase(text, parse)
    return _structure(info, words, int(head), names)


def _nine(match: re.Match[str], dialect: Dialect) -> str:
    six = np.array([float(number) for number in match[2].split()])
    return f'{match[1]}"{" ".join(map(repr, six_to_matrix(six, dialect).ravel().tolist()))}"'


@lru_cache(maxsize=128)
def _names(properties: str) -> Mapping[str, int] | None:
    """Return name to number of columns for positions and what follows them; None for columns of other kinds."""
    columns = _PLAIN_COLUMNS.fullmatch(properties)
    if columns is None:
        return None
    parts = columns[1].split(":")[1:]
    return {"positions": 3} | {name: int(count) for name, count in zip(parts[::3], parts[2::3], strict=True)}


@cache
def _atomic_number(symbol: str) -> int:
    from ase.data import atomic_numbers

    return int(atomic_numbers[symbol.capitalize()])


def _structure(info: dict[str, Any], words: list[str], atoms: int, names: Mapping[str, int]) -> RawStructure:
    width = 1 + sum(names.values())
    numbers = np.array([*map(_atomic_number, words[::width])], dtype=np.int64)
    del words[::width]
    table = np.fromiter(map(float, words), np.float64, len(words)).reshape(atoms, width - 1)
    arrays = dict(_columns(table, names))
    periodic = info.pop("pbc", "Lattice" in info)
    lattice = info.pop("Lattice", None)
    info.pop("Properties", None)
    return RawStructure(
        numbers=numbers,
        positions=arrays.pop("positions"),
        cell=np.zeros((3, 3)) if lattice is None else np.array(lattice.T, dtype=np.float64),
        pbc=np.full(3, periodic, dtype=np.bool_),
        results={name: info.pop(name) for name in _RESULTS if name in info},
        info=info,
        arrays=arrays,
    )


def _columns(table: NDArray[np.float64], names: Mapping[str, int]) -> Iterator[tuple[str, NDArray[np.float64]]]:
    start = 0
    for name, count in names.items():
        values = table[:, start : start + count]
        yield "charges" if name == "charge" else name, values[:, 0] if count == 1 else values
        start += count


def _parsed_by_ase(text: str, parse: Callable[[str], dict[str, Any]]) -> RawStructure:
    from ase.io.extxyz import read_xyz

    try:
        return raw_structure(next(read_xyz(StringIO(text), 0, parse)))
    except ValueError:
        _check_columns(text.splitlines(), parse)
        raise


def _check_columns(lines: list[str], parse: Callable[[str], dict[str, Any]]) -> None:
    properties = str(parse(lines[1]).get("Properties", _POSITIONS_ONLY))
    columns = sum(int(number) for number in properties.split(":")[2::3])
    for atom, line in enumerate(lines[2:]):
        found = len(line.split())
        if found < columns:
            raise DataError(f"atom {atom} has {found} columns, but Properties={properties} names {columns}")
