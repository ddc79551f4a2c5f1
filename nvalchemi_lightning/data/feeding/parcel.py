"""How a batch travels from a worker: all its tensors in one block of bytes.

Torch sends every tensor by itself, as a file of shared memory whose descriptor is handed over in a connection of its
own: 0.15 ms each, more than reading a batch of small molecules takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nvalchemi_lightning.data.batch import Batch

__all__ = ["Parcel", "opened", "packed"]

_LARGEST_IN_PIPE = 2**19
"""Bytes up to which a pipe is faster than shared memory."""

_ALIGNMENT = 16


class _Place(NamedTuple):
    """Where a tensor lies in the block."""

    dtype: torch.dtype
    shape: torch.Size
    start: int

    @property
    def size(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def of(self, block: NDArray[np.uint8]) -> Tensor:
        """Return the tensor; it shares the memory, but not the version counter, of its neighbors."""
        if not self.size:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(block, dtype=self.dtype, count=self.shape.numel(), offset=self.start).view(self.shape)


def _places(fields: Mapping[str, Tensor]) -> tuple[dict[str, _Place], int]:
    places, end = {}, 0
    for name, value in fields.items():
        places[name] = _Place(value.dtype, value.shape, end)
        end += -(-places[name].size // _ALIGNMENT) * _ALIGNMENT
    return places, end


class Parcel:
    """A batch whose fields are one block.

    Parameters
    ----------
    batch : Batch
        In main memory.
    """

    def __init__(self, batch: Batch) -> None:
        fields = dict(iter(batch))
        self._kind = type(batch)
        self._places, size = _places(fields)
        block = np.empty(size, dtype=np.uint8)
        for name, place in self._places.items():
            place.of(block).copy_(fields[name].detach())
        # Torch moves a tensor to shared memory when it is pickled; an array goes through the pipe.
        self._block: NDArray[np.uint8] | Tensor = block if size <= _LARGEST_IN_PIPE else torch.from_numpy(block)
        self._levels = dict(batch._levels)
        self._layout = batch._layout.without_neighbor_list()
        known = {*fields, "_levels", "_layout"}
        self._private: dict[str, Any] = {name: value for name, value in batch.__dict__.items() if name not in known}

    def open(self) -> Batch:
        """Return the batch."""
        block = self._block.numpy() if isinstance(self._block, Tensor) else self._block
        fields = {name: place.of(block) for name, place in self._places.items()}
        return self._kind._build(fields, self._levels, **self._private, _layout=self._layout.with_neighbor_list(fields))

    def pin_memory(self) -> Parcel:
        """Move the block to page-locked memory; Torch calls it where that was asked for."""
        block = self._block if isinstance(self._block, Tensor) else torch.from_numpy(self._block)
        self._block = block.pin_memory()
        return self


def packed(batch: Batch) -> Batch | Parcel:
    """Return a batch as it is best sent to another process."""
    return Parcel(batch) if batch.device.type == "cpu" else batch


def opened(sent: Batch | Parcel) -> Batch:
    """Return the batch that was sent."""
    return sent.open() if isinstance(sent, Parcel) else sent
