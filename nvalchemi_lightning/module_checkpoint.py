"""What a checkpoint of Lightning holds of a recipe besides weights, optimizers and schedules, and a recipe from it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from nvalchemi_lightning.checkpoint.migrations import upgraded, versioned
from nvalchemi_lightning.checkpoint.moments import require_same_optimizers
from nvalchemi_lightning.checkpoint.restoring import adopt_dtypes
from nvalchemi_lightning.checkpoint.states import hook_states, load_hook_states, optimized_names, to_plain_names
from nvalchemi_lightning.errors import ConfigurationError, ConfigurationTypeError, StoreError
from nvalchemi_lightning.recipe import TrainingRecipe
from nvalchemi_lightning.resume import check_resume_states, gather_from_ranks
from nvalchemi_lightning.strategy_spec import checkpoint_dict, strategy_arguments_from_spec, strategy_class

__all__ = ["add_to_checkpoint", "check_moments", "recipe_from_checkpoint", "take_from_checkpoint"]

_KEY = "nvalchemi_lightning"
_WHERE = "the Lightning checkpoint"


def add_to_checkpoint(recipe: TrainingRecipe, checkpoint: dict[str, Any]) -> None:
    """Add recipe, states of hooks, where every rank stands, which parameters the optimizers hold, and the provenance.

    Parameters
    ----------
    recipe : TrainingRecipe
        What is trained. Every rank must call this.
    checkpoint : dict
        Changed in place; to one of weights alone the recipe alone is added. Its weights get names free of wrappers.
    """
    to_plain_names(checkpoint["state_dict"])
    checkpoint[_KEY] = versioned("lightning", {"recipe": _form(recipe)})
    if "optimizer_states" not in checkpoint:
        return
    names = optimized_names(recipe.models)
    checkpoint[_KEY] |= {
        "hooks": hook_states(recipe.hooks),
        "ranks": gather_from_ranks(recipe.resume.state()),
        "parameters": [names(optimizer) for optimizer in recipe.flat_optimizers()[0]],
        "provenance": recipe.provenance.form(),
    }


def _form(recipe: TrainingRecipe) -> dict[str, Any]:
    """Return the recipe as JSON data, or why there is none: a run that brings its own objects can do without."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Omitting")
        try:
            return checkpoint_dict(recipe)
        except (ConfigurationError, ConfigurationTypeError) as error:
            return {"omitted": str(error)}


def recipe_from_checkpoint(checkpoint: Mapping[str, Any], path: Any, **arguments: Any) -> TrainingRecipe:
    """Rebuild the recipe that `add_to_checkpoint` stored, with the weights.

    Parameters
    ----------
    checkpoint : mapping
        As it was read.
    path : str or Path
        How messages name it.
    **arguments
        See `strategy_arguments_from_spec`.

    Raises
    ------
    ConfigurationError
        If there is no recipe, or a part of it cannot be built.
    UntrustedPathError
        If it names something outside the trusted packages.
    """
    absent = {"omitted": "an AlchemiModule of this version did not write it"}
    form = _added(checkpoint, path).get("recipe", absent)
    if not isinstance(form, Mapping):
        raise StoreError(f"{path} is damaged: the recipe is {form!r:.80}")
    if "omitted" in form:
        raise ConfigurationError(
            f"{path} holds no recipe: {form['omitted']}; build AlchemiModule(...) yourself, and pass "
            f"ckpt_path={path!r} to fit, validate, test or predict"
        )
    recipe: TrainingRecipe = strategy_class(form.get("strategy_cls"), TrainingRecipe)(
        **strategy_arguments_from_spec(form, **arguments)
    )
    if arguments.get("models") is None:
        for name, model in recipe.models.items():
            prefix = f"models.{name}."
            tensors = {key.removeprefix(prefix): value for key, value in checkpoint["state_dict"].items()}
            adopt_dtypes(model, tensors)
    return recipe


def take_from_checkpoint(recipe: TrainingRecipe, checkpoint: Mapping[str, Any]) -> None:
    """Take over the states of hooks, and where every rank stands.

    Parameters
    ----------
    recipe : TrainingRecipe
        Its hooks are built.
    checkpoint : mapping
        As it was read; one that a plain LightningModule wrote has nothing to take.

    Raises
    ------
    StoreError
        If it is damaged.
    ConfigurationError
        If a newer version of this package wrote it.
    """
    added = _added(checkpoint, _WHERE)
    if "hooks" in added:
        _check_training(added)
        load_hook_states(recipe.hooks, added["hooks"], _WHERE)
        recipe.resume.load(added["ranks"])


def _added(checkpoint: Mapping[str, Any], where: Any) -> dict[str, Any]:
    """Return what this package added, as its present version has it; empty if it added nothing."""
    if _KEY not in checkpoint:
        return {}
    added = checkpoint[_KEY]
    if not isinstance(added, Mapping):
        raise StoreError(f"{where} is damaged: {_KEY} is {added!r:.80}")
    return upgraded("lightning", added, where)


def _check_training(added: Mapping[str, Any]) -> None:
    check_resume_states(added.get("ranks"), _WHERE)
    if not isinstance(added["hooks"], Mapping):
        raise StoreError(f"{_WHERE} is damaged: the states of hooks are {added['hooks']!r:.80}")
    names = added.get("parameters")
    if not isinstance(names, list) or not all(isinstance(each, list) for each in names):
        raise StoreError(f"{_WHERE} is damaged: the names of parameters are {names!r:.80}")


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
    added = _added(checkpoint, _WHERE)
    if "parameters" in added:
        optimizers, names = recipe.flat_optimizers()[0], optimized_names(recipe.models)
        pairs = zip(map(names, optimizers), added["parameters"], strict=False)
        require_same_optimizers(optimizers, checkpoint["optimizer_states"], list(pairs))
