"""Describe an optimizer and its learning-rate schedule."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter
from typing import Any

import torch
from pydantic import ConfigDict, Field, ValidationInfo, field_serializer, field_validator, model_validator
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from nvalchemi_lightning.errors import ConfigurationError, ConfigurationTypeError, UnknownNameError, nearest
from nvalchemi_lightning.specs.base import BaseSpec, checked, create_model_spec
from nvalchemi_lightning.specs.hints import NO_HINT, signature_of
from nvalchemi_lightning.specs.trust import dotted_path, resolve
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
        ``"total_loss"``. Time-based schedulers do not read it.
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
    lr: float | Tensor | None = Field(default=None, exclude=True, validate_default=True)
    weight_decay: float | Tensor | None = Field(default=None, exclude=True, validate_default=True)

    def build(self, params: Iterable[Any]) -> tuple[Optimizer, LRScheduler | None]:
        """Build the optimizer and its scheduler.

        Parameters
        ----------
        params : iterable of Tensor
            What to optimize. Parameters that do not require gradients are left out, so weight decay and momentum
            cannot move them.

        Returns
        -------
        tuple of Optimizer and LRScheduler or None
            The pair.
        """
        trained = [p for p in params if getattr(p, "requires_grad", True)]
        optimizer = self.optimizer_cls(trained, **self.optimizer_kwargs)
        if self.scheduler_cls is None:
            return optimizer, None
        name = _runtime_name(self.scheduler_cls, "optimizer")
        kwargs = {key: _scheduled(value, optimizer) for key, value in self.scheduler_kwargs.items()}
        return optimizer, self.scheduler_cls(**{name: optimizer, **kwargs})

    def to_spec(self) -> BaseSpec:
        """Return the recipe of this configuration.

        Raises
        ------
        ConfigurationTypeError
            If a keyword cannot be stored, such as a lambda for `LambdaLR`.
        """
        return create_model_spec(type(self), **{name: getattr(self, name) for name in _STORED})

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
        if self.optimizer_cls.__module__.startswith("torch.optim."):
            try:
                self.optimizer_cls([torch.zeros(1, requires_grad=True)], **self.optimizer_kwargs)
            except (TypeError, ValueError) as error:
                raise ConfigurationError(
                    f"{self.optimizer_cls.__name__} does not take {self.optimizer_kwargs}: {error}"
                ) from error
        return self

    @field_serializer("optimizer_cls", "scheduler_cls", when_used="json")
    def _path_of_class(self, value: type | None) -> str | None:
        return None if value is None else dotted_path(value)

    @field_validator("optimizer_cls", mode="before", json_schema_input_type=str)
    @classmethod
    def _optimizer_class(cls, value: Any) -> Any:
        found = _class_of(value, Optimizer, "optimizer_cls", "torch.optim.AdamW")
        closure = inspect.signature(found.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise ConfigurationError(
                f"{found.__name__} evaluates the loss several times per step, but a training batch has one forward and "
                "one backward pass; choose an optimizer whose step needs no closure"
            )
        return found

    @field_validator("scheduler_cls", mode="before", json_schema_input_type=str | None)
    @classmethod
    def _scheduler_class(cls, value: Any) -> Any:
        return (
            None if value is None else _class_of(value, LRScheduler, "scheduler_cls", "torch.optim.lr_scheduler.StepLR")
        )

    @field_validator("optimizer_kwargs")
    @classmethod
    def _check_optimizer_kwargs(cls, kwargs: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        target = info.data.get("optimizer_cls")
        return kwargs if target is None else _checked_kwargs(target, kwargs, "params", "optimizer")

    @field_validator("scheduler_kwargs")
    @classmethod
    def _check_scheduler_kwargs(cls, kwargs: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        target = info.data.get("scheduler_cls")
        if target is not None:
            return _checked_kwargs(target, kwargs, "optimizer", "scheduler")
        if kwargs and "scheduler_cls" in info.data:
            raise ConfigurationError(
                f"scheduler_kwargs {sorted(kwargs)} need a scheduler_cls; give one or leave them out"
            )
        return kwargs

    @field_validator("scheduler_metric_adapter")
    @classmethod
    def _check_adapter(cls, adapter: Any, info: ValidationInfo) -> Any:
        if adapter is not None and info.data.get("scheduler_cls", LRScheduler) is None:
            raise ConfigurationError(
                f"scheduler_metric_adapter={adapter!r} needs a scheduler_cls such as ReduceLROnPlateau"
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


def _class_of(value: Any, kind: type, field: str, example: str) -> Any:
    if isinstance(value, str):
        try:
            return resolve(value, kind=kind)
        except ConfigurationError as error:
            raise ConfigurationError(f"{field} must resolve to an importable class: {error}") from error
    if not (isinstance(value, type) and issubclass(value, kind)):
        raise ConfigurationError(
            f"{field} must be a class derived from {kind.__name__}, or the dotted path of one ({example!r}); "
            f"got {value!r}"
        )
    return value


def _runtime_name(target: type, usual: str) -> str:
    """Return the name of the parameter that is known at run time only; by custom the first one."""
    parameters = signature_of(target).parameters
    return usual if usual in parameters else next(iter(parameters))


def _checked_kwargs(target: type, kwargs: Mapping[str, Any], runtime: str, role: str) -> dict[str, Any]:
    signature = signature_of(target)
    runtime = _runtime_name(target, runtime)
    open_ended = any(p.kind is Parameter.VAR_KEYWORD for p in signature.parameters.values())
    valid = [name for name in signature.parameters if name != runtime]
    unknown = [name for name in kwargs if name not in valid and (name == runtime or not open_ended)]
    if unknown:
        raise UnknownNameError(
            f"Invalid {role} kwargs for {target.__name__}: {unknown}{nearest(unknown[0], valid)}; "
            f"it takes {', '.join(sorted(valid))}"
        )
    try:
        signature.bind(**{runtime: None, **kwargs})
    except TypeError as error:
        raise ConfigurationError(f"{role}_kwargs for {target.__name__}: {error}") from error
    hints = {name: p.annotation for name, p in signature.parameters.items()}
    where = f"{role}_kwargs"
    return {name: checked(value, hints.get(name, NO_HINT), f"{where}[{name!r}]") for name, value in kwargs.items()}


def _scheduled(value: Any, optimizer: Optimizer) -> Any:
    """Build the specs of schedulers inside a keyword; they need the optimizer too."""
    if isinstance(value, BaseSpec):
        return value.build(optimizer, **{name: _scheduled(item, optimizer) for name, item in value.kwargs.items()})
    if isinstance(value, list | tuple):
        return type(value)(_scheduled(item, optimizer) for item in value)
    return value
