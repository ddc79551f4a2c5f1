"""Edges equal those of ASE and of brute force, whatever the cell."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.io import read
from ase.neighborlist import neighbor_list as ase_neighbor_list
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi_lightning.data import AtomicData, Batch
from nvalchemi_lightning.errors import ConfigurationError, DataError
from nvalchemi_lightning.neighbors import Structures, edge_vectors, neighbor_list


def raw(*atoms: Atoms, dtype: torch.dtype = torch.float64) -> SimpleNamespace:
    """Join structures without any check of the data objects."""
    counts = torch.tensor([len(one) for one in atoms])
    return SimpleNamespace(
        positions=torch.cat([torch.tensor(one.positions, dtype=dtype).reshape(-1, 3) for one in atoms]),
        cell=torch.stack([torch.tensor(np.array(one.cell), dtype=dtype) for one in atoms]),
        pbc=torch.stack([torch.tensor(one.pbc) for one in atoms]),
        batch_ptr=torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]),
        batch_idx=torch.repeat_interleave(torch.arange(len(atoms)), counts),
    )


def edge_set(edges: torch.Tensor, shifts: torch.Tensor) -> Counter[tuple[int, ...]]:
    return Counter(map(tuple, torch.cat([edges, shifts.long()], 1).tolist()))


def ase_edge_set(atoms: Atoms, cutoff: float, first: int = 0) -> Counter[tuple[int, ...]]:
    source, target, shifts = ase_neighbor_list("ijS", atoms, cutoff)
    return Counter(zip((source + first).tolist(), (target + first).tolist(), *shifts.T.tolist(), strict=True))


def brute_force(atoms: Atoms, cutoff: float, images: int) -> Counter[tuple[int, ...]]:
    found: Counter[tuple[int, ...]] = Counter()
    for shift in itertools.product(*(range(-images, images + 1) if along else (0,) for along in atoms.pbc)):
        moved = atoms.positions + np.array(shift) @ np.array(atoms.cell)
        for i, j in itertools.product(range(len(atoms)), repeat=2):
            if (i != j or any(shift)) and np.linalg.norm(moved[j] - atoms.positions[i]) < cutoff:
                found[(i, j, *shift)] += 1
    return found


@st.composite
def structures(draw: st.DrawFn) -> Atoms:
    """Draw skewed, left-handed, small and flat cells, partial periodicity, and atoms outside the cell."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    pbc = np.array(draw(st.tuples(st.booleans(), st.booleans(), st.booleans())))
    shape = np.diag(rng.uniform(1.5, 8.0, 3)) + rng.uniform(-2.0, 2.0, (3, 3)) * draw(st.sampled_from([0.0, 0.5, 1.0]))
    rotation, _ = np.linalg.qr(rng.normal(size=(3, 3)))
    cell = (shape @ rotation)[draw(st.permutations([0, 1, 2]))]
    if draw(st.booleans()):
        cell[~pbc] = 0.0
    # Nearly flat cells have so many images within the cutoff that ASE takes minutes.
    periodic = cell[pbc]
    flat = len(periodic) and np.linalg.svd(periodic, compute_uv=False)[-1] < 0.7
    count = draw(st.integers(1, 6))
    spread = draw(st.sampled_from([3.0, 30.0]))
    return Atoms("H" * count, rng.uniform(-spread, spread, (count, 3)), cell=cell, pbc=False if flat else pbc)


@settings(max_examples=80, deadline=None)
@given(st.lists(structures(), min_size=1, max_size=3), st.floats(1.0, 5.0))
def test_edges_equal_ase(atoms: list[Atoms], cutoff: float) -> None:
    batch = raw(*atoms)
    edges, shifts = neighbor_list(batch, cutoff)
    expected = [ase_edge_set(one, cutoff, int(first)) for one, first in zip(atoms, batch.batch_ptr, strict=False)]
    assert edge_set(edges, shifts) == sum(expected, Counter())
    assert edges.dtype == torch.int64
    assert shifts.dtype == torch.int32
    assert bool((edges[1:, 0] >= edges[:-1, 0]).all())
    lengths = edge_vectors(batch, edges, shifts, batch.batch_idx).norm(dim=1)
    assert bool((lengths < cutoff + 1e-9).all())


