"""Put what was read from a checkpoint into a live strategy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nvalchemi_lightning.checkpoint.kinds import require_no_methods, require_same_kind
from nvalchemi_lightning.checkpoint.layout import HOOKS, component_names, state_file
from nvalchemi_lightning.checkpoint.moments import following_names, require_same_groups, require_same_parameters
from nvalchemi_lightning.checkpoint.reading import Stored
from nvalchemi_lightning.checkpoint.snapshot import named_optimizers
from nvalchemi_lightning.checkpoint.states import load_hook_states, model_state, optimized_names, plain_name
from nvalchemi_lightning.errors import ConfigurationError, LabelNotFoundError, StoreError
from nvalchemi_lightning.optim import OptSchedPair
from nvalchemi_lightning.runtime import move_to_devices, unwrap_model
from nvalchemi_lightning.specs import dotted_path
from nvalchemi_lightning.strategy_spec import counters_from

__all__ = ["adopt_dtypes", "apply"]

_CONFIG_KEYS = (
    *("optimizer_cls", "optimizer_kwargs", "scheduler_cls", "scheduler_kwargs"),
    *("parameters", "param_groups", "no_decay"),
)


def apply(strategy: Any, stored: Stored, *, new_configs: bool = False) -> None:
    """Load weights, optimizers, schedulers, counters and hook states, in this order.

    Parameters
    ----------
    strategy : TrainingStrategy
        The live strategy; its devices stay what they are.
    stored : Stored
        What was read.
    new_configs : bool
        Whether a live optimizer config that differs from the saved one wins: its optimizer keeps the moments of the
        checkpoint, if the class is the same, but takes the new hyperparameters and groups, and its schedule begins
        anew.

    Raises
    ------
    LabelNotFoundError
        If the checkpoint has a component that the strategy lacks.
    ConfigurationError
        If names, shapes, parameters or counters do not fit. In both cases nothing is changed.
    StoreError
        If the state of an optimizer, a schedule or a hook is not what it must be.

    Notes
    -----
    Hooks come last, as in the reference; one that refuses its state does so when the rest is loaded.
    """
    recipe = stored.strategy or {}
    counters = counters_from(recipe.get("runtime_state"))
    models = {name: stored.states[f"models/{name}"] for name in strategy.models if f"models/{name}" in stored.states}
    _require_live(stored, "models", strategy.models)
    for name, state in models.items():
        _check_model(name, strategy.models[name], state)
    with strategy.training_mode():  # parameters that only train during a run belong to the optimizers too
        pairs = strategy.optimizers()
    if not new_configs:
        _require_live_optimizers(stored, pairs)
    names = optimized_names(strategy.models)
    resumed = _resumed(pairs, stored, _changed(strategy, recipe) if new_configs else {}, names)
    for each in resumed:
        each.check()
    for name, state in models.items():
        _load_model(strategy.models[name], state)
    move_to_devices(strategy.models, strategy.devices)
    for each in resumed:
        each.load()
    strategy.counters = counters or strategy.counters
    load_hook_states(strategy.hooks, stored.hooks, stored.root / state_file(HOOKS, stored.index))
    strategy.resume.load(stored.resume)


def adopt_dtypes(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Give the tensors of a freshly built model the dtypes of the saved ones, so that loading loses nothing.

    Parameters
    ----------
    model : nn.Module
        Changed in place; parameters keep their identity.
    state : mapping of str to Tensor
        The saved state.
    """
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        saved = state.get(plain_name(name))
        if isinstance(saved, Tensor) and saved.is_floating_point() and tensor.is_floating_point():
            tensor.data = tensor.data.to(saved.dtype)


def _require_live(stored: Stored, kind: str, live: Iterable[str]) -> None:
    names, saved = sorted(live), [name.partition("/")[2] for name in stored.states if name.startswith(f"{kind}/")]
    missing = [name for name in saved if name not in names]
    if missing:
        raise LabelNotFoundError(
            f"Checkpoint contains {kind.removesuffix('s')}(s) not present in the live strategy: {missing}; "
            f"the strategy has {names}"
        )


def _require_live_optimizers(stored: Stored, pairs: Mapping[str, list[OptSchedPair]]) -> None:
    named = list(named_optimizers(pairs))
    _require_live(stored, "optimizers", [optimizer for _, optimizer, _, _ in named])
    _require_live(stored, "schedulers", [name for _, _, name, (_, scheduler) in named if scheduler is not None])


