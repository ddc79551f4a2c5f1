"""Statistics of data sets against NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stats_rigs import cut, random_structures, rms, structure

from nvalchemi_lightning.data import AtomicData, Batch
from nvalchemi_lightning.data.inspection.size_range import SizeRange
from nvalchemi_lightning.errors import DataError
from nvalchemi_lightning.models import AtomicStatistics, isolated_atom_energies
from nvalchemi_lightning.models.statistics_sums import StatisticsSums


def numbers_in(found: AtomicStatistics) -> np.ndarray:
    per_element = [(part.reference_energy, part.force_scale) for part in found.per_element]
    scales = (found.energy_scale, found.energy_residual, found.force_scale, found.stress_scale)
    return np.array([*np.ravel(per_element), *scales, found.neighbors_per_atom])


def counts_in(found: AtomicStatistics) -> tuple[object, ...]:
    per_element = [(part.number, part.atoms, part.labelled_atoms) for part in found.per_element]
    labels = (found.num_structures, found.num_atoms, found.num_energies, found.num_forces, found.num_stresses)
    return per_element, labels, found.sizes, found.rank, found.isolated_atoms


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 30), st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_blocks_do_not_matter(seed: int, count: int, sizes: list[int]) -> None:
    structures = random_structures(np.random.default_rng(seed), count, offset=-100.0)
    single = AtomicStatistics.fit(structures, cutoff=3.1)
    blocks = AtomicStatistics.fit(cut(structures, sizes), cutoff=3.1)
    assert counts_in(blocks) == counts_in(single)
    np.testing.assert_allclose(numbers_in(blocks), numbers_in(single), rtol=1e-10, atol=1e-10)


def test_all_numbers_are_those_of_numpy() -> None:
    structures = random_structures(np.random.default_rng(3), 200, offset=-50.0)
    found = AtomicStatistics.fit(cut(structures, [64]), cutoff=1.6)
    labelled = [data for data in structures if data.energy is not None]
    design = np.array([[(data.atomic_numbers == number).sum() for number in found.elements] for data in labelled])
    energy = np.array([float(data.energy) for data in labelled])
    references = np.linalg.lstsq(design, energy)[0]
    np.testing.assert_allclose(found.reference_energies, references, rtol=1e-10)
    left = energy - design @ references
    assert found.energy_residual == pytest.approx(rms(left / design.sum(axis=1)), rel=1e-10)
    assert found.energy_scale == pytest.approx(math.sqrt((left**2).sum() / design.sum()), rel=1e-10)
    with_forces = [data for data in structures if data.forces is not None]
    forces = torch.cat([data.forces for data in with_forces]).numpy()
    owners = torch.cat([data.atomic_numbers for data in with_forces]).numpy()
    assert found.force_scale == pytest.approx(rms(forces), rel=1e-10)
    for element in found.per_element:
        assert element.force_scale == pytest.approx(rms(forces[owners == element.number]), rel=1e-10)
    with_stress = [data for data in structures if data.stress is not None and bool(data.pbc.any())]
    assert found.stress_scale == pytest.approx(rms(torch.cat([data.stress for data in with_stress]).numpy()), rel=1e-10)
    assert (found.num_energies, found.num_forces, found.num_stresses) == (
        len(labelled),
        len(with_forces),
        len(with_stress),
    )
    sizes = [data.num_nodes for data in structures]
    assert found.sizes == SizeRange(min(sizes), float(np.median(sizes)), max(sizes))
    assert (found.num_structures, found.num_atoms) == (200, sum(sizes))
    # Each atom of a row has its two neighbors, except the ends.
    assert found.neighbors_per_atom == pytest.approx(sum(2 * (size - 1) for size in sizes) / sum(sizes))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=30))
def test_the_range_of_sizes(sizes: list[int]) -> None:
    counts = {size: sizes.count(size) for size in sizes}
    assert SizeRange.of(counts) == SizeRange(min(sizes), float(np.median(sizes)), max(sizes))


def test_zeros_in_place_of_stress_do_not_count() -> None:
    """Stores that mix molecules and crystals hold zeros for the molecules."""
    crystal = structure([29], pbc=[True] * 3, stress=np.ones((1, 3, 3)))
    molecule = structure([1], pbc=[False] * 3, stress=np.zeros((1, 3, 3)))
    found = AtomicStatistics.fit([Batch.from_data_list([crystal, molecule])])
    assert (found.num_stresses, found.stress_scale) == (1, 1.0)


def test_resolution_is_that_of_the_dtype() -> None:
    data = AtomicData(positions=torch.zeros(1, 3), atomic_numbers=torch.tensor([1]), energy=torch.tensor([[-2.5e6]]))
    found = AtomicStatistics.fit([data, structure([1], energy=[[-1.0]])])
    assert found.energy_resolution == 0.25
    assert math.isnan(AtomicStatistics.fit([structure([1], energy=[[math.nan]])]).energy_resolution)
    assert any("resolves only 0.25 eV; store energies of that size in float64" in text for text in found.remarks)


@pytest.mark.parametrize(
    ("label", "value"),
    [("energy", [[math.inf]]), ("forces", [[0.0, -math.inf, 0.0]]), ("stress", [[[math.inf] * 3] * 3])],
)
def test_an_infinite_label_is_named(label: str, value: object) -> None:
    good = structure([1, 8], forces=np.zeros((2, 3)), energy=[[0.0]], stress=np.zeros((1, 3, 3)))
    bad = structure([1], forces=np.zeros((1, 3)), energy=[[0.0]], stress=np.zeros((1, 3, 3)))
    batch = Batch.from_data_list([good, good, bad])
    batch[label][-1] = torch.tensor(value, dtype=torch.float64)
    sums = StatisticsSums(None)
    sums.add(Batch.from_data_list([good, good]))
    with pytest.raises(DataError, match=f"{label} of structure 4 is infinite; correct it or leave it out"):
        sums.add(batch)


def test_atomic_numbers_are_checked() -> None:
    data = structure([1, 8])
    data.atomic_numbers[1] = 119
    with pytest.raises(DataError, match="119 is no atomic number; they go from 1 to 118"):
        AtomicStatistics.fit([data])


WATER, HYDROGEN = structure([8, 1, 1], energy=[[-30.0]]), structure([1, 1], energy=[[-10.0]])


def test_ordinary_data_need_no_remark() -> None:
    assert AtomicStatistics.fit([WATER, HYDROGEN], cutoff=5.0).remarks == []


def test_b84_references_that_do_not_fit_the_labels_are_reported() -> None:
    """B84: labels of another size than the references."""
    deep = structure([8, 1, 1], energy=[[-1e5]])
    (remark,) = AtomicStatistics.fit([deep], reference_energies={1: 0.0, 8: 0.0}).remarks
    assert remark.startswith("The reference energies leave 3.333e+04 eV per atom, more than any bonds do")
    fitted = AtomicStatistics.fit([structure([1, 1], energy=[[-1e5]]), HYDROGEN])
    assert fitted.remarks[0].startswith("The reference energies leave 2.5e+04 eV per atom")


def test_b84_degenerate_compositions_are_reported() -> None:
    """B84: water alone does not tell the energies of hydrogen and oxygen apart."""
    (remark,) = AtomicStatistics.fit([WATER, WATER]).remarks
    assert remark.startswith("The compositions determine 1 of 2 reference energies, so they are not unique")
    assert AtomicStatistics.fit([WATER], reference_energies={1: -1.0, 8: -2.0}).remarks == []


def test_elements_without_energies_are_reported() -> None:
    (remark,) = AtomicStatistics.fit([HYDROGEN, structure([79])]).remarks
    assert remark.startswith("No structure with Au has an energy")
    (remark,) = AtomicStatistics.fit([structure([79])]).remarks
    assert remark.startswith("No structure has an energy, so")


def test_isolated_atoms_in_the_fit_are_reported() -> None:
    atom = structure([1], energy=[[-4.0]], pbc=[True] * 3)
    assert AtomicStatistics.fit([atom], cutoff=5.0).isolated_atoms == (1,)
    # Without a cutoff nothing is known about its images.
    assert AtomicStatistics.fit([atom]).isolated_atoms == ()
    assert AtomicStatistics.fit([structure([1], energy=[[-4.0]]), structure([79])]).isolated_atoms == (1,)
    (remark,) = AtomicStatistics.fit([atom, HYDROGEN], cutoff=5.0).remarks
    assert remark.startswith("Isolated atoms of H are among the structures and took part in the fit")


def test_isolated_atoms_are_found_in_batches() -> None:
    batch = Batch.from_data_list([HYDROGEN, structure([8], energy=[[-7.0]]), structure([1])])
    assert isolated_atom_energies([batch, structure([1], energy=[[-5.0]])], 5.0) == {8: -7.0, 1: -5.0}
    with pytest.raises(DataError, match="structure 4 is an isolated atom of atomic number 8"):
        isolated_atom_energies([batch, structure([1]), structure([8], energy=[[-6.0]])], 5.0)
