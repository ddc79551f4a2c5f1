"""A strategy as data: its recipe, and what is built from a recipe again."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any

import torch
from torch import nn

from nvalchemi_lightning.counters import Counters
from nvalchemi_lightning.errors import ConfigurationError, ConfigurationTypeError, nearest
from nvalchemi_lightning.losses import BaseLossFunction, ComposedLossFunction
from nvalchemi_lightning.optim import OptimizerConfig
from nvalchemi_lightning.specs import create_model_spec_from_json, dotted_path, resolve
from nvalchemi_lightning.specs.hints import signature_of
from nvalchemi_lightning.specs.model_spec import model_spec_or_warning
from nvalchemi_lightning.specs.places import built, located
from nvalchemi_lightning.strategy_extras import EXTRAS, extras_of, hooks_from, stored_assembler, stored_validation

__all__ = [
    "checkpoint_dict",
    "counters_from",
    "require_json",
    "spec_dict",
    "strategy_arguments_from_spec",
    "strategy_class",
    "strategy_from_checkpoint_dict",
]

_REQUIRED = ("optimizer_configs", "devices", "loss_fn_spec")
_OVERRIDES = (
    "loss_target_assembler",
    "validation_config",
    "validation_data",
    "devices",
    "num_epochs",
    "num_steps",
    "optimizer_configs",
)


def spec_dict(strategy: Any) -> dict[str, Any]:
    """Return the recipe of a strategy as JSON data.

    Counters, validation data and objects of the script are not part of it.

    Parameters
    ----------
    strategy : TrainingStrategy
        Anything with its fields.

    Returns
    -------
    dict
        ``optimizer_configs, num_epochs, num_steps, epoch_step_modifier, devices, loss_fn_spec, model_specs,
        single_model_input`` and ``training_fn``. A model without a recipe, or a ``training_fn`` that cannot be
        imported, is left out with a warning. What the reference does not store is under ``lightning``, a key that it
        passes over: see `extras_of`.

    Raises
    ------
    ConfigurationTypeError
        If a keyword of an optimizer, schedule or loss cannot be stored.
    """
    with located("optimizer_configs"):
        optimizers = {
            name: [config.to_spec().model_dump() for config in configs]
            for name, configs in strategy.optimizer_configs.items()
        }
    specs = {name: model_spec_or_warning(name, model) for name, model in strategy.models.items()}
    form = {
        "optimizer_configs": optimizers,
        "num_epochs": strategy.num_epochs,
        "num_steps": strategy.num_steps,
        "epoch_step_modifier": strategy.epoch_step_modifier,
        "devices": [str(device) for device in strategy.devices],
        "loss_fn_spec": strategy.loss_fn.to_spec().model_dump(),
        "model_specs": {name: spec.model_dump() for name, spec in specs.items() if spec is not None},
        "single_model_input": strategy.single_model_input,
        **_training_fn_form(strategy.training_fn),
        EXTRAS: extras_of(strategy),
    }
    require_json(form, "spec")
    return form


def checkpoint_dict(strategy: Any) -> dict[str, Any]:
    """Return `spec_dict`, the class of the strategy and its counters: what a checkpoint says besides tensors.

    Parameters
    ----------
    strategy : TrainingStrategy
        Anything with its fields.

    Returns
    -------
    dict
        The recipe, ``strategy_cls`` (a dotted path) and ``runtime_state`` (five counters).

    Raises
    ------
    ConfigurationTypeError
        If the class of the strategy cannot be imported, or see `spec_dict`.
    """
    return {
        **spec_dict(strategy),
        "strategy_cls": dotted_path(type(strategy)),
        "runtime_state": dict(vars(strategy.counters)),
    }


def _training_fn_form(training_fn: Any) -> dict[str, str]:
    try:
        return {"training_fn": dotted_path(training_fn)}
    except ConfigurationTypeError as error:
        warnings.warn(
            f"Omitting non-importable training_fn from spec: {error}. Or pass training_fn= again wherever the spec or "
            "the checkpoint is loaded",
            stacklevel=4,
        )
        return {}


def strategy_arguments_from_spec(
    spec: Mapping[str, Any],
    *,
    models: Any = None,
    hooks: Any = None,
    training_fn: Callable[..., Any] | str | None = None,
    **overrides: Any,
) -> dict[str, Any]:
    """Return the constructor keywords of the strategy that a recipe describes.

    Parameters
    ----------
    spec : mapping
        What `spec_dict` returned. Keys that it does not know are passed over.
    models : nn.Module or mapping of str to nn.Module, optional
        Live models; each replaces the recipe of the same name, which is then not looked at.
    hooks : iterable or "saved", optional
        The hooks; ``"saved"`` builds those of the recipe. By default there are none, as in the reference: a hook
        writes files and holds connections, which a file should not set going unasked.
    training_fn : callable or str, optional
        Replaces the stored one.
    **overrides
        ``loss_target_assembler``, ``validation_config``, ``devices``, ``num_epochs``, ``num_steps`` or
        ``optimizer_configs``; None leaves what is stored, and one kind of duration replaces the other.
        ``validation_data`` goes with the stored validation; without it or ``validation_config`` there is none.

    Raises
    ------
    ConfigurationError
        If a key is missing or of the wrong shape, or a part cannot be built.
    ConfigurationTypeError
        If an override is unknown.
    UntrustedPathError
        If the recipe names something outside the trusted packages.
    """
    _require_overrides(overrides)
    _require_shape(spec)
    overrides = {name: value for name, value in overrides.items() if value is not None}
    devices = overrides.get("devices", spec["devices"])
    if "loss_target_assembler" not in overrides:
        overrides.update(stored_assembler(spec))
    arguments = {
        "models": _models(spec, models, devices),
        "loss_fn": _loss(spec["loss_fn_spec"]),
        "training_fn": _training_fn(spec, training_fn),
        "hooks": hooks_from(spec, hooks),
        "devices": devices,
        "epoch_step_modifier": spec.get("epoch_step_modifier", 1.0),
        "validation_config": _validation(spec, overrides),
        **_duration(spec, overrides),
    }
    if "optimizer_configs" not in overrides:
        arguments["optimizer_configs"] = _optimizer_configs(spec["optimizer_configs"])
    return {**overrides, **arguments}


def strategy_from_checkpoint_dict(base: type, form: Mapping[str, Any], **arguments: Any) -> Any:
    """Return the strategy that `checkpoint_dict` described, with its counters.

    Parameters
    ----------
    base : type
        What its class must be or derive from.
    form : mapping
        The recipe, ``strategy_cls`` and ``runtime_state``.
    **arguments
        Handed to its ``from_spec_dict``, see `strategy_arguments_from_spec`.

    Raises
    ------
    ConfigurationError
        See `strategy_class`, `strategy_arguments_from_spec` and `counters_from`.
    """
    concrete: Any = strategy_class(form.get("strategy_cls"), base)
    counters = counters_from(form.get("runtime_state"))
    strategy = concrete.from_spec_dict(form, **arguments)
    strategy.counters = counters or strategy.counters
    return strategy


def strategy_class(path: Any, base: type) -> type:
    """Return the class that ``strategy_cls`` names.

    Parameters
    ----------
    path : str
        Its dotted path.
    base : type
        What it must be or derive from. ``base`` itself is in the caller's hands and need not be trusted.

    Raises
    ------
    ConfigurationError
        If it is no text, cannot be found, or names something else.
    UntrustedPathError
        If it lies outside the trusted packages.
    """
    if not isinstance(path, str):
        raise ConfigurationError(f"strategy_cls must be a dotted path; got {path!r}")
    if path == f"{base.__module__}.{base.__qualname__}":
        return base
    with located("strategy_cls"):
        found: type = resolve(path, kind=base)
    return found


def counters_from(state: Mapping[str, Any] | None) -> Counters | None:
    """Return the counters of a checkpoint.

    Parameters
    ----------
    state : mapping or None
        ``runtime_state``; without a ``global_step_count`` every worker is taken to have made the same steps.

    Returns
    -------
    Counters or None
        None where nothing is known.

    Raises
    ------
    ConfigurationError
        If it is no mapping, or a count is not an integer >= 0.
    """
    if state is None:
        return None
    if not isinstance(state, Mapping):
        raise ConfigurationError(f"runtime_state must be an object of counters; got {state!r}")
    counts = {name: state[name] for name in vars(Counters()) if name in state}
    with located("runtime_state"):
        counters = Counters(**counts)
    if "global_step_count" not in counts:
        counters.global_step_count = counters.step_count * _world_size()
    return counters


def require_json(value: Any, where: str) -> None:
    """Refuse data that JSON cannot hold exactly.

    Parameters
    ----------
    value : Any
        The data.
    where : str
        How messages name it.

    Raises
    ------
    ConfigurationError
        Naming the place.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ConfigurationError(f"{where} has the key {key!r}; JSON has only text keys")
            require_json(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            require_json(item, f"{where}[{i}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigurationError(f"{where} is {value}, which JSON cannot hold; give a finite number")
    elif value is not None and not isinstance(value, str | int | float):
        raise ConfigurationError(
            f"{where} is a {type(value).__qualname__}, which JSON cannot hold; give numbers, text, lists or mappings, "
            "or call register_type_serializer"
        )


def _require_overrides(overrides: Mapping[str, Any]) -> None:
    unknown = [name for name in overrides if name not in _OVERRIDES]
    if unknown:
        known = ("models", "hooks", "training_fn", *_OVERRIDES)
        raise ConfigurationTypeError(
            f"from_spec_dict: got runtime overrides {unknown}, but it accepts only {', '.join(known)}"
            f"{nearest(unknown[0], known)}"
        )


def _require_shape(spec: Mapping[str, Any]) -> None:
    missing = [key for key in _REQUIRED if key not in spec]
    if missing:
        raise ConfigurationError(f"the spec is missing required key(s) {missing}; present keys: {sorted(spec)}")
    configs, devices = spec["optimizer_configs"], spec["devices"]
    lists = isinstance(configs, Mapping) and all(
        isinstance(forms, list) and all(isinstance(form, Mapping) for form in forms) for forms in configs.values()
    )
    _require(lists, "optimizer_configs", configs, "map model names to lists of objects")
    texts = isinstance(devices, list) and all(isinstance(device, str) for device in devices)
    _require(texts, "devices", devices, "be a list of text such as ['cpu']")
    _require(isinstance(spec["loss_fn_spec"], Mapping), "loss_fn_spec", spec["loss_fn_spec"], "be an object")
    model_specs = spec.get("model_specs", {})
    _require(isinstance(model_specs, Mapping), "model_specs", model_specs, "be an object")
    single = spec.get("single_model_input", True)
    _require(isinstance(single, bool), "single_model_input", single, "be true or false")


def _require(condition: bool, field: str, value: Any, wanted: str) -> None:
    if not condition:
        raise ConfigurationError(f"{field} of the spec must {wanted}; got {value!r:.120}")


def _models(spec: Mapping[str, Any], live: Any, devices: Any) -> Any:
    bare = isinstance(live, nn.Module) and not isinstance(live, nn.ModuleDict)
    given = {} if live is None else {"main": live} if bare else dict(live.items())
    forms = {_main(name): form for name, form in spec.get("model_specs", {}).items()}
    merged = {name: given.pop(name) if name in given else _model(name, form, devices) for name, form in forms.items()}
    merged.update(given)
    if not merged:
        raise ConfigurationError("the spec holds no model; pass models=")
    if live is None:
        single = spec.get("single_model_input", set(merged) == {"main"})
    else:
        single = bare and set(merged) == {"main"}
    if not single:
        return merged
    if set(merged) != {"main"}:
        raise ConfigurationError(f"single_model_input needs exactly the model 'main'; the spec has {sorted(merged)}")
    return merged["main"]


def _model(name: str, form: Any, devices: Any) -> nn.Module:
    with located(f"model_specs[{name!r}]", f"; or pass models={{{name!r}: model}}"):
        spec = create_model_spec_from_json(form, kind=nn.Module)
        device = torch.device(devices[0] if isinstance(devices, list | tuple) else devices)
        device_aware = signature_of(spec.target).parameters.get("device")
        placed = device_aware is not None and device_aware.kind is not Parameter.VAR_KEYWORD
        model: nn.Module = built(spec, **({"device": device} if placed else {}))
    return model


def _loss(form: Mapping[str, Any]) -> nn.Module:
    with located("loss_fn_spec"):
        loss: nn.Module = built(create_model_spec_from_json(form, kind=(ComposedLossFunction, BaseLossFunction)))
    return loss


def _optimizer_configs(forms: Mapping[str, Any]) -> dict[str, list[OptimizerConfig]]:
    configs = {}
    for name, listed in forms.items():
        with located(f"optimizer_configs[{name!r}]"):
            configs[_main(name)] = [built(create_model_spec_from_json(form, kind=OptimizerConfig)) for form in listed]
    return configs


def _training_fn(spec: Mapping[str, Any], given: Callable[..., Any] | str | None) -> Any:
    stored = spec.get("training_fn") if given is None else given
    if given is None and not isinstance(stored, str):
        raise ConfigurationError(
            f"training_fn of the spec must be a dotted path; got {stored!r}. Functions that cannot be imported are "
            "never stored: pass training_fn= again"
        )
    if not isinstance(stored, str):
        return stored
    with located("training_fn", "; or pass training_fn=<the function>"):
        return resolve(stored)


def _validation(spec: Mapping[str, Any], overrides: dict[str, Any]) -> Any:
    data, config = overrides.pop("validation_data", None), overrides.pop("validation_config", None)
    if config is None:
        return stored_validation(spec, data)
    if data is not None:
        raise ConfigurationError("validation_data= and validation_config= were both given; give one")
    return config


def _duration(spec: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    kinds = ("num_epochs", "num_steps")
    source = overrides if any(overrides.get(kind) is not None for kind in kinds) else spec
    return {kind: source.get(kind) for kind in kinds}


def _main(name: str) -> str:
    """Return the name of a model; the first releases of the reference wrote ``"0"`` for the only one."""
    return "main" if name == "0" else name


def _world_size() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
