"""The recipe of a model: its own, or one derived from its constructor and proven by building it."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from inspect import Parameter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from nvalchemi_lightning.errors import ConfigurationError, ConfigurationTypeError
from nvalchemi_lightning.runtime import unwrap_model
from nvalchemi_lightning.specs.base import BaseSpec, create_model_spec
from nvalchemi_lightning.specs.hints import signature_of
from nvalchemi_lightning.specs.places import BUILD_ERRORS

__all__ = ["model_spec", "model_spec_or_warning"]

_ABSENT = object()

# Proving a recipe costs a construction, so it is done once per model and recipe.
_proven: WeakKeyDictionary[nn.Module, BaseSpec] = WeakKeyDictionary()


def model_spec(model: nn.Module) -> BaseSpec:
    """Return the recipe that rebuilds a model, without its weights.

    That is what the model's own ``checkpoint_spec()`` returns. Where it has none, or returns None, the recipe is
    derived: every constructor argument is read from the attribute of the same name, submodules become recipes of
    their own, and the result is built once, on the CPU, to see that it stands for the same arguments.

    Parameters
    ----------
    model : nn.Module
        The model; wrappers of data parallelism and ``torch.compile`` are looked through.

    Raises
    ------
    ConfigurationTypeError
        If ``checkpoint_spec()`` returns something else than a `BaseSpec` or None.
    ConfigurationError
        If no recipe can be derived; it names the argument.

    Notes
    -----
    Where the model lives is not part of the recipe, so an argument ``device`` is left out. So is a ``dtype`` that the
    model does not store, for weights bring their own, and a private argument (``_name``) with a default. The random
    state of torch is not touched.
    """
    model = unwrap_model(model)
    own = _own_spec(model)
    if own is not None:
        return own
    spec = _derived(model)
    if model not in _proven or _proven[model] != spec:
        _prove(spec)
        _proven[model] = spec
    return _proven[model]


def model_spec_or_warning(name: str, model: nn.Module) -> BaseSpec | None:
    """Return the recipe of a model, or warn and return None.

    Parameters
    ----------
    name : str
        How the warning calls the model.
    model : nn.Module
        The model.
    """
    try:
        return model_spec(model)
    except ConfigurationError as error:
        warnings.warn(f"Omitting model spec for {name!r}: {error}", stacklevel=3)
        return None


def _own_spec(model: nn.Module) -> BaseSpec | None:
    checkpoint_spec = getattr(model, "checkpoint_spec", None)
    spec = None if checkpoint_spec is None else checkpoint_spec()
    if spec is not None and not isinstance(spec, BaseSpec):
        raise ConfigurationTypeError(
            f"{type(model).__name__}.checkpoint_spec() must return a BaseSpec or None; got {type(spec).__name__}"
        )
    return spec


def _derived(model: nn.Module) -> BaseSpec:
    cls = type(model)
    arguments: dict[str, Any] = {}
    for parameter in _constructor(cls):
        if parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
            raise ConfigurationError(
                f"{cls.__name__} takes *{parameter.name}, whose values nothing tells; implement checkpoint_spec()"
            )
        value = _stored(model, parameter)
        if value is not _ABSENT:
            arguments[parameter.name] = value
    try:
        return create_model_spec(cls, **arguments)
    except ConfigurationTypeError as error:
        raise ConfigurationError(f"{error}; or implement {cls.__name__}.checkpoint_spec()") from error


def _constructor(cls: type[nn.Module]) -> list[Parameter]:
    if cls.__init__ is nn.Module.__init__:  # its *args are there for multiple inheritance only
        return []
    return list(signature_of(cls).parameters.values())


def _stored(model: nn.Module, parameter: Parameter) -> Any:
    """Return what the model holds under the name of a constructor argument."""
    name, cls = parameter.name, type(model).__name__
    value = getattr(model, name, _ABSENT)
    if inspect.ismethod(value):
        value = getattr(model, f"_{name}", _ABSENT)
    if name == "device":
        return _ABSENT
    if value is _ABSENT and (name == "dtype" or (name.startswith("_") and parameter.default is not Parameter.empty)):
        return _ABSENT
    if value is _ABSENT:
        raise ConfigurationError(
            f"{cls} does not store its constructor argument {name!r}; add self.{name} = {name} to its __init__, "
            "or implement checkpoint_spec()"
        )
    if parameter.annotation is bool and (value is None or isinstance(value, nn.Parameter)):
        return value is not None  # the habit of torch.nn: ``bias=True`` is kept as the parameter ``bias``
    return _with_specs(value)


def _with_specs(value: Any) -> Any:
    if isinstance(value, nn.ModuleList | list | tuple):
        return [_with_specs(item) for item in value]
    if isinstance(value, nn.ModuleDict | Mapping):
        return {key: _with_specs(item) for key, item in value.items()}
    if isinstance(value, nn.Module):
        module = unwrap_model(value)
        return _own_spec(module) or _derived(module)
    return value


def _prove(spec: BaseSpec) -> None:
    cls = spec.cls_path.rpartition(".")[2]
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            rebuilt = spec.build()
    except BUILD_ERRORS as error:
        raise ConfigurationError(
            f"{cls} cannot be built again from what its attributes hold ({error}); store constructor arguments "
            "unchanged, or implement checkpoint_spec()"
        ) from error
    again = _derived(rebuilt)
    changed = [name for name in spec.kwargs if not _same(spec, again, name)]
    if changed:
        raise ConfigurationError(
            f"{cls} changes its constructor argument {changed[0]!r}: built with {spec.kwargs[changed[0]]!r:.80} it "
            f"holds {again.kwargs.get(changed[0])!r:.80}; store the argument unchanged, or implement checkpoint_spec()"
        )


def _same(one: BaseSpec, other: BaseSpec, name: str) -> bool:
    pair = [BaseSpec(spec.target, {name: spec.kwargs[name]}, spec.cls_path, "") for spec in (one, other)]
    return pair[0] == pair[1]
