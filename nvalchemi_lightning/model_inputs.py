"""The accepted spellings of ``models`` and ``optimizer_configs``, and what they must satisfy together."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from nvalchemi_lightning.errors import ConfigurationError, UnknownNameError, nearest
from nvalchemi_lightning.optim import require_metric, uses_validation_metric

__all__ = [
    "check_metric_keys",
    "check_metric_schedulers",
    "check_models",
    "normalize_models",
    "normalize_optimizer_configs",
]


def normalize_models(models: Any) -> tuple[dict[str, Any], bool]:
    """Return the models by name, and whether one bare model was given.

    Parameters
    ----------
    models : nn.Module, mapping of str to nn.Module, or nn.ModuleDict
        One bare model becomes ``{"main": model}``.

    Raises
    ------
    ConfigurationError
        If there is none.
    """
    if isinstance(models, (Mapping, nn.ModuleDict)):
        if not models:
            raise ConfigurationError("models must contain at least one model")
        return dict(models.items()), False
    return {"main": models}, True


def normalize_optimizer_configs(configs: Any, *, single_model: bool) -> dict[str, Any]:
    """Return the optimizer configs as lists by model name.

    Parameters
    ----------
    configs : OptimizerConfig, sequence or mapping
        An unkeyed form belongs to the one bare model; key 0 is read as ``"main"``.
    single_model : bool
        Whether one bare model was given.

    Raises
    ------
    ConfigurationError
        If an unkeyed form meets named models, or nothing is configured.
    """
    if not isinstance(configs, Mapping):
        if not single_model:
            raise ConfigurationError(
                "Unkeyed optimizer_configs require single-model input; for named models write "
                "optimizer_configs={'<model name>': [OptimizerConfig(...)]}"
            )
        configs = {"main": list(configs) if isinstance(configs, Sequence) else [configs]}
    keyed = {"main" if key == 0 else key: _as_list(key, value) for key, value in configs.items()}
    empty = [key for key, value in keyed.items() if not value]
    if not keyed or empty:
        where = f" for {empty[0]!r}" if empty else ""
        raise ConfigurationError(
            f"optimizer_configs is empty{where}; give at least one OptimizerConfig or leave it out"
        )
    return keyed


def _as_list(key: Any, value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def check_models(
    models: Mapping[str, Any], optimizer_configs: Mapping[str, Any], devices: Sequence[torch.device]
) -> None:
    """Refuse models, optimizer configs and devices that do not fit together.

    Raises
    ------
    ConfigurationError
        If a value is no module or is wrapped for data parallelism, or the number of devices
        is neither one nor that of the models, or named models would train on different devices.
    UnknownNameError
        If an optimizer config names a model that does not exist.
    """
    for name, model in models.items():
        if not isinstance(model, nn.Module):
            raise ConfigurationError(f"models must map names to nn.Module instances; models[{name!r}] is {model!r:.80}")
        if isinstance(model, (DistributedDataParallel, DataParallel)):
            raise ConfigurationError(
                f"models[{name!r}] is wrapped in {type(model).__name__}; pass the bare model, "
                "the Trainer's strategy wraps it"
            )
    for key in optimizer_configs:
        if key not in models:
            raise UnknownNameError(
                f"optimizer_configs has key {key!r}, not present in models{nearest(str(key), models)}; "
                f"available model keys: {sorted(models)}"
            )
    if len(devices) not in (1, len(models)):
        raise ConfigurationError(f"devices must hold 1 or {len(models)} devices (one per model); got {len(devices)}")
    if len(set(devices)) > 1:
        raise ConfigurationError(
            f"Named-model training across distinct devices is unsupported; got {[str(device) for device in devices]}"
        )


def check_metric_schedulers(optimizer_configs: Mapping[str, Any], *, validates: bool) -> None:
    """Refuse a scheduler that validation steps when nothing is validated.

    Parameters
    ----------
    optimizer_configs : mapping of str to list of OptimizerConfig
        Per model.
    validates : bool
        Whether the run validates.

    Raises
    ------
    ConfigurationError
        If it does not, and a scheduler needs it.
    """
    for key, configs in optimizer_configs.items():
        for config in configs:
            if uses_validation_metric(config.scheduler_cls) and not validates:
                raise ConfigurationError(
                    f"optimizer_configs[{key!r}] has the scheduler {config.scheduler_cls.__name__}, which is stepped "
                    "by validation, but the run does not validate: set validation_config (and leave the Trainer's "
                    "limit_val_batches above 0)"
                )


def check_metric_keys(optimizer_configs: Mapping[str, Any], numbers: Collection[str]) -> None:
    """Refuse a scheduler that watches a number that no validation summary of the run can have.

    Parameters
    ----------
    optimizer_configs : mapping of str to list of OptimizerConfig
        Per model.
    numbers : collection of str
        Every key that a summary may have; which metrics it has depends on labels and predictions.

    Raises
    ------
    LabelNotFoundError
        For the first such key.
    """
    for config in (config for configs in optimizer_configs.values() for config in configs):
        adapter = config.scheduler_metric_adapter or "total_loss"
        if uses_validation_metric(config.scheduler_cls) and isinstance(adapter, str):
            require_metric(adapter, numbers)
