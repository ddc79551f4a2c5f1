"""Metrics are exact, masked and independent of batches."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi_lightning.errors import DataError
from nvalchemi_lightning.metrics import (
    EnergyMAE,
    EnergyRMSE,
    ErrorMetric,
    ForcesMAE,
    ForcesRMSE,
    StressMAE,
    StressRMSE,
)

SHAPES: dict[type[ErrorMetric], tuple[int, ...]] = {
    EnergyMAE: (1,),
    EnergyRMSE: (1,),
    ForcesMAE: (3,),
    ForcesRMSE: (3,),
    StressMAE: (3, 3),
    StressRMSE: (3, 3),
}
ALL = pytest.mark.parametrize("cls", SHAPES)


def rows(cls: type[ErrorMetric], seed: int, count: int = 12) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw predictions, targets (a third missing) and numbers of atoms."""
    generator = torch.Generator().manual_seed(seed)
    shape = (count, *SHAPES[cls])
    prediction, target = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    target[torch.rand(shape, generator=generator) < 1 / 3] = math.nan
    return prediction, target, torch.randint(1, 9, (count,), generator=generator)


def expected(cls: type[ErrorMetric], prediction: torch.Tensor, target: torch.Tensor, atoms: torch.Tensor) -> float:
    errors = []
    for p, t, n in zip(prediction, target, atoms, strict=True):
        for a, b in zip(p.flatten().tolist(), t.flatten().tolist(), strict=True):
            if not math.isnan(b):
                errors.append((a - b) / (int(n) if cls.per_atom else 1))
    if cls.root_mean_square:
        return math.sqrt(math.fsum(e * e for e in errors) / len(errors))
    return math.fsum(map(abs, errors)) / len(errors)


@ALL
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), splits=st.lists(st.integers(0, 12), max_size=4))
def test_value_does_not_depend_on_batches(cls: type[ErrorMetric], seed: int, splits: list[int]) -> None:
    prediction, target, atoms = rows(cls, seed)
    metric = cls()
    for piece in torch.arange(12).tensor_split(sorted(splits)):
        metric.update(prediction[piece], target[piece], atoms[piece])
    assert metric.compute().dtype == torch.float64
    assert metric.compute().item() == pytest.approx(expected(cls, prediction, target, atoms), rel=1e-13)
    assert metric.count.item() == (~target.isnan()).sum()


@ALL
def test_ranks_are_reduced_by_adding_up(cls: type[ErrorMetric]) -> None:
    prediction, target, atoms = rows(cls, 7)
    whole, parts = cls(), [cls(), cls()]
    whole.update(prediction, target, atoms)
    for part, piece in zip(parts, (slice(0, 1), slice(1, None)), strict=True):
        part.update(prediction[piece], target[piece], atoms[piece])
    # What torchmetrics does after gathering: the stacked states go through the reduction.
    reduced = cls()
    for name, reduction in reduced._reductions.items():
        assert reduction is not None
        setattr(reduced, name, reduction(torch.stack([getattr(part, name) for part in parts])))
    reduced._update_count = 1
    assert reduced.compute().item() == pytest.approx(whole.compute().item(), rel=1e-14)


@ALL
def test_nothing_labelled_gives_nan(cls: type[ErrorMetric]) -> None:
    metric = cls()
    missing = torch.full((2, *SHAPES[cls]), math.nan)
    metric.update(torch.zeros_like(missing), missing, torch.tensor([1, 2]))
    assert metric.count == 0
    assert metric.compute().isnan()


def test_a_prediction_of_nan_is_no_missing_label() -> None:
    metric = ForcesMAE()
    metric.update(torch.full((2, 3), math.nan), torch.zeros(2, 3))
    assert metric.compute().isnan()
    assert metric.count == 6


def test_b52_large_totals_keep_their_digits() -> None:
    metric = EnergyMAE()
    target = torch.full((3, 1), -123456.789, dtype=torch.float64)
    metric.update(target + 0.001, target, torch.tensor([1, 1, 1]))
    assert metric.compute().item() == pytest.approx(0.001, rel=1e-7)


@pytest.mark.parametrize("convert", [torch.nn.Module.float, torch.nn.Module.half, lambda m: m.to(torch.float32)])
def test_states_stay_float64(convert: object) -> None:
    metric = ForcesRMSE()
    convert(torch.nn.ModuleDict({"metric": metric}))  # type: ignore[operator]
    metric.set_dtype(torch.float32)
    metric.update(torch.full((1, 3), 1e-9), torch.zeros(1, 3))
    assert metric.total.dtype == metric.compute().dtype == torch.float64


def test_the_graph_is_not_kept() -> None:
    metric = ForcesMAE()
    metric.update(torch.ones(2, 3, requires_grad=True), torch.zeros(2, 3))
    assert not metric.total.requires_grad


def test_reset_starts_again() -> None:
    metric = ForcesMAE()
    metric.update(torch.ones(2, 3), torch.zeros(2, 3))
    metric.reset()
    metric.update(torch.full((1, 3), 2.0), torch.zeros(1, 3))
    assert metric.compute() == 2.0


@ALL
def test_units_say_what_the_number_is(cls: type[ErrorMetric]) -> None:
    quantity = cls.__name__.removesuffix("MAE").removesuffix("RMSE")
    assert cls.unit == {"Energy": "eV/atom", "Forces": "eV/A", "Stress": "eV/A^3"}[quantity]
    assert cls.root_mean_square is cls.__name__.endswith("RMSE")
    assert cls.per_atom is (quantity == "Energy")


def test_shapes_must_agree() -> None:
    with pytest.raises(DataError, match=r"EnergyMAE needs .* the same shape, got \(2, 1\) and \(2,\)"):
        EnergyMAE().update(torch.zeros(2, 1), torch.zeros(2), torch.tensor([1, 1]))


@pytest.mark.parametrize(("atoms", "given"), [(None, "None"), (torch.tensor([1]), r"\(1,\)")])
def test_energies_need_the_number_of_atoms(atoms: torch.Tensor | None, given: str) -> None:
    metric = EnergyRMSE()
    with pytest.raises(DataError, match=rf"give num_nodes_per_graph of shape \(2,\), got {given}"):
        metric.update(torch.zeros(2, 1), torch.zeros(2, 1), atoms)
    assert metric.count == 0
