"""Where the structures of a batch come from, so that a message can name them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.utils.data import Subset

__all__ = ["SampleOrigin", "origins_of"]


class SampleOrigin(NamedTuple):
    """Where a structure lies.

    Attributes
    ----------
    source : str
        Its store, or what else holds it.
    number : int
        Which one there, from 0.
    """

    source: str
    number: int


def origins_of(dataset: Any, indices: Sequence[int]) -> tuple[SampleOrigin, ...]:
    """Return where the samples of a data set come from.

    Parameters
    ----------
    dataset : object
        Asked by ``origins(indices)`` where it has that method. A ``torch.utils.data.Subset`` is looked through.
        Anything else is its own source, named by its class.
    indices : sequence of int
        Numbers of samples.
    """
    if isinstance(dataset, Subset):
        return origins_of(dataset.dataset, [dataset.indices[index] for index in indices])
    tell = getattr(dataset, "origins", None)
    if tell is not None:
        found: tuple[SampleOrigin, ...] = tell(indices)
        return found
    return tuple(SampleOrigin(type(dataset).__name__, int(index)) for index in indices)
