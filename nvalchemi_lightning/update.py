"""The one owner of gradients and weights.

Everything that zeroes a gradient, runs backward or steps an optimizer goes through `UpdateOwner`. It hands out
permits for exactly that moment; autograd and optimizer hooks catch everybody else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from nvalchemi_lightning.context import TrainContext
from nvalchemi_lightning.errors import SecondOwnerError, TrainingStateError
from nvalchemi_lightning.hooks.gradients import has_gradients
from nvalchemi_lightning.hooks.registry import HookRegistry
from nvalchemi_lightning.optim import step_lr_schedulers
from nvalchemi_lightning.stages import TrainingStage

__all__ = ["MAX_IDLE_BATCHES", "UpdateOwner", "UpdatePrimitives"]

MAX_IDLE_BATCHES = 1000
"""So many batches (accumulation windows) in a row may pass without an optimizer step; then a run ends with an error."""


class UpdatePrimitives(Protocol):
    """What the owner asks to act; Lightning's strategies have these methods."""

    def backward(self, closure_loss: Any, optimizer: Optimizer | None) -> Any:
        """Differentiate the loss."""

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        """Step one optimizer."""

    def pre_backward(self, closure_loss: Any) -> None:
        """Prepare a backward pass, for example the reduction of gradients over ranks."""

    def post_backward(self, closure_loss: Any) -> None:
        """Finish a backward pass."""

    def keeping_gradients_local(self) -> AbstractContextManager[Any]:
        """Return the context in which a backward pass leaves gradients on their rank."""


