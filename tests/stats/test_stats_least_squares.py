"""Least squares in blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi_lightning.data.inspection import least_squares
from nvalchemi_lightning.data.inspection.least_squares import LeastSquares

SIZES = st.lists(st.integers(1, 7), min_size=1, max_size=5)


def solved(design: np.ndarray, target: np.ndarray, sizes: list[int]) -> LeastSquares:
    problem, start, turn = LeastSquares(design.shape[1]), 0, 0
    while start < len(target):
        stop = start + sizes[turn % len(sizes)]
        problem.add(design[start:stop], target[start:stop])
        start, turn = stop, turn + 1
    return problem


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 40), st.integers(1, 5), SIZES, st.integers(1, 9))
def test_any_blocks_give_what_numpy_gives(seed: int, rows: int, columns: int, sizes: list[int], reduced: int) -> None:
    rng = np.random.default_rng(seed)
    design = rng.integers(0, 6, (rows, columns)).astype(float)
    target = design @ rng.normal(-1e3, 300, columns) + rng.normal(size=rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(least_squares, "_BLOCK", reduced)
        problem = solved(design, target, sizes)
        found = problem.solve()
    expected, _, rank, _ = np.linalg.lstsq(design, target)
    assert found.rank == rank
    np.testing.assert_allclose(found.values, expected, rtol=1e-10, atol=1e-10 * np.abs(target).max())
    other = rng.normal(size=columns)
    for values in (expected, other):
        residual = np.linalg.norm(design @ values - target)
        assert problem.residual(values) == pytest.approx(residual, rel=1e-10, abs=1e-11 * np.linalg.norm(target))


def test_residuals_below_the_roundings_of_squares_are_exact() -> None:
    """Sums of squares, 1e14 here, would lose everything below 0.1."""
    rng = np.random.default_rng(1)
    design = rng.integers(1, 20, (1000, 2)).astype(float)
    noise = rng.normal(size=1000) * 1e-6
    problem = solved(design, design @ [-1e4, -3e4] + noise, [17])
    values = problem.solve().values
    np.testing.assert_allclose(values, [-1e4, -3e4], rtol=1e-11)
    assert problem.residual(values) == pytest.approx(np.linalg.norm(noise), rel=0.01)


def test_without_rows_all_is_zero() -> None:
    problem = LeastSquares(3)
    values, rank = problem.solve()
    assert values.tolist() == [0.0, 0.0, 0.0]
    assert rank == 0
    assert problem.residual(values) == 0.0


def test_the_memory_is_that_of_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(least_squares, "_BLOCK", 8)
    problem = solved(np.ones((1000, 2)), np.ones(1000), [3])
    assert problem.rows == 1000
    assert sum(map(len, problem._waiting)) < 8
    assert problem._factor.shape == (3, 3)
