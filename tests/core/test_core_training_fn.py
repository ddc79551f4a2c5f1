"""Which functions may be the forward path, and what is said to the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import pytest
import torch
from core_rigs import Harm, batches, run, sgd, strategy
from pydantic import ValidationError
from torch import Tensor, nn

from nvalchemi_lightning import TrainingStrategy
from nvalchemi_lightning.errors import (
    ConfigurationError,
    ConfigurationTypeError,
)
from nvalchemi_lightning.training_fn import check_call_shape, default_training_fn


def two(**fields: Any) -> TrainingStrategy:
    return strategy(**{"models": {"a": Harm(), "b": Harm()}, "training_fn": lambda models, batch: {}, **fields})


def test_named_models_need_a_forward_function() -> None:
    with pytest.raises(
        ValidationError, match=r"training_fn is required for named models \['a', 'b'\]; write training_fn"
    ):
        strategy(models={"a": Harm(), "b": Harm()}, optimizer_configs={"a": [sgd()]})


def test_the_default_forward_function_names_outputs() -> None:
    outputs = {"energy": torch.ones(1), "forces": None}
    assert default_training_fn(lambda batch: outputs, None) == {"predicted_energy": outputs["energy"]}  # type: ignore[arg-type]


class Callable2:
    """A callable object."""

    def __call__(self, model: Any, batch: Any) -> dict[str, Tensor]:
        return {}


def one_model(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {}


def own_class(model: Harm, batch: Any) -> dict[str, Tensor]:
    return {}


def many_models(models: Mapping[str, nn.Module], batch: Any) -> dict[str, Tensor]:
    return {}


def module_dict(models: nn.ModuleDict, batch: Any) -> dict[str, Tensor]:
    return {}


def plain_dict(models: dict[str, nn.Module], batch: Any) -> dict[str, Tensor]:
    return {}


def anything(model: Any, batch: Any) -> dict[str, Tensor]:
    return {}


def unresolvable(model: Nowhere, batch: Any) -> dict[str, Tensor]:  # type: ignore[name-defined]  # noqa: F821
    return {}


def unannotated(model, batch):  # type: ignore[no-untyped-def]
    return {}


def with_default(model: Any, batch: Any, scale: float = 1.0) -> dict[str, Tensor]:
    return {}


def variadic(*args: Any) -> dict[str, Tensor]:
    return {}


@pytest.mark.parametrize(
    "function",
    [
        one_model,
        own_class,
        anything,
        unresolvable,
        unannotated,
        with_default,
        variadic,
        Callable2(),
        lambda m, b: {},
        dict.get,
    ],
    ids=lambda function: getattr(function, "__name__", "object"),
)
def test_functions_for_one_model(function: Any) -> None:
    check_call_shape(function, single_model=True)
    strategy(training_fn=function)


@pytest.mark.parametrize(
    "function",
    [many_models, module_dict, plain_dict, anything, unresolvable, unannotated, Callable2()],
    ids=lambda function: getattr(function, "__name__", "object"),
)
def test_functions_for_named_models(function: Any) -> None:
    check_call_shape(function, single_model=False)
    two(optimizer_configs={"a": [sgd()]}, training_fn=function)


@pytest.mark.parametrize("function", [many_models, module_dict, plain_dict], ids=lambda function: function.__name__)
def test_a_function_of_many_models_does_not_fit_one(function: Any) -> None:
    with pytest.raises(
        ValidationError, match=r"takes a mapping of models \(models: .*\), but one bare model was given"
    ):
        strategy(training_fn=function)


@pytest.mark.parametrize("function", [one_model, own_class], ids=lambda function: function.__name__)
def test_a_function_of_one_model_does_not_fit_many(function: Any) -> None:
    with pytest.raises(
        ValidationError, match=r"training_fn takes one model \(model: .*\), but named models were given"
    ):
        two(optimizer_configs={"a": [sgd()]}, training_fn=function)


@pytest.mark.parametrize(
    "function",
    [
        lambda: None,
        lambda model: {},
        lambda model, batch, extra: {},
        lambda model, batch, *, extra: {},
        lambda *, model, batch: {},
    ],
    ids=["none", "one", "three", "required keyword", "keywords only"],
)
def test_a_function_takes_two_arguments(function: Any) -> None:
    with pytest.raises(ValidationError, match="training_fn must accept exactly the two arguments"):
        strategy(training_fn=function)


@pytest.mark.parametrize("function", [3, [default_training_fn]])
def test_a_function_is_callable(function: Any) -> None:
    with pytest.raises((ValidationError, ConfigurationTypeError), match="training_fn must be callable; got"):
        strategy(training_fn=function)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("function", "dot"),
        ("no_such_package_zzz.fn", "no_such_package_zzz"),
        ("nvalchemi_lightning.training_fn.default_trainin_fn", "default_training_fn"),
    ],
)
def test_a_dotted_path_that_leads_nowhere_is_refused(path: str, message: str) -> None:
    with pytest.raises((ValidationError, ConfigurationError), match=message):
        strategy(training_fn=path)


def test_a_dotted_path_is_a_function() -> None:
    what = strategy(training_fn="nvalchemi_lightning.training_fn.default_training_fn")
    assert what.training_fn is default_training_fn


@pytest.mark.parametrize("result", [None, [1], torch.ones(1)])
def test_a_function_that_returns_no_mapping_is_refused(result: Any) -> None:
    with pytest.raises(
        ConfigurationTypeError, match=f"training_fn must return a mapping of predictions; got {type(result).__name__}"
    ):
        run(strategy(training_fn=lambda model, batch: result), batches(1))


def test_predictions_without_a_gradient_are_explained() -> None:
    def detached(model: Any, batch: Any) -> dict[str, Tensor]:
        return {key: value.detach() for key, value in default_training_fn(model, batch).items()}

    with pytest.raises(RuntimeError, match="does not depend on a trainable parameter") as caught:
        run(strategy(training_fn=detached), batches(1))
    assert "training_fn" in " ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


def test_named_models_are_handed_over_by_name() -> None:
    seen: list[Any] = []

    def forward(models: Any, batch: Any) -> dict[str, Tensor]:
        seen.append(dict(models))
        return default_training_fn(models["main"], batch)

    model = Harm()
    what = strategy(models={"main": model}, optimizer_configs={"main": [sgd()]}, training_fn=forward)
    run(what, batches(1))
    assert seen == [{"main": model}]


T = TypeVar("T")


def of_any_kind(model: T, batch: Any) -> dict[str, Tensor]:
    return {}


def optional(model: nn.Module | None, batch: Any) -> dict[str, Tensor]:
    return {}


@pytest.mark.parametrize("function", [of_any_kind, optional, min], ids=lambda function: function.__name__)
@pytest.mark.parametrize("single", [True, False])
def test_functions_whose_signature_says_nothing_are_accepted(function: Any, single: bool) -> None:
    check_call_shape(function, single_model=single)
