"""Sums and means per graph against plain Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi_lightning.errors import ConfigurationError, DataError
from nvalchemi_lightning.losses import (
    assert_same_shape,
    frobenius_mse,
    graph_balanced_mean,
    masked_mean,
    per_graph_mean,
    per_graph_sum,
)

some_cases = settings(deadline=None, max_examples=50)

rows = st.lists(st.tuples(st.integers(0, 4), st.floats(-10, 10), st.booleans()), min_size=1, max_size=12)


def grouped(graphs: list[int], values: list[float], number: int) -> list[list[float]]:
    return [[v for g, v in zip(graphs, values, strict=True) if g == graph] for graph in range(number)]


@some_cases
@given(rows=rows)
def test_per_graph_sum_and_mean(rows: list[tuple[int, float, bool]]) -> None:
    graphs, values, _ = map(list, zip(*rows, strict=True))
    groups = grouped(graphs, values, 5)
    tensor, index = torch.tensor(values, dtype=torch.float64), torch.tensor(graphs)
    assert per_graph_sum(tensor, index, 5).tolist() == pytest.approx([sum(group) for group in groups], abs=1e-12)
    means = [sum(group) / max(len(group), 1) for group in groups]
    assert per_graph_mean(tensor, index, 5).tolist() == pytest.approx(means, abs=1e-12)
    assert per_graph_sum(tensor, index).shape == (max(graphs) + 1,)


@some_cases
@given(rows=rows)
def test_masked_and_balanced_mean(rows: list[tuple[int, float, bool]]) -> None:
    graphs, values, valid = map(list, zip(*rows, strict=True))
    tensor, index = torch.tensor(values, dtype=torch.float64), torch.tensor(graphs)
    mask = torch.tensor(valid)
    kept = [value for value, ok in zip(values, valid, strict=True) if ok]
    scalar, samples = masked_mean(tensor, mask, graph_balanced=False)
    assert samples is None
    assert scalar.item() == pytest.approx(sum(kept) / max(len(kept), 1), abs=1e-12)
    groups = grouped([g for g, ok in zip(graphs, valid, strict=True) if ok], kept, 5)
    brackets = [sum(group) / max(len(group), 1) for group in groups]
    scalar, samples = graph_balanced_mean(tensor, mask, index, 5, loss_name="mean")
    assert samples.tolist() == pytest.approx(brackets, abs=1e-12)
    assert scalar.item() == pytest.approx(sum(brackets) / 5, abs=1e-12)
    other, _ = masked_mean(tensor, mask, graph_balanced=True, batch_idx=index, num_graphs=5)
    assert other.item() == scalar.item()


def test_trailing_dimensions() -> None:
    values = torch.arange(12.0).reshape(3, 2, 2)
    index = torch.tensor([1, 0, 1])
    assert torch.equal(per_graph_sum(values, index), torch.stack([values[1], values[0] + values[2]]))
    assert torch.equal(per_graph_mean(values, index, 3)[2], torch.zeros(2, 2))
    scalar, samples = graph_balanced_mean(values, torch.ones_like(values).bool(), index, 2, loss_name="mean")
    assert samples.tolist() == [values[1].mean().item(), values[[0, 2]].mean().item()]
    assert scalar.item() == sum(samples.tolist()) / 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.float32, torch.float64])
def test_results_are_wide(dtype: torch.dtype) -> None:
    values, index = torch.ones(3, dtype=dtype), torch.zeros(3, dtype=torch.long)
    expected = torch.promote_types(dtype, torch.float32)
    assert per_graph_sum(values, index).dtype is expected
    assert per_graph_mean(values, index).dtype is expected
    if dtype.is_floating_point:
        assert masked_mean(values, values > 0, graph_balanced=False)[0].dtype is expected
        assert frobenius_mse(values.expand(2, 2, 3), values.expand(2, 2, 3)).dtype is expected


def test_fp16_sums_do_not_overflow() -> None:
    values = torch.full((4,), 60000.0, dtype=torch.float16)
    assert per_graph_sum(values, torch.zeros(4, dtype=torch.long)).item() == pytest.approx(240000, rel=1e-3)


def test_invalid_entries_may_hold_anything() -> None:
    residual = torch.tensor([1.0, torch.nan, torch.inf])
    valid = torch.tensor([True, False, False])
    assert masked_mean(residual, valid, graph_balanced=False)[0].item() == 1.0


def test_metadata_from_a_batch() -> None:
    batch = type("Holder", (), {"batch_idx": torch.tensor([0, 1]), "num_graphs": 2})()
    values = torch.tensor([1.0, 3.0])
    assert masked_mean(values, values > 0, graph_balanced=True, batch=batch)[0].item() == 2.0


def test_frobenius() -> None:
    pred, target = torch.zeros(2, 3, 3), torch.ones(2, 3, 3)
    target[1] = 2.0
    assert frobenius_mse(pred, target).tolist() == [1.0, 4.0]


@pytest.mark.parametrize(
    ("values", "index", "graphs", "message"),
    [
        (torch.ones(2), torch.zeros(2, 1).long(), 1, r"batch_idx must be a 1-D integer tensor.*got shape \(2, 1\)"),
        (torch.ones(2), torch.zeros(2), 1, r"batch_idx must be a 1-D integer tensor.*torch\.float32"),
        (torch.ones(2), torch.zeros(2).bool(), 1, r"batch_idx must be a 1-D integer tensor.*torch\.bool"),
        (torch.ones(2), torch.zeros(3).long(), 1, r"batch_idx has 3 entries, but the values have shape \(2,\)"),
        (torch.ones(2), torch.zeros(2).long(), 0, "num_graphs must be positive; got 0"),
        (torch.ones(0), torch.zeros(0).long(), None, "num_graphs cannot be inferred from an empty batch_idx"),
    ],
)
def test_refusals(values: torch.Tensor, index: torch.Tensor, graphs: int | None, message: str) -> None:
    with pytest.raises(DataError, match=message):
        per_graph_sum(values, index, graphs)


def test_a_number_of_graphs_that_is_too_small_is_not_scanned_for() -> None:
    with pytest.raises(RuntimeError, match="out of bounds"):
        per_graph_sum(torch.ones(2), torch.tensor([0, 3]), 2)


def test_missing_metadata() -> None:
    ones = torch.ones(2)
    with pytest.raises(ConfigurationError, match=r"mine requires batch_idx=\.\.\. metadata\."):
        graph_balanced_mean(ones, ones > 0, None, 2, loss_name="mine")
    with pytest.raises(ConfigurationError, match=r"masked_mean requires num_graphs=\.\.\. metadata\."):
        masked_mean(ones, ones > 0, graph_balanced=True, batch_idx=torch.zeros(2).long())


def test_shapes_that_do_not_fit() -> None:
    with pytest.raises(DataError, match=r"residual and valid must have the same shape; got \(2, 3\) and \(2,\)"):
        masked_mean(torch.ones(2, 3), torch.ones(2).bool(), graph_balanced=False)
    with pytest.raises(DataError, match=r"two tensors of the same shape \(B, M, N\); got \(3, 3\) and \(3, 3\)"):
        frobenius_mse(torch.ones(3, 3), torch.ones(3, 3))
    with pytest.raises(DataError, match="frobenius_mse needs"):
        frobenius_mse(torch.ones(2, 3, 3), torch.ones(1, 3, 3))


def test_assert_same_shape() -> None:
    one, two = torch.ones(2, 3), torch.ones(2, 1)
    assert_same_shape(one, two, name="mine")
    assert_same_shape(one, one, name="mine", strict=True)
    with pytest.raises(DataError, match=r"mine: shape mismatch; prediction has shape \(2, 3\), target .*\(2, 2\)"):
        assert_same_shape(one, torch.ones(2, 2), name="mine")
    with pytest.raises(DataError, match=r"mine: shape must match exactly.*prediction_key='p' .*target_key='t'"):
        assert_same_shape(one, two, name="mine", prediction_key="p", target_key="t", strict=True)
    with pytest.raises(DataError, match=r"mine: prediction and target dtype mismatch; prediction has dtype"):
        assert_same_shape(one, torch.ones(5).double(), name="mine")