DENSE = Atoms("H1000", np.random.default_rng(1).uniform(0, 17.0, (1000, 3)), cell=np.eye(3) * 17.0, pbc=True)
PAIR = Atoms("H2", [[0, 0, 0], [0.3, 0.4, 0.5]], pbc=True)
SMALL = {
    "one atom, cutoff of 2.5 cells": (Atoms("H", [[0.1, 0, 0]], cell=np.eye(3) * 2.0, pbc=True), 5.0, 3),
    "below twice the cutoff": (Atoms(PAIR, cell=np.eye(3) * 3.1), 2.9, 2),
    "wire": (Atoms(PAIR, cell=[[0, 0, 0], [0, 1.3, 0.2], [0, 0, 0]], pbc=[0, 1, 0]), 4.0, 4),
    "slab": (Atoms(PAIR, cell=[[1.9, 0, 0], [0.7, 1.4, 0], [0, 0, 0]], pbc=[1, 1, 0]), 3.0, 4),
    "left-handed": (Atoms(PAIR, cell=[[2.0, 0, 0], [0.5, 2.1, 0], [0.3, 0.2, -1.9]]), 3.0, 4),
}


@pytest.mark.parametrize("name", SMALL)
def test_b76_small_cells_equal_brute_force(name: str) -> None:
    atoms, cutoff, images = SMALL[name]
    found = edge_set(*neighbor_list(raw(atoms), cutoff))
    assert found == brute_force(atoms, cutoff, images)
    assert max(found.values()) == 1


def test_b76_dense_cell_loses_no_edge() -> None:
    assert edge_set(*neighbor_list(raw(DENSE), 2.5)) == ase_edge_set(DENSE, 2.5)


def test_a_vector_that_is_not_periodic_may_be_anything() -> None:
    flat = Atoms("H2", [[0, 0, 0], [0.3, 0.4, 2.5]], cell=[[2.0, 0, 0], [0.5, 2.1, 0], [0, 0, 9.0]], pbc=[1, 1, 0])
    dependent = Atoms(flat, cell=[[2.0, 0, 0], [0.5, 2.1, 0], [2.5, 2.1, 0]])
    assert edge_set(*neighbor_list(raw(dependent), 3.0)) == ase_edge_set(flat, 3.0)


def test_without_pbc_the_cell_is_ignored() -> None:
    atoms = Atoms("H2", [[0, 0, 0], [0, 0, 0.9]])
    boxed = Atoms(atoms, cell=np.eye(3))
    assert (
        edge_set(*neighbor_list(raw(boxed), 2.0))
        == ase_edge_set(atoms, 2.0)
        == Counter({(0, 1, 0, 0, 0): 1, (1, 0, 0, 0, 0): 1})
    )


@pytest.mark.parametrize("distance", [1e3, 0.99e5])
def test_b24_no_edges_have_the_shape_of_edges(distance: float) -> None:
    lonely = [Atoms("H"), Atoms("H2", [[0, 0, 0], [0, 0, distance]])]
    edges, shifts = neighbor_list(raw(*lonely), 5.0)
    assert (edges.shape, edges.dtype) == ((0, 2), torch.int64)
    assert (shifts.shape, shifts.dtype) == ((0, 3), torch.int32)


def test_far_from_the_origin() -> None:
    atoms = Atoms(PAIR, cell=np.eye(3) * 3.0)
    far = Atoms(atoms, positions=atoms.positions + 1e11)
    expected = edge_set(*neighbor_list(raw(atoms), 2.5))
    assert expected
    assert edge_set(*neighbor_list(raw(far), 2.5)) == expected


def test_batch_and_single_structure() -> None:
    atoms = [Atoms("H2", [[0, 0, 0], [0, 0, 0.8]]), Atoms(PAIR, cell=np.eye(3) * 3.0)]
    single = [AtomicData.from_atoms(one) for one in atoms]
    batch = Batch.from_data_list(single)
    edges, shifts = neighbor_list(batch, 2.5)
    first, second = (neighbor_list(data, 2.5) for data in single)
    assert torch.equal(edges, torch.cat([first[0], second[0] + 2]))
    assert torch.equal(shifts, torch.cat([first[1], second[1]]))
    batch.neighbor_list, batch.neighbor_list_shifts = edges, shifts
    assert torch.equal(batch[1].neighbor_list, second[0])


def test_structures_of_no_atoms_are_passed_over() -> None:
    assert neighbor_list(raw(Atoms(), Atoms("H2", [[0, 0, 0], [0, 0, 1.0]])), 2.0)[0].tolist() == [[0, 1], [1, 0]]
    assert neighbor_list(raw(Atoms()), 2.0)[0].shape == (0, 2)


