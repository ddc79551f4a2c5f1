"""The update hooks that come with the package, a line each, and what every one of them is run on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from update_rigs import adam
from update_window_rigs import Potential, cut, labelled, three_terms

from nvalchemi_lightning.data import Batch
from nvalchemi_lightning.hooks import (
    EMAHook,
    GradientAccumulationHook,
    GradientClipHook,
    MixedPrecisionHook,
    SpikeSkipHook,
    TrainingUpdateHook,
)
from nvalchemi_lightning.strategy import TrainingStrategy

TABLE: dict[str, Callable[[], TrainingUpdateHook]] = {
    "GradientAccumulationHook": lambda: GradientAccumulationHook(2, normalize="batch"),
    "MixedPrecisionHook": lambda: MixedPrecisionHook(precision="fp16"),
    "GradientClipHook": lambda: GradientClipHook(max_norm=0.1),
    "SpikeSkipHook": lambda: SpikeSkipHook(factor=3.0, min_history=1),
    "EMAHook": lambda: EMAHook(decay=0.5),
}
"""A new update hook joins with one line; its class must make a fresh hook at every call."""

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
