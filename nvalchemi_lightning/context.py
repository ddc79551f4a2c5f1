"""What a hook is handed: the state of the run at one stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from nvalchemi_lightning.window import Window

__all__ = ["HookContext", "TrainContext"]


@dataclass(kw_only=True)
class HookContext:
    """The part of a context that every kind of workflow shares.

    Attributes
    ----------
    batch : Batch or None
        The batch at hand, on the training device; None at ``SETUP``.
    model : nn.Module or None
        The model called ``"main"``, if there is one.
    global_rank : int
        This process's rank over all nodes.
    workflow : object or None
        The strategy that runs.
    """

    batch: Any
    model: nn.Module | None = None
    global_rank: int = 0
    workflow: Any = None


@dataclass(kw_only=True)
class TrainContext(HookContext):
    """The state of a training run at one stage.

    One object is shared by the stages of one batch, ``BEFORE_BATCH`` to ``AFTER_BATCH``, so hooks may leave
    attributes on it for each other. Every other stage gets an object of its own.

    Attributes
    ----------
    step_count, global_step_count : int
        Executed optimizer steps, of this worker and summed over all workers.
    batch_count, epoch_step_count, epoch : int
        Completed batches, batches consumed in the current epoch, completed epochs.
    predictions : mapping of str to Tensor, or None
        What ``training_fn`` returned. A hook at ``AFTER_FORWARD`` may replace it: the loss reads it back.
    loss : Tensor or None
        The scalar that is differentiated; detached from ``AFTER_BACKWARD`` on.
    losses : mapping or None
        The structured output of the loss; detached from ``AFTER_BACKWARD`` on.
    models : mapping of str to nn.Module, or None
        The live models.
    optimizers, lr_schedulers : list
        Flat and aligned; a scheduler may be None.
    gradients, grad_scaler : object or None
        Room for update hooks.
    gradient_norm : Tensor or None
        2-norm of all gradients before they were clipped, a scalar on the device; set by `GradientClipHook`.
    window : Window or None
        Where the batch is in its accumulation window; None without `GradientAccumulationHook`.
    window_loss : Tensor or None
        Loss of the window up to this batch, detached, from ``DO_BACKWARD`` on; that of the window at its last batch.
    validation : dict or None
        The newest validation summary.
    validating : bool
        True where a forward stage fires for a validation batch.
    """

    step_count: int = 0
    global_step_count: int = 0
    batch_count: int = 0
    epoch_step_count: int = 0
    epoch: int = 0
    predictions: Mapping[str, Tensor] | None = None
    loss: Tensor | None = None
    losses: Mapping[str, Any] | None = None
    models: Mapping[str, nn.Module] | None = None
    optimizers: list[Optimizer] = field(default_factory=list)
    lr_schedulers: list[Any] = field(default_factory=list)
    gradients: Any = None
    grad_scaler: Any = None
    gradient_norm: Tensor | None = None
    window: Window | None = None
    window_loss: Tensor | None = None
    validation: dict[str, Any] | None = None
    validating: bool = False
