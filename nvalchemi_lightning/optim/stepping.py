"""Build the optimizers of a run and step them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nvalchemi_lightning.errors import (
    ConfigurationError,
    ConfigurationTypeError,
    DataError,
    LabelNotFoundError,
    UnknownNameError,
    nearest,
)
from nvalchemi_lightning.optim.config import OptimizerConfig, SchedulerMetricAdapter, uses_validation_metric
from nvalchemi_lightning.optim.shares import shared_out
from nvalchemi_lightning.runtime import Models, iter_qualified_named_parameters, named_models

__all__ = [
    "OptSchedPair",
    "require_metric",
    "setup_optimizers",
    "step_lr_schedulers",
    "step_metric_schedulers",
    "step_optimizers",
    "summary_numbers",
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
        By model key. Several on one model divide its parameters if they say how (`OptimizerConfig.parameters`);
        otherwise each holds all of them, and all step.
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
        If a key is not a model, or a pattern matches no parameter.
    ConfigurationError
        If a configured model has no trainable parameter, or several configs do not divide them.
    """
    named = named_models(models)
    for key in configs:
        if key not in named:
            raise UnknownNameError(
                f"optimizer_configs has key {key!r}, not present in models{nearest(str(key), named)}; "
                f"available model keys: {sorted(named)}"
            )
    built = {}
    for key, listed in configs.items():
        parameters = dict(iter_qualified_named_parameters({key: named[key]}))
        trained = _trained(key, parameters, allowed_parameter_names)
        shares = shared_out(parameters, listed, trained, key)
        built[key] = [config.build(share.items(), only=trained) for config, share in zip(listed, shares, strict=True)]
    return built


def _trained(key: str, parameters: Mapping[str, nn.Parameter], allowed: Collection[str] | None) -> set[str]:
    found = {
        name
        for name, parameter in parameters.items()
        if parameter.requires_grad and (allowed is None or name in allowed)
    }
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
        The validation summary. A key may also be that of a loss component (``"ForceMSELoss"``) or of a metric
        (``"forces_mae"``) in it.

    Raises
    ------
    ConfigurationError
        If the two sequences differ in length.
    LabelNotFoundError
        If the summary lacks the key; it is a `KeyError`.
    ConfigurationTypeError
        If a metric is not a number.
    DataError
        If it is NaN. In all these cases no scheduler has been stepped.
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


def require_metric(key: str, numbers: Collection[str]) -> None:
    """Refuse a key that a validation summary does not have.

    Raises
    ------
    LabelNotFoundError
        Naming the nearest key, and all there are.
    """
    if key not in numbers:
        raise LabelNotFoundError(
            f"Scheduler metric key {key!r} not found in validation summary{nearest(key, numbers)}; "
            f"available keys: {sorted(numbers)}"
        )


def _metric(adapter: SchedulerMetricAdapter | None, summary: Mapping[str, Any]) -> float:
    key = "total_loss" if adapter is None else adapter
    if isinstance(key, str):
        numbers = summary_numbers(summary)
        require_metric(key, numbers)
        value = numbers[key]
    else:
        value = key(summary)
    try:
        metric = float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigurationTypeError(f"the scheduler metric {key!r} must be a number, got {value!r}") from error
    if math.isnan(metric):
        raise DataError(
            f"the scheduler metric {key!r} is NaN, which no schedule can compare: no validation structure has such a "
            "label, or the model has diverged"
        )
    return metric


def summary_numbers(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a validation summary, and what it nests, by the names that logs use.

    Parameters
    ----------
    summary : mapping
        The validation summary.
    """
    top = {key: value for key, value in summary.items() if not isinstance(value, Mapping)}
    return {**summary.get("per_component_unweighted", {}), **summary.get("metrics", {}), **top}
