"""What a potential must satisfy whatever its weights: derivatives, symmetries, equal systems, empty surroundings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.io import read
from models_rigs import Join, strained
from torch import Tensor

from nvalchemi_lightning.data import Batch
from nvalchemi_lightning.models import PaiNN

Make = Callable[..., PaiNN]
ALL = ("energy", "forces", "stress")


def evaluate(model: PaiNN, batch: Batch) -> dict[str, Tensor]:
    model.eval()
    model.set_config("active_outputs", set(ALL))
    outputs = model(batch)
    assert list(outputs) == sorted(ALL)
    return {name: value for name, value in outputs.items() if value is not None}


def test_forces_are_the_slope_of_the_energy(small: Make, join: Join, structures: list[Atoms]) -> None:
    model, h = small(), 1e-5
    forces = evaluate(model, join(*structures))["forces"]
    first = 0
    for atoms in structures:
        for atom, axis in np.ndindex(len(atoms), 3):
            energies = []
            for step in (h, -h):
                moved = atoms.copy()
                moved.positions[atom, axis] += step
                energies.append(evaluate(model, join(moved))["energy"].item())
            assert forces[first + atom, axis].item() == pytest.approx(-(energies[0] - energies[1]) / (2 * h), abs=1e-6)
        first += len(atoms)


def test_b23_stress_is_the_slope_of_the_energy_under_strain(small: Make, join: Join, crystal: Atoms) -> None:
    model, h = small(), 1e-5
    stress = evaluate(model, join(crystal))["stress"][0]
    assert stress.abs().max() > 1e-3
    for i, j in np.ndindex(3, 3):
        strain = np.zeros((3, 3))
        strain[i, j] += h / 2
        strain[j, i] += h / 2
        energies = [evaluate(model, join(strained(crystal, sign * strain)))["energy"].item() for sign in (1, -1)]
        slope = (energies[0] - energies[1]) / (2 * h) / crystal.get_volume()
        assert stress[i, j].item() == pytest.approx(slope, abs=1e-6)


def test_stress_of_a_slab_in_a_cell_with_volume(small: Make, join: Join) -> None:
    slab = Atoms("Cu2", [[0, 0, 0], [1.2, 1.3, 1.9]], cell=[2.5, 2.6, 12.0], pbc=[1, 1, 0])
    model, h = small(), 1e-5
    stress = evaluate(model, join(slab))["stress"][0]
    strain = np.diag([h, 0, 0])
    energies = [evaluate(model, join(strained(slab, sign * strain)))["energy"].item() for sign in (1, -1)]
    assert stress[0, 0].item() == pytest.approx((energies[0] - energies[1]) / (2 * h) / slab.get_volume(), abs=1e-6)


def rotation(seed: int) -> np.ndarray:
    """Draw an orthogonal matrix; half of them reflect."""
    matrix, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(3, 3)))
    return matrix


@pytest.mark.parametrize("seed", range(4))
def test_turned_structures_have_turned_forces_and_stress(
    small: Make, join: Join, structures: list[Atoms], seed: int
) -> None:
    model, turn = small(), rotation(seed)
    turned = []
    for atoms in structures:
        copy = atoms.copy()
        copy.set_cell(np.array(atoms.cell) @ turn)
        copy.positions = atoms.positions @ turn + 17.0
        turned.append(copy)
    before, after = evaluate(model, join(*structures)), evaluate(model, join(*turned))
    matrix = torch.tensor(turn)
    torch.testing.assert_close(after["energy"], before["energy"], rtol=0, atol=1e-10)
    torch.testing.assert_close(after["forces"], before["forces"] @ matrix, rtol=0, atol=1e-10)
    torch.testing.assert_close(after["stress"], matrix.T @ before["stress"] @ matrix, rtol=0, atol=1e-10)
    torch.testing.assert_close(before["stress"], before["stress"].mT, rtol=0, atol=0)


def test_order_of_atoms_and_structures_does_not_matter(small: Make, join: Join, structures: list[Atoms]) -> None:
    model, rng = small(), np.random.default_rng(0)
    orders = [rng.permutation(len(atoms)) for atoms in structures]
    before = evaluate(model, join(*structures))
    after = evaluate(model, join(*[atoms[order] for atoms, order in zip(structures[::-1], orders[::-1], strict=True)]))
    torch.testing.assert_close(after["energy"].flip(0), before["energy"], rtol=0, atol=1e-10)
    pieces = before["forces"].split([len(atoms) for atoms in structures])
    expected = torch.cat([piece[order] for piece, order in zip(pieces[::-1], orders[::-1], strict=True)])
    torch.testing.assert_close(after["forces"], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("repeats", [(2, 1, 1), (3, 2, 2)])
def test_a_repeated_cell_is_the_same_crystal(
    small: Make, join: Join, crystal: Atoms, repeats: tuple[int, int, int]
) -> None:
    model, count = small(), int(np.prod(repeats))
    one, many = evaluate(model, join(crystal)), evaluate(model, join(crystal * repeats))
    torch.testing.assert_close(many["energy"], count * one["energy"], rtol=0, atol=1e-9)
    torch.testing.assert_close(many["forces"], one["forces"].repeat(count, 1), rtol=0, atol=1e-10)
    torch.testing.assert_close(many["stress"], one["stress"], rtol=0, atol=1e-11)


def test_atoms_may_be_in_any_image(small: Make, join: Join, crystal: Atoms) -> None:
    model, moved = small(), crystal.copy()
    moved.positions += np.array([[0, 5, -3], [7, 0, 1]]) @ np.array(crystal.cell)
    before, after = evaluate(model, join(crystal)), evaluate(model, join(moved))
    for name in ALL:
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=1e-9)


@pytest.mark.parametrize("element", ["Cu", "Au"])
def test_energy_and_forces_vanish_smoothly_at_the_cutoff(small: Make, join: Join, element: str) -> None:
    model = small()
    lone = evaluate(model, join(Atoms(element)))["energy"].item()
    pairs = [Atoms([element, "H"], [[0, 0, 0], [0, 0, 4.0 - gap]]) for gap in (1e-2, 1e-4, -1e-4)]
    energies, forces = zip(
        *((out["energy"], out["forces"]) for out in (evaluate(model, join(p)) for p in pairs)), strict=True
    )
    hydrogen = evaluate(model, join(Atoms("H")))["energy"].item()
    excess = [abs(energy.item() - lone - hydrogen) for energy in energies]
    assert 0 < excess[0] < 1e-4
    assert excess[1] < 1e-9
    assert excess[2] < 1e-14
    assert forces[0].abs().max() > 0
    assert forces[1].abs().max() < 1e-6
    assert forces[2].abs().max() == 0


def test_edges_beyond_the_cutoff_have_no_effect(small: Make, join: Join, structures: list[Atoms]) -> None:
    from nvalchemi_lightning.data.feeding.edge_transform import NeighborListTransform

    model, batch = small(), join(*structures)
    short, long = (evaluate(model, NeighborListTransform(cutoff)(batch)) for cutoff in (4.0, 6.5))
    for name in ALL:
        torch.testing.assert_close(long[name], short[name], rtol=0, atol=1e-11)


def test_nasty_twins_have_the_same_energy_per_atom(shared: Path, join: Join) -> None:
    frames = read(shared / "data" / "nasty" / "nasty_valid.extxyz", ":")
    model = PaiNN(hidden=8, num_radial=4, elements=(29, 79)).double()
    per_atom = {atoms.info["case"]: evaluate(model, join(atoms))["energy"].item() / len(atoms) for atoms in frames}
    twins = {atoms.info["case"]: atoms.info["twin_of"] for atoms in frames if "twin_of" in atoms.info}
    assert len(twins) > 5
    for case, twin in twins.items():
        assert per_atom[case] == pytest.approx(per_atom[twin], abs=1e-8), f"{case} and {twin}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_b24_nasty_frames_train_without_nan(shared: Path, join: Join, dtype: torch.dtype) -> None:
    frames = read(shared / "data" / "nasty" / "nasty_valid.extxyz", ":")
    batch = join(*(atoms for atoms in frames if len(atoms) < 100), dtype=dtype)
    model = PaiNN(hidden=8, num_radial=4, elements=(29, 79), active_outputs=ALL).to(dtype)
    outputs = model(batch)
    assert all(value.isfinite().all() for value in outputs.values())
    sum(value.square().mean() for value in outputs.values()).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize(
    "lonely", [[Atoms("H")], [Atoms("H2", [[0, 0, 0], [0, 0, 50.0]])], [Atoms("H"), Atoms("O"), Atoms("C")]]
)
def test_b24_without_edges_energies_are_finite_and_forces_zero(small: Make, join: Join, lonely: list[Atoms]) -> None:
    model, batch = small(active_outputs=ALL), join(*lonely)
    outputs = model(batch)
    assert outputs["energy"].shape == (len(lonely), 1)
    assert outputs["energy"].isfinite().all()
    assert (outputs["forces"] == 0).all()
    assert (outputs["stress"] == 0).all()
    sum(value.square().sum() for value in outputs.values()).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients.values())
    assert gradients["embedding.weight"].abs().sum() > 0


def test_two_atoms_at_one_place_give_finite_numbers(small: Make, join: Join) -> None:
    model = small()
    outputs = model(join(Atoms("H2", [[0, 0, 0], [0, 0, 0]])))
    assert outputs["forces"].isfinite().all()
    outputs["forces"].square().sum().backward()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())


def test_a_site_of_high_symmetry_has_finite_gradients(small: Make, join: Join) -> None:
    # All vectors of the atom are zero, where norms have no derivative.
    model = small()
    model(join(Atoms("Cu", cell=np.eye(3) * 2.6, pbc=True)))["forces"].square().sum().backward()
    model(join(Atoms("HOH", [[0, 0, -1.0], [0, 0, 0], [0, 0, 1.0]])))["forces"].square().sum().backward()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())


def test_b13_a_molecule_beside_a_crystal_leaves_the_stress_alone(small: Make, join: Join, crystal: Atoms) -> None:
    model = small(active_outputs=ALL)
    boxed = Atoms("OH", [[0, 0, 0], [0, 0, 0.97]], cell=np.eye(3))
    both, alone = model(join(Atoms("OH2", np.eye(3)), crystal, boxed)), model(join(crystal))
    torch.testing.assert_close(both["stress"][1], alone["stress"][0], rtol=0, atol=1e-13)
    assert (both["stress"][[0, 2]] == 0).all()
    sum(value.sum() for value in both.values()).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_b13_molecules_alone_have_no_stress(small: Make, join: Join) -> None:
    outputs = small(active_outputs=ALL)(join(Atoms("OH2", np.eye(3)), Atoms("H")))
    assert torch.equal(outputs["stress"], torch.zeros(2, 3, 3, dtype=torch.float64))
