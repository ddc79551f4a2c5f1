"""One pass over evaluation data: which weights, with or without autograd, what is added up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

from nvalchemi_lightning.batch_step import call_forward, detached
from nvalchemi_lightning.errors import ConfigurationError, TrainingStateError
from nvalchemi_lightning.feeding import checked_batch, loader_length
from nvalchemi_lightning.hooks.registry import stray_stop_iteration
from nvalchemi_lightning.losses import ComposedLossFunction, assemble_loss_targets, compute_supervised_loss
from nvalchemi_lightning.recipe import TrainingRecipe
from nvalchemi_lightning.stages import TrainingStage
from nvalchemi_lightning.validation.config import ValidationConfig
from nvalchemi_lightning.validation.models import evaluated_models
from nvalchemi_lightning.validation.potential import POTENTIAL_METRICS, PotentialMetrics
from nvalchemi_lightning.validation.summary import SummaryAccumulator

__all__ = ["Evaluation", "EvaluationLoader", "NamedPredictions", "check_validation_data", "summary_keys"]


class NamedPredictions(dict[str, Tensor]):
    """Predictions that also answer to the label's name: ``["energy"]`` finds ``["predicted_energy"]``."""

    def __missing__(self, key: str) -> Tensor:
        return self[f"predicted_{key}"] if not key.startswith("predicted_") else _no_prediction(key, self)


def _no_prediction(key: str, predictions: Mapping[str, Tensor]) -> Tensor:
    raise KeyError(f"no prediction {key!r}; there are {sorted(predictions)}")


class Evaluation:
    """One pass over evaluation data.

    Parameters
    ----------
    recipe : TrainingRecipe
        Whose models, loss and hooks are used.
    config : ValidationConfig
        What is special about the pass.
    device : torch.device
        Where the sums are kept.

    Raises
    ------
    TrainingStateError
        If averaged weights or mixed precision are demanded but not there.
    """

    def __init__(self, recipe: TrainingRecipe, config: ValidationConfig, device: torch.device) -> None:
        self._recipe, self._config = recipe, config
        self._forward = config.validation_fn or recipe.training_fn
        self._loss_fn = config.loss_fn or recipe.loss_fn
        self._models, self._source, self._averaged = evaluated_models(recipe, config.use_ema)
        self._enable_grad = _needs_grad(config, self._loss_fn, self._models)
        self._autocast, self._precision = _precision(recipe, config, device)
        self._sums = SummaryAccumulator(
            self._loss_fn.weight_factors(step=recipe.step_count, epoch=recipe.epoch_count), device
        )
        self._metrics = PotentialMetrics(device)

    def predict(self, batch: Any, *, rank: int = 0) -> dict[str, Tensor]:
        """Return the detached predictions of a batch."""
        with torch.set_grad_enabled(self._enable_grad), self._autocast():
            return NamedPredictions({key: value.detach() for key, value in self._call(batch, rank).items()})

    def add(self, batch: Any, batch_count: int, *, rank: int = 0) -> None:
        """Evaluate one batch, add up its losses and errors, and show it to the callback."""
        recipe = self._recipe
        with torch.set_grad_enabled(self._enable_grad), self._autocast():
            predictions = self._call(batch, rank)
            losses = compute_supervised_loss(
                self._loss_fn,
                predictions,
                batch,
                step=recipe.step_count,
                epoch=recipe.epoch_count,
                workflow=recipe,
                target_assembler=recipe.loss_target_assembler,
                batch_label="Validation batch",
            )
        seen = NamedPredictions({key: value.detach() for key, value in predictions.items()})
        self._sums.update(losses, batch.num_graphs)
        self._metrics.update(seen, batch)
        if self._config.batch_callback is not None:
            self._show(batch, seen, detached(losses), batch_count)

    def _show(self, batch: Any, predictions: NamedPredictions, losses: dict[str, Any], batch_count: int) -> None:
        try:
            self._config.batch_callback(
                batch=batch,
                predictions=predictions,
                loss=losses,
                batch_count=batch_count,
                step_count=self._recipe.step_count,
                epoch=self._recipe.epoch_count,
            )
        except StopIteration as error:
            raise stray_stop_iteration("the batch_callback") from error

    def summary(self, sum_over_ranks: Callable[[Tensor], Tensor] | None = None) -> dict[str, Any]:
        """Return the summary of the pass, the same on every rank.

        Parameters
        ----------
        sum_over_ranks : callable, optional
            Sums a tensor over all ranks.
        """
        return {
            **self._sums.summary(self._config.name, sum_over_ranks),
            "metrics": self._metrics.compute(sum_over_ranks),
            "model_source": self._source,
            "ema_model_keys": self._averaged,
            "precision": self._precision,
        }

    def _call(self, batch: Any, rank: int) -> Mapping[str, Tensor]:
        recipe, fire = self._recipe, self._recipe.registry.fire
        ctx = recipe.context(batch, global_rank=rank, validating=True)
        ctx.models, ctx.model = self._models, self._models.get("main")
        fire(TrainingStage.BEFORE_FORWARD, ctx)
        try:
            ctx.predictions = call_forward(self._forward, self._models, batch, single=recipe.single_model_input)
        except RuntimeError as error:
            if not self._enable_grad and "does not require grad" in str(error):
                error.add_note(
                    "The model differentiates, but nothing says so and autograd is off in this pass; "
                    "write ValidationConfig(grad_mode='enabled')"
                )
            raise
        fire(TrainingStage.AFTER_FORWARD, ctx)
        return ctx.predictions


