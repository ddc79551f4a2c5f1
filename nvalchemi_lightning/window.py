"""The batches that make one optimizer step together, as one of them sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Window"]


@dataclass(frozen=True, eq=False)
class Window:
    """An accumulation window, known before its first batch is trained.

    Attributes
    ----------
    index : int
        Place of the batch in the window, from 0.
    counts : Tensor
        What every batch of the window holds over all ranks, shape (size, K): its labels, graphs or atoms.
    own : Tensor
        What this batch holds on this rank, shape (K,).
    """

    index: int
    counts: Tensor
    own: Tensor

    @property
    def size(self) -> int:
        """Number of batches; the last window of an epoch may have fewer than the others."""
        return len(self.counts)

    @property
    def first(self) -> bool:
        """Whether the window begins with this batch."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """Whether the step comes after this batch."""
        return self.index + 1 == self.size

    @property
    def shares(self) -> Tensor:
        """Share of this batch in the means over the window, shape (K,).

        A mean divides by at least 1, hence the clamps: value of the batch times share is what the batch
        contributes, also where it holds nothing.
        """
        return self.counts[self.index].clamp_min(1) / self.counts.sum(0).clamp_min(1)
