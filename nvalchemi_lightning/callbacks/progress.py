"""A progress bar that is drawn by the clock, not by the batch."""

from __future__ import annotations

import sys
import time
from typing import Any

from lightning.pytorch.callbacks import TQDMProgressBar

__all__ = ["TimedProgressBar"]


class TimedProgressBar(TQDMProgressBar):
    """Lightning's bar, redrawn at most ten times a second on a terminal and every ten seconds in a log file.

    Drawing costs about as much as a training step of a small potential.
    """

    def __init__(self) -> None:
        super().__init__()
        self._interval = 0.1 if sys.stdout.isatty() else 10.0
        self._drawn = 0.0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Draw the training bar if it is time, and always for the last batch."""
        if self._due() or batch_idx + 1 == self.total_train_batches:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Draw the validation bar if it is time."""
        if self._due():
            super().on_validation_batch_end(trainer, pl_module, outputs, batch, batch_idx, dataloader_idx)

    def _due(self) -> bool:
        now = time.monotonic()
        if now - self._drawn < self._interval:
            return False
        self._drawn = now
        return True
