"""Checks that judge a structure by itself."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from check_rigs import judged, structure, subject, water

from nvalchemi_lightning.data import AtomicData
from nvalchemi_lightning.data.checkup import geometry, labels, placeholders
from nvalchemi_lightning.data.checkup.elements import one_atom_cell
from nvalchemi_lightning.data.checkup.subject import Subject

CUBE = 10.0 * np.eye(3)
FCC = np.array([[0.0, 1.8, 1.8], [1.8, 0.0, 1.8], [1.8, 1.8, 0.0]])
WATER = [[0.0, 0.0, 0.0], [0.97, 0.0, 0.0], [-0.24, 0.92, 0.0]]
NUMBERS = [8, 1, 1]
SANE = structure(WATER, NUMBERS, energy=-1.0, forces=[[0.1, 0, 0], [-0.1, 0, 0], [0, 0, 0]])
NAN = math.nan
PLANE = (True, True, False)

CASES: dict[str, tuple[Callable[[Subject], str | None], AtomicData, str]] = {
    "coincident": (geometry.coincident_atoms, structure([[0, 0, 0], [0, 0, 0.1]], [29, 29]), "Cu 0 and Cu 1 are 0.1 A"),
    "close": (geometry.close_atoms, structure([[0, 0, 0], [0, 0, 0.9]], [29, 29]), "0.9 A apart, 0.34 of the sum"),
    "image": (geometry.close_atoms, structure([[0, 0, 0]], [29], cell=1.5 * np.eye(3)), "Cu 0 and Cu 0 (an image)"),
    "tiny": (geometry.tiny_cell, structure([[0, 0, 0]], [1], cell=0.9 * np.eye(3)), "0.729 A^3 per atom"),
    "left": (geometry.left_handed, structure([[0, 0, 0]], [29], cell=CUBE[[1, 0, 2]]), "det(cell) < 0"),
    "parts": (
        geometry.fragments,
        structure([[0, 0, 0], [2, 0, 0], [4, 0, 0], [40, 0, 0]], [29] * 4),
        "2 parts of 3, 1 atoms",
    ),
    "many parts": (
        geometry.fragments,
        structure([[20.0 * atom, 0, 0] for atom in range(6)], [29] * 6),
        "6 parts of 1, 1, 1, 1, ... atoms",
    ),
    "NaN": (
        labels.partly_nan,
        structure(WATER, NUMBERS, forces=[[NAN, 0, 0], [0, 0, 0], [0, 0, 0]]),
        "NaN in 1 of the 9 numbers of forces",
    ),
    "overflow": (labels.overflow, structure(WATER, NUMBERS, energy=1e39), "energy reaches 1e+39, infinite in float32"),
    "huge": (
        labels.huge_forces,
        structure(WATER, NUMBERS, forces=[[0, 0, 320.0], [0, 0, -320.0], [0, 0, 0]]),
        "320 eV/A on O 0",
    ),
    "net force": (
        labels.net_force,
        structure(WATER, NUMBERS, forces=[[0, 0, 3.0], [0, 0, 1.0], [0, 0, 0]]),
        "the forces sum to 4 eV/A",
    ),
    "torque": (
        labels.net_torque,
        structure(WATER, NUMBERS, forces=[[0, 1.0, 0], [0, -1.0, 0], [0, 0, 0]]),
        "torque 0.97 eV",
    ),
    "asymmetric": (
        labels.asymmetric_stress,
        structure(WATER, NUMBERS, cell=CUBE, stress=[[1, 0.5, 0], [0, 1, 0], [0, 0, 1]]),
        "transposed entries of stress differ by 0.5",
    ),
    "asymmetric virial": (
        labels.asymmetric_stress,
        structure(WATER, NUMBERS, cell=CUBE, virial=[[1, 0.5, 0], [0, 1, 0], [0, 0, 1]]),
        "transposed entries of virial differ by 0.5",
    ),
    "no volume": (
        labels.no_volume,
        structure(WATER, NUMBERS, cell=CUBE, pbc=PLANE, stress=np.eye(3)),
        "stress up to 1 eV/A^3, but pbc is [True, True, False]",
    ),
    "virial": (
        labels.virial_mismatch,
        structure(WATER, NUMBERS, cell=CUBE, stress=0.01 * np.eye(3), virial=10.0 * np.eye(3)),
        "differ by up to 20 eV",
    ),
    "zero forces": (
        placeholders.zero_forces,
        structure(WATER, NUMBERS, forces=np.zeros((3, 3))),
        "all 3 forces are exactly 0",
    ),
    "zero stress": (
        placeholders.zero_stress,
        structure(WATER, NUMBERS, cell=CUBE, stress=np.zeros((3, 3))),
        "the stress is exactly 0",
    ),
    "one atom": (one_atom_cell, structure([[0, 0, 0]], [29], cell=FCC), "Cu with 42 images of itself nearby"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_said(case: str) -> None:
    judge, bad, expected = CASES[case]
    assert expected in judged(judge, bad)


FINE: dict[str, tuple[Callable[[Subject], str | None], AtomicData]] = {
    "coincident only": (geometry.close_atoms, CASES["coincident"][1]),
    "close only": (geometry.coincident_atoms, CASES["close"][1]),
    "one atom": (geometry.fragments, structure([[0, 0, 0]], [29])),
    "one part": (geometry.fragments, structure([[0, 0, 0], [4, 0, 0], [8, 0, 0]], [29] * 3)),
    "far atoms": (geometry.close_atoms, structure([[0, 0, 0], [20, 0, 0]], [29, 29])),
    "no cell": (geometry.tiny_cell, SANE),
    "large cell": (geometry.tiny_cell, structure([[0, 0, 0]], [1], cell=CUBE)),
    "right-handed": (geometry.left_handed, structure([[0, 0, 0]], [1], cell=CUBE)),
    "all NaN": (labels.partly_nan, structure(WATER, NUMBERS, energy=NAN)),
    "sane range": (labels.overflow, SANE),
    "sane size": (labels.huge_forces, SANE),
    "zero sum": (labels.net_force, SANE),
    "zero torque": (labels.net_torque, SANE),
    "net force is no torque": (labels.net_torque, CASES["net force"][1]),
    "crystals have no torque": (
        labels.net_torque,
        structure(WATER, NUMBERS, cell=CUBE, forces=[[0, 1.0, 0], [0, -1.0, 0], [0, 0, 0]]),
    ),
    "symmetric": (labels.asymmetric_stress, structure(WATER, NUMBERS, cell=CUBE, stress=np.eye(3), virial=np.eye(3))),
    "volume": (labels.no_volume, structure(WATER, NUMBERS, cell=CUBE, stress=np.eye(3))),
    "consistent": (
        labels.virial_mismatch,
        structure(WATER, NUMBERS, cell=CUBE, stress=0.01 * np.eye(3), virial=-10.0 * np.eye(3)),
    ),
    "no volume for a virial": (
        labels.virial_mismatch,
        structure(WATER, NUMBERS, cell=CUBE, pbc=PLANE, stress=np.eye(3), virial=np.eye(3)),
    ),
    "forces": (placeholders.zero_forces, SANE),
    "zero by symmetry": (
        placeholders.zero_forces,
        structure([[0, 0, 0], [1.8, 1.8, 1.8]], [29, 29], cell=3.6 * np.eye(3), forces=np.zeros((2, 3))),
    ),
    "zero on one atom": (placeholders.zero_forces, structure([[0, 0, 0]], [29], forces=np.zeros((1, 3)))),
    "zero in vacuum": (
        placeholders.zero_stress,
        structure([[0, 0, 0]], [29], cell=CUBE, stress=np.zeros((3, 3))),
    ),
    "isolated": (one_atom_cell, structure([[0, 0, 0]], [29], cell=CUBE)),
    "molecule": (one_atom_cell, SANE),
}


@pytest.mark.parametrize("case", FINE)
def test_what_is_fine_is_not_said(case: str) -> None:
    judge, good = FINE[case]
    assert judged(judge, good) == ""


def test_the_rig_obeys_physics() -> None:
    """The forces of the molecule are the derivative of its energy, so that they prove something elsewhere."""
    positions = np.array(WATER)
    moved = positions.copy()
    moved[1, 0] += 1e-5
    back = positions.copy()
    back[1, 0] -= 1e-5
    slope = (float(water(moved).energy) - float(water(back).energy)) / 2e-5
    assert slope == pytest.approx(-float(water(positions).forces[1, 0]), abs=1e-6)
    assert judged(labels.net_torque, water(positions)) == ""


def test_labels_are_known_in_full_or_not_at_all() -> None:
    data = structure(
        WATER, NUMBERS, energy=NAN, forces=[[NAN, 0, 0], [0, 0, 0], [0, 0, 0]], cell=CUBE, stress=np.eye(3)
    )
    assert subject(data).known.keys() == {"stress"}
    assert [label for label in ("energy", "forces", "stress") if subject(data).has(label)] == ["forces", "stress"]


def test_structures_in_float32_are_judged_in_float64() -> None:
    one = subject(SANE.to(dtype=torch.float32))
    assert one.positions.dtype == one.known["forces"].dtype == np.float64
