"""What a checkpoint of Lightning holds of a recipe besides weights, optimizers and schedules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nvalchemi_lightning.checkpoint.moments import require_same_optimizers
from nvalchemi_lightning.checkpoint.states import hook_states, load_hook_states, optimized_names
from nvalchemi_lightning.recipe import TrainingRecipe
from nvalchemi_lightning.resume import gather_from_ranks

__all__ = ["add_to_checkpoint", "check_moments", "take_from_checkpoint"]

_KEY = "nvalchemi_lightning"


def add_to_checkpoint(recipe: TrainingRecipe, checkpoint: dict[str, Any]) -> None:
    """Add the states of hooks, where every rank stands, which parameters the optimizers hold, and the provenance.

    Parameters
    ----------
    recipe : TrainingRecipe
        What is trained. Every rank must call this.
    checkpoint : dict
        Changed in place, unless it is one of weights alone.
    """
    if "optimizer_states" not in checkpoint:
        return
    names = optimized_names(recipe.models)
    checkpoint[_KEY] = {
        "hooks": hook_states(recipe.hooks),
        "ranks": gather_from_ranks(recipe.resume.state()),
        "parameters": [names(optimizer) for optimizer in recipe.flat_optimizers()[0]],
        "provenance": recipe.provenance.form(),
    }


def take_from_checkpoint(recipe: TrainingRecipe, checkpoint: Mapping[str, Any]) -> None:
    """Take over the states of hooks, and where every rank stands.

    Parameters
    ----------
    recipe : TrainingRecipe
        Its hooks are built.
    checkpoint : mapping
        As it was read; one that a plain LightningModule wrote has nothing to take.
    """
    added = checkpoint.get(_KEY)
    if added is not None:
        load_hook_states(recipe.hooks, added["hooks"])
        recipe.resume.load(added["ranks"])


def check_moments(recipe: TrainingRecipe, checkpoint: Mapping[str, Any]) -> None:
    """Refuse the optimizers of a checkpoint whose moments would land on other parameters: they are stored by number.

    Parameters
    ----------
    recipe : TrainingRecipe
        Its optimizers exist.
    checkpoint : mapping
        As it was read.

    Raises
    ------
    ConfigurationError
        If they hold other parameters, or in other groups.
    """
    if _KEY in checkpoint:
        optimizers, names = recipe.flat_optimizers()[0], optimized_names(recipe.models)
        pairs = zip(map(names, optimizers), checkpoint[_KEY]["parameters"], strict=False)
        require_same_optimizers(optimizers, checkpoint["optimizer_states"], list(pairs))
