"""Giving every batch of a data set the same fields, whichever structures meet in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from nvalchemi_lightning.data.batch import Batch
from nvalchemi_lightning.data.collate import fill_rows
from nvalchemi_lightning.data.fields import Level

__all__ = ["Template", "completed", "templates_of"]


class Template(NamedTuple):
    """What a field looks like.

    Attributes
    ----------
    level : {"node", "edge", "system"}
        Its level.
    like : Tensor
        No rows of it, which tell shape and dtype.
    """

    level: Level
    like: Tensor

    def widened(self, other: Template) -> Template:
        """Return this template in the dtype that holds the values of both."""
        return Template(self.level, self.like.to(torch.promote_types(self.like.dtype, other.like.dtype)))


def templates_of(batch: Batch, names: Iterable[str]) -> dict[str, Template]:
    """Return what some fields of a batch look like."""
    return {name: Template(batch.field_levels[name], batch[name][:0].clone()) for name in names}


def completed(batch: Batch, wanted: Mapping[str, Template]) -> Batch:
    """Give a batch every wanted field in its dtype; NaN where none of its structures has the label.

    Raises
    ------
    DataError
        If nothing can stand in for a field.
    """
    for name, (level, like) in wanted.items():
        if name not in batch:
            batch._store(name, fill_rows(name, level, batch, like, 0), level)
        elif batch[name].dtype != like.dtype:
            batch._store(name, batch[name].to(like.dtype), level)
    return batch
