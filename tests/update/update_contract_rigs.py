"""The hooks that come with the package, a line each, and what every one of them is run on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from update_rigs import adam
from update_window_rigs import Potential, cut, labelled, three_terms

from nvalchemi_lightning import hooks
from nvalchemi_lightning.data import Batch
from nvalchemi_lightning.specs import create_model_spec, create_model_spec_from_json
from nvalchemi_lightning.strategy import TrainingStrategy

TABLE: dict[str, dict[str, Any]] = {
    "GradientAccumulationHook": {"steps": 2, "normalize": "batch"},
    "MixedPrecisionHook": {"precision": "fp16"},
    "GradientClipHook": {"max_norm": 0.1},
    "SpikeSkipHook": {"factor": 3.0, "min_history": 1},
    "EMAHook": {"decay": 0.5},
    "CheckpointHook": {"checkpoint_dir": "checkpoints", "step_interval": 1},
    "NeighborListHook": {"cutoff": 2.0},
    "StageTimingHook": {"profiled_stages": "all", "log_path": "times.csv"},
    "TorchProfilerHook": {"output_dir": "profiles", "record_shapes": False},
    "TraceHook": {},
}
"""A new hook joins with one line: the name of its class, and arguments that a job file could hold."""


def make(name: str) -> Any:
    """Return a fresh hook."""
    return getattr(hooks, name)(**TABLE[name])


def from_spec(name: str) -> Any:
    """Return a fresh hook by way of the JSON that a job file holds."""
    spec = create_model_spec(getattr(hooks, name), **TABLE[name])
    return create_model_spec_from_json(json.loads(spec.model_dump_json())).build()


STRUCTURES = 16


def fields(*hooks: Any) -> dict[str, Any]:
    """Return the fields of a recipe: energy, forces and stress, and Adam, whose state shows a step too many."""
    return {
        "models": Potential(),
        "optimizer_configs": adam(0.05),
        "loss_fn": three_terms(),
        "hooks": list(hooks),
        "num_epochs": 2,
    }


def recipe(*hooks: Any) -> TrainingStrategy:
    """Return a strategy with these hooks."""
    return TrainingStrategy(**fields(*hooks))


def loader(size: int) -> list[Batch]:
    """Return all structures in batches of one size; the sizes of the structures differ."""
    return cut(labelled(STRUCTURES, seed=2), [size] * (STRUCTURES // size))


def numbers(*values: Any) -> list[float]:
    """Return every number in nested states, in order."""
    return [number for value in values for number in _numbers(value)]


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, Tensor):
        yield from value.detach().double().flatten().tolist()
    elif isinstance(value, Mapping):
        for key in sorted(value):
            yield from _numbers(value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, int | float):
        yield float(value)


def result(what: Any, hook: Any) -> list[float]:
    """Return the weights, the counters but the global one, and the state of the hook."""
    counters = {name: count for name, count in vars(what.counters).items() if name != "global_step_count"}
    state = hook.state_dict() if hasattr(hook, "state_dict") else {}
    return numbers(list(what.models["main"].parameters()), counters, state)


def close(ours: list[float], theirs: list[float]) -> bool:
    """Return whether two results agree to 1e-12."""
    pair = [torch.tensor(values, dtype=torch.float64) for values in (ours, theirs)]
    return torch.allclose(*pair, rtol=1e-12, atol=1e-12, equal_nan=True)
