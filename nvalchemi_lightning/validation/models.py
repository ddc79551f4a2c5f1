"""Which weights a validation pass evaluates: the live ones or the averaged ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torch import nn

from nvalchemi_lightning.errors import TrainingStateError

if TYPE_CHECKING:
    from nvalchemi_lightning.recipe import TrainingRecipe

__all__ = ["evaluated_models"]


def evaluated_models(
    recipe: TrainingRecipe, use_ema: Literal["auto", "always", "never"]
) -> tuple[dict[str, nn.Module], str, list[str]]:
    """Choose the models of a pass; the live weights are never swapped.

    Parameters
    ----------
    recipe : TrainingRecipe
        Its ``inference_model`` slot holds averaged weights, if there are any.
    use_ema : {"auto", "always", "never"}
        Use the slot where it has a model, demand it for every model, or ignore it.

    Returns
    -------
    dict, str, list of str
        The models, ``"live"``, ``"ema"`` or ``"mixed"``, and the names of the averaged ones.

    Raises
    ------
    TrainingStateError
        If ``use_ema="always"`` and the slot lacks a model.
    """
    averaged = {} if use_ema == "never" else _averaged(recipe)
    missing = sorted(set(recipe.models) - set(averaged))
    if use_ema == "always" and missing:
        raise TrainingStateError(
            f"use_ema='always', but the inference_model slot lacks averaged weights, missing: {missing}; "
            "register an EMAHook for each or use 'auto'"
        )
    source = "live" if not averaged else "mixed" if missing else "ema"
    return {**recipe.models, **averaged}, source, sorted(averaged)


def _averaged(recipe: TrainingRecipe) -> dict[str, nn.Module]:
    slot = recipe.inference_model
    if slot is None:
        return {}
    if isinstance(slot, nn.ModuleDict) and not recipe.single_model_input:
        return {name: module for name, module in slot.items() if name in recipe.models}
    return {"main": slot} if "main" in recipe.models else {}
