"""Where the numbers of a run go: progress bar, callbacks and loggers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from nvalchemi_lightning import _lightning
from nvalchemi_lightning.context import TrainContext
from nvalchemi_lightning.errors import TrainingStateError
from nvalchemi_lightning.scalars import step_scalars, summary_scalars, to_floats

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

__all__ = ["called_for", "log_step", "log_summary"]

# Of a validation summary, the progress bar shows these, under names that leave room for the numbers.
_ON_BAR = {"total_loss": "val_loss", "energy_mae": "energy_mae", "forces_mae": "forces_mae"}


def called_for(trainer: Any) -> str:
    """Return what a Trainer was called for: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``."""
    return str(trainer.state.fn.value)


def log_step(module: LightningModule, ctx: TrainContext, extra: Mapping[str, Tensor | float]) -> None:
    """Log losses, learning rates and what hooks asked for; the one transfer from the device per logging cadence.

    Parameters
    ----------
    module : LightningModule
        The running module.
    ctx : TrainContext
        The context of the batch that is done.
    extra : mapping of str to Tensor or float
        Further scalars by tag.

    Raises
    ------
    TrainingStateError
        If the loss is NaN although a step was taken.
    """
    scalars = to_floats({**step_scalars(ctx), **extra})
    if math.isnan(scalars["loss/total"]):
        raise TrainingStateError(
            f"the loss is NaN at step {ctx.step_count} of epoch {ctx.epoch}, and by now the weights are too; "
            "go back to a checkpoint, look at the data and the learning rate, or add a SpikeSkipHook, which skips such "
            "steps and names their structures"
        )
    _lightning.show(module.trainer, {"loss": scalars["loss/total"]})
    _to_loggers(module, scalars, ctx.step_count)


def log_summary(module: LightningModule, summary: Mapping[str, Any], *, step: int) -> None:
    """Log a validation summary, for monitoring callbacks too.

    Parameters
    ----------
    module : LightningModule
        The running module.
    summary : mapping
        The summary, reduced over the ranks.
    step : int
        Executed optimizer steps.
    """
    if module.trainer.barebones:  # the user wants no logging at all
        return
    scalars, fitting = summary_scalars(summary), called_for(module.trainer) == "fit"
    # The numbers are reduced already and every rank logs them: these flags keep Lightning from reducing again.
    options: dict[str, Any] = {"sync_dist": True, "rank_zero_only": True, "batch_size": 1}
    module.log_dict(dict(scalars), logger=False if fitting else None, **options)
    if fitting:
        tag = summary["name"]
        shown = {short: scalars[f"{tag}/{key}"] for key, short in _ON_BAR.items() if f"{tag}/{key}" in scalars}
        _lightning.show(module.trainer, shown)
        _to_loggers(module, scalars, step)


def _to_loggers(module: LightningModule, scalars: Mapping[str, float], step: int) -> None:
    # Lightning would log against the number of batches; loggers get the number of executed steps.
    for logger in module.trainer.loggers:
        logger.log_metrics(dict(scalars), step=step)
