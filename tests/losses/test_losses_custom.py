"""Terms that a user writes, specs of terms, and compiled terms."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from losses_rigs import EVERY_TERM, NAN, Structures, label
from torch import Tensor

from nvalchemi_lightning import losses
from nvalchemi_lightning.errors import ConfigurationError, ConfigurationTypeError
from nvalchemi_lightning.losses import (
    BaseLossFunction,
    EnergyHuberLoss,
    EnergyMAELoss,
    EnergyMSELoss,
    ForceL2NormLoss,
    ForceMSELoss,
    ReductionContext,
    frobenius_mse,
    graph_balanced_mean,
    loss_component_to_spec,
    masked_mean,
    per_graph_mean,
    per_graph_sum,
)
from nvalchemi_lightning.specs import create_model_spec_from_json


class LogCosh(BaseLossFunction):
    """The example of the documentation: the least that a term needs."""

    prediction_key, target_key = "predicted_energy", "energy"
    requires_eval_grad = False

    def __init__(self, *, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def compute_residual(self, pred: Tensor, target: Tensor, valid: Tensor) -> Tensor:
        scaled = torch.where(valid, pred - target, 0.0) / self.scale
        return torch.nn.functional.softplus(2 * scaled) - scaled - math.log(2.0)


class Traced(BaseLossFunction):
    """A term that writes down which hooks run, with which metadata."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[str, ...]]] = []

    def align_dtypes(self, pred: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        self.seen.append(("align_dtypes", ()))
        return super().align_dtypes(pred, target)

    def validate(self, pred: Tensor, target: Tensor) -> None:
        self.seen.append(("validate", ()))

    def normalize(self, pred: Tensor, target: Tensor, **metadata: Any) -> tuple[Tensor, Tensor, ReductionContext]:
        self.seen.append(("normalize", tuple(metadata)))
        return pred, target, ReductionContext(weights=torch.tensor([[1.0], [3.0]]))

    def mask(self, pred: Tensor, target: Tensor, ctx: ReductionContext, **metadata: Any) -> Tensor:
        self.seen.append(("mask", tuple(metadata)))
        return super().mask(pred, target, ctx, **metadata)

    def compute_residual(self, pred: Tensor, target: Tensor, valid: Tensor) -> Tensor:
        self.seen.append(("compute_residual", ()))
        return pred - target

    def reduce(self, residual: Tensor, valid: Tensor, ctx: ReductionContext, **metadata: Any) -> Tensor:
        self.seen.append(("reduce", tuple(metadata)))
        return super().reduce(residual, valid, ctx, **metadata)


def test_the_least_that_a_term_needs() -> None:
    batch = Structures([2, 3])
    errors = (batch.predictions["predicted_energy"] - batch.targets["energy"]).flatten().tolist()
    expected = sum(math.log(math.cosh(error / 2)) for error in errors) / 2
    assert batch.call(LogCosh(scale=2.0)).item() == pytest.approx(expected, rel=1e-12)
    batch.hide("energy", 0)
    term = LogCosh()
    assert batch.call(term, missing_is_nan=True).item() == pytest.approx(math.log(math.cosh(errors[1])), rel=1e-12)
    assert math.isnan(batch.call(term).item())
    assert term.per_sample_loss.shape == (2,)


def test_the_pipeline_and_its_weights() -> None:
    term = Traced()
    value = term(torch.tensor([[1.0], [2.0]]), torch.zeros(2, 1), num_graphs=2, anything=None)
    assert term.seen == [
        ("align_dtypes", ()),
        ("validate", ()),
        ("normalize", ("num_graphs", "anything")),
        ("mask", ("num_graphs", "anything")),
        ("compute_residual", ()),
        ("reduce", ("num_graphs", "anything")),
    ]
    assert value.item() == (1 * 1 + 3 * 2) / 4
    assert term.per_sample_loss.tolist() == [1.0, 2.0]


def test_default_reduction_clamps_and_widens() -> None:
    class Plain(BaseLossFunction):
        def compute_residual(self, pred: Tensor, target: Tensor, valid: Tensor) -> Tensor:
            return (pred - target).square()

    term = Plain()
    half = torch.full((3, 4), 200.0, dtype=torch.float16)
    value = term(half, torch.zeros_like(half))
    assert value.dtype is torch.float32
    assert value.item() == pytest.approx(40000.0)
    assert term.per_sample_loss is None
    term(torch.ones(3), torch.zeros(3))
    assert term.per_sample_loss.tolist() == [1.0, 1.0, 1.0]


def test_per_sample_loss_is_cleared_when_a_call_fails() -> None:
    term = EnergyMSELoss()
    term(torch.ones(2, 1), torch.zeros(2, 1))
    assert term.per_sample_loss is not None
    with pytest.raises(ValueError, match="shape must match exactly"):
        term(torch.ones(2, 1), torch.zeros(3, 1))
    assert term.per_sample_loss is None


def test_the_base_and_incomplete_terms_are_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        BaseLossFunction()

    class Incomplete(BaseLossFunction):
        pass

    with pytest.raises(TypeError, match="compute_residual"):
        Incomplete()


@pytest.mark.parametrize("term", EVERY_TERM, ids=label)
def test_spec_round_trip(term: BaseLossFunction) -> None:
    form = loss_component_to_spec(term).model_dump()
    rebuilt = create_model_spec_from_json(form).build()
    assert type(rebuilt) is type(term)
    assert repr(rebuilt) == repr(term)


def test_spec_of_a_reference_term_reads_the_same() -> None:
    form = {"cls_path": "nvalchemi.training.losses.terms.EnergyHuberLoss", "timestamp": "", "delta": 0.5}
    assert repr(create_model_spec_from_json(form).build()) == repr(EnergyHuberLoss(delta=0.5))


def test_spec_of_a_term_of_ones_own() -> None:
    assert loss_component_to_spec(LogCosh(scale=3.0)).build().scale == 3.0


def test_a_term_that_forgets_its_argument_has_no_spec() -> None:
    class Forgetful(LogCosh):
        def __init__(self, *, power: float = 2.0, **kwargs: Any) -> None:
            super().__init__(**kwargs)

    with pytest.raises(ConfigurationError, match=r"does not store its constructor argument 'power'; add self\.power"):
        loss_component_to_spec(Forgetful())


@pytest.mark.parametrize("other", [EnergyMSELoss() + ForceMSELoss(), torch.nn.MSELoss(), None])
def test_only_single_terms_have_a_component_spec(other: Any) -> None:
    with pytest.raises(ConfigurationTypeError, match="loss_component_to_spec needs a single loss term; got"):
        loss_component_to_spec(other)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda term: pickle.loads(pickle.dumps(term))])
