"""Fingerprints know a structure however it is written, and tell it from others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from check_rigs import structure, subject
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi_lightning.data import AtomicData
from nvalchemi_lightning.data.checkup.duplicates import _SAME
from nvalchemi_lightning.data.checkup.fingerprint import SIZE, fingerprint, polarity

FCC = np.array([[0.0, 1.8, 1.8], [1.8, 0.0, 1.8], [1.8, 1.8, 0.0]])
seeds = st.integers(0, 10_000)
few = settings(deadline=None, max_examples=25)


def turned(rng: np.random.Generator) -> np.ndarray:
    """Return a random orthogonal matrix, proper or not."""
    return np.linalg.qr(rng.normal(size=(3, 3)))[0]


def apart(one: AtomicData, two: AtomicData) -> float:
    return float(np.abs(fingerprint(subject(one)) - fingerprint(subject(two))).max())


def crystal(rng: np.random.Generator, atoms: int = 5) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    cell = np.diag([5.0, 6.0, 7.0]) + rng.normal(0, 0.3, (3, 3))
    return rng.uniform(size=(atoms, 3)) @ cell, rng.choice([6, 8, 29], atoms), cell


@few
@given(seeds)
def test_molecules_are_known_when_moved(seed: int) -> None:
    rng = np.random.default_rng(seed)
    positions, numbers = rng.normal(0, 2.5, (7, 3)), rng.choice([1, 6, 8], 7)
    order = rng.permutation(7)
    moved = positions[order] @ turned(rng) + rng.normal(0, 50, 3)
    assert apart(structure(positions, numbers), structure(moved, numbers[order])) < 1e-8


@few
@given(seeds)
def test_crystals_are_known_in_other_cells(seed: int) -> None:
    rng = np.random.default_rng(seed)
    positions, numbers, cell = crystal(rng)
    order, turn = rng.permutation(5), turned(rng)
    skew = np.array([[1, 0, 0], [1, 1, 0], [-1, 2, 1]]) @ cell
    unwrapped = positions + rng.integers(-3, 4, (5, 3)) @ cell + rng.normal(0, 5, 3)
    other = structure(unwrapped[order] @ turn, numbers[order], cell=skew @ turn)
    assert apart(structure(positions, numbers, cell=cell), other) < 1e-8


@pytest.mark.parametrize("pbc", [(True, True, False), (True, False, False)])
def test_vectors_that_do_not_repeat_do_not_matter(pbc: tuple[bool, bool, bool]) -> None:
    positions, numbers, cell = crystal(np.random.default_rng(3))
    without = cell * np.array(pbc)[:, None]
    one = structure(positions, numbers, cell=cell, pbc=pbc)
    assert apart(one, structure(positions, numbers, cell=without, pbc=pbc)) < 1e-8


def test_rounding_to_float32_is_within_the_tolerance() -> None:
    positions, numbers, cell = crystal(np.random.default_rng(5), 40)
    one = structure(positions, numbers, cell=cell)
    assert 0 < apart(one, one.to(dtype=torch.float32)) < _SAME


@few
@given(seeds)
def test_moving_one_atom_is_seen(seed: int) -> None:
    rng = np.random.default_rng(seed)
    positions, numbers, cell = crystal(rng, 30)
    step = rng.normal(size=3)
    moved = positions.copy()
    moved[7] += 0.01 * step / np.linalg.norm(step)
    assert apart(structure(positions, numbers, cell=cell), structure(moved, numbers, cell=cell)) > _SAME


def test_distortions_of_symmetric_crystals_are_seen() -> None:
    grid = np.stack(np.meshgrid(*[np.arange(3)] * 3, indexing="ij"), -1).reshape(-1, 3)
    perfect = structure(grid @ FCC, [29] * 27, cell=3 * FCC)
    displaced = grid @ FCC
    displaced[0, 0] += 0.005
    shear = np.eye(3)
    shear[0, 1] = 0.005
    assert apart(perfect, structure(displaced, [29] * 27, cell=3 * FCC)) > _SAME
    assert apart(perfect, structure(grid @ FCC @ shear, [29] * 27, cell=3 * FCC @ shear)) > _SAME


def test_elements_and_molecules_beyond_the_cutoff_are_seen() -> None:
    pair = [[0, 0, 0], [20.0, 0, 0]]
    assert apart(structure(pair, [29, 79]), structure([[0, 0, 0], [30.0, 0, 0]], [29, 79])) > 1
    triple = [[0, 0, 0], [1.2, 0, 0], [2.7, 0, 0]]
    assert apart(structure(triple, [6, 8, 8]), structure(triple, [8, 6, 8])) > 0.01


def test_atoms_at_one_place_have_a_finite_fingerprint() -> None:
    numbers = fingerprint(subject(structure([[0, 0, 0], [0, 0, 0]], [29, 29])))
    assert numbers.shape == (SIZE,)
    assert np.isfinite(numbers).all()


def test_polarity_vanishes_where_symmetry_makes_forces_vanish() -> None:
    assert polarity(subject(structure([[0, 0, 0]], [29], cell=FCC))) < 1e-9
    assert polarity(subject(structure([[0, 0, 0], [2, 0, 0]], [29, 29]))) > 0.1
    assert polarity(subject(structure([[0, 0, 0], [20, 0, 0]], [29, 29]))) == 0
