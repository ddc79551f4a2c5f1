"""Lightning strategies with a single owner of backward and optimizer step.

Importing this module registers them: ``Trainer(strategy="nvalchemi")`` for one device, ``"nvalchemi_ddp"``,
``"nvalchemi_ddp_spawn"`` and ``"nvalchemi_ddp_notebook"`` for several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy, StrategyRegistry
from torch import Tensor
from torch.optim import Optimizer

from nvalchemi_lightning import _lightning
from nvalchemi_lightning.callbacks.driver import RunDriver
from nvalchemi_lightning.callbacks.metric_schedulers import MetricSchedulers
from nvalchemi_lightning.callbacks.stage import StageCallback
from nvalchemi_lightning.errors import ConfigurationError
from nvalchemi_lightning.module_evaluation import EvaluatingModule
from nvalchemi_lightning.requests import RunRequests
from nvalchemi_lightning.second_owners import refuse_second_owners, refuse_two_precisions
from nvalchemi_lightning.update import UpdateOwner

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from nvalchemi_lightning.module import AlchemiModule

__all__ = ["SingleOwner", "SingleOwnerDDP", "SingleOwnerMixin"]


class SingleOwnerMixin(Strategy):
    """Give a Lightning strategy the one owner of gradients and weights.

    Attributes
    ----------
    owner : UpdateOwner
        Created when a module is connected; everybody else who calls `backward` or `optimizer_step` is refused.
    limits : TrainerLimits
        The limits and the validation cadence that were taken over from the Trainer.
    """

    owner: UpdateOwner
    limits: _lightning.TrainerLimits
    _direct_transfer = False

    def connect(self, model: LightningModule) -> None:
        """Check the Trainer, take over what Lightning would count wrongly, and become the owner.

        Raises
        ------
        ConfigurationError
            If the module is not an `AlchemiModule`.
        SecondOwnerError
            If the Trainer has an option or callback that would touch gradients or weights.
        """
        if not isinstance(model, EvaluatingModule):
            raise ConfigurationError(
                f"Trainer(strategy='nvalchemi…') runs an AlchemiModule; got {type(model).__name__}. "
                "Wrap the models with AlchemiModule(models=..., loss_fn=..., optimizer_configs=...)"
            )
        super().connect(model)
        module, trainer = self.alchemi_module, model.trainer
        _lightning.attach_missing(trainer, module.recipe.lightning_callbacks)
        refuse_second_owners(trainer)
        refuse_two_precisions(trainer, module.recipe.registry)
        if not hasattr(self, "limits"):
            self.limits = _lightning.take_over_limits(trainer)
        _lightning.allow_gradients_in_evaluation(trainer)
        _lightning.silence_mode_warning(trainer)
        _lightning.silence_wrong_advice()
        _lightning.drop_idle_profiler(trainer)
        self._direct_transfer = module.transfers_plainly() and getattr(trainer, "datamodule", None) is None
        if not trainer.training:
            _lightning.shard_evaluation_ourselves(trainer)
        self.owner = UpdateOwner(module.recipe.registry, self)
        module.connect_owner(self)
        _lightning.attach_first(trainer, RunDriver(), replacing=(RunDriver, StageCallback, MetricSchedulers))

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward pass that the owner has just asked for."""
        self.owner.consume("backward")
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Take the optimizer step that the owner has just asked for."""
        self.owner.consume("optimizer_step")
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch, directly if nobody overrides how."""
        if self._direct_transfer:
            return batch.to(device or self.root_device, non_blocking=True)
        return super().batch_to_device(batch, device, dataloader_idx)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Build the optimizers and put the owner in charge of them."""
        super().setup_optimizers(trainer)
        self.alchemi_module.put_owner_in_charge()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the moments of a checkpoint, if they belong to the parameters of this run.

        Raises
        ------
        ConfigurationError
            If they would land on other parameters.
        """
        self.alchemi_module.check_moments(checkpoint)
        super().load_optimizer_state_dict(checkpoint)

    def process_dataloader(self, dataloader: object) -> object:
        """Wrap the training loader into epochs that follow the counters, and share evaluation batches out."""
        return self.alchemi_module.feed(super().process_dataloader(dataloader))

    def teardown(self) -> None:
        """Release gradients and weights, then tear down as usual."""
        if hasattr(self, "owner"):
            self.owner.detach()
        super().teardown()

    @property
    def alchemi_module(self) -> AlchemiModule:
        """The connected module."""
        return self.lightning_module  # type: ignore[return-value]

    def refuse_uneven(self, batches: int | None) -> None:
        """Refuse loaders that give the ranks different numbers of batches; nothing to do on one rank."""

    def keeping_gradients_local(self) -> AbstractContextManager[None]:
        """Return the context in which a backward pass leaves gradients on their rank; on one device they are."""
        return nullcontext()

    def count_reducer(self, requests: RunRequests) -> Callable[[Tensor], Tensor] | None:
        """Return what turns loss denominators of one rank into global ones, None for one process."""
        return None

    def sum_over_ranks(self) -> Callable[[Tensor], Tensor] | None:
        """Return what sums a tensor over all ranks, None for one process."""
        return None


