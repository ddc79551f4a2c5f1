"""The LightningModule's part that meets a Trainer: callbacks, optimizers, loaders and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from nvalchemi_lightning import _lightning
from nvalchemi_lightning.batch_step import BatchStep
from nvalchemi_lightning.callbacks.metric_schedulers import MetricSchedulers
from nvalchemi_lightning.callbacks.stage import stage_callbacks
from nvalchemi_lightning.checkpoint.states import to_live_names
from nvalchemi_lightning.context import TrainContext
from nvalchemi_lightning.counters import Counters
from nvalchemi_lightning.errors import ConfigurationError
from nvalchemi_lightning.feeding import OneLoader, loader_length
from nvalchemi_lightning.model_inputs import check_metric_keys, check_metric_schedulers
from nvalchemi_lightning.module_checkpoint import add_to_checkpoint, check_moments, take_from_checkpoint
from nvalchemi_lightning.module_evaluation import EvaluatingModule
from nvalchemi_lightning.module_log import called_for
from nvalchemi_lightning.recipe import TrainingRecipe
from nvalchemi_lightning.stages import TrainingStage
from nvalchemi_lightning.validation.config import ValidationConfig
from nvalchemi_lightning.validation.evaluation import EvaluationLoader, summary_keys

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback

    from nvalchemi_lightning.owner import SingleOwnerMixin

__all__ = ["ConnectedModule"]


class ConnectedModule(EvaluatingModule):
    """Give a Trainer what it asks for, and take from it what it would do wrongly.

    Parameters
    ----------
    recipe : TrainingRecipe
        What is trained.
    """

    # A rank may have no share of a small validation set.
    allow_zero_length_dataloader_with_multiple_devices = True

    def __init__(self, recipe: TrainingRecipe) -> None:
        super().__init__(recipe)
        self.automatic_optimization = False
        self._open = ExitStack()
        self._batch_step: Any = None
        self._resumed = False

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
            check_metric_keys(self.recipe.optimizer_configs, summary_keys(loss_fn))

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
        """Take over what was added, and name the weights as this module does; hooks are built already."""
        take_from_checkpoint(self.recipe, checkpoint)
        to_live_names(checkpoint["state_dict"], self)

    def check_moments(self, checkpoint: Mapping[str, Any]) -> None:
        """Refuse the optimizers of a checkpoint whose moments would land on other parameters."""
        check_moments(self.recipe, checkpoint)

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
