"""Checkpoints of models, optimizers and schedulers that no strategy holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from nvalchemi_lightning.checkpoint.kinds import require_no_methods
from nvalchemi_lightning.checkpoint.layout import is_folder_name, read_json, spec_file
from nvalchemi_lightning.checkpoint.provenance import RunProvenance
from nvalchemi_lightning.checkpoint.reading import Stored
from nvalchemi_lightning.checkpoint.reference_names import in_reference_names
from nvalchemi_lightning.checkpoint.restoring import adopt_dtypes
from nvalchemi_lightning.checkpoint.snapshot import Snapshot
from nvalchemi_lightning.checkpoint.states import copied, model_state
from nvalchemi_lightning.checkpoint.writing import write
from nvalchemi_lightning.errors import ConfigurationError, ConfigurationTypeError, LabelNotFoundError, nearest
from nvalchemi_lightning.runtime import move_to_devices
from nvalchemi_lightning.specs import BaseSpec, create_model_spec_from_json, without_timestamps

__all__ = ["CheckpointManifest", "load_components", "save_components"]

Parts: TypeAlias = Mapping[str, tuple[Any, BaseSpec]]
"""Objects and their recipes by name."""

_SCHEDULES = (LRScheduler, ReduceLROnPlateau)


@dataclass(frozen=True)
class CheckpointManifest:
    """The components of a checkpoint, alive.

    Attributes
    ----------
    checkpoint_index : int
        Which checkpoint of the folder.
    models, optimizers, schedulers : dict of str to tuple
        Object and recipe by name.
    associations : dict of str to dict
        By model: its ``optimizers``, its ``schedulers`` and the ``scheduler_optimizers``.
    """

    checkpoint_index: int
    models: dict[str, tuple[nn.Module, BaseSpec]]
    optimizers: dict[str, tuple[Optimizer, BaseSpec]]
    schedulers: dict[str, tuple[Any, BaseSpec]]
    associations: dict[str, Any]


def save_components(
    root: str | Path,
    models: Parts,
    optimizers: Parts,
    schedulers: Parts,
    associations: Mapping[str, Any] | None,
    index: int,
) -> int:
    """Save components, see `save_checkpoint`."""
    if not models:
        raise ConfigurationError("save_checkpoint needs a strategy, or models={name: (module, spec)}")
    parts = {"models": models, "optimizers": optimizers, "schedulers": schedulers}
    named = {f"{kind}/{name}": part for kind, listed in parts.items() for name, part in listed.items()}
    for component, part in named.items():
        _check_part(component, part)
    specs = {component: in_reference_names(spec.model_dump()) for component, (_, spec) in named.items()}
    for component, spec in specs.items():
        _require_same_recipe(Path(root) / spec_file(component), spec)
    snapshot = Snapshot(
        strategy=None,
        specs=specs,
        states={component: copied(_state(part), component) for component, (part, _) in named.items()},
        hooks={},
        resume={},
        associations=dict(_associations(models, optimizers, schedulers) if associations is None else associations),
        metrics={},
        provenance=RunProvenance().form(),
    )
    return write(root, snapshot, index)


def _check_part(component: str, part: Any) -> None:
    name = component.partition("/")[2]
    if not is_folder_name(name):
        raise ConfigurationError(f"{component}: {name!r} cannot be a folder name; choose another")
    if not (isinstance(part, tuple) and len(part) == 2 and isinstance(part[1], BaseSpec)):
        raise ConfigurationTypeError(
            f"{component} must be a pair of the object and its recipe (see create_model_spec); got {part!r:.80}"
        )


def _state(part: Any) -> Any:
    return model_state(part) if isinstance(part, nn.Module) else part.state_dict()


def _require_same_recipe(path: Path, spec: Mapping[str, Any]) -> None:
    """Refuse to change a recipe by which earlier checkpoints are built."""
    if not path.exists():
        return
    here, new = without_timestamps(read_json(path)), without_timestamps(spec)
    if here != new:
        fields = [key for key in {**here, **new} if here.get(key) != new.get(key)]
        listed = ", ".join(f"{key}: {here.get(key)!r} -> {new.get(key)!r}" for key in fields)
        raise ConfigurationError(
            f"{path} disagrees with the spec being saved. Differing fields: {listed}. Save to another folder"
        )


def _associations(models: Parts, optimizers: Parts, schedulers: Parts) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (optimizer, _) in optimizers.items():
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        owners = [key for key, (model, _) in models.items() if any(id(p) in held for p in model.parameters())]
        if not owners:
            raise ConfigurationError(f"optimizers[{name!r}] holds no parameter of {sorted(models)}; save its model too")
        for owner in owners:
            entry = found.setdefault(owner, {"optimizers": [], "schedulers": [], "scheduler_optimizers": {}})
            stepping = [key for key, (scheduler, _) in schedulers.items() if scheduler.optimizer is optimizer]
            entry["optimizers"].append(name)
            entry["schedulers"] += stepping
            entry["scheduler_optimizers"].update(dict.fromkeys(stepping, name))
    return found


def load_components(stored: Stored, map_location: Any, model_names: Iterable[str] | None) -> CheckpointManifest:
    """Build components and load their states, see `load_checkpoint`."""
    saved = [name.partition("/")[2] for name in stored.states if name.startswith("models/")]
    wanted = saved if model_names is None else list(model_names)
    for name in wanted:
        if name not in saved:
            raise LabelNotFoundError(f"{stored.root} has no model {name!r}; it has {saved}{nearest(name, saved)}")
    models = {name: _built(stored, f"models/{name}", nn.Module) for name in wanted}
    if map_location is not None:
        move_to_devices({name: model for name, (model, _) in models.items()}, [torch.device(map_location)])
    known = stored.manifest.get("associations", {})
    associations = {name: known[name] for name in wanted if name in known}
    optimizers = {
        name: _built(stored, f"optimizers/{name}", Optimizer, parameters)
        for name, parameters in _trained(associations, models).items()
    }
    schedulers = {
        name: _built(stored, f"schedulers/{name}", _SCHEDULES, optimizers[optimizer][0])
        for entry in associations.values()
        for name, optimizer in entry.get("scheduler_optimizers", {}).items()
    }
    return CheckpointManifest(stored.index, models, optimizers, schedulers, associations)


def _trained(associations: Mapping[str, Any], models: Parts) -> dict[str, list[nn.Parameter]]:
    """Return the parameters of each optimizer, in its order: those that are named, or all of its models."""
    trained: dict[str, list[nn.Parameter]] = {}
    live = {f"{name}.{key}": p for name, (model, _) in models.items() for key, p in model.named_parameters()}
    for owner, entry in associations.items():
        for name in entry.get("optimizers", ()):
            named = entry.get("optimizer_parameter_names", {}).get(name)
            own = [key for key in live if key.startswith(f"{owner}.")] if named is None else named
            trained.setdefault(name, []).extend(live[key] for key in own if key in live)
    return trained


def _built(stored: Stored, component: str, kind: Any, *arguments: Any) -> tuple[Any, BaseSpec]:
    """Return a component with its state, and its recipe."""
    spec = create_model_spec_from_json(read_json(stored.root / spec_file(component)), kind=kind)
    built, state = spec.build(*arguments), stored.states[component]
    if isinstance(built, nn.Module):
        adopt_dtypes(built, state)
    elif isinstance(built, _SCHEDULES):
        require_no_methods(built, state, f"{stored.root}: {component}")
    try:
        built.load_state_dict(state)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{stored.root}: the state of {component} does not fit its recipe: {error}; if a strategy wrote it, load "
            "the strategy, which also knows how parameters are grouped and how hooks change models"
        ) from error
    return built, spec
