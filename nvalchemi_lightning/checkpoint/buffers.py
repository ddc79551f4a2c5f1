"""Host memory that snapshots are copied into again and again."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["HostBuffers"]


@dataclass
class HostBuffers:
    """One buffer per tensor of a snapshot, page-locked where the tensor is on a GPU.

    Copying into memory that is in use already takes half the time of copying into new memory, whose pages the system
    must provide first. A snapshot is valid until the next one.
    """

    # Not compared: two hooks of the same options are equal whatever they have copied.
    _buffers: dict[str, Tensor] = field(default_factory=dict, compare=False, repr=False)

    def __call__(self, tensor: Tensor, where: str) -> Tensor:
        """Return a copy of a tensor on the CPU.

        Parameters
        ----------
        tensor : Tensor
            What is copied.
        where : str
            Its place in the snapshot.
        """
        held = self._buffers.get(where)
        if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
            held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[where] = held
        return held.copy_(tensor.detach())
