"""The gradients that a step is about to use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["has_gradients", "optimized_parameters", "total_norm"]


def has_gradients(optimizer: Optimizer) -> bool:
    """Return whether any parameter of an optimizer has a gradient; a scaler complains about one without.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        The optimizer.
    """
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])


def optimized_parameters(ctx: Any) -> dict[int, nn.Parameter]:
    """Return every parameter that an optimizer holds, once, by its identity.

    Parameters
    ----------
    ctx : TrainContext
        Whose optimizers are looked at.
    """
    return {id(p): p for optimizer in ctx.optimizers for group in optimizer.param_groups for p in group["params"]}


def total_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the 2-norm of all gradients together, a scalar on their device; nothing waits for it.

    Parameters
    ----------
    parameters : iterable of nn.Parameter
        Those without a gradient are passed over.
    """
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