def test_the_order_of_edges_is_reproducible() -> None:
    first, second = neighbor_list(raw(DENSE), 3.0), neighbor_list(raw(DENSE), 3.0)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_float32_structures_have_the_edges_of_their_own_positions() -> None:
    batch = raw(DENSE, dtype=torch.float32)
    rounded = Atoms(DENSE, positions=batch.positions.double().numpy())
    assert edge_set(*neighbor_list(batch, 2.5)) == ase_edge_set(rounded, 2.5)


def test_another_backend_takes_the_place_of_the_default() -> None:
    seen: list[Any] = []

    def backend(structures: Structures, cutoff: float) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append((structures.first_atoms, cutoff))
        return torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 3, dtype=torch.int32)

    assert neighbor_list(raw(PAIR), 3, backend=backend)[0].shape == (0, 2)
    assert seen == [((0, 2), 3.0)]


def test_nasty_frames_equal_ase(shared: Path) -> None:
    frames = read(shared / "data" / "nasty" / "nasty_valid.extxyz", ":")
    for atoms in frames:
        assert edge_set(*neighbor_list(raw(atoms), 5.0)) == ase_edge_set(atoms, 5.0), atoms.info


@pytest.mark.parametrize("cutoff", [0.0, -1.0, math.inf, math.nan])
def test_cutoff_must_be_a_length(cutoff: float) -> None:
    with pytest.raises(ConfigurationError, match=f"cutoff must be a positive number of Angstrom, got {cutoff}"):
        neighbor_list(raw(PAIR), cutoff)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_positions_must_be_finite(value: float) -> None:
    with pytest.raises(DataError, match="structure 1 of the batch has a position that is not finite"):
        neighbor_list(raw(Atoms("H"), Atoms("H2", [[0, 0, 0], [0, 0, value]])), 5.0)


@pytest.mark.parametrize("pbc", [True, False])
def test_absurd_distances_are_named(pbc: bool) -> None:
    atoms = Atoms("H2", [[0, 0, 0], [0, 0, 1e6]], cell=np.eye(3) * 4, pbc=pbc)
    with pytest.raises(DataError, match=r"structure 0 of the batch extends over 1e\+06 A, more than 100000 A"):
        neighbor_list(raw(atoms), 5.0)


@pytest.mark.parametrize("cell", [np.zeros((3, 3)), np.ones((3, 3)), np.full((3, 3), math.nan)])
def test_periodic_directions_need_lattice_vectors(cell: np.ndarray) -> None:
    with pytest.raises(DataError, match=r"structure 1 of the batch has pbc .* zero, not finite or linearly dependent"):
        neighbor_list(raw(Atoms("H"), Atoms("H", cell=cell, pbc=[1, 1, 0])), 5.0)


def test_cell_and_pbc_belong_together() -> None:
    batch = raw(Atoms(PAIR, cell=np.eye(3) * 3.0))
    without_pbc = SimpleNamespace(positions=batch.positions, cell=batch.cell)
    without_cell = SimpleNamespace(positions=batch.positions, pbc=batch.pbc)
    with pytest.raises(DataError, match="there is a cell but no pbc"):
        neighbor_list(without_pbc, 3.0)
    with pytest.raises(DataError, match=r"pbc is \[\[True, True, True\]\] but there is no cell"):
        neighbor_list(without_cell, 3.0)
    without_pbc.cell, without_cell.pbc = torch.zeros(1, 3, 3), torch.zeros(1, 3, dtype=torch.bool)
    assert len(neighbor_list(without_pbc, 3.0)[0]) == len(neighbor_list(without_cell, 3.0)[0]) == 2


def test_edge_vectors_are_differentiable() -> None:
    atoms = Atoms(PAIR, cell=[[2.0, 0, 0], [0.5, 2.1, 0], [0.3, 0.2, -1.9]])
    batch = raw(atoms)
    edges, shifts = neighbor_list(batch, 3.0)

    def vectors(positions: torch.Tensor, cell: torch.Tensor) -> torch.Tensor:
        data = SimpleNamespace(positions=positions, cell=cell)
        return edge_vectors(data, edges, shifts, batch.batch_idx)

    expected = ase_neighbor_list("D", atoms, 3.0)
    lengths = vectors(batch.positions, batch.cell).norm(dim=1)
    assert torch.allclose(lengths.sort()[0], torch.tensor(np.linalg.norm(expected, axis=1)).sort()[0])
    assert torch.autograd.gradcheck(vectors, (batch.positions.requires_grad_(), batch.cell.requires_grad_()))
