"""What can be known of an optimizer and its schedule before there are parameters."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from inspect import Parameter
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from nvalchemi_lightning.errors import ConfigurationError, UnknownNameError, nearest
from nvalchemi_lightning.optim.groups import ParamGroup, require_options
from nvalchemi_lightning.specs.base import BaseSpec, checked
from nvalchemi_lightning.specs.hints import NO_HINT, signature_of
from nvalchemi_lightning.specs.trust import resolve

__all__ = ["checked_kwargs", "class_of", "refuse_closures", "scheduler_for", "try_optimizer", "try_scheduler"]

_KNOWN = ("torch.optim.", "nvalchemi_lightning.")
_REFUSALS = (TypeError, ValueError, ZeroDivisionError)


def class_of(value: Any, kind: type, field: str, example: str) -> Any:
    """Return a class that was given as such or by its dotted path.

    Raises
    ------
    ConfigurationError
        If it is not derived from ``kind``.
    """
    if isinstance(value, str):
        try:
            return resolve(value, kind=kind)
        except ConfigurationError as error:
            raise ConfigurationError(f"{field} must resolve to an importable class: {error}") from error
    if not (isinstance(value, type) and issubclass(value, kind)):
        raise ConfigurationError(
            f"{field} must be a class derived from {kind.__name__}, or the dotted path of one ({example!r}); "
            f"got {value!r}"
        )
    return value


def refuse_closures(optimizer: type[Optimizer]) -> None:
    """Refuse an optimizer that evaluates the loss itself.

    Raises
    ------
    ConfigurationError
        If its step needs a closure.
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ConfigurationError(
            f"{optimizer.__name__} evaluates the loss several times per step, but a training batch has one forward and "
            "one backward pass; choose an optimizer whose step needs no closure"
        )


def checked_kwargs(target: type, kwargs: Mapping[str, Any], runtime: str, role: str) -> dict[str, Any]:
    """Return keywords that a class takes, their values converted to what its annotations ask for.

    Parameters
    ----------
    target : type
        The class of an optimizer or a scheduler.
    kwargs : mapping
        The keywords.
    runtime : str
        The parameter that is known at run time only, by its usual name.
    role : str
        How messages call the class.

    Raises
    ------
    UnknownNameError
        If a keyword does not exist.
    ConfigurationError
        If one is missing or of a wrong type.
    """
    signature = signature_of(target)
    runtime = _runtime_name(target, runtime)
    open_ended = any(p.kind is Parameter.VAR_KEYWORD for p in signature.parameters.values())
    valid = [name for name in signature.parameters if name != runtime]
    unknown = [name for name in kwargs if name not in valid and (name == runtime or not open_ended)]
    if unknown:
        raise UnknownNameError(
            f"Invalid {role} kwargs for {target.__name__}: {unknown}{nearest(unknown[0], valid)}; "
            f"it takes {', '.join(sorted(valid))}"
        )
    try:
        signature.bind(**{runtime: None, **kwargs})
    except TypeError as error:
        raise ConfigurationError(f"{role}_kwargs for {target.__name__}: {error}") from error
    hints = {name: p.annotation for name, p in signature.parameters.items()}
    where = f"{role}_kwargs"
    return {name: checked(value, hints.get(name, NO_HINT), f"{where}[{name!r}]") for name, value in kwargs.items()}


def try_optimizer(
    target: type[Optimizer], kwargs: Mapping[str, Any], groups: Sequence[ParamGroup], *, spare: bool = False
) -> Optimizer | None:
    """Build an optimizer of known origin for parameters of no meaning; None for a class of the user's own.

    Parameters
    ----------
    target : type
        Its class.
    kwargs : mapping
        Its keywords.
    groups : sequence of ParamGroup
        What some of its parameters have for themselves.
    spare : bool
        Whether some parameters are to be without weight decay.

    Raises
    ------
    ConfigurationError
        If it refuses its keywords, or lacks an option that a group sets.
    """
    if not target.__module__.startswith(_KNOWN):
        return None
    options = [{"name": group.label, **group.options} for group in groups]
    options += [{"name": "no_decay", "weight_decay": 0.0}] if spare else []
    try:
        optimizer = target([{"params": [_parameter()], **each} for each in ({}, *options)], **kwargs)
    except _REFUSALS as error:
        raise ConfigurationError(f"{target.__name__} does not take {dict(kwargs)}: {error}") from error
    require_options(optimizer, options)
    return optimizer


def try_scheduler(target: type[LRScheduler], kwargs: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Build a schedule of known origin and take one step; a class of the user's own is left alone.

    Raises
    ------
    ConfigurationError
        If it refuses its keywords, at construction or in its first step.
    """
    if not target.__module__.startswith(_KNOWN):
        return
    try:
        scheduler = scheduler_for(optimizer, target, kwargs)
        if not issubclass(target, ReduceLROnPlateau):
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore"
                )  # the optimizer has taken no step, and must not: that imports a compiler
                scheduler.step()
    except _REFUSALS as error:
        raise ConfigurationError(f"{target.__name__} does not take {dict(kwargs)}: {error}") from error


def scheduler_for(optimizer: Optimizer, target: type[LRScheduler], kwargs: Mapping[str, Any]) -> LRScheduler:
    """Build a schedule, and the schedules that its keywords describe, for an optimizer."""
    built = {key: _scheduled(value, optimizer) for key, value in kwargs.items()}
    return target(**{_runtime_name(target, "optimizer"): optimizer, **built})


def _parameter() -> torch.Tensor:
    # Muon takes matrices only.
    return torch.zeros(1, 1, requires_grad=True)


def _runtime_name(target: type, usual: str) -> str:
    """Return the name of the parameter that is known at run time only; by custom the first one."""
    parameters = signature_of(target).parameters
    return usual if usual in parameters else next(iter(parameters))


def _scheduled(value: Any, optimizer: Optimizer) -> Any:
    """Build the specs of schedulers inside a keyword; they need the optimizer too."""
    if isinstance(value, BaseSpec):
        return value.build(optimizer, **{name: _scheduled(item, optimizer) for name, item in value.kwargs.items()})
    if isinstance(value, list | tuple):
        return type(value)(_scheduled(item, optimizer) for item in value)
    return value