def _check_model(name: str, model: nn.Module, state: Mapping[str, Any]) -> None:
    live = model_state(model)
    lacking, additional = sorted(live.keys() - state.keys()), sorted(state.keys() - live.keys())
    if lacking or additional:
        raise ConfigurationError(
            f"models[{name!r}] does not fit: the checkpoint lacks {lacking} and has {additional} in addition; "
            "use the model, and the hooks that change it, of the run that was saved"
        )
    for key, value in state.items():
        if isinstance(live[key], Tensor) and _described(value) != _described(live[key]):
            raise ConfigurationError(
                f"models[{name!r}] does not fit: {key} has {_described(live[key])}, in the checkpoint "
                f"{_described(value)}; use the arguments that the model was trained with"
            )


def _described(value: Any) -> str:
    """Return what must be the same in a model and a checkpoint; the number of bits may differ."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    kind = "complex " if value.is_complex() else "" if value.is_floating_point() else "integer "
    layout = "" if value.layout is torch.strided else f"{value.layout} "
    return f"{layout}{kind}shape {tuple(value.shape)}"


@dataclass(frozen=True)
class _Resumed:
    """An optimizer that goes on from a saved state, with its schedule unless its config is new."""

    name: str
    where: Path
    optimizer: Optimizer
    names: Sequence[str]
    state: Mapping[str, Any]
    saved_names: Sequence[str] | None
    new_config: bool
    scheduler: Any
    schedule: Mapping[str, Any] | None

    def check(self) -> None:
        groups, where = self.state["param_groups"], str(self.where)
        held = sum(len(group["params"]) for group in groups)
        if self.saved_names is not None:
            require_same_parameters(self.name, self.names, self.saved_names)
            if len(self.saved_names) != held:
                raise StoreError(f"{where} is damaged: it has {held} parameters, named are {len(self.saved_names)}")
        if self.saved_names is None or not self.new_config:
            require_same_groups(self.name, self.names, self.optimizer.param_groups, self.saved_names, groups)
            require_same_kind([_options(group) for group in self.optimizer.param_groups], groups, f"{where}: group")
        if self.scheduler is not None and self.schedule is not None:
            require_no_methods(self.scheduler, self.schedule, f"{where}: its schedule")
            require_same_kind(self.scheduler.state_dict(), self.schedule, f"{where}: its schedule")

    def load(self) -> None:
        try:
            self._load()
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise StoreError(f"{self.where} does not fit: {type(error).__name__}: {error}") from error

    def _load(self) -> None:
        if not self.new_config:
            self.optimizer.load_state_dict(dict(self.state))
            if self.scheduler is not None and self.schedule is not None:
                self.scheduler.load_state_dict(self.schedule)
            return
        state, live = self.state, self.optimizer.state_dict()
        moments = state["state"]
        if self.saved_names is not None:
            moments = following_names(moments, state["param_groups"], self.saved_names, self.names)
        self.optimizer.load_state_dict({**state, "state": moments, "param_groups": live["param_groups"]})


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _resumed(
    pairs: Mapping[str, list[OptSchedPair]],
    stored: Stored,
    changed: Mapping[str, bool],
    names: Callable[[Optimizer], list[str]],
) -> list[_Resumed]:
    """Return the optimizers that have a saved state of their own class."""
    found = []
    for model, name, scheduler_name, (optimizer, scheduler) in named_optimizers(pairs):
        state = stored.states.get(f"optimizers/{name}")
        if state is not None and changed.get(name, True):
            saved = stored.manifest.get("associations", {}).get(model, {}).get("optimizer_parameter_names", {})
            schedule = stored.states.get(f"schedulers/{scheduler_name}")
            live = names(optimizer)
            where = stored.root / state_file(f"optimizers/{name}", stored.index)
            found.append(
                _Resumed(name, where, optimizer, live, state, saved.get(name), name in changed, scheduler, schedule)
            )
    return found


def _changed(strategy: Any, recipe: Mapping[str, Any]) -> dict[str, bool]:
    """Return the optimizers whose configs differ from the saved ones, and whether at least the class is the same."""
    saved = recipe.get("optimizer_configs", {})
    names = component_names("optimizer", strategy.optimizer_configs)
    changed = {}
    for model, configs in strategy.optimizer_configs.items():
        forms = chain(saved.get(model, ()), repeat({}))
        for name, config, form in zip(names[model], configs, forms, strict=False):
            if _form(config) != _form(form):
                changed[name] = form.get("optimizer_cls") == dotted_path(config.optimizer_cls)
    return changed


def _load_model(model: nn.Module, state: Mapping[str, Any]) -> None:
    model = unwrap_model(model)
    model.load_state_dict({name: state[plain_name(name)] for name in model.state_dict()})


def _form(config: Any) -> dict[str, Any]:
    """Return what two optimizer configs, live or saved, are compared by."""
    form = config if isinstance(config, Mapping) else json.loads(config.to_spec().model_dump_json())
    return {key: form.get(key) for key in _CONFIG_KEYS}
