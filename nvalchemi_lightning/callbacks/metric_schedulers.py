"""Stepping the schedulers that listen to validation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Callback

from nvalchemi_lightning.callbacks.stage import silent_per_batch

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["MetricSchedulers"]


@silent_per_batch
class MetricSchedulers(Callback):
    """Step metric-driven schedulers after ``AFTER_VALIDATION`` and before any checkpoint is written."""

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Hand the new summary to the schedulers."""
        pl_module.step_metric_schedulers()
