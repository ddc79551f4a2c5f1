"""The state of a strategy at one moment, copied to the CPU."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from nvalchemi_lightning.checkpoint.layout import component_names, is_folder_name
from nvalchemi_lightning.checkpoint.reference_names import in_reference_names
from nvalchemi_lightning.checkpoint.states import Hold, copied, hook_states, model_state, optimized_names
from nvalchemi_lightning.errors import ConfigurationError
from nvalchemi_lightning.optim import OptSchedPair, summary_numbers
from nvalchemi_lightning.specs import BaseSpec, create_model_spec
from nvalchemi_lightning.specs.model_spec import model_spec
from nvalchemi_lightning.strategy_spec import checkpoint_dict, require_json

__all__ = ["Description", "Snapshot", "named_optimizers", "require_savable", "take_snapshot"]


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds; nothing in it changes while training goes on.

    Attributes
    ----------
    strategy : dict or None
        Recipe and counters, `checkpoint_dict` in the names that files use; None for components without a strategy.
    specs : dict of str to dict
        The recipe of each component, such as ``"optimizers/main_optimizer"``.
    states : dict of str to dict
        Its state, tensors on the CPU.
    hooks : dict of str to dict
        States of hooks by class path and occurrence.
    resume : dict of int to dict
        Rank to its `ResumePoint` state.
    associations : dict
        Per model its optimizers and schedulers, as ``manifest.json`` has it.
    metrics : dict of str to float
        The validation of these weights; empty if there was none.
    provenance : dict
        What `RunProvenance.form` returns.
    """

    strategy: dict[str, Any] | None
    specs: dict[str, dict[str, Any]]
    states: dict[str, Any]
    hooks: dict[str, Any]
    resume: dict[int, Any]
    associations: dict[str, Any]
    metrics: dict[str, float]
    provenance: dict[str, Any]


@dataclass
class Description:
    """A recipe as data, made anew only when the recipe has other parts: it takes as long as copying some megabytes."""

    # Not compared: two hooks of the same options are equal whatever they describe.
    _numbers: list[Any] = field(default_factory=list, compare=False, repr=False)
    _objects: list[Any] = field(default_factory=list, compare=False, repr=False)
    _strategy: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    _specs: dict[str, dict[str, Any]] = field(default_factory=dict, compare=False, repr=False)

    def of(self, strategy: Any) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Return `checkpoint_dict` and the recipe of each component, in the names that files use.

        Parameters
        ----------
        strategy : TrainingStrategy
            Anything with its fields.

        Raises
        ------
        ConfigurationError
            If a model has no recipe, or something cannot be stored.
        """
        if not self._is_of(strategy):
            specs = require_savable(strategy)
            self._strategy = in_reference_names(checkpoint_dict(strategy))
            self._specs = in_reference_names({component: spec.model_dump() for component, spec in specs.items()})
            require_json(self._specs, "specs")
            self._numbers, self._objects = _numbers(strategy), _objects(strategy)
        return {**self._strategy, "runtime_state": dict(vars(strategy.counters))}, self._specs

    def _is_of(self, strategy: Any) -> bool:
        objects = _objects(strategy)
        return (
            self._numbers == _numbers(strategy)
            and len(self._objects) == len(objects)
            and all(one is other for one, other in zip(self._objects, objects, strict=True))
        )


def _numbers(strategy: Any) -> list[Any]:
    return [strategy.num_epochs, strategy.num_steps, strategy.epoch_step_modifier, *strategy.devices]


def _objects(strategy: Any) -> list[Any]:
    configs = [config for listed in strategy.optimizer_configs.values() for config in listed]
    given = [strategy.loss_fn, strategy.training_fn, strategy.validation_config, strategy.loss_target_assembler]
    return [*given, *configs, *strategy.models.values(), *strategy.hooks]


def take_snapshot(
    strategy: Any,
    ranks: Mapping[int, Any] | None = None,
    hold: Hold | None = None,
    description: Description | None = None,
) -> Snapshot:
    """Copy the state of a strategy.

    Parameters
    ----------
    strategy : TrainingStrategy
        Anything with its fields and methods. Optimizers that do not exist yet are built.
    ranks : mapping of int to mapping, optional
        The state of ``strategy.resume`` on every rank. Default: that of this process, as rank 0.
    hold : callable, optional
        Copies a tensor, given its place; default: into new memory.
    description : Description, optional
        That of an earlier snapshot, which saves time.

    Raises
    ------
    ConfigurationError
        If a model has no recipe, or a state holds something that safe loading would refuse; it names the place.
    NotImplementedError
        If a model is sharded.
    """
    recipe, specs = (description or Description()).of(strategy)
    with strategy.training_mode():  # parameters that only train during a run belong to the optimizers too
        pairs = strategy.optimizers()
    live = dict(_components(strategy, pairs))
    return Snapshot(
        strategy=recipe,
        specs=specs,
        states={component: copied(state, component, hold) for component, state in live.items()},
        hooks=hook_states(strategy.hooks, hold),
        resume=copied(ranks or {0: strategy.resume.state()}, "resume"),
        associations=_associations(strategy, pairs),
        metrics=_metrics(strategy),
        provenance=strategy.provenance.form(),
    )


def _metrics(strategy: Any) -> dict[str, float]:
    """Return the numbers of the validation of these very weights, if there was one."""
    if strategy.last_validation is None or strategy.resume.validated_at != strategy.step_count:
        return {}
    numbers = {name: value for name, value in summary_numbers(strategy.last_validation).items() if _is_number(value)}
    return {name: float(value) for name, value in numbers.items() if math.isfinite(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor | int | float) and not isinstance(value, bool)


def require_savable(strategy: Any) -> dict[str, BaseSpec]:
    """Return the recipe of every component, or refuse a strategy that could not be rebuilt.

    Parameters
    ----------
    strategy : TrainingStrategy
        Anything with its fields.

    Raises
    ------
    ConfigurationError
        If a model has no recipe, or a name that is no folder name.
    """
    specs, reasons = {}, {}
    for name, model in strategy.models.items():
        if not is_folder_name(name):
            raise ConfigurationError(f"the model name {name!r} cannot be a folder name; rename the model")
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
