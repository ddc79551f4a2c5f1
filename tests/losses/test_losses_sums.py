"""Sums and counts: parts add up to the whole, whatever the batch, the rank or the order."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from losses_rigs import EVERY_TERM, Structures, label, seeds, sizes_strategy
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nvalchemi_lightning.errors import ConfigurationError, LabelNotFoundError
from nvalchemi_lightning.losses import (
    BaseLossFunction,
    ComposedLossFunction,
    EnergyMAELoss,
    EnergyMSELoss,
    ForceMSELoss,
    Reduction,
    StressMSELoss,
)

some_cases = settings(deadline=None, max_examples=25)


def evaluated(term: BaseLossFunction, batch: Structures, **extra: Any) -> dict[str, Any]:
    return ComposedLossFunction([term])(batch.predictions, batch.targets, **batch.metadata, **extra)


def sum_and_count(term: BaseLossFunction, batch: Structures) -> tuple[float, float]:
    output = evaluated(term, batch, missing_is_nan=True)
    (total,), (count,) = output["per_component_sum"].values(), output["per_component_count"].values()
    return total.item(), count.item()


@pytest.mark.parametrize("term", EVERY_TERM, ids=label)
@some_cases
@given(sizes=sizes_strategy, seed=seeds, data=st.data())
def test_parts_add_up_b27_b62(term: BaseLossFunction, sizes: list[int], seed: int, data: st.DataObject) -> None:
    """B27, B62: sums and counts of two parts, of unequal size and partly without labels, are those of the whole."""
    batch = Structures(sizes, seed)
    for graph in data.draw(st.sets(st.integers(0, len(sizes) - 1))):
        batch.hide(term.target_key, graph)
    cut = data.draw(st.integers(1, len(sizes) - 1))
    whole = sum_and_count(term, batch)
    parts = [sum_and_count(term, batch.subset(list(part))) for part in (range(cut), range(cut, len(sizes)))]
    assert sum(total for total, _ in parts) == pytest.approx(whole[0], rel=1e-12, abs=1e-12)
    assert sum(count for _, count in parts) == whole[1]


@pytest.mark.parametrize("term", EVERY_TERM, ids=label)
@some_cases
@given(sizes=sizes_strategy, seed=seeds, data=st.data())
def test_the_order_of_graphs_is_irrelevant(
    term: BaseLossFunction, sizes: list[int], seed: int, data: st.DataObject
) -> None:
    batch = Structures(sizes, seed)
    order = data.draw(st.permutations(range(len(sizes))))
    assert batch.subset(order).call(term).item() == pytest.approx(batch.call(term).item(), rel=1e-12)


@pytest.mark.parametrize("term", EVERY_TERM, ids=label)
def test_value_is_sum_over_count(term: BaseLossFunction) -> None:
    batch = Structures([1, 3, 2])
    output = evaluated(term, batch)
    (value,), (total,) = output["per_component_unweighted"].values(), output["per_component_sum"].values()
    (count,) = output["per_component_count"].values()
    assert value.item() == pytest.approx(total.item() / count.item(), rel=1e-14)
    assert total.requires_grad
    assert not count.requires_grad
    assert value.item() == batch.call(term).item()


def test_two_ranks_give_the_gradient_of_one_b62() -> None:
    """B62: 1 and 3 atoms here, 8 and 20 there; with global counts the gradients add up to those of one process."""
    whole = Structures([1, 3, 8, 20], seed=4)
    loss = EnergyMAELoss() + 10 * ForceMSELoss() + StressMSELoss() + EnergyMSELoss(per_atom=True)
    whole_output = loss(whole.predictions, whole.targets, missing_is_nan=True, **whole.metadata)
    whole_output["total_loss"].backward()
    ranks = [whole.subset([0, 1]), whole.subset([2, 3])]
    counts = []
    for rank in ranks:
        loss(rank.predictions, rank.targets, missing_is_nan=True, count_reducer=seen_by(counts), **rank.metadata)
    totals = torch.stack(counts).sum(0)
    value = 0.0
    for rank in ranks:
        output = loss(
            rank.predictions, rank.targets, missing_is_nan=True, count_reducer=lambda _: totals, **rank.metadata
        )
        output["total_loss"].backward()
        value += output["total_loss"].item()
    assert value == pytest.approx(whole_output["total_loss"].item(), rel=1e-12)
    for key, pred in whole.predictions.items():
        parts = torch.cat([rank.predictions[key].grad for rank in ranks])
        torch.testing.assert_close(parts, pred.grad, rtol=1e-12, atol=1e-14)


def seen_by(counts: list[Tensor]) -> Any:
    def reducer(own: Tensor) -> Tensor:
        counts.append(own)
        return own.clamp_min(1)

    return reducer


def test_count_reducer_sees_one_float64_vector_in_order() -> None:
    batch = Structures([2, 3])
    counts: list[Tensor] = []
    loss = EnergyMSELoss(per_atom=True) + ForceMSELoss(normalize_by_atom_count=False) + StressMSELoss()
    plain = loss(batch.predictions, batch.targets, **batch.metadata)
    output = loss(batch.predictions, batch.targets, count_reducer=seen_by(counts), **batch.metadata)
    assert len(counts) == 1
    assert counts[0].dtype is torch.float64
    assert counts[0].tolist() == [5.0, 15.0, 2.0]
    assert output["total_loss"].item() == plain["total_loss"].item()
    assert [count.item() for count in output["per_component_count"].values()] == [5, 15, 2]


@some_cases
@given(sizes_strategy, seeds, st.sets(st.tuples(st.sampled_from(["energy", "forces", "stress"]), st.integers(0, 1))))
def test_counts_are_known_before_predictions(sizes: list[int], seed: int, hidden: set[tuple[str, int]]) -> None:
    batch = Structures(sizes, seed)
    for key, graph in hidden:
        batch.hide(key, graph)
    loss = ComposedLossFunction(EVERY_TERM)
    output = loss(batch.predictions, batch.targets, missing_is_nan=True, **batch.metadata)
    ahead = loss.counts(batch.targets, missing_is_nan=True, **batch.metadata)
    assert ahead.dtype is torch.float64
    assert ahead.tolist() == [count.item() for count in output["per_component_count"].values()]


def test_counts_name_the_target_that_is_absent() -> None:
    batch = Structures([2, 3])
    del batch.targets["forces"]
    with pytest.raises(LabelNotFoundError, match="ForceMSELoss needs the target 'forces', which is absent"):
        (EnergyMSELoss() + ForceMSELoss()).counts(batch.targets, **batch.metadata)


def test_count_reducer_keeps_the_dtype() -> None:
    batch = Structures([2, 3], dtype=torch.float32)
    output = (EnergyMSELoss() + ForceMSELoss())(
        batch.predictions, batch.targets, count_reducer=lambda counts: 2 * counts, **batch.metadata
    )
    assert output["total_loss"].dtype is torch.float32
    for name, value in output["per_component_unweighted"].items():
        expected = output["per_component_sum"][name] / (2 * output["per_component_count"][name])
        assert value.item() == pytest.approx(expected.item(), rel=1e-6)


def test_count_reducer_must_return_one_divisor_per_component() -> None:
    batch = Structures([2, 3])
    with pytest.raises(ConfigurationError, match=r"one divisor per component, shape \(2,\); got \(\)"):
        (EnergyMSELoss() + ForceMSELoss())(
            batch.predictions, batch.targets, count_reducer=lambda counts: counts.sum(), **batch.metadata
        )


class RootMeanSquare(BaseLossFunction):
    """A term whose reduce is its own: no sum and count exist."""

    prediction_key, target_key = "predicted_energy", "energy"

    def compute_residual(self, pred: Tensor, target: Tensor, valid: Tensor) -> Tensor:
        return torch.where(valid, pred - target, 0.0)

    def reduce(self, residual: Tensor, valid: Tensor, ctx: Any, **metadata: Any) -> Tensor:
        return residual.square().mean().sqrt()


def test_a_reduce_of_its_own_counts_as_a_mean_over_graphs() -> None:
    batch = Structures([2, 3, 1])
    output = evaluated(RootMeanSquare(), batch)
    value = output["per_component_unweighted"]["RootMeanSquare"]
    assert output["per_component_count"]["RootMeanSquare"].item() == 3
    assert output["per_component_sum"]["RootMeanSquare"].item() == pytest.approx(3 * value.item())
    holder = type("Holder", (), batch.metadata)()
    term = ComposedLossFunction([RootMeanSquare()])
    assert term(batch.predictions, batch.targets, batch=holder)["per_component_count"]["RootMeanSquare"].item() == 3
    assert term(batch.predictions, batch.targets)["per_component_count"]["RootMeanSquare"].item() == 1
    output = term(batch.predictions, batch.targets, num_graphs=torch.tensor(3))
    assert output["per_component_count"]["RootMeanSquare"].item() == 3


class Doubled(EnergyMAELoss):
    """A term that changes the value of the built-in reduce."""

    def reduce(self, residual: Tensor, valid: Tensor, ctx: Any, **metadata: Any) -> Tensor:
        return 2 * super().reduce(residual, valid, ctx, **metadata)


def test_a_post_processed_reduce_keeps_its_count() -> None:
    batch = Structures([2, 3])
    plain, doubled = evaluated(EnergyMAELoss(), batch), evaluated(Doubled(), batch)
    assert doubled["per_component_count"]["Doubled"].item() == 5
    expected = 2 * plain["per_component_sum"]["EnergyMAELoss"].item()
    assert doubled["per_component_sum"]["Doubled"].item() == pytest.approx(expected, rel=1e-12)


class Weighted(BaseLossFunction):
    """A term that only overrides the sums: here a sum over graphs of the largest component."""

    prediction_key, target_key = "predicted_stress", "stress"

    def compute_residual(self, pred: Tensor, target: Tensor, valid: Tensor) -> Tensor:
        return torch.where(valid, pred - target, 0.0).abs()

    def sums(self, residual: Tensor, valid: Tensor, ctx: Any, **metadata: Any) -> Reduction:
        largest = residual.flatten(1).amax(1)
        return Reduction(largest.sum(), valid.flatten(1).any(1).sum(), largest)


def test_a_term_may_override_only_its_sums() -> None:
    batch = Structures([2, 3]).hide("stress", 1)
    term = Weighted()
    output = evaluated(term, batch, missing_is_nan=True)
    assert output["per_component_count"]["Weighted"].item() == 1
    assert output["per_component_sample"]["Weighted"].shape == (2,)
    assert output["total_loss"].item() == output["per_component_sum"]["Weighted"].item()


class Token:
    """Something that lives as long as the graph it hangs on."""


class Hang(torch.autograd.Function):
    """Identity whose graph node holds a token."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, token: Token) -> Tensor:
        ctx.token = token
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


