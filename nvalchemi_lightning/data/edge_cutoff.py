"""How far the edges of structures reach, as far as that is known."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from nvalchemi_lightning.errors import DataError

__all__ = ["CUTOFF", "check_reach", "reach_of", "reaching", "reaching_like"]

CUTOFF = "_neighbor_list_cutoff"
"""Attribute of batches and structures that holds the cutoff of their edges [A]; gone when edges are assigned."""

Data = TypeVar("Data")


def reach_of(data: Any) -> float | None:
    """Return the cutoff of the edges that a batch or structure brings [A]; None where nothing tells it."""
    return getattr(data, "__dict__", {}).get(CUTOFF)


def reaching(data: Data, cutoff: float | None) -> Data:
    """Note how far the edges of a batch or structure reach [A], if that is known, and return it."""
    if cutoff is not None:
        data.__dict__[CUTOFF] = cutoff
    return data


def reaching_like(data: Data, sources: Iterable[Any]) -> Data:
    """Note the smallest cutoff of what a batch or structure was made of, if all of them are known, and return it."""
    cutoffs = [source.__dict__.get(CUTOFF) for source in sources]
    return data if None in cutoffs else reaching(data, min(cutoffs))


def check_reach(data: Any, cutoff: float) -> None:
    """Refuse edges that are known to be too short.

    Raises
    ------
    DataError
        If the edges of ``data`` do not reach ``cutoff`` [A].
    """
    known = reach_of(data)
    if known is not None and known < cutoff:
        raise DataError(
            f"the edges of the batch were made with a cutoff of {known:g} A, but the model needs {cutoff:g} A; make "
            f"them with NeighborListTransform({cutoff:g}), or leave them out (fields=...)"
        )
