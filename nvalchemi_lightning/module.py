"""The LightningModule that executes a recipe."""

from __future__ import annotations

import inspect
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

import nvalchemi_lightning.owner  # noqa: F401  registers the strategies under their names
from nvalchemi_lightning import _lightning
from nvalchemi_lightning.batch_step import check_first_batch
from nvalchemi_lightning.checkpoint.tensors import load_tensors
from nvalchemi_lightning.errors import ConfigurationError
from nvalchemi_lightning.module_checkpoint import recipe_from_checkpoint
from nvalchemi_lightning.module_connection import ConnectedModule
from nvalchemi_lightning.module_log import log_step
from nvalchemi_lightning.progress import RunProgress
from nvalchemi_lightning.recipe import TrainingRecipe
from nvalchemi_lightning.resume import keeping_random_states
from nvalchemi_lightning.runtime import move_to_devices, restoring_modes
from nvalchemi_lightning.stages import TrainingStage
from nvalchemi_lightning.validation.evaluation import check_validation_data

__all__ = ["AlchemiModule"]


class AlchemiModule(ConnectedModule):
    """A recipe as a LightningModule: ``Trainer(strategy="nvalchemi", ...).fit(AlchemiModule(...), train, val)``.

    Parameters
    ----------
    recipe : TrainingRecipe, optional
        What is trained, for example a `TrainingStrategy`; its progress counters go on.
    **fields
        The fields of `TrainingRecipe`, instead of ``recipe``.

    Raises
    ------
    ConfigurationError
        If both or neither of ``recipe`` and fields are given, or the fields are not valid.

    Notes
    -----
    The module attaches its own callbacks and refuses a Trainer whose strategy is not a single owner. Its weights
    are stored under ``models.<name>.``.
    """

    def __init__(self, recipe: TrainingRecipe | None = None, **fields: Any) -> None:
        if (recipe is None) == (not fields):
            raise ConfigurationError("AlchemiModule takes either a recipe or its fields (models=..., loss_fn=..., ...)")
        super().__init__(recipe if recipe is not None else TrainingRecipe(**fields))

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]  # hyperparameters are the recipe's
        cls, checkpoint_path: str | Path, map_location: Any = None, **arguments: Any
    ) -> Self:
        """Rebuild a module, with its weights and counters, from a checkpoint of Lightning.

        To go on with training, hand the same file to ``fit(module, ckpt_path=...)``: optimizers are restored there.

        Parameters
        ----------
        checkpoint_path : str or Path
            A file that ``ModelCheckpoint`` or ``trainer.save_checkpoint`` wrote; read with ``weights_only=True``.
        map_location : str or torch.device, optional
            Replaces the saved ``devices``.
        **arguments
            ``models``, ``hooks``, ``training_fn`` and the other arguments of `TrainingStrategy.load_checkpoint`.

        Raises
        ------
        StoreError
            If the file is damaged or not safe to load.
        ConfigurationError
            If it holds no recipe, or a part of it cannot be built.
        UntrustedPathError
            If it names something outside the trusted packages.
        """
        checkpoint = load_tensors(Path(checkpoint_path))
        if map_location is not None:
            arguments["devices"] = [torch.device(map_location)]
        recipe = recipe_from_checkpoint(checkpoint, str(checkpoint_path), **arguments)
        module = cls(recipe)
        module.on_load_checkpoint(checkpoint)
        module.load_state_dict(checkpoint["state_dict"])
        move_to_devices(recipe.models, recipe.devices)
        return module

    # Opening and closing a run ----------------------------------------------------------------------------------

    def open_run(self, stage: str) -> None:
        """Enter the hooks and move the models, before ``SETUP`` fires."""
        self._open = ExitStack()
        self._open.enter_context(self.recipe.scope)
        self._open.callback(self.recipe.tell_of_new_hooks, None)
        self._open.callback(setattr, self.recipe, "running", None)
        self.recipe.running = self
        self.recipe.tell_of_new_hooks(self._attach_missing_callbacks)
        self._open.enter_context(restoring_modes(self.recipe.models.values()))
        if stage != "fit":
            return
        if self.trainer.limit_train_batches == 0:
            raise ConfigurationError("Trainer(limit_train_batches=0) leaves nothing to train on")
        self._progress = RunProgress(self.recipe)
        self.recipe.resume.begin_run()
        self.recipe.requests.forget()
        self.recipe.prepare_hooks()
        self.to(self.trainer.strategy.root_device)

    def setup(self, stage: str) -> None:
        """Freeze what is not trained; the hooks at ``SETUP`` have run."""
        if stage == "fit":
            self._open.enter_context(self.recipe.training_mode())

    def close_run(self, error: BaseException | None) -> None:
        """Restore modes and flags and leave the hooks; doing so twice is harmless."""
        opened, self._open = self._open, ExitStack()
        self._progress.ctx = self._evaluation = self._batch_step = None
        opened.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)

    # Training ---------------------------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning notes the running hook some 30 times per batch; nn.Module would search its tables each time. Text
        # or None under a name of the instance dictionary can be neither parameter, buffer nor module.
        if (value is None or type(value) is str) and name in self.__dict__:
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Copy the batch to the device; hooks may then change it without changing stored data."""
        return batch.to(device, non_blocking=True)

    @classmethod
    def transfers_plainly(cls) -> bool:
        """Return whether no subclass changes how batches get to the device."""
        names = ("transfer_batch_to_device", "on_before_batch_transfer", "on_after_batch_transfer")
        return all(getattr(cls, name) is getattr(AlchemiModule, name) for name in names)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Differentiate the loss while gradients may accumulate."""
        with self._owner.owner.accumulating():
            loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def on_train_start(self) -> None:
        """Validate if that was due where the run was stopped."""
        if self.recipe.resume.validation_due and self._validation is not None:
            _lightning.run_validation(self.trainer)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Fire the stages that open a run and an epoch; leave the pass if the target is reached."""
        progress = self._progress
        if progress.finished():
            return -1
        if not progress.started:
            with keeping_random_states():
                check_first_batch(self.recipe, batch)
                if self._validation is not None:
                    check_validation_data(self.recipe, self._validation, self.trainer.val_dataloaders)
            progress.started = True
            # Random numbers that hooks draw here were drawn before the checkpoint, too.
            with keeping_random_states() if self._resumed else nullcontext():
                self.fire_outer(TrainingStage.BEFORE_TRAINING, batch)
        if self.recipe.counters.epoch_step_count == 0:
            self.fire_outer(TrainingStage.BEFORE_EPOCH, batch)
        return None

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Run the stages of one batch."""
        progress = self._progress
        windows = progress.windows
        window = None if windows is None else windows.take()
        progress.ctx, progress.stepped = self._batch_step(batch, rank=self.global_rank, window=window)
        if progress.stepped:
            _lightning.count_update(self.trainer)
        _lightning.align_log_step(self.trainer, self.recipe.step_count)
        validation = self._validation
        self.recipe.resume.validation_due = validation is not None and validation.due_after_step(
            self.recipe.counters, stepped=progress.stepped
        )

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log, see whether validation is due, and take over a request to stop."""
        trainer: Any = self.trainer
        progress, counters = self._progress, self.recipe.counters
        cadence = trainer.log_every_n_steps
        if cadence and progress.stepped and (counters.step_count % cadence == 0 or progress.at_epoch_end()):
            log_step(self, progress.ctx, self.recipe.requests.take_scalars())  # type: ignore[arg-type]
        due = self.recipe.resume.validation_due
        _lightning.schedule_validation(trainer, due=due)
        # At the end of an epoch, what is deferred waits for the stages and the validation that follow.
        if not due and not progress.at_epoch_end():
            self.recipe.requests.run_deferred()
        if trainer.should_stop and _lightning.can_stop_early(trainer):
            # Lightning would validate at once; the recipe ends the pass and validates once, at the end.
            self.recipe.stop("the Trainer was asked to stop")
            trainer.should_stop = False

    def close_epoch(self) -> None:
        """Advance the epoch counter if the pass reached the end of its loader."""
        self._progress.close_epoch()
        validation, resume = self._validation, self.recipe.resume
        if self._progress.epoch_closed and validation is not None and validation.due_after_epoch(self.recipe.counters):
            resume.validation_due |= resume.validated_at != self.recipe.step_count

    def on_train_epoch_end(self) -> None:
        """Validate if an epoch makes it due, and end the run if the target is reached."""
        if self.recipe.resume.validation_due:
            _lightning.run_validation(self.trainer)
        self.recipe.requests.run_deferred()
        if self.trainer.should_stop and _lightning.can_stop_early(self.trainer):
            self.recipe.stop("the Trainer was asked to stop")
        if self._progress.finished():
            self.trainer.should_stop = True

    def on_train_end(self) -> None:
        """Validate the final weights, unless they were just validated.

        Raises
        ------
        TrainingStateError
            If the whole run made no optimizer step, and nobody asked it to stop.
        """
        if self._progress.idle and self.recipe.stop_reason is None:
            raise self._owner.owner.never_stepped()
        if self._validation is not None and self._progress.started:
            self._validate_now()

    def _validate_now(self) -> None:
        if self.recipe.resume.validated_at != self.recipe.step_count:
            _lightning.run_validation(self.trainer)


# Lightning inspects the arguments of this method for every batch; with a signature at hand it is quick about it.
AlchemiModule.training_step.__signature__ = inspect.signature(AlchemiModule.training_step)  # type: ignore[attr-defined]
