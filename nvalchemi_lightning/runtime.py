"""Put models in the state a run needs, and give them back exactly as they were."""

from __future__ import annotations

import sys
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from nvalchemi_lightning.errors import ConfigurationError, UnknownNameError, nearest

__all__ = [
    "eval_configured_models",
    "evaluating",
    "freeze_unconfigured_models",
    "iter_qualified_named_parameters",
    "move_to_devices",
    "named_models",
    "rehome_optimizer_state",
    "require_parameters",
    "restoring_modes",
    "train_configured_models",
    "trainable_parameters",
    "unwrap_model",
]

Models = nn.Module | Mapping[str, nn.Module] | nn.ModuleDict
"""One bare model (its key is ``"main"``) or models by name."""


def named_models(models: Models) -> dict[str, nn.Module]:
    """Return models by name.

    Parameters
    ----------
    models : nn.Module, mapping of str to nn.Module, or nn.ModuleDict
        One bare model has the key ``"main"``.
    """
    return dict(models.items()) if isinstance(models, Mapping | nn.ModuleDict) else {"main": models}


@contextmanager
def freeze_unconfigured_models(models: Models, configs: Container[str]) -> Iterator[None]:
    """Hold the models without an optimizer in eval mode, their parameters frozen.

    On exit every mode and every ``requires_grad`` is as before, also after an error. A parameter that a configured
    model shares is not frozen.

    Parameters
    ----------
    models : nn.Module, mapping of str to nn.Module, or nn.ModuleDict
        All models.
    configs : container of str
        The keys of the models that train.
    """
    configured, others = _split(models, configs)
    shared = {id(p) for model in configured for p in model.parameters()}
    frozen = [p for model in others for p in model.parameters() if id(p) not in shared]
    with restoring_modes(others), _flags_restored(frozen):
        for model in others:
            model.eval()
        for parameter in frozen:
            parameter.requires_grad_(False)
        yield


@contextmanager
def train_configured_models(models: Models, configs: Container[str]) -> Iterator[None]:
    """Hold the models that train in train mode; restore every submodule's mode on exit.

    A submodule in eval mode inside a model in train mode was put there on purpose (a frozen batch norm) and stays.

    Parameters
    ----------
    models : nn.Module, mapping of str to nn.Module, or nn.ModuleDict
        All models.
    configs : container of str
        The keys of the models that train.
    """
    configured, _ = _split(models, configs)
    with restoring_modes(configured):
        for model in configured:
            if not model.training:
                model.train()
        yield


@contextmanager
def eval_configured_models(models: Models, configs: Container[str]) -> Iterator[None]:
    """Hold the models that train in eval mode; restore every submodule's mode on exit.

    Parameters
    ----------
    models : nn.Module, mapping of str to nn.Module, or nn.ModuleDict
        All models.
    configs : container of str
        The keys of the models that train.
    """
    configured, _ = _split(models, configs)
    with restoring_modes(configured):
        for model in configured:
            model.eval()
        yield


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Hold a module and all it contains in eval mode; restore every submodule's mode on exit.

    Parameters
    ----------
    module : nn.Module
        The root of the tree.
    """
    with restoring_modes([module]):
        module.eval()
        yield


@contextmanager
def trainable_parameters(
    models: Models, *, trainable: frozenset[str] | None = None, forced: frozenset[str] | None = None
) -> Iterator[None]:
    """Choose by name which parameters may train; restore every ``requires_grad`` on exit.

    Parameters
    ----------
    models : nn.Module, mapping of str to nn.Module, or nn.ModuleDict
        The models.
    trainable : frozenset of str, optional
        Names ``"<model key>.<parameter>"``; parameters that are not listed are frozen, those listed keep their flag.
    forced : frozenset of str, optional
        Names of parameters that train whatever their flag and ``trainable`` say.

    Raises
    ------
    UnknownNameError
        If a name fits no parameter; nothing is changed then.
    """
    named = dict(iter_qualified_named_parameters(models))
    require_parameters((trainable or frozenset()) | (forced or frozenset()), named)
    with _flags_restored(named.values()):
        for name, parameter in named.items():
            if trainable is not None and name not in trainable:
                parameter.requires_grad_(False)
        for name in forced or ():
            named[name].requires_grad_(True)
        yield


def iter_qualified_named_parameters(models: Models) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield ``("<model key>.<parameter name>", parameter)``, the names free of wrappers.

    Parameters
    ----------
    models : nn.Module, mapping of str to nn.Module, or nn.ModuleDict
        One bare model has the key ``"main"``.
    """
    for key, model in named_models(models).items():
        for name, parameter in unwrap_model(model).named_parameters():
            yield f"{key}.{name}", parameter


