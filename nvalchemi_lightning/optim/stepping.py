"""Build the optimizers of a run and step them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nvalchemi_lightning.errors import (
    ConfigurationError,
    ConfigurationTypeError,
    LabelNotFoundError,
    UnknownNameError,
    nearest,
)
from nvalchemi_lightning.optim.config import OptimizerConfig, SchedulerMetricAdapter, uses_validation_metric
from nvalchemi_lightning.runtime import Models, iter_qualified_named_parameters, named_models

__all__ = [
    "OptSchedPair",
    "setup_optimizers",
    "step_lr_schedulers",
    "step_metric_schedulers",
    "step_optimizers",
    "zero_gradients",
]

OptSchedPair = tuple[Optimizer, LRScheduler | None]
"""An optimizer and its scheduler, if it has one."""


def setup_optimizers(
    models: Models,
    configs: Mapping[str, Sequence[OptimizerConfig]],
    *,
    allowed_parameter_names: Collection[str] | None = None,
) -> dict[str, list[OptSchedPair]]:
    """Build the optimizers and schedulers of every configured model.

    Parameters
    ----------
    models : nn.Module, mapping of str to nn.Module, or nn.ModuleDict
        One bare model has the key ``"main"``.
    configs : mapping of str to sequence of OptimizerConfig
        By model key. Several on one model share all its trainable parameters, and all of them step.
    allowed_parameter_names : collection of str, optional
        Names ``"<model key>.<parameter>"``; others stay out of every optimizer.

    Returns
    -------
    dict of str to list of tuple
        ``(optimizer, scheduler or None)`` per config, in the order of ``configs``. Parameters that do not require
        gradients are in none of them.

    Raises
    ------
    UnknownNameError
        If a key is not a model.
    ConfigurationError
        If a configured model has no trainable parameter.
    """
    named = named_models(models)
    for key in configs:
        if key not in named:
            raise UnknownNameError(
                f"optimizer_configs has key {key!r}, not present in models{nearest(str(key), named)}; "
                f"available model keys: {sorted(named)}"
            )
    parameters = {key: _trainable(key, named[key], allowed_parameter_names) for key in configs}
    return {key: [config.build(parameters[key]) for config in configs[key]] for key in configs}


def _trainable(key: str, model: nn.Module, allowed: Collection[str] | None) -> list[nn.Parameter]:
    found = [
        parameter
        for name, parameter in iter_qualified_named_parameters({key: model})
        if parameter.requires_grad and (allowed is None or name in allowed)
    ]
    if not found:
        filtered = "" if allowed is None else " after optimizer parameter filtering"
        raise ConfigurationError(
            f"Configured model {key!r} has no trainable parameters (requires_grad=True{filtered}). "
            "Unfreeze some, or leave the model out of optimizer_configs"
        )
    return found


def zero_gradients(optimizers: Iterable[Optimizer]) -> None:
    """Set the gradients of every optimized parameter to None."""
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)


def step_optimizers(optimizers: Iterable[Optimizer]) -> None:
    """Step every optimizer once."""
    for optimizer in optimizers:
        optimizer.step()


def step_lr_schedulers(schedulers: Iterable[LRScheduler | None]) -> None:
    """Step every time-based scheduler once; None and metric-driven ones are passed over."""
    for scheduler in schedulers:
        if scheduler is not None and not uses_validation_metric(type(scheduler)):
            scheduler.step()


def step_metric_schedulers(
    schedulers: Sequence[LRScheduler | None],
    adapters: Sequence[SchedulerMetricAdapter | None],
    summary: Mapping[str, Any],
) -> None:
    """Step every metric-driven scheduler once with its metric; the others are passed over.

    Parameters
    ----------
    schedulers : sequence of LRScheduler or None
        Flat, one per optimizer.
    adapters : sequence of str, callable or None
        What each of them watches, aligned; None is ``"total_loss"``.
    summary : mapping
        The validation summary.

    Raises
    ------
    ConfigurationError
        If the two sequences differ in length.
    LabelNotFoundError
        If the summary lacks the key; no scheduler has been stepped then. It is a `KeyError`.
    ConfigurationTypeError
        If a metric is not a number.
    """
    if len(schedulers) != len(adapters):
        raise ConfigurationError(f"got {len(schedulers)} schedulers but {len(adapters)} metric adapters; give one each")
    metrics = [
        (scheduler, _metric(adapter, summary))
        for scheduler, adapter in zip(schedulers, adapters, strict=True)
        if uses_validation_metric(type(scheduler))
    ]
    for scheduler, metric in metrics:
        scheduler.step(metric)  # type: ignore[union-attr, arg-type]


def _metric(adapter: SchedulerMetricAdapter | None, summary: Mapping[str, Any]) -> float:
    key = "total_loss" if adapter is None else adapter
    if isinstance(key, str):
        if key not in summary:
            raise LabelNotFoundError(
                f"Scheduler metric key {key!r} not found in validation summary{nearest(key, summary)}; "
                f"available keys: {sorted(summary)}"
            )
        value = summary[key]
    else:
        value = key(summary)
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigurationTypeError(f"the scheduler metric {key!r} must be a number, got {value!r}") from error
