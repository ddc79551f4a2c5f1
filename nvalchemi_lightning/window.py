"""The batches that make one optimizer step together, as one of them sees them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Window", "window_places"]


@dataclass(frozen=True, eq=False)
class Window:
    """An accumulation window, known before its first batch is trained.

    Attributes
    ----------
    index : int
        Place of the batch in the window, from 0.
    size : int
        Number of batches; the last window of an epoch may have fewer than the others.
    counts : Tensor
        What every batch of the window holds over all ranks, shape (size, K): its labels, graphs or atoms.
    own : Tensor
        What this batch holds on this rank, shape (K,).
    shares : sequence of float or Tensor
        Share of this batch in the K means over the window: its value there is the value of the batch times the share.
    """

    index: int
    size: int
    counts: Tensor
    own: Tensor
    shares: Sequence[float | Tensor]

    @property
    def first(self) -> bool:
        """Whether the window begins with this batch."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """Whether the step comes after this batch."""
        return self.index + 1 == self.size


def window_places(counts: Tensor, own: Tensor) -> Iterator[Window]:
    """Yield a window as its last batches see it.

    Parameters
    ----------
    counts : Tensor
        What every batch holds over all ranks, shape (size, K).
    own : Tensor
        What each of the last M batches holds on this rank, shape (M, K).
    """
    # Every mean divides by at least 1, that of a batch without labels too.
    shares = counts.clamp_min(1) / counts.sum(0).clamp_min(1)
    # Numbers in host memory multiply values on any device; those on a device stay there, reading them would wait.
    rows = shares.tolist() if shares.is_cpu else [row.unbind() for row in shares.unbind()]
    size = len(rows)
    for index, row in enumerate(own.unbind(), size - len(own)):
        yield Window(index=index, size=size, counts=counts, own=row, shares=rows[index])
