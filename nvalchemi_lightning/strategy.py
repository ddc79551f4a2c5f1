"""The training strategy: a recipe with a duration, and the methods that run it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ProgressBar
from pydantic import model_validator

from nvalchemi_lightning import _lightning, rehearsal, strategy_spec
from nvalchemi_lightning.batch_step import BatchStep
from nvalchemi_lightning.callbacks.progress import TimedProgressBar
from nvalchemi_lightning.checkpoint import saving
from nvalchemi_lightning.errors import ConfigurationError, TrainingStateError
from nvalchemi_lightning.feeding import as_loader
from nvalchemi_lightning.model_inputs import check_metric_schedulers
from nvalchemi_lightning.module import AlchemiModule
from nvalchemi_lightning.owner import SingleOwner
from nvalchemi_lightning.recipe import TrainingRecipe
from nvalchemi_lightning.runtime import move_to_devices, rehome_optimizer_state
from nvalchemi_lightning.stages import TrainingStage
from nvalchemi_lightning.update import UpdateOwner
from nvalchemi_lightning.validation.evaluation import EvaluationLoader

__all__ = ["TrainingStrategy"]


class TrainingStrategy(TrainingRecipe):
    """Train models by a recipe; PyTorch Lightning runs the loop.

    The fields are those of `TrainingRecipe`; exactly one of ``num_epochs`` and ``num_steps`` says how long.

    Examples
    --------
    >>> strategy = TrainingStrategy(
    ...     models=model,
    ...     optimizer_configs=OptimizerConfig(lr=1e-4),
    ...     loss_fn=EnergyMSELoss() + ForceMSELoss() * 10.0,
    ...     num_epochs=20,
    ... )
    >>> strategy.run(train_loader)
    """

    @model_validator(mode="after")
    def _require_duration(self) -> TrainingStrategy:
        if self.num_epochs is None and self.num_steps is None:
            raise ConfigurationError("Exactly one of num_epochs or num_steps must be set; got neither")
        check_metric_schedulers(self.optimizer_configs, validates=self.validation_config is not None)
        return self

    def run(self, dataloader: Iterable[Any], **trainer_options: Any) -> None:
        """Train until ``num_epochs`` or ``num_steps`` is reached, from wherever the counters are.

        Where that is the case already, it returns at once: raise the limit to train on.

        Parameters
        ----------
        dataloader : iterable of Batch
            Re-iterable if more than one pass is needed.
        **trainer_options
            Handed to ``lightning.pytorch.Trainer``, for example ``logger=CSVLogger("runs")``,
            ``enable_progress_bar=False`` or ``strategy="nvalchemi_ddp", devices=4``. Without any, nothing is
            written to disk and nothing but the progress bar is printed.

        Raises
        ------
        ConfigurationError
            If the loader is empty, of the wrong kind, or does not fit the recipe.
        SecondOwnerError
            If something other than the strategy touches gradients or weights.
        TrainingStateError
            If it is called by a hook of a run.
        KeyboardInterrupt
            If the user interrupts; hooks are closed and the strategy can run again.
        """
        self._refuse_nesting("run")
        self.active_dataloader = as_loader(dataloader)
        self.check_duration()
        options = self._trainer_options(trainer_options)
        module = AlchemiModule(self)
        try:
            with _lightning.quiet():
                trainer = Trainer(**options)
                _lightning.align_epoch(trainer, self.epoch_count)
                _lightning.fit(trainer, module)
        finally:
            module.close_run(None)
            self.active_dataloader = None
            self._come_home()

    def train_batch(self, batch: Any) -> None:
        """Train on one batch, without a loader and without the stages around epochs and runs.

        Inside ``with strategy:`` hooks are entered once for several calls, otherwise per call. The batch belongs to
        no epoch: ``batch_count`` and ``step_count`` advance, ``epoch_step_count`` does not.

        Parameters
        ----------
        batch : Batch
            Moved to the training device first.
        """
        self._refuse_nesting("train_batch")
        with self.scope:
            self.prepare_hooks()
            move_to_devices(self.models, self.devices)
            self.registry.fire(TrainingStage.SETUP, self.context(None))
            self.resume.take_over(rank=0, world_size=1)
            with self.training_mode():
                self._train_guarded(batch.to(self.devices[0], non_blocking=True))

    def _train_guarded(self, batch: Any) -> None:
        owner = UpdateOwner.plain(self.registry)
        owner.attach(self.trained_parameters(), *self.flat_optimizers())
        try:
            ctx, _ = BatchStep(self, owner)(batch, in_epoch=False)
            self.registry.fire(TrainingStage.AFTER_BATCH, ctx)
            self.requests.run_deferred()
        finally:
            owner.detach()

    def validate(self) -> dict[str, Any]:  # type: ignore[override]  # hides a deprecated method of pydantic
        """Run one validation pass now, also from a hook of a run, and return its summary.

        Fires ``AFTER_VALIDATION``; steps no scheduler.

        Returns
        -------
        dict
            The summary, also kept as ``last_validation``.

        Raises
        ------
        TrainingStateError
            If there is no ``validation_config``.
        """
        if self.validation_config is None:
            raise TrainingStateError("validate() requires a validation_config; set strategy.validation_config")
        if self.running is not None:
            self.running.validate_by_hand()
        else:
            self._validate_alone(EvaluationLoader.wrap(self.validation_config.validation_data))
        return self.last_validation  # type: ignore[return-value]

    def _refuse_nesting(self, call: str) -> None:
        if self.running is not None:
            raise TrainingStateError(f"{call}() was called while a run is under way; call it after run() has returned")

    def _validate_alone(self, data: EvaluationLoader) -> None:
        with _lightning.quiet():
            trainer = Trainer(**self._trainer_options({"enable_progress_bar": False}))
            trainer.validate(AlchemiModule(self), data, verbose=False)
        self._come_home()

    def _come_home(self) -> None:
        """Bring models and optimizers back from where a Trainer left them."""
        move_to_devices(self.models, self.devices)
        for optimizer in self.flat_optimizers()[0] if self.has_optimizers else ():
            rehome_optimizer_state(optimizer)

    def save_checkpoint(self, root: str | Path, *, checkpoint_index: int = -1) -> int:
        """Save weights, optimizers, schedulers, counters and the states of hooks; see `checkpoint.save`."""
        return saving.save(self, root, checkpoint_index=checkpoint_index)

    def restore_checkpoint(
        self, root: str | Path, checkpoint_index: int = -1, map_location: Any = None
    ) -> dict[str, Any]:
        """Load a checkpoint into this strategy; see `checkpoint.restore`."""
        return saving.restore(self, root, checkpoint_index, map_location)

    @classmethod
    def load_checkpoint(
        cls, root: str | Path, checkpoint_index: int = -1, map_location: Any = None, **arguments: Any
    ) -> Self:
        """Rebuild a strategy from a checkpoint; see `checkpoint.load` for the keyword arguments."""
        return saving.load(cls, root, checkpoint_index, map_location, **arguments)

    def rehearse(self, **arguments: Any) -> None:
        """Prove before a long run that it can be resumed; see `rehearsal.rehearse` for what that costs.

        Raises
        ------
        ConfigurationError
            If something would not come back from a checkpoint; it names the places and what to write.
        """
        self._refuse_nesting("rehearse")
        rehearsal.rehearse(self, **arguments)

    def to_spec_dict(self) -> dict[str, Any]:
        """Return the recipe as JSON data; see `strategy_spec.spec_dict`."""
        return strategy_spec.spec_dict(self)

    @classmethod
    def from_spec_dict(cls, spec: Mapping[str, Any], **arguments: Any) -> Self:
        """Build a strategy from a recipe; see `strategy_spec.strategy_arguments_from_spec`."""
        return cls(**strategy_spec.strategy_arguments_from_spec(spec, **arguments))

    def to_checkpoint_dict(self) -> dict[str, Any]:
        """Return the recipe with class and counters as JSON data; see `strategy_spec.checkpoint_dict`."""
        return strategy_spec.checkpoint_dict(self)

    @classmethod
    def from_checkpoint_dict(cls, form: Mapping[str, Any], **arguments: Any) -> Self:
        """Build a strategy from `to_checkpoint_dict`; see `strategy_spec.strategy_from_checkpoint_dict`."""
        built: Self = strategy_spec.strategy_from_checkpoint_dict(cls, form, **arguments)
        return built

    def __enter__(self) -> TrainingStrategy:
        """Enter the hooks for several calls of `train_batch` or `run`."""
        self.scope.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.scope.__exit__(kind, error, trace)

    def _trainer_options(self, options: dict[str, Any]) -> dict[str, Any]:
        device = self.devices[0]
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigurationError(
                f"devices={[str(each) for each in self.devices]}, but torch sees no CUDA device here"
            )
        defaults: dict[str, Any] = {
            "strategy": SingleOwner(device),
            "accelerator": "cpu" if device.type == "cpu" else "gpu",
            "devices": 1 if device.index is None else [device.index],
            "max_epochs": -1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
        }
        callbacks = [*self.lightning_callbacks, *options.pop("callbacks", ())]
        own_bar = any(isinstance(callback, ProgressBar) for callback in callbacks)
        if options.get("enable_progress_bar", True) and not own_bar:
            callbacks.append(TimedProgressBar())
        return {**defaults, **options, "callbacks": callbacks}