def move_to_devices(models: Models, devices: Sequence[torch.device | str | int], *, non_blocking: bool = False) -> None:
    """Move models to their devices, in place.

    Parameters
    ----------
    models : nn.Module, mapping of str to nn.Module, or nn.ModuleDict
        The models.
    devices : sequence of torch.device, str or int
        One for all, or one per model in the order of ``models``.
    non_blocking : bool
        Whether the copies may overlap with computation.

    Raises
    ------
    ConfigurationError
        If the number of devices is neither one nor that of the models.
    """
    named = named_models(models)
    if len(devices) not in (1, len(named)):
        raise ConfigurationError(
            f"got {len(devices)} devices for {len(named)} models ({', '.join(named)}); "
            "give one device, or one per model"
        )
    targets = list(devices) * len(named) if len(devices) == 1 else devices
    for model, device in zip(named.values(), targets, strict=True):
        model.to(device=device, non_blocking=non_blocking)


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the model inside data-parallel wrappers and ``torch.compile``.

    Parameters
    ----------
    model : nn.Module
        A model, wrapped any number of times or not at all. A model that merely has an attribute ``module`` is
        returned as it is.
    """
    while True:
        if isinstance(model, DistributedDataParallel | DataParallel):
            model = model.module
        elif _is_compiled(model):
            model = model.get_submodule("_orig_mod")
        else:
            return model


def rehome_optimizer_state(optimizer: Optimizer) -> None:
    """Move the state of every parameter to where the parameter is, in place.

    A ``step`` count that is kept on the CPU stays there, unless its group is capturable or fused: reading it from an
    accelerator would wait for the device at every step.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        An optimizer whose parameters have moved.
    """
    for group in optimizer.param_groups:
        host_step = not (group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                on_host = isinstance(value, Tensor) and value.device.type == "cpu"
                if not (name == "step" and host_step and on_host):
                    state[name] = _moved(value, parameter.device)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_moved(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_moved(item, device) for item in value)
    return value


def _is_compiled(model: nn.Module) -> bool:
    # Importing dynamo takes seconds; before someone has, nothing can be compiled.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(model, dynamo.OptimizedModule)


def _split(models: Models, configs: Container[str]) -> tuple[list[nn.Module], list[nn.Module]]:
    named = named_models(models)
    configured = [model for key, model in named.items() if key in configs]
    return configured, [model for key, model in named.items() if key not in configs]


def require_parameters(names: Iterable[str], valid: Collection[str]) -> None:
    """Refuse names that are no parameter.

    Parameters
    ----------
    names : iterable of str
        What was asked for.
    valid : mapping or set of str
        The qualified names that exist.

    Raises
    ------
    UnknownNameError
        For the first name that does not exist; gives the nearest one that does.
    """
    for name in sorted(names):
        if name not in valid:
            raise UnknownNameError(
                f"no parameter is called {name!r}{nearest(name, valid)}; names are '<model key>.<parameter name>'"
            )


@contextmanager
def restoring_modes(roots: Iterable[nn.Module]) -> Iterator[None]:
    """Give every submodule its train or eval mode back on exit.

    Parameters
    ----------
    roots : iterable of nn.Module
        The roots of the trees.
    """
    roots = list(roots)
    modes = [(module, module.training) for root in roots for module in root.modules()]
    switched = [(root, root.training) for root in roots]
    try:
        yield
    finally:
        # train() first: a module may do more there than set the flag, such as unmerging adapter weights.
        for root, mode in switched:
            if root.training != mode:
                root.train(mode)
        for module, mode in modes:
            module.training = mode


@contextmanager
def _flags_restored(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    flags = [(parameter, parameter.requires_grad) for parameter in parameters]
    try:
        yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
