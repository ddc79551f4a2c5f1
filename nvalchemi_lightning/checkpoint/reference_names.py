"""The names under which the reference knows what this package has too.

Files are written with the names of the reference, so that it can read them; `specs.own_path` leads back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nvalchemi_lightning.errors import AlchemiError
from nvalchemi_lightning.specs import dotted_path, own_path, resolve

__all__ = ["in_own_names", "in_reference_names"]

_TRAINING = "nvalchemi.training"
_TERMS = {
    "energy": ("EnergyHuberLoss", "EnergyMAELoss", "EnergyMSELoss"),
    "forces": ("ForceHuberLoss", "ForceL2NormLoss", "ForceMSELoss"),
    "stress": ("StressHuberLoss", "StressMSELoss"),
}
_SCHEDULES = ("ConstantWeight", "CosineWeight", "LinearWeight", "PiecewiseWeight")

_REFERENCE_NAMES = {
    # The reference trains nothing but strategies; a recipe that a Trainer was brought for reads as one.
    "recipe.TrainingRecipe": f"{_TRAINING}.strategy.TrainingStrategy",
    "strategy.TrainingStrategy": f"{_TRAINING}.strategy.TrainingStrategy",
    "training_fn.default_training_fn": f"{_TRAINING}.strategy.default_training_fn",
    "optim.config.OptimizerConfig": f"{_TRAINING}.optimizers.OptimizerConfig",
    "losses.composition.ComposedLossFunction": f"{_TRAINING}.losses.composition.ComposedLossFunction",
    **{f"losses.{file}.{name}": f"{_TRAINING}.losses.terms.{name}" for file, names in _TERMS.items() for name in names},
    **{f"losses.schedules.{name}": f"{_TRAINING}.losses.schedules.{name}" for name in _SCHEDULES},
    "hooks.ema.EMAHook": f"{_TRAINING}.hooks.ema.EMAHook",
    "models.demo.DemoModel": "nvalchemi.models.demo.DemoModel",
    "models.demo.DemoModelWrapper": "nvalchemi.models.demo.DemoModelWrapper",
}


def in_reference_names(form: Any) -> Any:
    """Return JSON data with every dotted path of ours that the reference has too replaced by its path there.

    Parameters
    ----------
    form : Any
        JSON data, or one dotted path.
    """
    if isinstance(form, Mapping):
        return {key: in_reference_names(item) for key, item in form.items()}
    if isinstance(form, list | tuple):
        return [in_reference_names(item) for item in form]
    if isinstance(form, str) and form.startswith("nvalchemi_lightning."):
        return _REFERENCE_NAMES.get(form.partition(".")[2], form)
    return form


def in_own_names(path: str) -> str:
    """Return where a class that a file names is defined here, or the path itself if it has no counterpart.

    Parameters
    ----------
    path : str
        A dotted path. Nothing is imported but this package.
    """
    own = own_path(path)
    try:
        return path if own is None else dotted_path(resolve(own))
    except AlchemiError:  # a name of ours that is not what it seems: nothing to compare with
        return path
