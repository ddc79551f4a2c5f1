"""Prove that a strategy would come back from a checkpoint."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from itertools import chain, islice
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from nvalchemi_lightning.checkpoint.reference_names import in_reference_names
from nvalchemi_lightning.checkpoint.saving import load
from nvalchemi_lightning.checkpoint.snapshot import Snapshot, take_snapshot
from nvalchemi_lightning.checkpoint.states import model_state, plain_name
from nvalchemi_lightning.checkpoint.writing import write
from nvalchemi_lightning.errors import AlchemiError, ConfigurationError
from nvalchemi_lightning.resume import keeping_random_states
from nvalchemi_lightning.runtime import unwrap_model
from nvalchemi_lightning.specs import without_timestamps
from nvalchemi_lightning.strategy_extras import EXTRAS, stored_hooks

__all__ = ["rehearse"]

_SHOWN = 8

# The rehearsal lives on the CPU, and what an override replaces is not to come back.
_NOT_COMPARED = ("devices", EXTRAS)

_ADVICE = {
    "strategy": "what the recipe holds must come back from it unchanged",
    "specs": "store constructor arguments unchanged (self.<name> = <name>), or implement checkpoint_spec()",
    "states": "keep what is trained in parameters and buffers, and what an optimizer needs in its state_dict()",
    "hooks": "return it from state_dict() and take it back in load_state_dict()",
    "buffers": "a buffer with persistent=False is not saved: let __init__ compute it, or make it persistent",
}


def rehearse(strategy: Any, **arguments: Any) -> None:
    """Save a strategy, rebuild it as a resumed run would, and compare.

    Parameters
    ----------
    strategy : TrainingStrategy
        The live strategy. It is not changed: neither weights, optimizers, counters nor random states.
    **arguments
        What will be passed to ``load_checkpoint``, such as ``training_fn`` or ``models``. Hooks that are not passed
        are rebuilt from the recipe as far as it holds them.

    Raises
    ------
    ConfigurationError
        If the strategy cannot be saved or rebuilt, or something would not come back; it names the places and what
        to write.

    Notes
    -----
    The cost is that of writing one checkpoint to a temporary folder (``TMPDIR``) and reading it, and the main memory
    for three more copies of weights and optimizer states, one of them the rebuilt models. Nothing is allocated on a
    GPU. No batch is needed and none is computed.
    """
    with keeping_random_states(), _quiet(), strategy.trying_optimizers():
        saved = take_snapshot(strategy)
        again = _rebuilt(strategy, saved, arguments)
        lost = list(islice(_lost(strategy, saved, again, arguments), _SHOWN + 1))
    if lost:
        listed = "\n".join(f"  {line}" for line in lost[:_SHOWN]) + ("\n  ..." if len(lost) > _SHOWN else "")
        raise ConfigurationError(f"this strategy would not come back from its checkpoint:\n{listed}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Drop the warnings about what a resumed run has to be given: without it, the rebuilding fails and says so."""
    with warnings.catch_warnings():
        for text in ("Omitting non-importable", "the checkpoint has"):
            warnings.filterwarnings("ignore", text)
        yield


def _rebuilt(strategy: Any, saved: Snapshot, arguments: Mapping[str, Any]) -> Any:
    options = dict(arguments)
    if not {"validation_config", "validation_data"} & set(options):
        options["validation_config"] = strategy.validation_config
    if options.get("hooks") is None:
        options["hooks"] = list(_hooks(saved.strategy or {}))
    with TemporaryDirectory(prefix="rehearsal_") as folder:
        write(folder, saved)
        try:
            return load(type(strategy), folder, map_location="cpu", **options)
        except AlchemiError as error:
            raise ConfigurationError(f"this strategy could not be resumed from its checkpoint: {error}") from error


def _hooks(recipe: Mapping[str, Any]) -> Iterator[Any]:
    for build in stored_hooks(recipe):
        try:
            yield build()
        except AlchemiError:  # a hook of the script, which a resumed run is given
            continue


def _lost(strategy: Any, saved: Snapshot, again: Any, arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for everything that is not as it was."""
    before, after = _comparable(saved), _comparable(take_snapshot(again))
    for key in {*_NOT_COMPARED, *arguments} & set(before["strategy"]):
        after["strategy"][key] = before["strategy"][key]
    if "optimizer_configs" in arguments:
        for part in ("specs", "states"):
            before[part], after[part] = _models_only(before[part]), _models_only(after[part])
    before["hooks"] = {key: state for key, state in before["hooks"].items() if key in after["hooks"]}
    before["buffers"], after["buffers"] = _unsaved(strategy.models), _unsaved(again.models)
    for part, advice in _ADVICE.items():
        for line in _differences(before[part], after[part], part):
            yield f"{line}; {advice}"


def _comparable(snapshot: Snapshot) -> dict[str, Any]:
    found = {field.name: getattr(snapshot, field.name) for field in fields(snapshot)}
    return {**found, **{name: without_timestamps(in_reference_names(found[name])) for name in ("strategy", "specs")}}


def _models_only(parts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: part for name, part in parts.items() if name.startswith("models/")}


def _unsaved(models: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return the buffers that are in no state_dict, on the CPU."""
    found = {}
    for key, model in models.items():
        saved = model_state(model)
        for name, buffer in unwrap_model(model).named_buffers():
            if plain_name(name) not in saved:
                found[f"{key}.{plain_name(name)}"] = buffer.detach().cpu()
    return found


def _differences(one: Any, other: Any, where: str) -> Iterator[str]:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in chain(one, (key for key in other if key not in one)):
            place = f"{where}.{str(key).replace('/', '.')}"
            if key not in other or key not in one:
                yield f"{place} would be {'lost' if key in one else 'new'}"
            else:
                yield from _differences(one[key], other[key], place)
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from _differences(left, right, f"{where}[{index}]")
    elif not _same(one, other):
        yield f"{where} is {_shown(one)} and would come back as {_shown(other)}"


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and bool(torch.eq(one, other).logical_or(one.isnan() & other.isnan()).all())
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return type(one) is type(other) and bool(one == other)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype}, shape {tuple(value.shape)}, beginning {value.flatten()[:3].tolist()}"
    return f"{value!r:.80}"
