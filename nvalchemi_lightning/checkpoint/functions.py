"""Save and load whatever a checkpoint may hold: a strategy, or components alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nvalchemi_lightning.checkpoint.components import CheckpointManifest, Parts, load_components, save_components
from nvalchemi_lightning.checkpoint.reading import read
from nvalchemi_lightning.checkpoint.saving import loaded, rebuild, restore, save
from nvalchemi_lightning.errors import ConfigurationError
from nvalchemi_lightning.recipe import TrainingRecipe

__all__ = ["load_checkpoint", "save_checkpoint"]


def save_checkpoint(
    root: str | Path,
    strategy: Any = None,
    *,
    models: Parts | None = None,
    optimizers: Parts | None = None,
    schedulers: Parts | None = None,
    associations: Mapping[str, Any] | None = None,
    checkpoint_index: int = -1,
) -> int:
    """Save a strategy, or models and what trains them without one.

    Parameters
    ----------
    root : str or Path
        The folder of checkpoints; made if absent.
    strategy : TrainingStrategy, optional
        What ``strategy.save_checkpoint`` saves. Either this or ``models``.
    models, optimizers, schedulers : mapping of str to tuple, optional
        Object and recipe (`create_model_spec`) by name.
    associations : mapping, optional
        See `CheckpointManifest`. Default: an optimizer belongs to the models whose parameters it holds, a scheduler
        to the optimizer that it steps.
    checkpoint_index : int
        A slot to fill or to overwrite; -1 is the one after the newest.

    Returns
    -------
    int
        The index of the checkpoint.

    Raises
    ------
    ConfigurationError
        If there is neither a strategy nor a model, or both; or something cannot be stored. Nothing is written then.
    OSError
        If the folder cannot be written; earlier checkpoints are untouched.
    """
    if strategy is None:
        return save_components(root, models or {}, optimizers or {}, schedulers or {}, associations, checkpoint_index)
    parts = {"models": models, "optimizers": optimizers, "schedulers": schedulers, "associations": associations}
    _require_none("a strategy is saved with its own components", parts)
    return save(strategy, root, checkpoint_index=checkpoint_index)


def load_checkpoint(
    root: str | Path,
    checkpoint_index: int = -1,
    map_location: Any = None,
    model_names: Iterable[str] | None = None,
    *,
    strategy: Any = None,
    **arguments: Any,
) -> dict[str, Any] | CheckpointManifest:
    """Load a checkpoint: as a strategy if one wrote it, otherwise its components.

    Parameters
    ----------
    root : str or Path
        The folder, or a name in it: ``step_<K>``, ``epoch_<K>`` or ``final``.
    checkpoint_index : int
        Which one; -1 is the newest complete one.
    map_location : str or torch.device, optional
        Where models go. Default: the saved ``devices`` of a strategy, otherwise the CPU.
    model_names : iterable of str, optional
        Load these models with their optimizers and schedulers, also from the checkpoint of a strategy, and no
        strategy.
    strategy : TrainingStrategy, optional
        A live strategy that takes over the checkpoint, instead of a new one.
    **arguments
        ``models``, ``hooks``, ``training_fn`` and overrides for the new strategy, see
        ``TrainingStrategy.load_checkpoint``.

    Returns
    -------
    dict or CheckpointManifest
        ``strategy``, ``models``, ``manifest``, ``checkpoint_index``, ``source`` and ``strategy_metadata``; or the
        components.

    Raises
    ------
    FileNotFoundError
        If there is no such checkpoint.
    StoreError
        If a file of it is damaged.
    ConfigurationError
        If arguments contradict each other or what was saved, or a part cannot be built.
    UntrustedPathError
        If it names something outside the trusted packages.
    """
    if strategy is not None:
        _require_none(f"{root} is loaded into strategy=", {**arguments, "model_names": model_names})
        return restore(strategy, root, checkpoint_index, map_location)
    stored = read(root, checkpoint_index)
    if model_names is None and stored.strategy is not None:
        return loaded(rebuild(TrainingRecipe, stored, map_location, **arguments), stored)
    _require_none(f"the components of {root} are loaded without a strategy", arguments)
    return load_components(stored, map_location, model_names)


def _require_none(what: str, arguments: Mapping[str, Any]) -> None:
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        raise ConfigurationError(f"{what}, so {', '.join(given)} would be ignored; leave that out")
