"""Saying once that weights of single structures, which some files have, weigh nothing here."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache

__all__ = ["notice_weights"]

_LOG = logging.getLogger(__name__)

_NAMES = frozenset(
    {"weight", "weights", "sample_weight", "config_weight"}
    | {
        f"{prefix}{label}_weight"
        for prefix in ("", "config_")
        for label in ("energy", "forces", "force", "stress", "virial", "virials")
    }
)
"""What other programs call them."""


def notice_weights(names: Iterable[str]) -> None:
    """Log a line for every name of a weight of single structures, the first time that it is met in this process."""
    for name in _NAMES.intersection(names):
        _tell(name)


@cache
def _tell(name: str) -> None:
    _LOG.warning(
        "the structures have %r, but losses do not weight single structures: all count alike. Weight the terms of the "
        "loss, or give sets their shares with MultiDatasetSampler, and leave %r out",
        name,
        name,
    )