class UpdateOwner:
    """Zero gradients, run backward and step optimizers; refuse everybody else.

    Parameters
    ----------
    registry : HookRegistry
        Asked for the claimants of the replacement stages, and for the stage that an error names.
    primitives : UpdatePrimitives
        What differentiates and steps: a Lightning strategy.

    Notes
    -----
    Permits are one-shot. ``requested`` is what the owner has just asked its primitives for; `consume` takes it, so
    a callback that runs inside the primitive and asks again is refused. Gradients may accumulate only inside
    `accumulating`, and an optimizer may step once per request.
    """

    def __init__(self, registry: HookRegistry, primitives: UpdatePrimitives) -> None:
        self._registry = registry
        self._primitives = primitives
        self._parameters: tuple[nn.Parameter, ...] = ()
        self._optimizers: tuple[Optimizer, ...] = ()
        self._schedulers: tuple[Any, ...] = ()
        self._guards: list[RemovableHandle] = []
        self._requested: str | None = None
        self._may_differentiate = False
        self._may_accumulate = False
        self._may_step: set[int] = set()
        self._delegated = False
        self._accumulated = False
        self._stepped = False
        self._idle_batches = 0
        self._idle_steps = 0

    @classmethod
    def plain(cls, registry: HookRegistry) -> UpdateOwner:
        """Return an owner whose primitives are those of torch, for training without a Trainer."""
        primitives = _TorchPrimitives()
        primitives.owner = owner = cls(registry, primitives)
        return owner

    def attach(
        self, parameters: Iterable[nn.Parameter], optimizers: Sequence[Optimizer], schedulers: Sequence[Any]
    ) -> None:
        """Take charge of the parameters and optimizers of a run.

        Parameters
        ----------
        parameters : iterable of nn.Parameter
            Every trainable parameter, also those that no optimizer holds.
        optimizers, schedulers : sequence
            Flat and aligned; a scheduler may be None.
        """
        self.detach()
        self._parameters = tuple(parameters)
        self._optimizers, self._schedulers = tuple(optimizers), tuple(schedulers)
        guarded: Any = self._parameters
        self._guards = [parameter.register_post_accumulate_grad_hook(self._on_accumulate) for parameter in guarded]
        self._guards += [o.register_step_pre_hook(self._on_step) for o in self._optimizers]

    def detach(self) -> None:
        """Remove every guard; doing so twice is harmless."""
        for guard in self._guards:
            guard.remove()
        self._guards = []

    def zero_gradients(self) -> None:
        """Drop the gradients of every parameter in charge, unless an update hook vetoed it for this batch."""
        policy = self._registry.policy
        if policy is not None and policy.zeroing_skipped:
            return
        for parameter in self._parameters:
            parameter.grad = None

    def backward(self, ctx: TrainContext) -> None:
        """Run the backward pass of this batch, by the claimant of ``DO_BACKWARD`` or by default.

        Update hooks transform ``ctx.loss`` first. Gradients of several ranks are averaged at the last batch of an
        accumulation window.

        Raises
        ------
        TrainingStateError
            If a claimant ran no backward pass, or the loss depends on nothing that trains.
        """
        claimant = self._registry.claimant(TrainingStage.DO_BACKWARD)
        if claimant is None or claimant is self._registry.policy:
            self._registry.fire(TrainingStage.DO_BACKWARD, ctx)
            if ctx.loss is None or not ctx.loss.requires_grad:
                raise TrainingStateError(
                    "the loss does not depend on a trainable parameter; look whether training_fn detaches its "
                    "predictions or runs the model that trains without gradients"
                )
            more = ctx.window is not None and not ctx.window.last
            with self._primitives.keeping_gradients_local() if more else nullcontext(), self._request("backward"):
                self._primitives.backward(ctx.loss, None)
            return
        self._accumulated = False
        self._primitives.pre_backward(ctx.loss)
        with self._delegate():
            self._registry.fire(TrainingStage.DO_BACKWARD, ctx)
        self._primitives.post_backward(ctx.loss)
        if not self._accumulated:
            raise TrainingStateError(
                f"{type(claimant).__name__} claims DO_BACKWARD but accumulated no gradient; "
                "call loss.backward() there, or observe at BEFORE_BACKWARD or AFTER_BACKWARD instead"
            )

    def step(self, ctx: TrainContext) -> bool:
        """Step the optimizers and their time-based schedulers, by the claimant or by default.

        Update hooks may veto it first. With ``ctx.grad_scaler`` every optimizer steps through the scaler, which is
        then updated once; the scheduler of an optimizer that the scaler held back does not step.

        Returns
        -------
        bool
            Whether the step was taken: no veto, and no optimizer was held back.

        Raises
        ------
        TrainingStateError
            If `MAX_IDLE_BATCHES` in a row passed without a step; of an accumulation window only the last one counts.
        """
        claimant, policy = self._registry.claimant(TrainingStage.DO_OPTIMIZER_STEP), self._registry.policy
        if claimant is None:
            self._registry.fire(TrainingStage.DO_OPTIMIZER_STEP, ctx)
            stepped = self._step_all(None)
        elif policy is not None and claimant is policy:
            self._registry.fire(TrainingStage.DO_OPTIMIZER_STEP, ctx)
            stepped = not policy.optimizer_step_skipped and self._step_all(ctx.grad_scaler)
            policy.optimizer_step_skipped = not stepped
        else:
            self._stepped = False
            with self._delegate():
                self._registry.fire(TrainingStage.DO_OPTIMIZER_STEP, ctx)
            stepped = self._stepped
        self._note(stepped=stepped, due=ctx.window is None or ctx.window.last)
        return stepped

    def _note(self, *, stepped: bool, due: bool) -> None:
        self._idle_batches = 0 if stepped else self._idle_batches + 1
        self._idle_steps = 0 if stepped else self._idle_steps + due
        if self._idle_steps >= MAX_IDLE_BATCHES:
            raise self.never_stepped()

    def end_batch(self) -> None:
        """Let update hooks give back what must not outlive a batch, also one that failed."""
        policy = self._registry.policy
        if policy is not None:
            policy.end_batch()

    def consume(self, action: str) -> None:
        """Take the permit for ``action`` (``"backward"`` or ``"optimizer_step"``).

        Raises
        ------
        SecondOwnerError
            If the owner did not ask for it, or it was taken already.
        """
        requested, self._requested = self._requested, None
        if requested != action and not self._delegated:
            raise self._second_owner(f"{action} was called")
        self._may_differentiate = action == "backward"

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Permit gradients to accumulate while the primitive differentiates, once per consumed request.

        Raises
        ------
        SecondOwnerError
            If no request for a backward pass was consumed.
        """
        if not self._may_differentiate:
            raise self._second_owner("backward was called")
        self._may_differentiate, self._may_accumulate = False, True
        try:
            yield
        finally:
            self._may_accumulate = False

    def _step_all(self, scaler: Any) -> bool:
        if scaler is None:
            taken = [self._step_one(optimizer, optimizer) for optimizer in self._optimizers]
        else:
            taken = self._step_scaled(scaler)
        step_lr_schedulers(scheduler for scheduler, stepped in zip(self._schedulers, taken, strict=True) if stepped)
        return bool(taken) and all(taken)

    def _step_scaled(self, scaler: Any) -> list[bool]:
        # A scaler complains about optimizers without gradients: it has nothing to look at.
        scaled = [has_gradients(optimizer) for optimizer in self._optimizers]
        taken = [
            self._step_one(optimizer, _ScaledOptimizer(optimizer, scaler) if through else optimizer)
            for optimizer, through in zip(self._optimizers, scaled, strict=True)
        ]
        if any(scaled):
            scaler.update()
        return taken

    def _step_one(self, optimizer: Optimizer, face: Any) -> bool:
        """Step one optimizer, through ``face``, and return whether it did."""
        self._stepped = False
        self._may_step.add(id(optimizer))
        with self._request("optimizer_step"):
            self._primitives.optimizer_step(face, _no_closure)
        self._may_step.discard(id(optimizer))
        return self._stepped

    def never_stepped(self) -> TrainingStateError:
        """Return the error for batches that passed without a step."""
        policy = self._registry.policy
        vetoed_by = policy.vetoed_by if policy is not None else ""
        why = f"the last one was vetoed by {vetoed_by}" if vetoed_by else "the gradients of the last one are not finite"
        claimant = self._registry.claimant(TrainingStage.DO_OPTIMIZER_STEP)
        if claimant is not policy:
            why = f"{type(claimant).__name__} claims DO_OPTIMIZER_STEP and stepped no optimizer"
        return TrainingStateError(
            f"{self._idle_batches} batches in a row passed without an optimizer step, so the run would never reach its "
            f"target; {why}. Look at what that hook waits for, or at the losses of these batches"
        )

    @contextmanager
    def _request(self, action: str) -> Iterator[None]:
        self._requested = action
        try:
            yield
        finally:
            self._requested = None

    @contextmanager
    def _delegate(self) -> Iterator[None]:
        self._delegated = True
        try:
            yield
        finally:
            self._delegated = False

    def _on_accumulate(self, parameter: nn.Parameter) -> None:
        if self._may_accumulate or self._delegated:
            self._accumulated = True
            return
        raise self._second_owner(f"a gradient of shape {tuple(parameter.shape)} was accumulated")

    def _on_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) not in self._may_step and not self._delegated:
            raise self._second_owner(f"{type(optimizer).__name__}.step() was called")
        self._may_step.discard(id(optimizer))
        # A fused optimizer is told by the scaler and holds itself back, on the device.
        held_back = getattr(optimizer, "found_inf", None)
        self._stepped = held_back is None or not bool(held_back)

    def _second_owner(self, what: str) -> SecondOwnerError:
        stage = self._registry.stage
        where = f"at {stage.name}" if stage is not None else "outside a batch"
        return SecondOwnerError(
            f"{what} {where}, but the strategy is the one owner of backward and optimizer step. "
            "Observe with a Hook; change the update with a TrainingUpdateHook; "
            "torch.autograd.grad is free for diagnostics"
        )


class _TorchPrimitives:
    owner: UpdateOwner

    def backward(self, closure_loss: Any, optimizer: Optimizer | None) -> None:
        self.owner.consume("backward")
        with self.owner.accumulating():
            closure_loss.backward()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any]) -> None:
        self.owner.consume("optimizer_step")
        optimizer.step()

    def pre_backward(self, closure_loss: Any) -> None:
        """Nothing to prepare on one device."""

    def post_backward(self, closure_loss: Any) -> None:
        """Nothing to finish on one device."""

    def keeping_gradients_local(self) -> AbstractContextManager[Any]:
        """Return a context in which nothing is different on one device."""
        return nullcontext()


class _ScaledOptimizer:
    """An optimizer whose step goes through a gradient scaler; anything else is the optimizer's own."""

    def __init__(self, optimizer: Optimizer, scaler: Any) -> None:
        self._optimizer, self._scaler = optimizer, scaler

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        # Lightning's closure tells its callbacks that the step comes; it computes nothing.
        if closure is not None:
            closure()
        return self._scaler.step(self._optimizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def _no_closure() -> None:
    return None
