"""What a validation pass evaluates, and when it is due."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Protocol, runtime_checkable

from pydantic import Field, field_validator, model_validator

from nvalchemi_lightning.counters import Counters
from nvalchemi_lightning.errors import ConfigurationError
from nvalchemi_lightning.losses import ComposedLossFunction, as_composed_loss
from nvalchemi_lightning.strict_model import StrictModel

__all__ = ["BatchValidationCallback", "ValidationConfig", "ensure_reiterable_validation_data"]


@runtime_checkable
class BatchValidationCallback(Protocol):
    """A callable that sees every validation batch, on every rank."""

    def __call__(
        self, *, batch: Any, predictions: Any, loss: Any, batch_count: int, step_count: int, epoch: int
    ) -> None:
        """Take one evaluated batch.

        Parameters
        ----------
        batch : Batch
            The validation batch on the training device.
        predictions : mapping of str to Tensor
            Detached outputs of the forward function.
        loss : mapping
            Detached structured loss output of this batch.
        batch_count : int
            Index of the batch in this pass, from 0.
        step_count, epoch : int
            Progress of training.
        """


def ensure_reiterable_validation_data(data: Any) -> Any:
    """Return ``data`` if it can be iterated more than once.

    Raises
    ------
    ConfigurationError
        If it is a one-shot iterator or cannot be iterated at all.
    """
    if isinstance(data, Iterator):
        raise ConfigurationError(
            f"validation_data must be a re-iterable container such as a list or a DataLoader; "
            f"got {type(data).__name__}, which is empty after one pass"
        )
    if hasattr(data, "num_nodes_per_graph"):
        raise ConfigurationError("validation_data must be an iterable of Batch; one Batch is none, write [batch]")
    if isinstance(data, (str, bytes)) or not (hasattr(data, "__iter__") or hasattr(data, "__getitem__")):
        raise ConfigurationError(f"validation_data must be iterable; got {type(data).__name__}")
    return data


class ValidationConfig(StrictModel):
    """What a validation pass evaluates, and when it is due.

    Attributes
    ----------
    validation_data : iterable of Batch
        Iterated once per pass; generators are refused.
    validation_fn : callable or None
        Forward function with the call shape of ``training_fn``; None uses that one.
    loss_fn : loss or None
        A leaf is wrapped; None uses the strategy's loss.
    every_n_epochs, every_n_steps : int or None
        Cadence in epochs or executed optimizer steps, >= 1, not both. Without either only the pass at the end of
        the run remains.
    grad_mode : {"auto", "enabled", "disabled"}
        Whether autograd is on. ``"auto"`` turns it on when a loss term or an active model output needs it.
    set_eval : bool
        Put the models in evaluation mode for the pass; every submodule's mode is restored.
    use_ema : {"auto", "always", "never"}
        Whether averaged weights are evaluated: where available, necessarily, or not at all.
    use_mixed_precision : {"auto", "always", "never"}
        Whether the autocast of a mixed-precision hook applies.
    batch_callback : BatchValidationCallback or None
        Called with every evaluated batch.
    name : str
        Name of the pass in summaries and logs.
    """

    validation_data: Any
    validation_fn: Any = None
    loss_fn: ComposedLossFunction | None = None
    every_n_epochs: int | None = Field(default=None, ge=1)
    every_n_steps: int | None = Field(default=None, ge=1)
    grad_mode: Literal["auto", "enabled", "disabled"] = "auto"
    set_eval: bool = True
    use_ema: Literal["auto", "always", "never"] = "auto"
    use_mixed_precision: Literal["auto", "always", "never"] = "auto"
    batch_callback: Any = None
    name: str = Field(default="validation", min_length=1)

    @field_validator("validation_data")
    @classmethod
    def _reiterable(cls, data: Any) -> Any:
        return ensure_reiterable_validation_data(data)

    @field_validator("loss_fn", mode="before")
    @classmethod
    def _composed(cls, loss: Any) -> ComposedLossFunction | None:
        return None if loss is None else as_composed_loss(loss)

    @field_validator("validation_fn", "batch_callback")
    @classmethod
    def _callable(cls, function: Any) -> Any:
        if function is not None and not callable(function):
            raise ConfigurationError(f"expected a callable; got {function!r}")
        return function

    @model_validator(mode="after")
    def _one_cadence(self) -> ValidationConfig:
        if self.every_n_epochs is not None and self.every_n_steps is not None:
            raise ConfigurationError(
                f"every_n_epochs={self.every_n_epochs} and every_n_steps={self.every_n_steps} exclude each other; "
                "set one"
            )
        return self

    def due_after_step(self, counters: Counters, *, stepped: bool) -> bool:
        """Return whether a pass is due now that a batch is done; a batch without a step never makes it due."""
        return stepped and self.every_n_steps is not None and counters.step_count % self.every_n_steps == 0

    def due_after_epoch(self, counters: Counters) -> bool:
        """Return whether a pass is due now that an epoch is done."""
        return self.every_n_epochs is not None and counters.epoch_count % self.every_n_epochs == 0
