"""One batch, from ``BEFORE_BATCH`` to the advanced counters: the heart of the training loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from nvalchemi_lightning.context import TrainContext
from nvalchemi_lightning.recipe import TrainingRecipe
from nvalchemi_lightning.stages import TrainingStage as Stage
from nvalchemi_lightning.update import UpdateOwner

__all__ = ["BatchStep"]


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
        self._owner = owner
        self._fire = recipe.registry.fire
        self._world_size = world_size
        self._count_reducer = count_reducer

    def __call__(self, batch: Any, *, rank: int = 0, in_epoch: bool = True) -> tuple[TrainContext, bool]:
        """Run every stage of the batch up to ``AFTER_OPTIMIZER_STEP`` and advance the counters.

        Parameters
        ----------
        batch : Batch
            On the training device.
        rank : int
            Global rank, for the context.
        in_epoch : bool
            Whether the batch belongs to a pass over a loader.

        Returns
        -------
        TrainContext, bool
            The context for ``AFTER_BATCH``, and whether an optimizer stepped.
        """
        ctx = self._recipe.context(batch, global_rank=rank)
        self._fire(Stage.BEFORE_BATCH, ctx)
        self._owner.zero_gradients()
        self._forward(ctx, batch)
        self._backward(ctx)
        self._fire(Stage.BEFORE_OPTIMIZER_STEP, ctx)
        stepped = self._owner.step(ctx)
        self._fire(Stage.AFTER_OPTIMIZER_STEP, ctx)
        self._advance(ctx, stepped=stepped, in_epoch=in_epoch)
        return ctx, stepped

    def _forward(self, ctx: TrainContext, batch: Any) -> None:
        self._fire(Stage.BEFORE_FORWARD, ctx)
        ctx.predictions = self._recipe.forward(batch)
        self._fire(Stage.AFTER_FORWARD, ctx)
        self._fire(Stage.BEFORE_LOSS, ctx)
        ctx.losses = self._recipe.losses(ctx.predictions, batch, self._count_reducer)
        ctx.loss = ctx.losses["total_loss"]
        self._fire(Stage.AFTER_LOSS, ctx)

    def _backward(self, ctx: TrainContext) -> None:
        self._fire(Stage.BEFORE_BACKWARD, ctx)
        self._owner.backward(ctx)
        ctx.losses = _detached(ctx.losses)
        ctx.loss = ctx.losses["total_loss"]
        ctx.predictions = _detached(ctx.predictions)
        self._fire(Stage.AFTER_BACKWARD, ctx)

    def _advance(self, ctx: TrainContext, *, stepped: bool, in_epoch: bool) -> None:
        counters = self._recipe.counters
        counters.batch_done(stepped=stepped, world_size=self._world_size, in_epoch=in_epoch)
        ctx.step_count = counters.step_count
        ctx.global_step_count = counters.global_step_count
        ctx.batch_count = counters.batch_count
        ctx.epoch_step_count = counters.epoch_step_count


def _detached(values: Any) -> dict[str, Any]:
    return {
        key: value.detach() if isinstance(value, Tensor) else _detached(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
    }