def _needs_grad(config: ValidationConfig, loss_fn: Any, models: Mapping[str, nn.Module]) -> bool:
    if config.grad_mode != "auto":
        return config.grad_mode == "enabled"
    return loss_fn.requires_eval_grad() or any(getattr(model, "requires_autograd", False) for model in models.values())


def _precision(
    recipe: TrainingRecipe, config: ValidationConfig, device: torch.device
) -> tuple[Callable[[], AbstractContextManager[Any]], str]:
    """Return the autocast of the registered mixed-precision hook, if there is one and it is wanted."""
    hooks = [each for hook in recipe.registry for each in getattr(hook, "iter_hooks", lambda hook=hook: [hook])()]
    owner = next((hook for hook in hooks if hasattr(hook, "inference_autocast")), None)
    if config.use_mixed_precision == "always" and owner is None:
        raise TrainingStateError(
            "use_mixed_precision='always', but no MixedPrecisionHook is registered; register one or use 'auto'"
        )
    if config.use_mixed_precision == "never" or owner is None:
        return nullcontext, "float32"
    return lambda: owner.inference_autocast(device), str(owner.precision).removeprefix("torch.")


def summary_keys(loss_fn: ComposedLossFunction) -> set[str]:
    """Return every key under which the summary of a pass may hold a number.

    Parameters
    ----------
    loss_fn : ComposedLossFunction
        The loss of the pass.
    """
    return {"total_loss", "num_batches", "num_structures", *loss_fn.names, *POTENTIAL_METRICS}


def check_validation_data(recipe: TrainingRecipe, config: ValidationConfig, loaders: Any) -> None:
    """Refuse validation data that would fail in the first pass, before training has begun.

    One batch of each loader is looked at, unless worker processes would have to be started for it.

    Parameters
    ----------
    recipe : TrainingRecipe
        Whose loss and targets are used.
    config : ValidationConfig
        What is special about the pass.
    loaders : EvaluationLoader or list of EvaluationLoader
        The loaders.

    Raises
    ------
    DataError
        If a loader hands out something other than batches.
    MissingTargetError
        If a batch lacks a target of the loss; not checked for an assembler of the user's own.
    """
    for loader in loaders if isinstance(loaders, list) else [loaders]:
        if getattr(loader.loader, "num_workers", 0):
            continue
        batch = next(iter(loader), None)
        if batch is not None and recipe.loss_target_assembler is assemble_loss_targets:
            assemble_loss_targets(config.loss_fn or recipe.loss_fn, {}, batch, batch_label="Validation batch")


class EvaluationLoader:
    """The share of one rank of the evaluation data: every batch once over all ranks.

    Parameters
    ----------
    loader : iterable of Batch
        The data; one with a ``DistributedSampler`` is left to do its own part.
    rank, world_size : int
        Which share of how many.

    Raises
    ------
    ConfigurationError
        If the data is empty, or there are fewer batches than ranks.
    """

    def __init__(self, loader: Any, rank: int = 0, world_size: int = 1) -> None:
        self.loader = loader
        shares = world_size > 1 and not isinstance(getattr(loader, "sampler", None), DistributedSampler)
        self._rank, self._world_size = (rank, world_size) if shares else (0, 1)
        length = loader_length(loader)
        if length == 0:
            raise ConfigurationError("validation_data produced no batches.")
        if length is not None and length < self._world_size:
            raise ConfigurationError(
                f"validation_data has {length} batches for {world_size} ranks; "
                "use smaller batches so that each gets one"
            )

    @classmethod
    def wrap(cls, loader: Any, rank: int = 0, world_size: int = 1) -> EvaluationLoader:
        """Return the share of a rank, of a loader that may be wrapped already."""
        return cls(loader.loader if isinstance(loader, cls) else loader, rank, world_size)

    def __len__(self) -> int:
        return math.ceil((len(self.loader) - self._rank) / self._world_size)

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(self.loader):
            if index % self._world_size == self._rank:
                yield checked_batch(batch, self.loader)