def test_terms_can_be_copied_after_a_call(clone: Any) -> None:
    batch = Structures([2, 3])
    loss = EnergyMAELoss() + ForceMSELoss()
    value = loss(batch.predictions, batch.targets, **batch.metadata)["total_loss"]
    other = clone(loss)
    assert other(batch.predictions, batch.targets, **batch.metadata)["total_loss"].item() == value.item()


def compiled(function: Any) -> Any:
    return torch.compile(function, fullgraph=True, backend="eager")


@pytest.mark.parametrize("term", [EnergyMAELoss(), EnergyMAELoss(ignore_nonfinite=False), ForceL2NormLoss()], ids=label)
def test_compiled_terms(term: BaseLossFunction) -> None:
    batch = Structures([2, 3]).hide(term.target_key, 0)
    pair = batch.predictions[term.prediction_key], batch.targets[term.target_key]
    value = compiled(term)(*pair, missing_is_nan=True, **batch.metadata)
    samples = term.per_sample_loss
    assert value.item() == batch.call(term, missing_is_nan=True).item()
    assert torch.equal(samples, term.per_sample_loss)


def test_compiled_padded_forces() -> None:
    term = ForceL2NormLoss()
    pred, target = torch.randn(2, 2, 3, 3, generator=torch.Generator().manual_seed(0))
    target[1, 2] = NAN
    counts = torch.tensor([2, 3])
    assert compiled(term)(pred, target, num_nodes_per_graph=counts).item() == pytest.approx(
        term(pred, target, num_nodes_per_graph=counts).item()
    )


def test_compiled_reductions() -> None:
    values, index = torch.arange(8.0).reshape(4, 2), torch.tensor([0, 1, 1, 0])
    valid = values > 2

    def everything(values: Tensor, valid: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        return (
            per_graph_sum(values, index, 2),
            per_graph_sum(values, index),
            per_graph_mean(values, index, 2),
            *graph_balanced_mean(values, valid, index, 2, loss_name="mine"),
            masked_mean(values, valid, graph_balanced=False)[0],
            frobenius_mse(values.expand(2, 4, 2), 2 * values.expand(2, 4, 2)),
        )

    for actual, expected in zip(
        compiled(everything)(values, valid, index), everything(values, valid, index), strict=True
    ):
        torch.testing.assert_close(actual, expected)


def test_every_public_name_is_there() -> None:
    for name in losses.__all__:
        assert hasattr(losses, name), name
    assert losses.__all__ == sorted(losses.__all__)
