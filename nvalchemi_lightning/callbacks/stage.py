"""One Lightning callback per training stage, made from the stage table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from lightning.pytorch.callbacks import Callback

from nvalchemi_lightning.stages import STAGES, TrainingStage

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from nvalchemi_lightning.hooks.protocol import Hook
    from nvalchemi_lightning.module_connection import ConnectedModule

__all__ = ["StageCallback", "silent_per_batch", "stage_callbacks"]

CallbackType = TypeVar("CallbackType", bound=Callback)

# Lightning calls these on every callback for every batch, and skips those that are not callable: a callback that
# sets the ones it does not need to None costs nothing there.
_PER_BATCH = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_validation_batch_start",
    "on_validation_batch_end",
)


def silent_per_batch(cls: type[CallbackType]) -> type[CallbackType]:
    """Switch off the per-batch methods that a callback class does not define itself."""
    for name in _PER_BATCH:
        if name not in vars(cls):
            setattr(cls, name, None)
    return cls


class StageCallback(Callback):
    """The face of one stage in ``trainer.callbacks``; it owns the ordered hooks of that stage.

    Attributes
    ----------
    stage : TrainingStage
        The stage.
    """

    stage: ClassVar[TrainingStage]

    def __init__(self, module: ConnectedModule) -> None:
        self._module = module

    @property
    def hooks(self) -> tuple[Hook, ...]:
        """The hooks of this stage in firing order."""
        return self._module.recipe.registry.at(self.stage)

    @property
    def state_key(self) -> str:
        """Identify the callback by its stage."""
        return f"StageCallback.{self.stage.name}"

    def dispatch(self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any) -> None:
        """Fire the stage, if the module says that this is its moment."""
        self._module.fire_outer(self.stage)


def _class_for(stage: TrainingStage) -> type[StageCallback]:
    """Make the callback class of a stage: it answers its own Lightning method and no other."""
    method = STAGES[stage].dispatched_by
    members: dict[str, Any] = {"stage": stage, "__doc__": f"The callback of {stage.name}.", "__module__": __name__}
    if method in _OUTER:
        members[method] = StageCallback.dispatch
    return silent_per_batch(type(f"{stage.name.title().replace('_', '')}Callback", (StageCallback,), members))


# The Lightning methods through which a stage is fired by its callback; the others are fired by the module.
_OUTER = ("setup", "on_train_batch_end", "on_train_epoch_end", "on_train_end", "on_validation_end")

_CLASSES = {stage: _class_for(stage) for stage in TrainingStage}
globals().update({cls.__name__: cls for cls in _CLASSES.values()})  # so that spawned processes can unpickle them


def stage_callbacks(module: ConnectedModule) -> list[StageCallback]:
    """Return a callback for every stage that a hook observes; an unobserved stage has none and costs nothing."""
    return [_CLASSES[stage](module) for stage in TrainingStage if module.recipe.registry.at(stage)]
