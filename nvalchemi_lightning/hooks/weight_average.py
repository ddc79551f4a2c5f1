"""The averaged copy of a model, and how it follows the live one."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

__all__ = ["WeightAverage"]

_Pair: TypeAlias = tuple[list[Tensor], list[Tensor]]
_Slot: TypeAlias = tuple[dict[str, Any], dict[str, Any], str]
"""Where a buffer is kept in the average and the live model: a model may put a new tensor there at any time."""


class WeightAverage:
    """A copy of a model whose weights follow those of the live model.

    Parameters
    ----------
    module : nn.Module
        The copy; its parameters and buffers are those of ``source`` by name and order.
    source : nn.Module
        The live model, which is only read.
    use_buffers : bool
        Average floating point buffers; others are copied.

    Attributes
    ----------
    count : int
        How often it was updated.
    published : bool
        Whether validation has been told of it.
    """

    def __init__(self, module: nn.Module, source: nn.Module, *, use_buffers: bool) -> None:
        self.module = module
        self.source = source
        self.count = 0
        self.published = False
        slots = list(_slots(module, source))
        mixed = [use_buffers and _may_be_averaged(live[name]) for _, live, name in slots]
        self._mixed = [slot for slot, averages in zip(slots, mixed, strict=True) if averages]
        self._copied = [slot for slot, averages in zip(slots, mixed, strict=True) if not averages]
        self._parameters: list[_Pair] = []
        self.align()

    def align(self) -> None:
        """Bring every averaged tensor to the device and floating dtype of the live one, and pair the parameters."""
        pairs = list(zip(self.module.parameters(), self.source.parameters(), strict=True))
        for average, live in chain(pairs, zip(self.module.buffers(), self.source.buffers(), strict=True)):
            if average.device != live.device or average.dtype != live.dtype:
                average.data = average.data.to(live.device, live.dtype)
        self._parameters = _grouped(pairs)

    def update(self, decay: float) -> None:
        """Set ``average = decay * average + (1 - decay) * live``; the first time, copy the live weights."""
        share = 1.0 - decay
        with torch.no_grad():
            for averaged, live in chain(self._parameters, _grouped(_tensors(self._mixed))):
                if self.count:
                    torch._foreach_lerp_(averaged, live, share)
                else:
                    torch._foreach_copy_(averaged, live)
            for averaged_buffer, live_buffer in _tensors(self._copied):
                averaged_buffer.copy_(live_buffer)
        self.count += 1


def _slots(module: nn.Module, source: nn.Module) -> Iterable[_Slot]:
    averaged = dict(module.named_modules())
    for prefix, live in source.named_modules():
        for name, _ in live.named_buffers(recurse=False):
            yield vars(averaged[prefix])["_buffers"], vars(live)["_buffers"], name


def _may_be_averaged(buffer: Tensor) -> bool:
    # A mask of infinities would become NaN: inf - inf.
    return buffer.is_floating_point() and bool(buffer.isfinite().all())


def _tensors(slots: Iterable[_Slot]) -> Iterable[tuple[Tensor, Tensor]]:
    return [(averaged[name], live[name]) for averaged, live, name in slots]


def _grouped(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[_Pair]:
    """Return lists of averaged and live tensors, one pair of lists per device and dtype: foreach kernels need that."""
    groups: dict[tuple[torch.device, torch.dtype], _Pair] = {}
    for average, live in pairs:
        averages, lives = groups.setdefault((live.device, live.dtype), ([], []))
        averages.append(average)
        lives.append(live)
    return list(groups.values())