@pytest.mark.parametrize("composed", [True, False])
@pytest.mark.parametrize("term", EVERY_TERM, ids=label)
def test_no_term_keeps_a_graph_alive_b43(term: BaseLossFunction, composed: bool) -> None:
    """B43: nothing of a step survives it."""
    batch = Structures([2, 3])
    token = Token()
    alive = weakref.ref(token)
    batch.predictions[term.prediction_key] = Hang.apply(batch.predictions[term.prediction_key], token)
    result = evaluated(term, batch)["total_loss"] if composed else batch.call(term)
    del token, batch
    assert alive() is not None
    assert result.requires_grad
    del result
    assert alive() is None


def test_a_failing_call_leaves_nothing_behind() -> None:
    batch = Structures([2, 3])
    loss = ComposedLossFunction([ForceMSELoss()])
    loss(batch.predictions, batch.targets, **batch.metadata)
    (term,) = loss.terms
    with pytest.raises(ConfigurationError, match="requires batch_idx"):
        loss(batch.predictions, batch.targets)
    assert term.per_sample_loss is None
    batch.call(term)
    assert term._last.recorded is None


class Operators(TorchDispatchMode):
    """Write down every operator that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


WAITS_FOR_THE_DEVICE = {"_local_scalar_dense", "nonzero", "is_nonzero", "item"}


@pytest.mark.parametrize("term", [*EVERY_TERM, RootMeanSquare()], ids=label)
def test_nothing_waits_for_the_device(term: BaseLossFunction) -> None:
    """No operator of a training call reads a value back."""
    batch = Structures([2, 3]).hide(term.target_key, 0)
    loss, metadata = 2.0 * term, batch.metadata
    with Operators() as operators:
        loss(batch.predictions, batch.targets, missing_is_nan=True, **metadata)["total_loss"].backward()
    assert "sub" in operators.names
    assert not operators.names & WAITS_FOR_THE_DEVICE
    with operators:
        batch.predictions[term.prediction_key].sum().item()
    assert operators.names & WAITS_FOR_THE_DEVICE


def test_a_validation_mean_over_ragged_batches_b27() -> None:
    """B27: batches of 4, 4 and 1 structures, losses 1 (first eight) and 10 (last): the mean is 2, not 4."""
    total = count = 0.0
    for errors in ([1.0] * 4, [1.0] * 4, [10.0]):
        pred = torch.tensor(errors).unsqueeze(1)
        output = ComposedLossFunction([EnergyMAELoss(per_atom=False)])(
            {"predicted_energy": pred}, {"energy": torch.zeros_like(pred)}
        )
        total += output["per_component_sum"]["EnergyMAELoss"].item()
        count += output["per_component_count"]["EnergyMAELoss"].item()
    assert total / count == 2.0


def test_nan_stays_nan_without_labels_meaning() -> None:
    batch = Structures([2, 3]).hide("energy", 0)
    assert evaluated(EnergyMSELoss(), batch)["total_loss"].isnan()
    assert not evaluated(EnergyMSELoss(), batch, missing_is_nan=True)["total_loss"].isnan()
    batch.targets["energy"][1] = torch.inf
    assert evaluated(EnergyMSELoss(), batch, missing_is_nan=True)["total_loss"].isinf()
