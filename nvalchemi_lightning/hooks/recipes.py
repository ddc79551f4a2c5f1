"""The recipe of a hook, and a hook from its recipe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel

from nvalchemi_lightning.errors import ConfigurationError, ConfigurationTypeError
from nvalchemi_lightning.hooks.update import TrainingUpdateHook
from nvalchemi_lightning.specs.base import BaseSpec, create_model_spec_from_json
from nvalchemi_lightning.specs.fields import fields_spec
from nvalchemi_lightning.specs.hints import is_class, signature_of
from nvalchemi_lightning.specs.places import built

__all__ = ["hook_from", "hook_spec", "require_hook_class"]


def hook_spec(hook: Any) -> BaseSpec:
    """Return the recipe of a hook: what its ``to_spec()`` returns or, of a pydantic model, the fields.

    Parameters
    ----------
    hook : Hook or TrainingUpdateHook
        The hook.

    Raises
    ------
    ConfigurationTypeError
        If it is neither, or holds something that cannot be stored.
    """
    to_spec = getattr(hook, "to_spec", None)
    if to_spec is not None:
        spec = to_spec()
        if not isinstance(spec, BaseSpec):
            raise ConfigurationTypeError(f"{type(hook).__name__}.to_spec() must return a BaseSpec; got {spec!r:.80}")
        return spec
    if isinstance(hook, BaseModel):
        return fields_spec(hook)
    raise ConfigurationTypeError(f"{type(hook).__name__} has no to_spec() and is no pydantic model")


def hook_from(form: Mapping[str, Any]) -> Any:
    """Build a hook from the JSON form of its recipe.

    Parameters
    ----------
    form : mapping
        The spec.

    Raises
    ------
    UntrustedPathError
        If it names something outside the trusted packages.
    ConfigurationError
        If it is the spec of something else, which is not called then, or the hook cannot be built.
    """
    spec = create_model_spec_from_json(form)
    require_hook_class(spec.target, spec.cls_path)
    return built(spec)


def require_hook_class(target: Any, path: str) -> None:
    """Refuse what does not make hooks, before it is called.

    Parameters
    ----------
    target : Any
        What a path leads to.
    path : str
        How the message names it.

    Raises
    ------
    ConfigurationError
        If it is no class whose instances are called at stages.
    """
    if not (is_class(target) and (issubclass(target, TrainingUpdateHook) or _has_stage(target))):
        raise ConfigurationError(
            f"Could not resolve {path!r}: {target!r} is not a class of hooks (with `frequency`, `stage` and "
            "`__call__(ctx, stage)`)"
        )


def _has_stage(class_: type) -> bool:
    called = any("__call__" in vars(base) for base in class_.__mro__)
    places: Iterable[str] = (*signature_of(class_).parameters, *dir(class_))
    return called and not {"stage", "_runs_on_stage"}.isdisjoint(places)
