"""The scalars of a training step, fetched from the device once per logging cadence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nvalchemi_lightning.context import TrainContext

__all__ = ["step_scalars", "summary_scalars", "to_floats"]


def step_scalars(ctx: TrainContext) -> dict[str, Tensor | float]:
    """Return the losses and learning rates of a step.

    Parameters
    ----------
    ctx : TrainContext
        The context of a finished batch.

    Returns
    -------
    dict of str to Tensor or float
        ``loss/total``, ``loss/<component>/unweighted``, ``loss/<component>/weight`` and ``optimizer/…lr``.
    """
    scalars: dict[str, Tensor | float] = {}
    if ctx.losses is not None:
        scalars["loss/total"] = ctx.losses["total_loss"]
        for name, value in ctx.losses["per_component_unweighted"].items():
            scalars[f"loss/{name}/unweighted"] = value
        for name, weight in ctx.losses["per_component_weight"].items():
            scalars[f"loss/{name}/weight"] = weight
    for index, optimizer in enumerate(ctx.optimizers):
        slot = "" if len(ctx.optimizers) == 1 else f"{index}/"
        for number, group in enumerate(optimizer.param_groups):
            part = "" if len(optimizer.param_groups) == 1 else f"group_{number}/"
            scalars[f"optimizer/{slot}{part}lr"] = group["lr"]
    return scalars


def summary_scalars(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a validation summary by tag.

    Returns
    -------
    dict of str to float
        ``<name>/total_loss``, ``<name>/<component>`` and ``<name>/<metric>``; what no structure had a label for is
        absent.
    """
    name = summary["name"]
    values = {"total_loss": summary["total_loss"], **summary["per_component_unweighted"], **summary["metrics"]}
    floats = {f"{name}/{key}": float(value) for key, value in values.items()}
    return {key: value for key, value in floats.items() if value == value}  # noqa: PLR0124  NaN: nothing labelled


def to_floats(scalars: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Fetch every tensor that is not in host memory in one transfer."""
    tensors = {name: value for name, value in scalars.items() if isinstance(value, Tensor) and not value.is_cpu}
    floats = {
        name: float(value.item() if isinstance(value, Tensor) else value)
        for name, value in scalars.items()
        if name not in tensors
    }
    if tensors:
        fetched = torch.stack([value.detach().reshape(()).to(torch.float64) for value in tensors.values()]).tolist()
        floats.update(zip(tensors, fetched, strict=True))
    return {name: floats[name] for name in scalars}
