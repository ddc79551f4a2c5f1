"""The state of a strategy at one moment, copied to the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nvalchemi_lightning.checkpoint.layout import component_names
from nvalchemi_lightning.checkpoint.reference_names import in_reference_names
from nvalchemi_lightning.errors import ConfigurationError, ConfigurationTypeError
from nvalchemi_lightning.optim import OptSchedPair
from nvalchemi_lightning.runtime import iter_qualified_named_parameters, unwrap_model
from nvalchemi_lightning.specs import BaseSpec, create_model_spec
from nvalchemi_lightning.specs.model_spec import model_spec
from nvalchemi_lightning.strategy_spec import checkpoint_dict, require_json

__all__ = [
    "Snapshot",
    "hook_states",
    "keyed_hooks",
    "model_state",
    "named_optimizers",
    "optimized_names",
    "plain_name",
    "require_savable",
    "take_snapshot",
]

_PLAIN = (bool, int, float, str, bytes, complex, torch.Size, torch.dtype, torch.device, type(None))
_COMPILED = "_orig_mod."


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds; nothing in it changes while training goes on.

    Attributes
    ----------
    strategy : dict
        Recipe and counters, `checkpoint_dict` in the names that files use.
    specs : dict of str to dict
        The recipe of each component, such as ``"optimizers/main_optimizer"``.
    states : dict of str to dict
        Its state, tensors on the CPU.
    hooks : dict of str to dict
        States of hooks by class path and occurrence.
    associations : dict
        Per model its optimizers and schedulers, as ``manifest.json`` has it.
    """

    strategy: dict[str, Any]
    specs: dict[str, dict[str, Any]]
    states: dict[str, Any]
    hooks: dict[str, Any]
    associations: dict[str, Any]


def take_snapshot(strategy: Any) -> Snapshot:
    """Copy the state of a strategy.

    Parameters
    ----------
    strategy : TrainingStrategy
        Anything with its fields and methods. Optimizers that do not exist yet are built.

    Raises
    ------
    ConfigurationError
        If a model has no recipe, or a state holds something that safe loading would refuse; it names the place.
    NotImplementedError
        If a model is sharded.
    """
    specs = require_savable(strategy)
    with strategy.training_mode():  # parameters that only train during a run belong to the optimizers too
        pairs = strategy.optimizers()
    live = dict(_components(strategy, pairs))
    snapshot = Snapshot(
        strategy=in_reference_names(checkpoint_dict(strategy)),
        specs=in_reference_names({component: spec.model_dump() for component, spec in specs.items()}),
        states={component: _copied(state, component) for component, state in live.items()},
        hooks=hook_states(strategy.hooks),
        associations=_associations(strategy, pairs),
    )
    require_json(snapshot.specs, "specs")
    return snapshot


def require_savable(strategy: Any) -> dict[str, BaseSpec]:
    """Return the recipe of every component, or refuse a strategy that could not be rebuilt.

    Parameters
    ----------
    strategy : TrainingStrategy
        Anything with its fields.

    Raises
    ------
    ConfigurationError
        If a model has no recipe.
    """
    specs, reasons = {}, {}
    for name, model in strategy.models.items():
        try:
            specs[f"models/{name}"] = model_spec(model)
        except ConfigurationError as error:
            reasons[name] = str(error)
    if reasons:
        listed = "; ".join(f"{name!r}: {reason}" for name, reason in reasons.items())
        raise ConfigurationError(
            f"Cannot save strategy checkpoint because model spec generation failed for model(s) {[*reasons]}: {listed}"
        )
    return {**specs, **dict(_optimizer_specs(strategy.optimizer_configs))}


def _optimizer_specs(configs: Mapping[str, Any]) -> Iterator[tuple[str, BaseSpec]]:
    optimizers, schedulers = component_names("optimizer", configs), component_names("scheduler", configs)
    for model, listed in configs.items():
        for config, optimizer, scheduler in zip(listed, optimizers[model], schedulers[model], strict=True):
            yield f"optimizers/{optimizer}", create_model_spec(config.optimizer_cls, **config.optimizer_kwargs)
            if config.scheduler_cls is not None:
                yield f"schedulers/{scheduler}", create_model_spec(config.scheduler_cls, **config.scheduler_kwargs)


def named_optimizers(pairs: Mapping[str, list[OptSchedPair]]) -> Iterator[tuple[str, str, str, OptSchedPair]]:
    """Yield the model, the name of its optimizer, that of the scheduler, and both objects.

    Parameters
    ----------
    pairs : mapping of str to list
        What ``strategy.optimizers()`` returns.
    """
    optimizers, schedulers = component_names("optimizer", pairs), component_names("scheduler", pairs)
    for model, listed in pairs.items():
        for pair, optimizer, scheduler in zip(listed, optimizers[model], schedulers[model], strict=True):
            yield model, optimizer, scheduler, pair


