"""The first callback of every run: it opens and closes what the run needs around all others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Callback

from nvalchemi_lightning import _lightning
from nvalchemi_lightning.callbacks.stage import silent_per_batch

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["RunDriver"]


@silent_per_batch
class RunDriver(Callback):
    """Enter hooks before ``SETUP``, close the epoch before ``AFTER_EPOCH``, and leave hooks whatever happens.

    The owner inserts it in front of all other callbacks, so an exception in another callback's clean-up cannot
    keep hooks open.
    """

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Open the run."""
        pl_module.open_run(stage)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Close the epoch if its loader is exhausted."""
        pl_module.close_epoch()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule | None, exception: BaseException) -> None:
        """Close the run after a failure."""
        _lightning.unwrap_loaders()
        if pl_module is not None:
            pl_module.close_run(exception)  # type: ignore[operator]

    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Close the run."""
        pl_module.close_run(None)
