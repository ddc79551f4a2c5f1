"""Extended XYZ files, one frame at a time: a damaged frame is that frame's error, not the file's."""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from nvalchemi_lightning.data.ase import symmetric_matrix
from nvalchemi_lightning.data.dialect import Dialect
from nvalchemi_lightning.data.translate import six_to_matrix
from nvalchemi_lightning.errors import DataError

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["frame_comments", "frame_texts", "is_extxyz", "parse_frame"]

_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


_SIX = re.compile(r'((?<!\S)(?:stress|virial)=)"\s*(\S+(?:\s+\S+){5})\s*"')
"""A stress or virial of six numbers under the names for which ASE demands nine."""


def _opened(path: Path) -> TextIO:
    opened: TextIO = _OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8")
    return opened


def is_extxyz(path: Path) -> bool:
    """Say whether the name of a file is that of an extended XYZ file."""
    plain = path.with_suffix("") if path.suffix in _OPENERS else path
    return plain.suffix in (".xyz", ".extxyz")


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
            lines = [line, *islice(file, _atoms(line) + 1)]
            if len(lines) < _atoms(line) + 2:
                raise DataError(f"the file ends after {max(len(lines) - 2, 0)} of {_atoms(line)} atoms")
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


def parse_frame(text: str, dialect: Dialect) -> Atoms:
    """Return a frame as ASE reads it, except that a stress or virial of six numbers becomes a matrix.

    Raises
    ------
    DataError
        If the stress is not symmetric, or an atom has too few columns.
    """
    from ase.io.extxyz import key_val_str_to_dict, read_xyz

    parse: Any = key_val_str_to_dict

    def expand(match: re.Match[str]) -> str:
        numbers = np.array([float(number) for number in match[2].split()])
        return f'{match[1]}"{" ".join(map(repr, six_to_matrix(numbers, dialect).ravel().tolist()))}"'

    def comment(line: str) -> dict[str, Any]:
        values: dict[str, Any] = parse(_SIX.sub(expand, line))
        if "stress" in values and not np.isnan(values["stress"]).all():  # ASE would take the upper triangle.
            values["stress"] = symmetric_matrix("stress", values["stress"])[0]
        return values

    try:
        atoms: Atoms = next(read_xyz(StringIO(text), 0, comment))
    except ValueError:
        _check_columns(text.splitlines(), parse)
        raise
    return atoms


def _check_columns(lines: list[str], parse: Callable[[str], dict[str, Any]]) -> None:
    properties = str(parse(lines[1]).get("Properties", "species:S:1:pos:R:3"))
    columns = sum(int(number) for number in properties.split(":")[2::3])
    for atom, line in enumerate(lines[2:]):
        found = len(line.split())
        if found < columns:
            raise DataError(f"atom {atom} has {found} columns, but Properties={properties} names {columns}")