def _components(strategy: Any, pairs: Mapping[str, list[OptSchedPair]]) -> Iterator[tuple[str, Any]]:
    for name, model in strategy.models.items():
        yield f"models/{name}", model_state(model)
    for _, optimizer_name, scheduler_name, (optimizer, scheduler) in named_optimizers(pairs):
        yield f"optimizers/{optimizer_name}", optimizer.state_dict()
        if scheduler is not None:
            yield f"schedulers/{scheduler_name}", scheduler.state_dict()


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return the live tensors of a model under names free of wrappers.

    Raises
    ------
    NotImplementedError
        If the model is sharded over processes.
    """
    model = unwrap_model(model)
    if any(type(module).__module__.startswith("torch.distributed") for module in model.modules()):
        raise NotImplementedError(
            f"{type(model).__name__} is sharded over processes; save it with torch.distributed.checkpoint"
        )
    return {plain_name(name): value for name, value in model.state_dict().items()}


def plain_name(name: str) -> str:
    """Return the name of a tensor without the marks that ``torch.compile`` leaves on compiled submodules."""
    return name.replace(_COMPILED, "")


def _associations(strategy: Any, pairs: Mapping[str, list[OptSchedPair]]) -> dict[str, Any]:
    names = optimized_names(strategy.models)
    found: dict[str, Any] = {}
    for model, optimizer_name, scheduler_name, (optimizer, scheduler) in named_optimizers(pairs):
        entry = found.setdefault(
            model, {"optimizers": [], "schedulers": [], "scheduler_optimizers": {}, "optimizer_parameter_names": {}}
        )
        entry["optimizers"].append(optimizer_name)
        entry["optimizer_parameter_names"][optimizer_name] = names(optimizer)
        if scheduler is not None:
            entry["schedulers"].append(scheduler_name)
            entry["scheduler_optimizers"][scheduler_name] = optimizer_name
    return found


def optimized_names(models: Mapping[str, nn.Module]) -> Any:
    """Return a function that lists the names of an optimizer's parameters, in its order.

    Parameters
    ----------
    models : mapping of str to nn.Module
        Where the parameters live; names are ``"<model>.<parameter>"``.
    """
    names = {id(parameter): name for name, parameter in iter_qualified_named_parameters(models)}

    def of(optimizer: torch.optim.Optimizer) -> list[str]:
        return [plain_name(names[id(p)]) for group in optimizer.param_groups for p in group["params"]]

    return of


def keyed_hooks(hooks: Any) -> dict[str, Any]:
    """Return the hooks that have state, keyed by class path and occurrence.

    Parameters
    ----------
    hooks : iterable
        All hooks in order; the ones inside a hook (its ``hooks``) come before it.
    """
    keyed: dict[str, Any] = {}
    for hook in _flat(hooks):
        if hasattr(hook, "state_dict") and hasattr(hook, "load_state_dict"):
            path = f"{type(hook).__module__}.{type(hook).__qualname__}"
            occurrence = sum(key.rpartition(":")[0] == path for key in keyed)
            keyed[f"{path}:{occurrence}"] = hook
    return keyed


def _flat(hooks: Any) -> Iterator[Any]:
    for hook in hooks:
        yield from _flat(getattr(hook, "hooks", ()))
        yield hook


def hook_states(hooks: Any) -> dict[str, Any]:
    """Return copies of the states of all hooks that have one, keyed as files have it.

    Parameters
    ----------
    hooks : iterable
        All hooks in order.

    Raises
    ------
    ConfigurationError
        If a state holds something that safe loading would refuse; it names hook and key.
    """
    states = {}
    for key, hook in keyed_hooks(hooks).items():
        path, _, occurrence = key.rpartition(":")
        state = _copied(hook.state_dict(), f"hook {type(hook).__name__}:{occurrence}")
        if state:  # Lightning callbacks return an empty mapping when there is nothing to keep
            states[f"{in_reference_names(path)}:{occurrence}"] = state
    return states


def _copied(value: Any, where: str) -> Any:
    """Return a deep copy on the CPU, made of nothing but what ``weights_only`` loading accepts."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if type(value) in _PLAIN:
        return value
    if isinstance(value, float):  # a number of numpy
        return float(value)
    if isinstance(value, Mapping):
        return {_key(key, where): _copied(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple | set) and type(value) in (list, tuple, set):
        return type(value)(_copied(item, f"{where}[{i}]") for i, item in enumerate(value))
    raise ConfigurationTypeError(
        f"{where} is a {type(value).__qualname__}, which a checkpoint cannot hold: safe loading "
        "(weights_only=True) would refuse it; keep tensors, numbers, text and containers of them"
    )


def _key(key: Any, where: str) -> Any:
    if type(key) in (str, int, float, bool, tuple, type(None)):
        return key
    raise ConfigurationTypeError(f"{where} has the key {key!r}, which a checkpoint cannot hold; use text or integers")
