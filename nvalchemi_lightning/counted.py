"""The part of a recipe that says how long to train and how far training has come."""

from __future__ import annotations

import math
from typing import Any

from pydantic import Field, PrivateAttr, model_validator

from nvalchemi_lightning.counters import Counters
from nvalchemi_lightning.errors import ConfigurationError
from nvalchemi_lightning.strict_model import StrictModel

__all__ = ["CountedRecipe"]

_COUNTER_FIELDS = tuple(vars(Counters()))


class CountedRecipe(StrictModel):
    """Duration and progress of a training run.

    Attributes
    ----------
    num_epochs, num_steps : int or None
        How long to train, >= 1, not both: passes over the data, or executed optimizer steps. With neither, the
        Trainer's limits decide.
    epoch_step_modifier : float
        Optimizer steps per batch, > 0. Other than 1 (the default), ``num_epochs`` becomes a number of steps:
        ``ceil(num_epochs * len(loader) * epoch_step_modifier)``.
    counters : Counters
        Progress; ``step_count=`` and its siblings are accepted as keywords too, and ``epoch=`` for ``epoch_count=``.
    """

    num_epochs: int | None = Field(default=None, ge=1)
    num_steps: int | None = Field(default=None, ge=1)
    epoch_step_modifier: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    counters: Counters = Field(default_factory=Counters)

    _counters_given: bool = PrivateAttr(default=False)

    @classmethod
    def _keywords(cls) -> set[str]:
        return super()._keywords() | set(_COUNTER_FIELDS) | {"epoch"}

    @model_validator(mode="before")
    @classmethod
    def _gather_counters(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = dict(data)
        counts = {name: data.pop(name) for name in _COUNTER_FIELDS if name in data}
        if "epoch" in data:
            counts["epoch_count"] = data.pop("epoch")
        if counts:
            if counts.get("global_step_count", 0) == 0:
                counts["global_step_count"] = counts.get("step_count", 0)
            data["counters"] = Counters(**counts)
        return data

    @model_validator(mode="after")
    def _check_duration(self) -> CountedRecipe:
        self.check_duration()
        self._counters_given = self.counters != Counters()
        return self

    def check_duration(self) -> None:
        """Refuse a duration that contradicts itself; assignments are not checked before a run begins.

        Raises
        ------
        ConfigurationError
            If both ``num_epochs`` and ``num_steps`` are set, or one is no integer >= 1.
        """
        for name in ("num_epochs", "num_steps"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigurationError(f"{name} must be an integer >= 1; got {value!r}")
        if self.num_epochs is not None and self.num_steps is not None:
            raise ConfigurationError(
                f"Exactly one of num_epochs or num_steps must be set; got num_epochs={self.num_epochs}, "
                f"num_steps={self.num_steps}"
            )

    @property
    def step_count(self) -> int:
        """Executed optimizer steps of this worker."""
        return self.counters.step_count

    @property
    def global_step_count(self) -> int:
        """Executed optimizer steps summed over all workers."""
        return self.counters.global_step_count

    @property
    def batch_count(self) -> int:
        """Completed batches of this worker."""
        return self.counters.batch_count

    @property
    def epoch_count(self) -> int:
        """How often the loader was exhausted."""
        return self.counters.epoch_count

    @property
    def epoch(self) -> int:
        """Alias of ``epoch_count``."""
        return self.counters.epoch_count

    @property
    def epoch_step_count(self) -> int:
        """Batches consumed in the epoch that is under way."""
        return self.counters.epoch_step_count

    def target_steps(self, batches_per_epoch: int | None) -> int | None:
        """Return the number of executed optimizer steps at which training is done, or None without such a limit.

        ``num_epochs`` alone means passes over the data, however many steps they take; with an ``epoch_step_modifier``
        it is a number of steps.

        Parameters
        ----------
        batches_per_epoch : int or None
            The length of the loader; None when unknown.

        Raises
        ------
        ConfigurationError
            If ``num_epochs`` meets a loader of unknown length.
        """
        if self.num_epochs is None:
            return self.num_steps
        if batches_per_epoch is None:
            raise ConfigurationError(
                "num_epochs requires a sized dataloader, but its length is unknown; set num_steps instead"
            )
        if self.epoch_step_modifier == 1.0:
            return None
        return math.ceil(self.num_epochs * batches_per_epoch * self.epoch_step_modifier)

    @property
    def target_epochs(self) -> int | None:
        """The number of passes at which training is done, or None where steps decide."""
        return self.num_epochs if self.epoch_step_modifier == 1.0 else None

    def reconcile_counters(self, batches_per_epoch: int) -> None:
        """Check the counters against a loader; those that were given from outside are made to agree with it.

        Parameters
        ----------
        batches_per_epoch : int
            The length of the loader.

        Raises
        ------
        ConfigurationError
            If they contradict each other.
        """
        given, self._counters_given = self._counters_given, False
        if given and not self.counters.is_before_epoch_end(batches_per_epoch):
            self.counters.reconcile(batches_per_epoch)
        elif self.counters.epoch_step_count > batches_per_epoch:
            raise ConfigurationError(
                f"the run stopped after batch {self.counters.epoch_step_count} of epoch {self.counters.epoch_count}, "
                f"but this dataloader has {batches_per_epoch} batches; go on with the same loader or set "
                "counters.epoch_step_count = 0"
            )
