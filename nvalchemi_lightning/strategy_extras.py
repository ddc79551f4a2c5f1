"""What the recipe of a strategy says beyond what the reference stores, under one key that the reference passes over."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from nvalchemi_lightning.errors import ConfigurationError, ConfigurationTypeError
from nvalchemi_lightning.hooks.lifecycle import each_hook
from nvalchemi_lightning.hooks.recipes import hook_from, hook_spec
from nvalchemi_lightning.specs import BaseSpec, create_model_spec_from_json, dotted_path, resolve
from nvalchemi_lightning.specs.fields import fields_spec
from nvalchemi_lightning.specs.places import built, located
from nvalchemi_lightning.validation import ValidationConfig

__all__ = ["EXTRAS", "extras_of", "hooks_from", "stored_assembler", "stored_hooks", "stored_validation"]

EXTRAS = "lightning"
"""The key of a recipe that holds what follows."""

# Of a validation, these are objects of the script.
_RUN_TIME = ("validation_data", "batch_callback")


def extras_of(strategy: Any) -> dict[str, Any]:
    """Return hooks, validation and target assembler of a strategy as JSON data.

    Parameters
    ----------
    strategy : TrainingStrategy
        Anything with its fields.

    Returns
    -------
    dict
        ``hooks``: in order, the spec of each, or ``{"omitted": path, "reason": text}``. ``validation_config``: the
        same, or None; without data and batch callback. ``loss_target_assembler``: a dotted path, or None with a
        warning for a function that cannot be imported.
    """
    config = strategy.validation_config
    return {
        "hooks": [_described(hook, hook_spec) for hook in each_hook(strategy.hooks)],
        "validation_config": None if config is None else _described(config, _validation_spec),
        "loss_target_assembler": _path_or_warning(strategy.loss_target_assembler),
    }


def _validation_spec(config: ValidationConfig) -> BaseSpec:
    return fields_spec(config, without=_RUN_TIME)


def _described(thing: Any, spec_of: Callable[[Any], BaseSpec]) -> dict[str, Any]:
    try:
        return spec_of(thing).model_dump()
    except (ConfigurationError, ConfigurationTypeError) as error:
        return {"omitted": f"{type(thing).__module__}.{type(thing).__qualname__}", "reason": str(error)}


def _path_or_warning(assembler: Any) -> str | None:
    try:
        return dotted_path(assembler)
    except ConfigurationTypeError as error:
        warnings.warn(
            f"Omitting non-importable loss_target_assembler from spec: {error}. Or pass loss_target_assembler= again "
            "wherever the spec or the checkpoint is loaded",
            stacklevel=5,
        )
        return None


# Reading ------------------------------------------------------------------------------------------------------------


def stored_assembler(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the target assembler of a recipe as a keyword; none where the recipe does not speak of it.

    Raises
    ------
    ConfigurationError
        If it could not be stored, or is not found.
    UntrustedPathError
        If it lies outside the trusted packages.
    """
    extras = _extras(spec)
    if "loss_target_assembler" not in extras:
        return {}
    path = extras["loss_target_assembler"]
    if not isinstance(path, str):
        raise ConfigurationError(
            "loss_target_assembler of the saved run could not be imported and was not stored: pass "
            "loss_target_assembler= again"
        )
    with located(f"{EXTRAS}.loss_target_assembler", "; or pass loss_target_assembler=<the function>"):
        return {"loss_target_assembler": resolve(path)}


def stored_validation(spec: Mapping[str, Any], data: Any) -> ValidationConfig | None:
    """Return the validation of a recipe with data to evaluate.

    Parameters
    ----------
    spec : mapping
        The recipe.
    data : iterable of Batch or None
        Without it there is no validation.

    Raises
    ------
    ConfigurationError
        If there is data, but the recipe has no validation or could not store it.
    """
    form = _extras(spec).get("validation_config")
    if data is None:
        return None
    where = f"{EXTRAS}.validation_config"
    if not isinstance(form, Mapping) or "omitted" in form:
        reason = form["reason"] if isinstance(form, Mapping) and "reason" in form else "it is not there"
        raise ConfigurationError(
            f"validation_data= goes with the validation of the spec, but {where} cannot be used: {reason}; pass "
            "validation_config=ValidationConfig(validation_data=..., ...) instead"
        )
    with located(where):
        config: ValidationConfig = built(create_model_spec_from_json(form, kind=ValidationConfig), validation_data=data)
    return config


def hooks_from(spec: Mapping[str, Any], hooks: Any) -> Any:
    """Return the hooks of a strategy that is built from a recipe.

    Parameters
    ----------
    spec : mapping
        The recipe.
    hooks : iterable, "saved" or None
        ``"saved"`` builds those of the recipe, None is none.

    Raises
    ------
    ConfigurationError
        If the recipe does not hold all of them, or one is no hook or cannot be built.
    UntrustedPathError
        If one lies outside the trusted packages.
    """
    if hooks is None:
        return []
    if not isinstance(hooks, str):
        return hooks
    if hooks != "saved":
        raise ConfigurationError(f"hooks must be a list of hooks, 'saved' or None; got {hooks!r}")
    entries = _extras(spec).get("hooks")
    if not isinstance(entries, list):
        raise ConfigurationError("hooks='saved', but the spec does not say which hooks there were; pass hooks=[...]")
    omitted = [entry for entry in entries if isinstance(entry, Mapping) and "omitted" in entry]
    if omitted:
        listed = "; ".join(f"{entry['omitted']} ({entry.get('reason')})" for entry in omitted)
        raise ConfigurationError(
            f"hooks='saved' cannot bring back {listed}; pass hooks=[...], and give such a class a to_spec() before "
            "the next save"
        )
    return [build() for build in stored_hooks(spec)]


def stored_hooks(spec: Mapping[str, Any]) -> Iterator[Callable[[], Any]]:
    """Yield a function that builds a hook for every hook that a recipe holds.

    Each raises what `hooks_from` does; until it is called, nothing is imported.

    Parameters
    ----------
    spec : mapping
        The recipe.
    """
    for index, form in enumerate(_extras(spec).get("hooks", ())):
        if not (isinstance(form, Mapping) and "omitted" in form):
            yield partial(_hook, form, f"{EXTRAS}.hooks[{index}]")


def _hook(form: Any, where: str) -> Any:
    with located(where, "; or pass hooks=[...]"):
        return hook_from(form)


def _extras(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    extras = spec.get(EXTRAS, {})
    if not isinstance(extras, Mapping):
        raise ConfigurationError(f"{EXTRAS} of the spec must be an object; got {extras!r:.80}")
    return extras
