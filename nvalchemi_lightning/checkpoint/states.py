"""The states of models and hooks under names that outlive wrappers, and copies of them that are safe to load."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nvalchemi_lightning.checkpoint.reference_names import in_own_names, in_reference_names
from nvalchemi_lightning.errors import AlchemiError, ConfigurationTypeError, StoreError
from nvalchemi_lightning.runtime import iter_qualified_named_parameters, unwrap_model

__all__ = [
    "Hold",
    "copied",
    "hook_states",
    "keyed_hooks",
    "load_hook_states",
    "model_state",
    "optimized_names",
    "plain_name",
    "to_live_names",
    "to_plain_names",
]

_PLAIN = (bool, int, float, str, bytes, complex, torch.Size, torch.dtype, torch.device, type(None))
_COMPILED = "_orig_mod."

Hold: TypeAlias = Callable[[Tensor, str], Tensor]


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return the live tensors of a model under names free of wrappers.

    Raises
    ------
    NotImplementedError
        If the model is sharded over processes.
    """
    model = unwrap_model(model)
    if any(_is_sharded(module) for module in model.modules()):
        raise NotImplementedError(
            f"{type(model).__name__} is sharded over processes; save it with torch.distributed.checkpoint"
        )
    return {plain_name(name): value for name, value in model.state_dict().items()}


def _is_sharded(module: nn.Module) -> bool:
    return any(base.__module__.startswith("torch.distributed.") for base in type(module).__mro__)


def plain_name(name: str) -> str:
    """Return the name of a tensor without the marks that ``torch.compile`` leaves on compiled submodules."""
    return name.replace(_COMPILED, "")


def to_plain_names(state: dict[str, Any]) -> None:
    """Free the names of a module's state from the marks of ``torch.compile``, in place."""
    for name in [*state]:
        state[plain_name(name)] = state.pop(name)


def to_live_names(state: dict[str, Any], module: nn.Module) -> None:
    """Undo `to_plain_names` for a module that may be compiled in other places than the one that was saved."""
    live = {plain_name(name): name for name in module.state_dict()}
    for name in [*state]:
        state[live.get(name, name)] = state.pop(name)


def optimized_names(models: Mapping[str, nn.Module]) -> Callable[[Optimizer], list[str]]:
    """Return a function that lists the names of an optimizer's parameters, in its order.

    Parameters
    ----------
    models : mapping of str to nn.Module
        Where the parameters live; names are ``"<model>.<parameter>"``.
    """
    names = {id(parameter): name for name, parameter in iter_qualified_named_parameters(models)}

    def of(optimizer: Optimizer) -> list[str]:
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
        inside = getattr(hook, "hooks", ())
        yield from _flat(inside if isinstance(inside, list | tuple) else ())
        yield hook


def hook_states(hooks: Any, hold: Hold | None = None) -> dict[str, Any]:
    """Return copies of the states of all hooks that have one, keyed as files have it.

    Parameters
    ----------
    hooks : iterable
        All hooks in order.
    hold : callable, optional
        Copies a tensor, given its place; default: into new memory.

    Raises
    ------
    ConfigurationError
        If a state holds something that safe loading would refuse; it names hook and key.
    """
    states = {}
    for key, hook in keyed_hooks(hooks).items():
        path, _, occurrence = key.rpartition(":")
        state = copied(hook.state_dict(), f"hook {type(hook).__name__}:{occurrence}", hold)
        if state:  # Lightning callbacks return an empty mapping when there is nothing to keep
            states[f"{in_reference_names(path)}:{occurrence}"] = state
    return states


def load_hook_states(hooks: Any, saved: Mapping[str, Any], where: object) -> None:
    """Give hooks the states that `hook_states` returned.

    Parameters
    ----------
    hooks : iterable
        All hooks in order.
    saved : mapping of str to mapping
        By class path and occurrence. A state without a hook, or a hook without a state, is warned of.
    where : object
        The file, for messages.

    Raises
    ------
    StoreError
        If a hook cannot make anything of its state.
    """
    states = {}
    for key, state in saved.items():
        path, _, occurrence = key.rpartition(":")
        states[f"{in_own_names(path)}:{occurrence}"] = state
    for key, hook in keyed_hooks(hooks).items():
        if key in states:
            _load_hook_state(hook, states.pop(key), f"{where}: the state of the hook {key}")
        elif hook.state_dict():
            warnings.warn(
                f"the checkpoint has no state of the hook {key}, which begins anew; leave the hook out if that is "
                "not what you want",
                stacklevel=4,
            )
    if states:
        warnings.warn(
            f"the checkpoint has states of hooks that are not there: {sorted(states)}; pass such hooks (hooks=[...]) "
            "to go on exactly, or ignore this if you only need the weights",
            stacklevel=4,
        )


def _load_hook_state(hook: Any, state: Any, what: str) -> None:
    if not isinstance(state, Mapping):
        raise StoreError(f"{what} is {state!r:.80}")
    try:
        hook.load_state_dict(state)
    except AlchemiError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise StoreError(f"{what} does not fit: {type(error).__name__}: {error}") from error


def copied(value: Any, where: str, hold: Hold | None = None) -> Any:
    """Return a deep copy on the CPU, made of nothing but what ``weights_only`` loading accepts.

    Parameters
    ----------
    value : Any
        The state of a model, an optimizer, a schedule or a hook.
    where : str
        How messages name it.
    hold : callable, optional
        Copies a tensor, given its place; default: into new memory.

    Raises
    ------
    ConfigurationTypeError
        If it holds anything else; it names the place.
    """
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True) if hold is None else hold(value, where)
    if type(value) in _PLAIN:
        return value
    if isinstance(value, float):  # a number of numpy
        return float(value)
    if isinstance(value, Mapping):
        return {_key(key, where): copied(item, f"{where}[{key!r}]", hold) for key, item in value.items()}
    if isinstance(value, list | tuple | set) and type(value) in (list, tuple, set):
        return type(value)(copied(item, f"{where}[{i}]", hold) for i, item in enumerate(value))
    raise ConfigurationTypeError(
        f"{where} is a {type(value).__qualname__}, which a checkpoint cannot hold: safe loading "
        "(weights_only=True) would refuse it; keep tensors, numbers, text and containers of them"
    )


def _key(key: Any, where: str) -> Any:
    if type(key) in (str, int, float, bool, tuple, type(None)):
        return key
    raise ConfigurationTypeError(f"{where} has the key {key!r}, which a checkpoint cannot hold; use text or integers")
