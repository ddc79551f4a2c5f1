"""Describe an optimizer and its learning-rate schedule."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationInfo, field_serializer, field_validator, model_validator
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from nvalchemi_lightning.errors import ConfigurationError, ConfigurationTypeError
from nvalchemi_lightning.optim.checks import (
    checked_kwargs,
    class_of,
    refuse_closures,
    scheduler_for,
    try_optimizer,
    try_scheduler,
)
from nvalchemi_lightning.optim.groups import ParamGroup, grouped, require_options, require_own_rates
from nvalchemi_lightning.specs.base import BaseSpec, create_model_spec
from nvalchemi_lightning.specs.trust import dotted_path
from nvalchemi_lightning.strict_model import StrictModel

__all__ = ["OptimizerConfig", "SchedulerMetricAdapter", "uses_validation_metric"]

SchedulerMetricAdapter = str | Callable[[Mapping[str, Any]], float]
"""What a metric-driven scheduler watches: a key of the validation summary, or a function of the summary."""

_SHORTHAND = ("lr", "weight_decay")


def uses_validation_metric(scheduler_cls: type | None) -> bool:
    """Tell whether a scheduler is stepped with a validation metric instead of once per optimizer step.

    Parameters
    ----------
    scheduler_cls : type or None
        The class; None is no scheduler.
    """
    return scheduler_cls is not None and issubclass(scheduler_cls, ReduceLROnPlateau)


class OptimizerConfig(StrictModel):
    """An optimizer and, if wanted, a schedule for its learning rate.

    ``OptimizerConfig(lr=1e-4)`` is AdamW with that learning rate. Everything that can be known without parameters is
    checked at construction: classes, keyword names, missing keywords and the types of their values.

    Parameters
    ----------
    optimizer_cls : type or str
        A `torch.optim.Optimizer` class or its dotted path; default `torch.optim.AdamW`.
    optimizer_kwargs : dict
        Its keywords.
    scheduler_cls : type or str, optional
        An `LRScheduler` class or its dotted path. It is stepped once per executed optimizer step;
        `ReduceLROnPlateau` is stepped after each validation instead.
    scheduler_kwargs : dict
        Its keywords. A scheduler made of schedulers (`SequentialLR`) takes specs of them
        (``create_model_spec(LinearLR, total_iters=100)``).
    scheduler_metric_adapter : str or callable, optional
        What a metric-driven scheduler watches: a key of the validation summary or a function of it; default
        ``"total_loss"``. Refused with a scheduler that steps by itself.
    parameters : tuple of str, optional
        Globs over names ``"<model key>.<parameter>"``: what this optimizer trains. Of several configs on one model,
        each takes what earlier ones left; one without globs takes the rest. If none of them has globs, each trains
        all parameters, as in the reference.
    param_groups : tuple of ParamGroup
        Parameters with their own learning rate and weight decay; the first match wins, the rest is the default group.
    no_decay : {"bias_and_scale"}, optional
        Keep weight decay from parameters of fewer than two dimensions: biases, scales of normalizations, and numbers
        per element. Matrices and embeddings decay. Default: all decay.
    lr, weight_decay : float, optional
        Short for the entries of ``optimizer_kwargs``, whose values they show.

    Raises
    ------
    pydantic.ValidationError
        A `ValueError` that names the field, the value and what to write instead.

    Examples
    --------
    >>> config = OptimizerConfig(lr=1e-3, scheduler_cls=StepLR, scheduler_kwargs={"step_size": 100})
    >>> optimizer, scheduler = config.build(model.parameters())
    """

    model_config = ConfigDict(frozen=True)

    optimizer_cls: type[Optimizer] = Field(default="torch.optim.AdamW", validate_default=True)
    optimizer_kwargs: dict[str, Any] = Field(default_factory=dict, validate_default=True)
    scheduler_cls: type[LRScheduler] | None = None
    scheduler_kwargs: dict[str, Any | BaseSpec] = Field(default_factory=dict, validate_default=True)
    scheduler_metric_adapter: SchedulerMetricAdapter | None = None
    parameters: tuple[str, ...] | None = Field(default=None, min_length=1)
    param_groups: tuple[ParamGroup, ...] = ()
    no_decay: Literal["bias_and_scale"] | None = None
    lr: float | Tensor | None = Field(default=None, exclude=True, validate_default=True)
    weight_decay: float | Tensor | None = Field(default=None, exclude=True, validate_default=True)

    def build(
        self, params: Iterable[Any], *, only: Collection[str] | None = None
    ) -> tuple[Optimizer, LRScheduler | None]:
        """Build the optimizer and its scheduler.

        Parameters
        ----------
        params : iterable of Tensor, or of (str, Tensor)
            What to optimize; ``param_groups`` need qualified names (`iter_qualified_named_parameters`). Parameters
            that do not require gradients are left out, so weight decay and momentum cannot move them.
        only : collection of str, optional
            Leave out the names that are not in it.

        Returns
        -------
        tuple of Optimizer and LRScheduler or None
            The pair.

        Raises
        ------
        ConfigurationTypeError
            If there are groups, but no names.
        UnknownNameError, ConfigurationError
            If a group has no parameter, or an option that the optimizer or the schedule would not look at.
        """
        arranged = self._arranged(list(params), only)
        options = [{**group} for group in arranged] if self._in_groups else []
        optimizer = self.optimizer_cls(arranged, **self.optimizer_kwargs)
        require_options(optimizer, options)
        if self.scheduler_cls is None:
            return optimizer, None
        rates = [group["lr"] for group in optimizer.param_groups]
        scheduler = scheduler_for(optimizer, self.scheduler_cls, self.scheduler_kwargs)
        require_own_rates(rates, optimizer, self.scheduler_cls)
        return optimizer, scheduler

    @property
    def _in_groups(self) -> bool:
        return bool(self.param_groups) or self.no_decay is not None

    def _arranged(self, params: list[Any], only: Collection[str] | None) -> list[Any]:
        if self.param_groups and not all(isinstance(each, tuple) for each in params):
            raise ConfigurationTypeError(
                "param_groups go by name; build them from iter_qualified_named_parameters(model), not from parameters"
            )
        pairs = (each if isinstance(each, tuple) else (str(i), each) for i, each in enumerate(params))
        named: dict[str, Tensor] = dict(pairs)
        trained = [name for name, p in named.items() if getattr(p, "requires_grad", True) and _allowed(name, only)]
        if not self._in_groups:
            return [named[name] for name in trained]
        return grouped(named, self.param_groups, trained=set(trained), spare=self.no_decay is not None)

    def to_spec(self) -> BaseSpec:
        """Return the recipe of this configuration.

        Raises
        ------
        ConfigurationTypeError
            If a keyword cannot be stored, such as a lambda for `LambdaLR`.
        """
        stored = {name: getattr(self, name) for name in _STORED}
        # The reference does not know these; left out where they say nothing, it can read the rest.
        ours = {name: getattr(self, name) for name in _OURS}
        return create_model_spec(type(self), **stored, **{name: value for name, value in ours.items() if value})

    @classmethod
    def from_spec(cls, spec: BaseSpec) -> OptimizerConfig:
        """Build a configuration from its recipe.

        Raises
        ------
        ConfigurationTypeError
            If the recipe is of something else.
        """
        if not (isinstance(spec.target, type) and issubclass(spec.target, cls)):
            raise ConfigurationTypeError(f"the spec builds {spec.cls_path}, not an {cls.__name__}")
        built: OptimizerConfig = spec.build()
        return built

    @model_validator(mode="before")
    @classmethod
    def _fold_shorthand(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not isinstance(data.get("optimizer_kwargs", {}), Mapping):
            return data
        short = {name: data[name] for name in _SHORTHAND if data.get(name) is not None}
        kwargs = data.get("optimizer_kwargs", {})
        twice = [name for name in short if name in kwargs]
        if twice:
            raise ConfigurationError(
                f"{twice[0]}={short[twice[0]]!r} and optimizer_kwargs[{twice[0]!r}]={kwargs[twice[0]]!r} are both "
                "given; keep one"
            )
        rest = {name: value for name, value in data.items() if name not in _SHORTHAND}
        return {**rest, "optimizer_kwargs": {**kwargs, **short}}

    @model_validator(mode="after")
    def _check_values(self) -> OptimizerConfig:
        labels = [group.label for group in self.param_groups]
        twice = [label for label in labels if labels.count(label) > 1]
        if twice:
            raise ConfigurationError(f"two param_groups are called {twice[0]!r}; give each a name of its own")
        spare = self.no_decay is not None
        optimizer = try_optimizer(self.optimizer_cls, self.optimizer_kwargs, self.param_groups, spare=spare)
        # With groups, their number is not known yet, and keywords may be lists of one value each.
        if optimizer is not None and self.scheduler_cls is not None and not self._in_groups:
            try_scheduler(self.scheduler_cls, self.scheduler_kwargs, optimizer)
        return self

    @field_serializer("optimizer_cls", "scheduler_cls", when_used="json")
    def _path_of_class(self, value: type | None) -> str | None:
        return None if value is None else dotted_path(value)

    @field_validator("optimizer_cls", mode="before", json_schema_input_type=str)
    @classmethod
    def _optimizer_class(cls, value: Any) -> Any:
        found = class_of(value, Optimizer, "optimizer_cls", "torch.optim.AdamW")
        refuse_closures(found)
        return found

    @field_validator("scheduler_cls", mode="before", json_schema_input_type=str | None)
    @classmethod
    def _scheduler_class(cls, value: Any) -> Any:
        example = "torch.optim.lr_scheduler.StepLR"
        return None if value is None else class_of(value, LRScheduler, "scheduler_cls", example)

    @field_validator("parameters", mode="before")
    @classmethod
    def _one_pattern(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("optimizer_kwargs")
    @classmethod
    def _check_optimizer_kwargs(cls, kwargs: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        target = info.data.get("optimizer_cls")
        return kwargs if target is None else checked_kwargs(target, kwargs, "params", "optimizer")

    @field_validator("scheduler_kwargs")
    @classmethod
    def _check_scheduler_kwargs(cls, kwargs: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        target = info.data.get("scheduler_cls")
        if target is not None:
            return checked_kwargs(target, kwargs, "optimizer", "scheduler")
        if kwargs and "scheduler_cls" in info.data:
            raise ConfigurationError(
                f"scheduler_kwargs {sorted(kwargs)} need a scheduler_cls; give one or leave them out"
            )
        return kwargs

    @field_validator("scheduler_metric_adapter")
    @classmethod
    def _check_adapter(cls, adapter: Any, info: ValidationInfo) -> Any:
        scheduler = info.data.get("scheduler_cls", ReduceLROnPlateau)
        if adapter is not None and not uses_validation_metric(scheduler):
            steps = "" if scheduler is None else f"; {scheduler.__name__} steps once per optimizer step and reads none"
            raise ConfigurationError(
                f"scheduler_metric_adapter={adapter!r} needs a scheduler_cls such as ReduceLROnPlateau{steps}"
            )
        return adapter

    @field_validator("lr", "weight_decay", mode="plain", json_schema_input_type=float | None)
    @classmethod
    def _show(cls, value: Any, info: ValidationInfo) -> Any:
        return info.data.get("optimizer_kwargs", {}).get(info.field_name)


_STORED = (
    "optimizer_cls",
    "optimizer_kwargs",
    "scheduler_cls",
    "scheduler_kwargs",
    "scheduler_metric_adapter",
)

_OURS = ("parameters", "param_groups", "no_decay")


def _allowed(name: str, only: Collection[str] | None) -> bool:
    return only is None or name in only
