"""The comment line of an extended XYZ frame: ``key=value`` pairs, by the rules of ASE but faster."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

__all__ = ["parse_comment"]

_PAIR = re.compile(r"""\s*([^\s=\\'"{}\[\],]+)=(?:"([^"\\]+)"|([^\s=\\'"{}\[\]]+))(?=\s|$)""")
"""A pair without escapes, nesting or missing parts; a line of other things is left to ASE."""

_TRUTH = {word: word[0] in "Tt" for word in ("T", "F", "true", "false", "True", "False", "TRUE", "FALSE")}
_BEGIN_NUMBERS = "nNiI"
"""Letters with which nan and inf begin."""

_MATRICES = ("Lattice", "stress", "virial")
_AS_TEXT = ("Properties", "uid")


def parse_comment(line: str) -> dict[str, Any]:
    """Return the values of a comment line by name: numbers, flags, arrays of them, or text.

    Raises
    ------
    ValueError
        If a lattice, stress or virial is not nine numbers.
    """
    pairs, end = [], 0
    line = line.strip()
    while found := _PAIR.match(line, end):
        pairs.append((found[1], found[2] if found[3] is None else found[3]))
        end = found.end()
    if end < len(line):
        return _parsed_by_ase(line)
    return {key: value if key in _AS_TEXT else _value(key, value) for key, value in pairs}


def _value(key: str, text: str) -> Any:
    words = text.replace(",", " ").split()
    numbers = _numbers(words)
    if key in _MATRICES:
        if numbers is None or len(numbers) != 9:
            raise ValueError(f"{key} must be nine numbers, got {text!r}")
        return numbers.reshape(3, 3).T
    if numbers is not None:
        return numbers[0] if len(numbers) == 1 else numbers
    if all(word in _TRUTH for word in words):
        flags = [_TRUTH[word] for word in words]
        return flags[0] if len(flags) == 1 else flags
    return _parsed_by_ase(f'{key}="{text}"')[key] if text.startswith("_JSON ") else text


def _numbers(words: list[str]) -> np.ndarray[Any, Any] | None:
    if words and words[0][0].isalpha() and words[0][0] not in _BEGIN_NUMBERS:
        return None
    for kind in (float,) if words and "." in words[0] else (int, float):
        try:
            return np.array([kind(word) for word in words], dtype=kind)
        except (ValueError, OverflowError):
            continue
    return None


def _parsed_by_ase(line: str) -> dict[str, Any]:
    from ase.io.extxyz import key_val_str_to_dict

    parse: Any = key_val_str_to_dict
    values: dict[str, Any] = parse(line)
    return values
