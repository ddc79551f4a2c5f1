"""The recipe of a pydantic model: its class and the fields that were chosen."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pydantic import BaseModel

from nvalchemi_lightning.specs.base import BaseSpec, create_model_spec

__all__ = ["fields_spec"]


def fields_spec(model: BaseModel, *, without: Collection[str] = ()) -> BaseSpec:
    """Return the recipe of a pydantic model; fields that have their default value are left out.

    Parameters
    ----------
    model : pydantic.BaseModel
        The model.
    without : collection of str
        Fields that are no part of a recipe, such as a count of what was done.

    Raises
    ------
    ConfigurationTypeError
        If the class cannot be imported, or a value cannot be stored.
    """
    chosen = {
        name: getattr(model, name)
        for name, field in type(model).model_fields.items()
        if name not in without and _differs(getattr(model, name), field.get_default(call_default_factory=True))
    }
    return create_model_spec(type(model), **chosen)


def _differs(value: Any, default: Any) -> bool:
    return type(value) is not type(default) or bool(value != default)
