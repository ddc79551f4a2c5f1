"""Reference energies and scales of data sets."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk
from ase.io import read
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi_lightning.data import AtomicData, Batch
from nvalchemi_lightning.errors import DataError
from nvalchemi_lightning.models import AtomicStatistics, isolated_atom_energies


def structure(symbols: str, energy: float = math.nan, **options: object) -> AtomicData:
    data = AtomicData.from_atoms(Atoms(symbols, **options), dtype=torch.float64)
    if not math.isnan(energy):
        data.energy = torch.tensor([[energy]], dtype=torch.float64)
    return data


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 12), st.integers(1, 4))
def test_reference_energies_equal_least_squares(seed: int, count: int, kinds: int) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 5, (count, kinds))
    counts[counts.sum(1) == 0, 0] = 1
    energies = rng.normal(size=count) - 1e3 * counts.sum(1)
    data = [
        structure("".join(symbol * number for symbol, number in zip("HCNO", row, strict=False)), energy)
        for row, energy in zip(counts, energies, strict=True)
    ]
    found = AtomicStatistics.fit(data)
    present = np.flatnonzero(counts.sum(0))
    design = counts[:, present]
    expected, _, rank, _ = np.linalg.lstsq(design, energies, rcond=None)
    assert found.elements == tuple(np.array([1, 6, 7, 8])[present])
    assert found.rank == rank
    assert found.is_degenerate == (rank < len(present))
    np.testing.assert_allclose(found.reference_energies, expected, rtol=1e-10, atol=1e-8)
    residual = math.sqrt(((design @ expected - energies) ** 2).sum() / counts.sum())
    assert found.energy_scale == pytest.approx(residual, abs=1e-9)


def test_exact_references_are_found() -> None:
    data = [structure("OH2", -10.0 - 2.0), structure("O2", -20.0), structure("H2", -2.0)]
    found = AtomicStatistics.fit(data)
    assert found.elements == (1, 8)
    assert found.reference_energies == pytest.approx((-1.0, -10.0), abs=1e-12)
    assert not found.is_degenerate
    assert found.num_energies == 3
    assert found.energy_scale < 1e-12


def test_b84_degenerate_data_are_finite_and_flagged() -> None:
    found = AtomicStatistics.fit([structure("OH2", -1e5), structure("O2H4", -2e5)])
    assert found.is_degenerate
    assert found.rank == 1
    # The smallest energies that explain the totals are in proportion to the composition.
    assert found.reference_energies == pytest.approx((-4e4, -2e4))


def test_absent_and_missing_labels_are_passed_over() -> None:
    labelled = structure("H2", -2.0)
    labelled.forces = torch.tensor([[3.0, 4.0, math.nan], [math.nan] * 3], dtype=torch.float64)
    mixed = [structure("H"), labelled, structure("C2")]
    one, together = AtomicStatistics.fit(mixed), AtomicStatistics.fit([Batch.from_data_list(mixed)])
    assert one.elements == together.elements == (1, 6)
    for found in (one, together):
        assert (found.num_structures, found.num_energies, found.num_forces, found.num_stresses) == (3, 1, 1, 0)
        assert found.reference_energies == pytest.approx((-1.0, 0.0))
        assert found.force_scale == pytest.approx(math.sqrt(12.5))
        assert math.isnan(found.neighbors_per_atom)


def test_without_labels_scales_are_nan() -> None:
    found = AtomicStatistics.fit([structure("H")])
    assert (found.num_energies, found.rank, found.reference_energies) == (0, 0, (0.0,))
    assert math.isnan(found.energy_scale)
    assert math.isnan(found.force_scale)


def test_neighbors_are_counted_within_the_cutoff() -> None:
    copper = AtomicData.from_atoms(bulk("Cu"))
    assert AtomicStatistics.fit([copper], cutoff=2.7).neighbors_per_atom == 12.0
    assert AtomicStatistics.fit([copper, structure("H").to(dtype=torch.float32)], cutoff=2.7).neighbors_per_atom == 6.0


def test_given_references_are_taken() -> None:
    found = AtomicStatistics.fit([structure("H2", -2.5)], reference_energies={1: -1.0, 6: -5.0})
    assert found.reference_energies == (-1.0,)
    assert found.energy_scale == pytest.approx(math.sqrt(0.25 / 2))
    with pytest.raises(DataError, match=r"reference_energies lacks the atomic numbers \[6\]; it has \[1\]"):
        AtomicStatistics.fit([structure("CH")], reference_energies={1: -1.0})


def test_there_must_be_structures() -> None:
    with pytest.raises(DataError, match="there are no structures to compute statistics from"):
        AtomicStatistics.fit([])


def test_b121_a_primitive_cell_is_no_isolated_atom() -> None:
    primitive = AtomicData.from_atoms(bulk("Cu"), dtype=torch.float64)
    primitive.energy = torch.tensor([[-3.5]], dtype=torch.float64)
    boxed = structure("Cu", -0.2, cell=np.eye(3) * 20.0, pbc=True)
    data = [primitive, boxed, structure("H2", -6.0), structure("Au"), structure("H", -13.6)]
    assert isolated_atom_energies(data, 5.0) == {29: -0.2, 1: -13.6}
    assert AtomicStatistics.fit(data).num_energies == 4


def test_isolated_atoms_must_agree() -> None:
    with pytest.raises(DataError, match=r"structure 1 is an isolated atom of atomic number 1 with -12\.0 eV, but an"):
        isolated_atom_energies([structure("H", -13.0), structure("H", -12.0)], 5.0)


def test_isolated_atoms_of_ethanol(shared: Path) -> None:
    frames = read(shared / "data" / "ethanol_isolated_atoms.extxyz", ":")
    energies = isolated_atom_energies([AtomicData.from_atoms(atoms) for atoms in frames], 5.0)
    assert sorted(energies) == [1, 6, 8]
