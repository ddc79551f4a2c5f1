"""The forward path of a strategy: ``training_fn``, its default and its call shape."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from nvalchemi_lightning.errors import ConfigurationError, ConfigurationTypeError
from nvalchemi_lightning.specs import resolve

__all__ = ["TrainingFn", "check_call_shape", "default_training_fn", "resolve_training_fn"]

TrainingFn = Callable[[Any, Any], Mapping[str, Tensor]]
"""``training_fn(model, batch)`` for one model, ``training_fn(models, batch)`` for named models."""


def default_training_fn(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """Call the model and name its outputs for the losses.

    Parameters
    ----------
    model : nn.Module
        A model that returns a mapping of outputs.
    batch : Batch
        The batch.

    Returns
    -------
    dict of str to Tensor
        ``predicted_<key>`` for every output that is not None, in the wider of its dtype and that of the label ``key``:
        a store may hold energies in float64 that a model in float32 is compared with.
    """
    return {
        f"predicted_{key}": _as_wide_as(getattr(batch, key, None), value)
        for key, value in model(batch).items()
        if value is not None
    }


def _as_wide_as(label: Any, value: Tensor) -> Tensor:
    if not isinstance(label, Tensor) or label.dtype == value.dtype:
        return value
    return value.to(torch.promote_types(label.dtype, value.dtype))


def resolve_training_fn(function: Any, *, single_model: bool) -> Any:
    """Return the forward function that was meant.

    Parameters
    ----------
    function : callable, str or None
        A dotted path into a trusted package is imported; None is `default_training_fn` for one bare model.
    single_model : bool
        Whether one bare model was given.

    Raises
    ------
    ConfigurationError
        If a path leads nowhere, or to something that cannot be called.
    UntrustedPathError
        If it leads outside the trusted packages: a recipe may come from a file of a stranger.
    """
    if function is None and single_model:
        return default_training_fn
    return resolve(function, kind="callable") if isinstance(function, str) else function


def check_call_shape(function: Any, *, single_model: bool) -> None:
    """Refuse a ``training_fn`` that cannot be called as the strategy will call it.

    Parameters
    ----------
    function : callable
        The candidate.
    single_model : bool
        Whether it gets one model (True) or the mapping of named models (False).

    Raises
    ------
    ConfigurationTypeError
        If it is not callable.
    ConfigurationError
        If it does not take exactly two positional arguments, or its first annotation contradicts the models.
    """
    if not callable(function):
        raise ConfigurationTypeError(f"training_fn must be callable; got {function!r}")
    try:
        signature = inspect.signature(function)
        signature.bind(None, None)
    except TypeError as error:
        raise ConfigurationError(
            f"training_fn must accept exactly the two arguments (model, batch) or (models, batch); {error}"
        ) from error
    except ValueError:  # a builtin without a signature: nothing to check
        return
    _check_first_annotation(function, next(iter(signature.parameters)), single_model)


def _check_first_annotation(function: Any, name: str, single_model: bool) -> None:
    try:
        annotation = get_type_hints(function).get(name, Any)
    except (NameError, TypeError, AttributeError):  # an annotation that cannot be resolved says nothing
        return
    kind = get_origin(annotation) or annotation
    if not isinstance(kind, type):
        return
    takes_many = issubclass(kind, (Mapping, nn.ModuleDict))
    takes_one = issubclass(kind, nn.Module) and not takes_many
    if single_model and takes_many:
        raise ConfigurationError(
            f"training_fn takes a mapping of models ({name}: {annotation}), but one bare model was given; "
            "pass models={'main': model} or annotate one model"
        )
    if not single_model and takes_one:
        raise ConfigurationError(
            f"training_fn takes one model ({name}: {annotation}), but named models were given; "
            "take a mapping, training_fn(models, batch)"
        )
