"""Save a strategy, load one, restore a live one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from nvalchemi_lightning.checkpoint.layout import strategy_file
from nvalchemi_lightning.checkpoint.reading import Stored, read
from nvalchemi_lightning.checkpoint.restoring import adopt_dtypes, apply
from nvalchemi_lightning.checkpoint.snapshot import take_snapshot
from nvalchemi_lightning.checkpoint.writing import write
from nvalchemi_lightning.errors import AlchemiError, ConfigurationError
from nvalchemi_lightning.runtime import named_models
from nvalchemi_lightning.strategy_spec import strategy_from_checkpoint_dict

__all__ = ["load", "loaded", "rebuild", "restore", "save"]

StrategyT = TypeVar("StrategyT")

# What a constructor that gets wrong arguments may raise; that of pydantic is a ValueError.
_BUILD_ERRORS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def save(strategy: Any, root: str | Path, *, checkpoint_index: int = -1) -> int:
    """Save a strategy: weights, optimizers, schedulers, counters and states of hooks.

    Parameters
    ----------
    strategy : TrainingStrategy
        Anything with its fields and methods.
    root : str or Path
        The folder of checkpoints; made if absent.
    checkpoint_index : int
        A slot to fill or to overwrite; -1 is the one after the newest.

    Returns
    -------
    int
        The index of the checkpoint.

    Raises
    ------
    ConfigurationError
        If a model has no recipe, or something cannot be stored; nothing is written then.
    OSError
        If the folder cannot be written; earlier checkpoints are untouched.
    """
    return write(root, take_snapshot(strategy), checkpoint_index)


def restore(strategy: Any, root: str | Path, checkpoint_index: int = -1, map_location: Any = None) -> dict[str, Any]:
    """Load a checkpoint into a live strategy.

    Parameters
    ----------
    strategy : TrainingStrategy
        Its models, optimizers and hooks must be those of the saved run; further models are left alone. Its own
        ``devices`` say where everything lives afterwards.
    root : str or Path
        The folder, or a name in it: ``step_<K>``, ``epoch_<K>`` or ``final``.
    checkpoint_index : int
        Which one; -1 is the newest complete one.
    map_location : str or torch.device, optional
        Accepted because the reference has it; tensors are always read on the CPU first.

    Returns
    -------
    dict
        ``strategy``, ``models``, ``manifest``, ``checkpoint_index``, ``source`` and ``strategy_metadata``.

    Raises
    ------
    FileNotFoundError
        If there is no such checkpoint.
    StoreError
        If a file of it is damaged.
    LabelNotFoundError
        If it has a component that the strategy lacks. It is a `KeyError`.
    ConfigurationError
        If it does not fit the strategy, or no strategy wrote it. The strategy is not changed.
    """
    stored = read(root, checkpoint_index)
    _require_strategy(stored)
    apply(strategy, stored)
    return loaded(strategy, stored)


def loaded(strategy: Any, stored: Stored) -> dict[str, Any]:
    """Return what is told of a checkpoint that a strategy took over, see `restore`."""
    return {
        "strategy": strategy,
        "models": strategy.models,
        "manifest": stored.manifest,
        "checkpoint_index": stored.index,
        "source": {"format": "native", "path": str(stored.root)},
        "strategy_metadata": stored.strategy,
    }


def load(
    cls: type[StrategyT],
    root: str | Path,
    checkpoint_index: int = -1,
    map_location: Any = None,
    *,
    models: nn.Module | Mapping[str, nn.Module] | None = None,
    hooks: Iterable[Any] | None = None,
    training_fn: Callable[..., Any] | str | None = None,
    **overrides: Any,
) -> StrategyT:
    """Rebuild a strategy from a checkpoint.

    Parameters
    ----------
    cls : type
        What the saved class must be or derive from; its ``from_spec_dict`` builds.
    root : str or Path
        The folder, or a name in it: ``step_<K>``, ``epoch_<K>`` or ``final``.
    checkpoint_index : int
        Which one; -1 is the newest complete one.
    map_location : str or torch.device, optional
        Replaces the saved ``devices``.
    models : nn.Module or mapping of str to nn.Module, optional
        Live models that get the weights, instead of building them; all of them, by the saved names.
    hooks : iterable, optional
        The hooks of the run; those with a saved state get it back.
    training_fn : callable or str, optional
        Replaces the saved one.
    **overrides
        ``loss_target_assembler``, ``validation_config``, ``devices``, ``num_epochs``, ``num_steps`` or
        ``optimizer_configs``. An optimizer config that differs from the saved one keeps the moments, if the class of
        the optimizer is the same, takes the new hyperparameters and begins its schedule anew.

    Raises
    ------
    FileNotFoundError
        If there is no such checkpoint.
    StoreError
        If a file of it is damaged.
    ConfigurationError
        If no strategy wrote it, or a part of it cannot be built.
    UntrustedPathError
        If it names something outside the trusted packages.
    """
    arguments = {"models": models, "hooks": hooks, "training_fn": training_fn, **overrides}
    return rebuild(cls, read(root, checkpoint_index), map_location, **arguments)


def rebuild(
    cls: type[StrategyT], stored: Stored, map_location: Any = None, *, models: Any = None, **overrides: Any
) -> StrategyT:
    """Rebuild a strategy from what was read, see `load`."""
    recipe = _require_strategy(stored)
    if map_location is not None:
        overrides["devices"] = [torch.device(map_location)]
    if models is not None:
        _require_models(stored, named_models(models), "models=")
    try:
        strategy = strategy_from_checkpoint_dict(cls, recipe, models=models, **overrides)
    except AlchemiError:
        raise
    except _BUILD_ERRORS as error:
        where = stored.root / strategy_file(stored.index)
        raise ConfigurationError(f"{where}: what it describes cannot be built: {error}") from error
    _require_models(stored, strategy.models, "the recipe")
    if models is None:
        for name, model in strategy.models.items():
            adopt_dtypes(model, stored.states[f"models/{name}"])
    apply(strategy, stored, new_configs=overrides.get("optimizer_configs") is not None)
    return strategy  # type: ignore[no-any-return]


def _require_strategy(stored: Stored) -> dict[str, Any]:
    if stored.strategy is None:
        raise ConfigurationError(
            f"{stored.root} holds components only; this requires a checkpoint saved from a TrainingStrategy"
        )
    return stored.strategy


def _require_models(stored: Stored, models: Mapping[str, nn.Module], what: str) -> None:
    saved = sorted(name.partition("/")[2] for name in stored.states if name.startswith("models/"))
    if sorted(models) != saved:
        raise ConfigurationError(f"{what} has the models {sorted(models)}, the checkpoint {saved}; pass exactly these")
