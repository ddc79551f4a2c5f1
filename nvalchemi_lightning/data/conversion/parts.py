"""Dividing structures among several stores: by fractions at random, or by what their files say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nvalchemi_lightning.errors import ConfigurationError

__all__ = ["NAMES", "checked_fractions", "part_path", "random_parts"]

NAMES = ("train", "val", "test")
"""Names of two or three parts that are given by fractions alone."""

_ROUNDING = 1e-9


def checked_fractions(split: Mapping[str, float] | Sequence[float]) -> dict[str, float]:
    """Return name to fraction.

    Raises
    ------
    ConfigurationError
        If they are not two or more positive fractions that add up to one, or a name cannot be part of a file's.
    """
    if not isinstance(split, Mapping):
        if not 2 <= len(split) <= len(NAMES):
            raise ConfigurationError(
                f"split must be fractions for {', '.join(NAMES)}, or name to fraction; got {split!r}"
            )
        split = dict(zip(NAMES, split, strict=False))
    if len(split) < 2 or min(split.values()) <= 0.0 or abs(sum(split.values()) - 1.0) > _ROUNDING:
        raise ConfigurationError(f"the fractions of split must be positive and add up to 1, got {dict(split)}")
    return dict(split)


def random_parts(count: int, fractions: Mapping[str, float], seed: int) -> dict[str, NDArray[np.int64]]:
    """Return name to the numbers of its structures, ascending: every structure in one part, drawn at random.

    Sizes are the fractions of ``count``; what rounding leaves goes to the largest remainders.

    Raises
    ------
    ConfigurationError
        If a part would be empty.
    """
    exact = [fraction * count for fraction in fractions.values()]
    sizes = [int(size + _ROUNDING) for size in exact]
    for index in sorted(range(len(sizes)), key=lambda index: sizes[index] - exact[index])[: count - sum(sizes)]:
        sizes[index] += 1
    for name, size in zip(fractions, sizes, strict=True):
        if size == 0:
            raise ConfigurationError(
                f"{count} structures are too few for split={dict(fractions)}: {name} would be empty"
            )
    order = np.random.default_rng(seed).permutation(count)
    pieces = np.split(order, np.cumsum(sizes)[:-1])
    return {name: np.sort(piece) for name, piece in zip(fractions, pieces, strict=True)}


def part_path(target: Path, name: str) -> Path:
    """Return the path of a part: ``data.zarr`` and "train" make ``data_train.zarr``.

    Raises
    ------
    ConfigurationError
        If the name cannot be part of a file's.
    """
    if not name or any(not (character.isalnum() or character in "-_.") for character in name):
        raise ConfigurationError(f"{name!r} cannot be the name of a part: use letters, digits, '-', '_' and '.'")
    return target.with_name(f"{target.stem}_{name}{target.suffix}")
