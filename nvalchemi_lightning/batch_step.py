"""One batch, from ``BEFORE_BATCH`` to the advanced counters: the heart of the training loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nvalchemi_lightning.context import TrainContext
from nvalchemi_lightning.errors import ConfigurationTypeError, DataError
from nvalchemi_lightning.hooks.registry import stray_stop_iteration
from nvalchemi_lightning.losses import assemble_loss_targets, compute_supervised_loss, loss_target_keys
from nvalchemi_lightning.recipe import TrainingRecipe
from nvalchemi_lightning.stages import TrainingStage as Stage
from nvalchemi_lightning.update import UpdateOwner
from nvalchemi_lightning.window import Window

__all__ = ["BatchStep", "call_forward", "check_first_batch", "detached"]

_HALF = (torch.bfloat16, torch.float16)


class BatchStep:
    """Train on one batch.

    Parameters
    ----------
    recipe : TrainingRecipe
        What is trained.
    owner : UpdateOwner
        The one that touches gradients and weights.
    world_size : int
        Number of data-parallel workers.
    count_reducer : callable, optional
        Turns this rank's loss denominators into those to divide by, so that several ranks give the gradient of
        one large batch.
    """

    def __init__(
        self,
        recipe: TrainingRecipe,
        owner: UpdateOwner,
        *,
        world_size: int = 1,
        count_reducer: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._recipe = recipe
        self._counters = recipe.counters
        self._target_keys = loss_target_keys(recipe.loss_fn)
        self._optimizers, self._schedulers = recipe.flat_optimizers()
        self._owner = owner
        self._fire = recipe.registry.fire
        self._world_size = world_size
        self._count_reducer = count_reducer

    def __call__(
        self, batch: Any, *, rank: int = 0, in_epoch: bool = True, window: Window | None = None
    ) -> tuple[TrainContext, bool]:
        """Run every stage of the batch up to ``AFTER_OPTIMIZER_STEP`` and advance the counters.

        Parameters
        ----------
        batch : Batch
            On the training device.
        rank : int
            Global rank, for the context.
        in_epoch : bool
            Whether the batch belongs to a pass over a loader.
        window : Window, optional
            Where it is in its accumulation window.

        Returns
        -------
        TrainContext, bool
            The context for ``AFTER_BATCH``, and whether an optimizer stepped.
        """
        optimizers, schedulers = [*self._optimizers], [*self._schedulers]
        ctx = self._recipe.context(batch, global_rank=rank, optimizers=optimizers, lr_schedulers=schedulers)
        ctx.window = window
        try:
            self._fire(Stage.BEFORE_BATCH, ctx)
            self._owner.zero_gradients()
            self._forward(ctx, batch)
            self._backward(ctx)
            self._fire(Stage.BEFORE_OPTIMIZER_STEP, ctx)
            stepped = self._owner.step(ctx)
            self._fire(Stage.AFTER_OPTIMIZER_STEP, ctx)
        finally:
            self._owner.end_batch()
        self._advance(ctx, stepped=stepped, in_epoch=in_epoch)
        return ctx, stepped

    def _forward(self, ctx: TrainContext, batch: Any) -> None:
        self._fire(Stage.BEFORE_FORWARD, ctx)
        recipe = self._recipe
        ctx.predictions = call_forward(recipe.training_fn, recipe.models, batch, single=recipe.single_model_input)
        self._fire(Stage.AFTER_FORWARD, ctx)
        self._fire(Stage.BEFORE_LOSS, ctx)
        ctx.losses = self._losses(ctx.predictions, batch)
        ctx.loss = ctx.losses["total_loss"]
        self._fire(Stage.AFTER_LOSS, ctx)

    def _losses(self, predictions: Mapping[str, Tensor], batch: Any) -> Any:
        recipe = self._recipe
        try:
            return compute_supervised_loss(
                recipe.loss_fn,
                predictions,
                batch,
                step=self._counters.step_count,
                epoch=self._counters.epoch_count,
                workflow=recipe,
                target_assembler=recipe.loss_target_assembler,
                target_keys=self._target_keys,
                count_reducer=self._count_reducer,
            )
        except StopIteration as error:
            raise stray_stop_iteration("the loss or the loss_target_assembler") from error

    def _backward(self, ctx: TrainContext) -> None:
        self._fire(Stage.BEFORE_BACKWARD, ctx)
        self._owner.backward(ctx)
        ctx.losses = detached(ctx.losses or {})
        ctx.loss = ctx.losses["total_loss"]
        ctx.predictions = detached(ctx.predictions or {})
        self._fire(Stage.AFTER_BACKWARD, ctx)

    def _advance(self, ctx: TrainContext, *, stepped: bool, in_epoch: bool) -> None:
        counters = self._counters
        counters.batch_done(stepped=stepped, world_size=self._world_size, in_epoch=in_epoch)
        ctx.step_count = counters.step_count
        ctx.global_step_count = counters.global_step_count
        ctx.batch_count = counters.batch_count
        ctx.epoch_step_count = counters.epoch_step_count


def call_forward(function: Any, models: Mapping[str, nn.Module], batch: Any, *, single: bool) -> Mapping[str, Tensor]:
    """Return the predictions of ``training_fn`` or ``validation_fn`` for a batch.

    Under autocast, those in half precision are cast to float32: losses compare them with labels of that precision.

    Parameters
    ----------
    function : callable
        The forward function.
    models : mapping of str to nn.Module
        The models by name.
    batch : Batch
        The batch.
    single : bool
        Whether the function takes the one bare model instead of the mapping.

    Raises
    ------
    ConfigurationTypeError
        If it returns no mapping.
    TrainingStateError
        If it lets a ``StopIteration`` escape.
    """
    try:
        predictions = function(models["main"] if single else models, batch)
    except StopIteration as error:
        raise stray_stop_iteration("the forward function") from error
    if not isinstance(predictions, Mapping):
        raise ConfigurationTypeError(
            f"training_fn must return a mapping of predictions; got {type(predictions).__name__}"
        )
    return _widened(predictions)


def _widened(predictions: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    if not any(_is_autocast(value) for value in predictions.values()):
        return predictions
    return {key: value.float() if _is_autocast(value) else value for key, value in predictions.items()}


def _is_autocast(value: Any) -> bool:
    return getattr(value, "dtype", None) in _HALF and torch.is_autocast_enabled(value.device.type)


def check_first_batch(recipe: TrainingRecipe, batch: Any) -> None:
    """Refuse a first batch that cannot be trained on, before a model is called.

    Raises
    ------
    DataError
        If a position is not finite.
    MissingTargetError
        If the batch lacks a target of the loss; not checked for an assembler of the user's own.
    """
    if not bool(batch.positions.isfinite().all()):
        raise DataError("the first batch has positions that are not finite; look at its structures before training")
    if recipe.loss_target_assembler is assemble_loss_targets:
        assemble_loss_targets(recipe.loss_fn, {}, batch, workflow=recipe, target_keys=loss_target_keys(recipe.loss_fn))


def detached(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a nested mapping of values off the graph."""
    return {
        key: detached(value) if type(value) is dict else value.detach() if _on_graph(value) else value
        for key, value in values.items()
    }


def _on_graph(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
