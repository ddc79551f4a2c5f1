"""What is trained and how: everything of a strategy that does not depend on who runs the loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from pydantic import Field, PrivateAttr, field_validator, model_validator
from torch import nn
from torch.optim import Optimizer

from nvalchemi_lightning.context import TrainContext
from nvalchemi_lightning.errors import ConfigurationError, ConfigurationTypeError, UnknownNameError, nearest
from nvalchemi_lightning.hooked import HookedRecipe
from nvalchemi_lightning.lifecycle import Lifecycle
from nvalchemi_lightning.losses import (
    ComposedLossFunction,
    as_composed_loss,
    assemble_loss_targets,
)
from nvalchemi_lightning.model_inputs import check_models, normalize_models, normalize_optimizer_configs
from nvalchemi_lightning.optim import OptimizerConfig, OptSchedPair, setup_optimizers
from nvalchemi_lightning.runtime import (
    freeze_unconfigured_models,
    iter_qualified_named_parameters,
    require_parameters,
    train_configured_models,
    trainable_parameters,
)
from nvalchemi_lightning.training_fn import check_call_shape, resolve_training_fn
from nvalchemi_lightning.validation.config import ValidationConfig

__all__ = ["TrainingRecipe"]


class TrainingRecipe(HookedRecipe):
    """Models, loss, optimizers, validation and hooks of a training run, and how far it has come.

    Attributes
    ----------
    models : nn.Module, mapping of str to nn.Module, or nn.ModuleDict
        One bare model becomes ``{"main": model}`` and is handed to ``training_fn`` as it is.
    optimizer_configs : OptimizerConfig, list, or mapping of str to list
        Per model; an unkeyed form needs one bare model. Models without an entry are frozen during training.
    training_fn : callable
        ``(model, batch)`` or ``(models, batch)`` to a mapping of predictions. One bare model defaults to
        `default_training_fn`.
    loss_fn : ComposedLossFunction or leaf loss
        A leaf is wrapped.
    loss_target_assembler : callable
        Where targets come from; by default the batch.
    devices : list of torch.device
        Where the models live; the first one is the training device. Default ``[cpu]``.
    validation_config : ValidationConfig or None
        What is evaluated, and when.
    last_validation : dict or None
        The newest validation summary.
    inference_model : nn.Module or None
        Averaged weights for validation, see `set_inference_model`.

    Further fields are those of `HookedRecipe` (hooks) and `CountedRecipe` (duration and progress).
    """

    models: dict[str, Any]
    optimizer_configs: dict[str, list[OptimizerConfig]] = Field(default_factory=dict)
    training_fn: Any = None
    loss_fn: ComposedLossFunction
    loss_target_assembler: Any = assemble_loss_targets
    devices: list[torch.device] = Field(default_factory=lambda: [torch.device("cpu")])
    validation_config: ValidationConfig | None = None
    single_model_input: bool = True
    last_validation: dict[str, Any] | None = None
    inference_model: nn.Module | None = None

    _optimizers: dict[str, list[OptSchedPair]] | None = PrivateAttr(default=None)
    _filters: dict[str, frozenset[str] | None] = PrivateAttr(
        default_factory=lambda: dict.fromkeys(("optimizer", "trainable", "forced"))
    )
    _active_dataloader: Any = PrivateAttr(default=None)

    # Construction -----------------------------------------------------------------------------------------------

    @model_validator(mode="before")
    @classmethod
    def _normalize(cls, data: Any) -> Any:
        if not isinstance(data, dict) or set(data) - cls._keywords():
            return data  # an unknown keyword is what there is to say first
        if "models" not in data:
            raise ConfigurationError(f"{cls.__name__} needs models=: one model, or models by name")
        data = dict(data)
        data["models"], single = normalize_models(data["models"])
        data["single_model_input"] = single
        if data.get("optimizer_configs") is not None:
            data["optimizer_configs"] = normalize_optimizer_configs(data["optimizer_configs"], single_model=single)
        data["training_fn"] = resolve_training_fn(data.get("training_fn"), single_model=single)
        return data

    @field_validator("loss_fn", mode="before")
    @classmethod
    def _composed(cls, loss: Any) -> ComposedLossFunction:
        return as_composed_loss(loss)

    @field_validator("devices", mode="before")
    @classmethod
    def _as_devices(cls, devices: Any) -> list[torch.device]:
        listed = devices if isinstance(devices, (list, tuple)) else [devices]
        try:
            return [torch.device(device) for device in listed]
        except (RuntimeError, TypeError) as error:
            raise ConfigurationError(f"devices={devices!r} holds what is no device: {error}") from error

    @field_validator("loss_target_assembler")
    @classmethod
    def _callable(cls, assembler: Any) -> Any:
        if not callable(assembler):
            raise ConfigurationTypeError(f"loss_target_assembler must be callable; got {assembler!r}")
        return assembler

    @model_validator(mode="after")
    def _check_together(self) -> TrainingRecipe:
        check_models(self.models, self.optimizer_configs, self.devices)
        self._check_training_fn()
        return self

    def _check_training_fn(self) -> None:
        if self.training_fn is None:
            raise ConfigurationError(
                f"training_fn is required for named models {sorted(self.models)}; write training_fn(models, batch) "
                "that returns a mapping of predictions (one bare model uses default_training_fn)"
            )
        check_call_shape(self.training_fn, single_model=self.single_model_input)

    # What hooks may ask of the workflow ---------------------------------------------------------------------------

    @property
    def active_dataloader(self) -> Any:
        """The loader of the present run; a hook at ``SETUP`` may replace it."""
        return self._active_dataloader

    @active_dataloader.setter
    def active_dataloader(self, loader: Any) -> None:
        self._active_dataloader = loader

    def set_inference_model(self, module: nn.Module, *, model_key: str | None = None) -> None:
        """Put averaged weights in the slot that validation evaluates.

        Parameters
        ----------
        module : nn.Module
            Moved to the training device.
        model_key : str, optional
            Which named model it stands for; ignored for one bare model.

        Raises
        ------
        UnknownNameError
            If there is no such model.
        """
        if not self.single_model_input and model_key is not None and model_key not in self.models:
            raise UnknownNameError(
                f"no model is called {model_key!r}{nearest(model_key, self.models)}; there are {sorted(self.models)}"
            )
        module.to(self.devices[0], non_blocking=True)
        if self.single_model_input or model_key is None:
            self.inference_model = module
            return
        if not isinstance(self.inference_model, nn.ModuleDict):
            self.inference_model = nn.ModuleDict()
        self.inference_model[model_key] = module

    def lifecycle(self) -> Lifecycle:
        """Return the order of a run as it is resolved now: stages, their hooks and owners, and how often they act.

        ``print(strategy.lifecycle())`` shows a table.
        """
        return Lifecycle.of(self.registry, self.validation_config)

    def set_optimizer_parameter_filter(self, names: Iterable[str] | None) -> None:
        """Let only these parameters (``"<model>.<parameter>"``) enter optimizers; None clears the filter."""
        self._set_filter("optimizer", names)

    def set_trainable_parameter_filter(self, names: Iterable[str] | None) -> None:
        """Freeze every parameter that is not listed while training runs; None clears the filter."""
        self._set_filter("trainable", names)

    def set_force_trainable_parameter_filter(self, names: Iterable[str] | None) -> None:
        """Train these parameters while training runs, whatever their flag says; None clears the filter."""
        self._set_filter("forced", names)

    def _set_filter(self, kind: str, names: Iterable[str] | None) -> None:
        chosen = None if names is None else frozenset(names)
        require_parameters(chosen or (), {name for name, _ in iter_qualified_named_parameters(self.models)})
        self._filters[kind] = chosen

    # What the loop asks of the recipe -----------------------------------------------------------------------------

    @contextmanager
    def training_mode(self) -> Iterator[None]:
        """Hold the models as training needs them; on leaving every mode and flag is as before.

        Raises
        ------
        ConfigurationError
            If no model has an optimizer.
        """
        if not self.optimizer_configs:
            raise ConfigurationError("nothing would be trained: optimizer_configs is empty; give an OptimizerConfig")
        with (
            freeze_unconfigured_models(self.models, self.optimizer_configs),
            train_configured_models(self.models, self.optimizer_configs),
            trainable_parameters(self.models, trainable=self._filters["trainable"], forced=self._filters["forced"]),
        ):
            yield

    def trained_parameters(self) -> list[nn.Parameter]:
        """Return every parameter that takes gradients now, also those that no optimizer holds."""
        return [p for model in self.models.values() for p in model.parameters() if p.requires_grad]

    def optimizers(self) -> dict[str, list[OptSchedPair]]:
        """Return the optimizers and schedulers of every configured model, built on first use and then kept."""
        if self._optimizers is None:
            self._optimizers = setup_optimizers(
                self.models, self.optimizer_configs, allowed_parameter_names=self._filters["optimizer"]
            )
        return self._optimizers

    @property
    def has_optimizers(self) -> bool:
        """Whether the optimizers were built already."""
        return self._optimizers is not None

    @contextmanager
    def trying_optimizers(self) -> Iterator[None]:
        """Forget the optimizers that are built within the block."""
        before = self._optimizers
        try:
            yield
        finally:
            self._optimizers = before

    def flat_optimizers(self) -> tuple[list[Optimizer], list[Any]]:
        """Return all optimizers and, aligned with them, their schedulers (None where there is none)."""
        pairs = [pair for pairs in self.optimizers().values() for pair in pairs]
        return [optimizer for optimizer, _ in pairs], [scheduler for _, scheduler in pairs]

    def context(self, batch: Any, **extra: Any) -> TrainContext:
        """Return a fresh context with the present counters, and further fields as given."""
        counters = self.counters
        if "optimizers" not in extra and self._optimizers is not None:
            extra["optimizers"], extra["lr_schedulers"] = self.flat_optimizers()
        return TrainContext(
            batch=batch,
            model=self.models.get("main"),
            workflow=self,
            step_count=counters.step_count,
            global_step_count=counters.global_step_count,
            batch_count=counters.batch_count,
            epoch_step_count=counters.epoch_step_count,
            epoch=counters.epoch_count,
            models=self.models,
            validation=self.last_validation,
            **extra,
        )
