"""What a data set reads from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from nvalchemi_lightning.data.batch import Batch

__all__ = ["Reader"]


class Reader(Protocol):
    """A source of structures by number."""

    @property
    def name(self) -> str:
        """What messages call it."""

    def __len__(self) -> int: ...

    def read_batch(self, indices: Sequence[int]) -> Batch:
        """Return the structures at these positions, in this order, as one batch.

        Raises
        ------
        IndexError
            If there is no such structure.
        """
