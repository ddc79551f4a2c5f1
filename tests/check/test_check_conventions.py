"""Signs and units are seen in the physics of the labels: B23."""

from __future__ import annotations

import re

import numpy as np
import pytest
from check_rigs import changed, crystals, molecules, named, structure

from nvalchemi_lightning.data import AtomicData, Finding, check

KCAL = 23.0605
HARTREE_BOHR = 1 / 51.4221
GPA = 160.2177

DISTORTED = molecules(120, 0.03, walk=False)
WALK = molecules(60, 0.002, walk=True)
CRYSTALS = crystals(40)


def only(found: list[Finding]) -> Finding:
    (finding,) = found
    return finding


def test_right_labels_are_not_complained_about() -> None:
    for frames in (DISTORTED, WALK, CRYSTALS):
        report = check(frames)
        assert not [finding for finding in report if finding.severity == "error"]


@pytest.mark.parametrize(
    ("factor", "expected"),
    [
        (-1.0, r"^forces push atoms apart where bonds are long \(H-O -\d+"),
        (KCAL, "seem to be in kcal/mol/A"),
        (HARTREE_BOHR, "seem to be in Ha/Bohr"),
        (1e4, r"impossible stiffness \(H-O .*\)$"),
    ],
)
def test_bonds_tell_sign_and_unit_of_forces(factor: float, expected: str) -> None:
    finding = only(named(check(changed(DISTORTED, forces=factor)), "force_convention"))
    assert finding.severity == "error"
    assert re.search(expected, finding.message)


def test_forces_that_do_not_depend_on_bonds_say_nothing() -> None:
    rng = np.random.default_rng(5)
    frames = [data.clone() for data in DISTORTED]
    for data in frames:
        data.forces = data.forces.new_tensor(rng.normal(size=(3, 3)))
    assert not named(check(frames), "force_convention")


@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        ({"forces": -1.0}, "perhaps the forces have the other sign$"),
        ({"forces": KCAL}, "perhaps the forces are in kcal/mol/A$"),
        ({"energy": KCAL}, "perhaps the energies are in kcal/mol$"),
        ({"energy": -1 / 27.2114}, "perhaps the forces have the other sign and the energies are in Ha$"),
        ({"energy": 7.0}, r"not by 1 times$"),
    ],
)
def test_steps_tell_energy_from_forces(factors: dict[str, float], expected: str) -> None:
    finding = only(named(check(changed(WALK, **factors)), "energy_differences"))
    assert finding.severity == "error"
    assert re.search(expected, finding.message)


def test_energies_unrelated_to_the_forces_are_a_warning() -> None:
    rng = np.random.default_rng(1)
    frames = [data.clone() for data in WALK]
    for data in frames:
        data.energy = data.energy.new_tensor([[rng.normal(0, 1.0)]])
    assert only(named(check(frames), "energy_differences")).severity == "warning"


def test_large_steps_say_nothing() -> None:
    """Frames of different molecules, or far apart, are no path to integrate along."""
    assert not named(check(changed(DISTORTED, energy=KCAL)), "energy_differences")
    assert not named(check(changed(WALK[:9], energy=KCAL)), "energy_differences")


def test_molecules_may_turn_between_frames() -> None:
    rng = np.random.default_rng(2)
    frames = []
    for data in WALK:
        turn = np.linalg.qr(rng.normal(size=(3, 3)))[0]
        turn *= np.sign(np.linalg.det(turn))
        frames.append(
            structure(
                data.positions.numpy() @ turn + rng.normal(0, 9, 3),
                [8, 1, 1],
                energy=float(data.energy),
                forces=data.forces.numpy() @ turn,
            )
        )
    assert not named(check(frames), "energy_differences")
    assert named(check(changed(frames, forces=-1.0)), "energy_differences")


@pytest.mark.parametrize("vector", [20.0, 0.0])
def test_slabs_are_compared_if_they_have_a_cell(vector: float) -> None:
    cell = np.diag([12.0, 12.0, vector])
    frames = [
        structure(
            data.positions.numpy(),
            [8, 1, 1],
            cell=cell,
            pbc=(True, True, False),
            energy=float(data.energy) * KCAL,
            forces=data.forces.numpy(),
        )
        for data in WALK
    ]
    assert len(named(check(frames), "energy_differences")) == (vector > 0)


@pytest.mark.parametrize(
    ("factor", "expected"),
    [
        (-1.0, ["the stress have the other sign", "it seems to have the other sign"]),
        (GPA, ["the stress are in GPa", "it seems to have the unit GPa"]),
        (-10 * GPA, ["other sign and the stress are in kbar", "the other sign and the unit kbar"]),
    ],
)
def test_strain_and_volume_tell_sign_and_unit_of_stress(factor: float, expected: list[str]) -> None:
    report = check(changed(CRYSTALS, stress=factor))
    messages = [only(named(report, name)).message for name in ("energy_differences", "stress_convention")]
    assert all(part in message for part, message in zip(expected, messages, strict=True))


def in_a_box(data: AtomicData, stress_factor: float) -> AtomicData:
    """Put a molecule into a periodic box; by the virial theorem its stress follows from its forces."""
    cell = np.array([[12.0, 0, 0], [2.0, 13.0, 0], [0, -1.0, 12.0]])
    positions, forces = data.positions.numpy(), data.forces.numpy()
    stress = -(positions.T @ forces) / np.linalg.det(cell)
    wrapped = ((positions + np.array([11.9, 3.0, 0.1])) @ np.linalg.inv(cell) % 1.0) @ cell
    return structure(wrapped, [8, 1, 1], cell=cell, energy=-1.0, forces=forces, stress=stress_factor * stress)


@pytest.mark.parametrize(
    ("factor", "expected"),
    [
        (1.0, ""),
        (-1.0, "is -1 times what the forces give, in the median of"),
        (GPA, "160 times what the forces give, in the median of"),
        (7.0, "it belongs to another calculation"),
        (0.0, "it belongs to another calculation"),
    ],
)
def test_vacuum_tells_sign_and_unit_of_stress(factor: float, expected: str) -> None:
    found = named(check([in_a_box(data, factor) for data in DISTORTED[:5]]), "stress_convention")
    assert (found[0].message if found else "").find(expected) >= 0
    assert bool(found) == bool(expected)


def test_stress_of_hundreds_of_gpa_is_doubted() -> None:
    frames = changed(CRYSTALS[:1], stress=GPA) * 12
    finding = only(named(check(frames), "stress_convention"))
    assert finding.severity == "warning"
    assert "it seems to have the unit GPa or kbar" in finding.message


@pytest.mark.parametrize(("factor", "unit"), [(1 / 0.529, "Bohr"), (0.1, "nm"), (1.0, "")])
def test_distances_tell_the_unit_of_length(factor: float, unit: str) -> None:
    frames = [structure(data.positions.numpy() * factor, [8, 1, 1], energy=0.0) for data in DISTORTED[:20]]
    found = named(check(frames), "length_unit")
    assert [f"in {unit} instead of A" in finding.message for finding in found] == [True] * bool(unit)
