"""Histograms whose range grows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nvalchemi_lightning.data.inspection.histogram import Histogram

# Beyond, the arithmetic that tells the bins apart overflows or vanishes; no label is there.
NUMBERS = (st.floats(-1e150, 1e150) | st.floats(-10, 10)).map(lambda number: number if abs(number) > 1e-100 else 0.0)
SETS = st.lists(NUMBERS, min_size=1, max_size=50)


def counted(values: np.ndarray, blocks: int, bins: int = 64) -> Histogram:
    histogram = Histogram(bins)
    for block in np.array_split(values, blocks):
        histogram.add(block)
    return histogram


@settings(max_examples=150, deadline=None)
@given(SETS, st.integers(1, 8), st.integers(2, 20), st.randoms(use_true_random=False))
@example([0.1, 0.1], 2, 2, None)
@example([-1e-13, 1e-13], 1, 2, None)
@example([1e150, -1e150], 2, 2, None)
def test_counts_are_exact_whatever_the_order(numbers: list[float], blocks: int, bins: int, random: object) -> None:
    values = np.array(numbers)
    one = counted(values, 1, bins)
    if random is not None:
        random.shuffle(numbers)
    many = counted(np.array(numbers), blocks, bins)
    np.testing.assert_array_equal(one.counts, many.counts)
    np.testing.assert_array_equal(one.edges, many.edges)
    assert one.counts.sum() == len(numbers)
    assert len(one.counts) <= bins
    assert one.counts[0] > 0
    assert one.counts[-1] > 0
    places = np.searchsorted(one.edges, values, side="right") - 1
    np.testing.assert_array_equal(np.bincount(places, minlength=len(one.counts)), one.counts)


def test_bins_are_as_narrow_as_they_can_be() -> None:
    histogram = counted(np.array([0.0, 1.0, 2.5]), 3, bins=8)
    assert histogram.edges.tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
    assert histogram.counts.tolist() == [1, 0, 1, 0, 0, 1]


def test_nan_is_passed_over() -> None:
    histogram = counted(np.array([np.nan, 2.0, np.nan]), 1)
    assert histogram.counts.tolist() == [1]
    empty = counted(np.array([np.nan]), 1)
    assert empty.counts.tolist() == []


@pytest.mark.parametrize("value", [0.0, -5.0, 1e200])
def test_one_value_has_one_bin(value: float) -> None:
    histogram = counted(np.full(5, value), 5)
    assert histogram.counts.tolist() == [5]
    assert histogram.edges[0] <= value < histogram.edges[1]
