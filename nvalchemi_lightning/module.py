"""The LightningModule that executes a recipe."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

import nvalchemi_lightning.owner  # noqa: F401  registers the strategies under their names
from nvalchemi_lightning import _lightning
from nvalchemi_lightning.batch_step import BatchStep, check_first_batch
from nvalchemi_lightning.callbacks.metric_schedulers import MetricSchedulers
from nvalchemi_lightning.callbacks.stage import stage_callbacks
from nvalchemi_lightning.checkpoint.reading import load_tensors
from nvalchemi_lightning.context import TrainContext
from nvalchemi_lightning.counters import Counters
from nvalchemi_lightning.errors import ConfigurationError
from nvalchemi_lightning.feeding import OneLoader, loader_length
from nvalchemi_lightning.model_inputs import check_metric_keys, check_metric_schedulers
from nvalchemi_lightning.module_checkpoint import (
    add_to_checkpoint,
    check_moments,
    recipe_from_checkpoint,
    take_from_checkpoint,
)
from nvalchemi_lightning.module_evaluation import EvaluatingModule
from nvalchemi_lightning.module_log import called_for, log_step
from nvalchemi_lightning.progress import RunProgress
from nvalchemi_lightning.recipe import TrainingRecipe
from nvalchemi_lightning.resume import keeping_random_states
from nvalchemi_lightning.runtime import move_to_devices, restoring_modes
from nvalchemi_lightning.stages import TrainingStage
from nvalchemi_lightning.validation.config import ValidationConfig
from nvalchemi_lightning.validation.evaluation import EvaluationLoader, check_validation_data, summary_numbers

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback

    from nvalchemi_lightning.owner import SingleOwnerMixin

__all__ = ["AlchemiModule"]


class AlchemiModule(EvaluatingModule):
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

    # A rank may have no share of a small validation set.
    allow_zero_length_dataloader_with_multiple_devices = True

    def __init__(self, recipe: TrainingRecipe | None = None, **fields: Any) -> None:
        if (recipe is None) == (not fields):
            raise ConfigurationError("AlchemiModule takes either a recipe or its fields (models=..., loss_fn=..., ...)")
        super().__init__(recipe if recipe is not None else TrainingRecipe(**fields))
        self.automatic_optimization = False
        self._open = ExitStack()
        self._batch_step: Any = None
        self._resumed = False

    # Connecting to a Trainer ------------------------------------------------------------------------------------

    def connect_owner(self, strategy: SingleOwnerMixin) -> None:
        """Take the strategy that owns the update, and the Trainer's validation cadence with it.

        Raises
        ------
        ConfigurationError
            If validation data is given twice, or a scheduler listens to validation and there is none.
        LabelNotFoundError
            If a scheduler watches a number that no summary can have.
        """
        trainer, configured = self.trainer, self.recipe.validation_config
        limits = strategy.limits
        self._owner, self._validation = strategy, configured
        if not trainer.training:
            if configured is None:
                name = {"validate": "validation"}.get(called_for(trainer), called_for(trainer))
                self._validation = ValidationConfig(validation_data=(), name=name)
            return
        if _lightning.has_own_validation_data(trainer, self):
            if configured is not None:
                raise ConfigurationError(
                    "validation data was given twice, to the Trainer's fit and as validation_config; give it once"
                )
            self._validation = ValidationConfig(
                validation_data=(), every_n_epochs=limits.every_n_epochs, every_n_steps=limits.every_n_steps
            )
        validates = self._validation is not None and limits.val_batches != 0
        _lightning.leave_validation_to(trainer, validates=validates, val_batches=limits.val_batches)
        check_metric_schedulers(self.recipe.optimizer_configs, validates=validates)
        if not validates:
            self._validation = None
        elif not self.recipe.registry.at(TrainingStage.AFTER_VALIDATION):  # a hook there may add to the summary
            loss_fn = self._validation.loss_fn or self.recipe.loss_fn  # type: ignore[union-attr]
            check_metric_keys(self.recipe.optimizer_configs, summary_numbers(loss_fn))

    def configure_callbacks(self) -> list[Callback]:
        """Return one callback per observed stage, and the one that steps metric schedulers.

        Raises
        ------
        ConfigurationError
            If the Trainer's strategy is not a single owner.
        """
        if self.trainer.strategy is not self._owner:
            raise ConfigurationError(
                f"an AlchemiModule needs a strategy that is the single owner of the update, not "
                f"{type(self.trainer.strategy).__name__}; write Trainer(strategy='nvalchemi', ...) for one device or "
                "'nvalchemi_ddp' for several"
            )
        return [*stage_callbacks(self), MetricSchedulers()]

    def _attach_missing_callbacks(self) -> None:
        trainer: Any = self.trainer
        present = {type(callback) for callback in trainer.callbacks}
        trainer.callbacks.extend(callback for callback in stage_callbacks(self) if type(callback) not in present)

    def configure_optimizers(self) -> Any:
        """Return the recipe's optimizers and schedulers; a second fit gets the same objects."""
        optimizers, schedulers = self.recipe.flat_optimizers()
        # Lightning steps none of them; the interval tells LearningRateMonitor that rates change within epochs.
        return optimizers, [{"scheduler": each, "interval": "step"} for each in schedulers if each is not None]

    def put_owner_in_charge(self) -> None:
        """Guard the parameters and optimizers of this run and prepare the batch step."""
        owner = self._owner.owner
        owner.attach(self.recipe.trained_parameters(), *self.recipe.flat_optimizers())
        self._open.callback(owner.detach)
        self._batch_step = BatchStep(
            self.recipe,
            owner,
            world_size=self.trainer.world_size,
            count_reducer=self._owner.count_reducer(self.recipe.requests),
        )

    def train_dataloader(self) -> Any:
        """Return the loader of the recipe, as the hooks at ``SETUP`` left it."""
        if self.recipe.active_dataloader is None:
            raise ConfigurationError("there is no training data; write trainer.fit(module, train_dataloader)")
        # Lightning takes a bare list of batches for a list of loaders; the wrapper keeps it in one piece.
        return OneLoader(self.recipe.active_dataloader)

    def val_dataloader(self) -> Any:
        """Return the configured validation data."""
        config = self.recipe.validation_config
        if config is None:
            raise ConfigurationError(
                f"there is no data to {called_for(self.trainer)}; pass a loader or set validation_config"
            )
        return EvaluationLoader.wrap(config.validation_data)

    def feed(self, loader: Any) -> Any:
        """Return what the Trainer iterates: epochs that follow the counters, or a rank's share of evaluation data."""
        trainer = self.trainer
        if not trainer.training:
            return EvaluationLoader.wrap(loader, rank=self.global_rank, world_size=trainer.world_size)
        if hasattr(loader, "num_graphs") or self._progress.fed:
            raise ConfigurationError(
                "training takes one loader, but a list was given, which Lightning takes for several loaders; "
                "pass one DataLoader, or OneLoader([batch, batch]) for a list of batches"
            )
        _lightning.shard_evaluation_ourselves(trainer)
        self._owner.refuse_uneven(loader_length(loader))
        max_steps = self._owner.limits.max_steps
        steps_left = None if max_steps is None else max(max_steps - trainer.global_step, 0)
        epochs = self._progress.feed(
            OneLoader.unwrap(loader),
            limit=trainer.limit_train_batches,
            steps_left=steps_left,
            sum_over_ranks=self._sum_over_ranks(),
            on_skip=partial(_lightning.fast_forward, trainer),
        )
        _lightning.align_global_step(trainer, self.recipe.step_count)
        _lightning.follow_counters(trainer, self.recipe.epoch_count)
        self._resumed = self.recipe.resume.take_over(self.global_rank, trainer.world_size)
        if self._progress.finished():
            trainer.should_stop = True
        return epochs

    def _sum_over_ranks(self) -> Callable[[Tensor], Tensor] | None:
        reduce, device = self._owner.sum_over_ranks(), self.trainer.strategy.root_device
        return None if reduce is None else lambda counts: reduce(counts.to(device))

    def get_extra_state(self) -> dict[str, int]:
        """Return the counters: they travel with the weights, also back from spawned processes."""
        return dict(vars(self.recipe.counters))

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Take over counters that came with weights."""
        vars(self.recipe.counters).update(vars(Counters(**state)))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what Lightning's checkpoint lacks."""
        add_to_checkpoint(self.recipe, checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take over what was added; hooks are built already."""
        take_from_checkpoint(self.recipe, checkpoint)

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

    def check_moments(self, checkpoint: Mapping[str, Any]) -> None:
        """Refuse the optimizers of a checkpoint whose moments would land on other parameters."""
        check_moments(self.recipe, checkpoint)

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

    def fire_outer(self, stage: TrainingStage, batch: Any = None) -> None:
        """Fire a stage that lies outside `training_step`, if this is its moment."""
        silent = {
            TrainingStage.SETUP: not self.trainer.training,
            TrainingStage.AFTER_EPOCH: not self._progress.epoch_closed,
            TrainingStage.AFTER_VALIDATION: self.trainer.sanity_checking,
        }
        if not silent.get(stage, False):
            self.recipe.registry.fire(stage, self._outer_context(stage, batch))

    def _outer_context(self, stage: TrainingStage, batch: Any) -> TrainContext:
        newest = self._progress.ctx
        if newest is None or batch is not None:
            return self.recipe.context(batch, global_rank=self.global_rank)
        if stage is TrainingStage.AFTER_BATCH:
            return newest
        ctx = self.recipe.context(newest.batch, global_rank=self.global_rank)
        if stage is not TrainingStage.AFTER_TRAINING:
            ctx.loss, ctx.losses = newest.loss, newest.losses
        return ctx


# Lightning inspects the arguments of this method for every batch; with a signature at hand it is quick about it.
AlchemiModule.training_step.__signature__ = inspect.signature(AlchemiModule.training_step)  # type: ignore[attr-defined]
