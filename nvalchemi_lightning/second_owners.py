"""Trainer options and callbacks that would be a second owner of gradients or weights, and what to use instead."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
    WeightAveraging,
)

from nvalchemi_lightning.errors import ConfigurationError, SecondOwnerError
from nvalchemi_lightning.hooks.lifecycle import each_hook

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["refuse_second_owners", "refuse_two_precisions"]

_CALLBACKS = {
    GradientAccumulationScheduler: "the GradientAccumulationHook",
    StochasticWeightAveraging: "the EMAHook",
    WeightAveraging: "the EMAHook",
    LearningRateFinder: "OptimizerConfig(lr=...) of a few short runs",
    BatchSizeFinder: "the loader's batch_size",
}


def refuse_second_owners(trainer: Trainer) -> None:
    """Refuse a Trainer that would touch gradients or weights beside the owner.

    Parameters
    ----------
    trainer : Trainer
        As its user configured it.

    Raises
    ------
    SecondOwnerError
        For gradient clipping, accumulation and mixed precision by the Trainer, and for callbacks that change
        gradients, weights or schedulers.
    ConfigurationError
        For a validation interval given as a fraction of an epoch, and for loaders that are built anew.
    """
    clip, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
    instead = f"hooks=[GradientClipHook({'max_value' if algorithm == 'value' else 'max_norm'}={clip or '...'})]"
    if clip is not None:
        _refuse(f"Trainer(gradient_clip_val={clip!r})", instead)
    if algorithm is not None:
        _refuse(f"Trainer(gradient_clip_algorithm={algorithm!r})", instead)
    if trainer.accumulate_grad_batches != 1:
        _refuse(
            f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches})",
            f"hooks=[GradientAccumulationHook({trainer.accumulate_grad_batches})]",
        )
    if "mixed" in str(trainer.precision):
        half = "fp16" if str(trainer.precision).startswith("16") else "bf16"
        _refuse(f"Trainer(precision={trainer.precision!r})", f"hooks=[MixedPrecisionHook(precision={half!r})]")
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind, instead in _CALLBACKS.items():
            if isinstance(callback, kind):
                _refuse(f"the callback {type(callback).__name__}", instead)
    _refuse_contradictions(trainer)


def refuse_two_precisions(trainer: Trainer, hooks: Iterable[Any]) -> None:
    """Refuse a Trainer that converts the models while a hook runs them under autocast.

    Parameters
    ----------
    trainer : Trainer
        As its user configured it.
    hooks : iterable
        The hooks of the run.

    Raises
    ------
    ConfigurationError
        If both set a precision.
    """
    owners = [type(hook).__name__ for hook in each_hook(hooks) if hasattr(hook, "inference_autocast")]
    if owners and str(trainer.precision) != "32-true":
        raise ConfigurationError(
            f"Trainer(precision={trainer.precision!r}) and the {owners[0]} both set the precision; leave the Trainer's "
            "out for mixed precision, or the hook to convert the models as a whole"
        )


def _refuse_contradictions(trainer: Trainer) -> None:
    reload: int = getattr(trainer, "reload_dataloaders_every_n_epochs", 0)
    if reload:
        raise ConfigurationError(
            f"Trainer(reload_dataloaders_every_n_epochs={reload}) would lose the "
            "position in the data; leave it out and let the loader's set_epoch change what an epoch holds"
        )
    interval = trainer.val_check_interval
    if isinstance(interval, float) and interval != 1.0:
        raise ConfigurationError(
            f"Trainer(val_check_interval={interval}) counts batches; write ValidationConfig(every_n_steps=...) or an "
            "integer, which is read as executed optimizer steps"
        )


def _refuse(what: str, instead: str) -> None:
    raise SecondOwnerError(
        f"{what} would be a second owner of the update beside the strategy; leave it out and use {instead}"
    )
