"""Exact comparison of structures and of batches."""

from __future__ import annotations

from torch import Tensor

from nvalchemi_lightning.data.collate import Piece, fill_rows
from nvalchemi_lightning.data.fields import LEVELS
from nvalchemi_lightning.errors import DataError

__all__ = ["differences"]


def differences(left: Piece, right: Piece) -> list[str]:
    """Name what differs between two structures or two batches.

    Parameters
    ----------
    left, right : AtomicData or Batch
        Both of one kind.

    Returns
    -------
    list of str
        Names of fields whose dtype, shape or numbers differ; empty when all are equal. NaN equals NaN. A field that
        one side lacks counts as what collation would write for it, so an absent label equals NaN.
    """
    for level in LEVELS[:2]:
        if left._sizes(level) != right._sizes(level):
            return [f"number of {level}s"]
    names = [*left._levels, *(name for name in right._levels if name not in left._levels)]
    return [name for name in names if not _same(name, left, right)]


def _same(name: str, left: Piece, right: Piece) -> bool:
    one, two = left.__dict__.get(name), right.__dict__.get(name)
    try:
        if one is None and two is not None:
            one = fill_rows(name, right._levels[name], left, two, 0)
        elif two is None and one is not None:
            two = fill_rows(name, left._levels[name], right, one, 0)
    except DataError:
        return False
    return one is not None and two is not None and _equal(one, two)


def _equal(one: Tensor, two: Tensor) -> bool:
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    same = one == two
    if one.is_floating_point():
        same |= one.isnan() & two.isnan()
    return bool(same.all())
