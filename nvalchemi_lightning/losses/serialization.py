"""Specs of loss terms."""

from __future__ import annotations

import inspect
from typing import Any

from nvalchemi_lightning.errors import ConfigurationError, ConfigurationTypeError
from nvalchemi_lightning.losses.term import LossTerm
from nvalchemi_lightning.specs import BaseSpec, create_model_spec

__all__ = ["constructor_arguments", "loss_component_to_spec"]


def constructor_arguments(leaf: LossTerm) -> dict[str, Any]:
    """Return the constructor's keyword arguments that the term stores under their own names."""
    names = inspect.signature(type(leaf)).parameters
    return {name: getattr(leaf, name) for name in names if hasattr(leaf, name)}


def loss_component_to_spec(leaf: LossTerm) -> BaseSpec:
    """Return what rebuilds a term: its class, and its constructor arguments as its attributes have them.

    Raises
    ------
    ConfigurationTypeError
        If ``leaf`` is not a single term.
    ConfigurationError
        If a required constructor argument is not stored under its own name.
    """
    if not isinstance(leaf, LossTerm):
        raise ConfigurationTypeError(f"loss_component_to_spec needs a single loss term; got {type(leaf).__name__}")
    arguments = constructor_arguments(leaf)
    for name, parameter in inspect.signature(type(leaf)).parameters.items():
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if name not in arguments and not variadic:
            raise ConfigurationError(
                f"{type(leaf).__name__} does not store its constructor argument {name!r}; "
                f"add self.{name} = {name} to its __init__ so that it can be rebuilt"
            )
    return create_model_spec(type(leaf), **arguments)