class SingleOwner(SingleOwnerMixin, SingleDeviceStrategy):
    """The owner on one device, ``Trainer(strategy="nvalchemi")``."""

    strategy_name = "nvalchemi"
    # Filled in by the accelerator connector, which otherwise would not tell a registered strategy its device.
    parallel_devices: list[torch.device] | None = None
    _direct_update = False

    @property
    def root_device(self) -> torch.device:
        """The device that the Trainer chose, else the one given at construction."""
        return self.parallel_devices[0] if self.parallel_devices else super().root_device

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Build the optimizers and see which of Lightning's steps around the update somebody needs."""
        super().setup_optimizers(trainer)
        self._direct_update = type(self.precision_plugin) is Precision and not _lightning.is_heard(
            trainer, "on_before_backward", "on_after_backward", "on_before_optimizer_step"
        )

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the stages of one batch."""
        if type(self.precision_plugin) is Precision:
            return self.alchemi_module.training_step(*args, **kwargs)
        return super().training_step(*args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward pass that the owner has just asked for, directly if nobody listens to Lightning's hooks."""
        if not self._direct_update:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        self.owner.consume("backward")
        self.alchemi_module.backward(closure_loss, *args, **kwargs)
        return closure_loss

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Take the step that the owner has just asked for, directly if nobody listens to Lightning's hooks."""
        if not self._direct_update:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        self.owner.consume("optimizer_step")
        return optimizer.step()

    def setup_environment(self) -> None:
        """Refuse several devices, which would silently train on one.

        Raises
        ------
        ConfigurationError
            If the Trainer was given more than one device.
        """
        if self.parallel_devices and len(self.parallel_devices) > 1:
            raise ConfigurationError(
                f"strategy='nvalchemi' trains on one device, but devices={len(self.parallel_devices)}; "
                "use strategy='nvalchemi_ddp'"
            )
        super().setup_environment()


class SingleOwnerDDP(SingleOwnerMixin, DDPStrategy):
    """The owner on several devices, ``Trainer(strategy="nvalchemi_ddp")``.

    Every rank divides its loss sums by the counts of all ranks, so the averaged gradient is that of one batch that
    holds the structures of all ranks.
    """

    def refuse_uneven(self, batches: int | None) -> None:
        """Compare the number of batches per epoch over the ranks; a rank with fewer would leave the others waiting.

        Raises
        ------
        ConfigurationError
            If they differ.
        """
        every: list[int | None] = [None] * self.world_size
        torch.distributed.all_gather_object(every, batches)
        if len(set(every)) > 1:
            raise ConfigurationError(
                f"the ranks have different numbers of batches per epoch, {every}; let the sampler pad or drop samples "
                "(nvalchemi_lightning.data.DataLoader pads with shuffle=True or distributed_padding=True)"
            )

    def keeping_gradients_local(self) -> AbstractContextManager[None]:
        """Return the context in which a backward pass leaves gradients on their rank.

        DDP learns a static graph from the first pass, which has to be a shared one: there every pass is.
        """
        return nullcontext() if self.model.static_graph else self.block_backward_sync()  # type: ignore[union-attr]

    def count_reducer(self, requests: RunRequests) -> Callable[[Tensor], Tensor] | None:
        """Return ``counts -> sum over ranks / world_size``; DDP averages gradients, hence the division.

        The ranks' requests to stop travel in the same reduction, so that all leave the loop at the same batch.
        """
        if self.world_size == 1:
            return None
        requests.count_votes(torch.zeros((), device=self.root_device))

        def reduce(counts: Tensor) -> Tensor:
            vote = counts.new_full((1,), requests.stop_reason is not None)
            total = _all_reduce(torch.cat((counts, vote)))
            requests.count_votes(total[-1])
            return total[:-1].clamp(min=1) / self.world_size

        return reduce

    def sum_over_ranks(self) -> Callable[[Tensor], Tensor] | None:
        """Return the all-reduce that sums a tensor over all ranks."""
        return None if self.world_size == 1 else _all_reduce

    def on_exception(self, exception: BaseException) -> None:
        """Name this package's option where DDP complains about parameters without a gradient."""
        if "Expected to have finished reduction in the prior iteration" in str(exception):
            exception.add_note(
                "Some trainable parameters did not take part in the loss. If that is intended (a force-only loss "
                "leaves the last energy bias unused), write strategy=SingleOwnerDDP(find_unused_parameters=True)."
            )


def _all_reduce(values: Tensor) -> Tensor:
    """Sum over all ranks; Lightning's own ``reduce`` would add a barrier to every call."""
    total = values.clone()
    torch.distributed.all_reduce(total)
    return total


def _register() -> None:
    registered = StrategyRegistry.available_strategies()
    if "nvalchemi" in registered:
        return
    StrategyRegistry.register("nvalchemi", SingleOwner, description="One owner of backward and step, one device")
    for name, start_method in (("", "popen"), ("_spawn", "spawn"), ("_notebook", "fork")):
        StrategyRegistry.register(
            f"nvalchemi_ddp{name}",
            SingleOwnerDDP,
            description=f"One owner of backward and step, DDP ({start_method})",
            start_method=start_method,
        )


_register()
