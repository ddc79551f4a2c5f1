"""Structures with a known potential, and what a check says of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from nvalchemi_lightning.data import AtomicData, CheckReport, Finding
from nvalchemi_lightning.data.checkup.subject import Subject

SPRING = 30.0
"""Stiffness of the bonds of the molecules [eV/A^2]."""

STIFFNESS = 1.0
"""Stiffness of the crystals against strain [eV/A^3]."""

_PAIRS = ((0, 1), (0, 2), (1, 2))
_REST = (0.96, 0.96, 1.52)


def tensor(values: object) -> torch.Tensor:
    return torch.as_tensor(np.asarray(values), dtype=torch.float64)


def structure(positions: object, numbers: Sequence[int], **fields: object) -> AtomicData:
    """Make a structure; labels may be given in any shape that has the right size."""
    shapes = {"energy": (1, 1), "stress": (1, 3, 3), "virial": (1, 3, 3), "cell": (1, 3, 3), "forces": (-1, 3)}
    tensors = {name: tensor(value).reshape(shapes[name]) for name, value in fields.items() if name != "pbc"}
    if "cell" in fields:
        tensors["pbc"] = torch.tensor([fields.get("pbc", (True, True, True))])
    return AtomicData(tensor(positions), torch.as_tensor(np.asarray(numbers)), **tensors)


def subject(data: AtomicData) -> Subject:
    return Subject(data, "rig", 0)


def water(positions: np.ndarray, offset: float = -10.0) -> AtomicData:
    """Return a molecule whose three distances are springs."""
    energy, forces = offset, np.zeros((3, 3))
    for (i, j), length in zip(_PAIRS, _REST, strict=True):
        bond = positions[j] - positions[i]
        excess = np.linalg.norm(bond) - length
        energy += SPRING * excess**2 / 2
        pull = SPRING * excess * bond / np.linalg.norm(bond)
        forces[i] += pull
        forces[j] -= pull
    return structure(positions, [8, 1, 1], energy=energy, forces=forces)


def molecules(count: int, step: float, *, walk: bool, seed: int = 0, offset: float = -10.0) -> list[AtomicData]:
    """Return distorted molecules: each a step from the one before, or from one and the same."""
    rng = np.random.default_rng(seed)
    center = np.array([[0.0, 0.0, 0.0], [0.97, 0.0, 0.0], [-0.24, 0.92, 0.0]])
    frames = []
    for _ in range(count):
        positions = center + rng.normal(0, step, (3, 3))
        frames.append(water(positions, offset))
        center = positions if walk else center
    return frames


def crystals(count: int = 20, seed: int = 0) -> list[AtomicData]:
    """Return strained cells of two copper atoms, quadratic in Lagrange's strain; forces vanish by symmetry."""
    rng = np.random.default_rng(seed)
    frames = []
    for _ in range(count):
        strain = rng.normal(0, 0.01, (3, 3))
        deformation = np.eye(3) + (strain + strain.T) / 2
        lagrange = (deformation @ deformation - np.eye(3)) / 2
        modulus = STIFFNESS * 2.9**3
        cell = 2.9 * deformation
        stress = deformation @ (modulus * lagrange) @ deformation / np.linalg.det(cell)
        frames.append(
            structure(
                np.array([[0, 0, 0], [0.5, 0.5, 0.5]]) @ cell,
                [29, 29],
                cell=cell,
                energy=modulus / 2 * (lagrange**2).sum(),
                stress=stress,
                forces=np.zeros((2, 3)),
            )
        )
    return frames


def changed(frames: Iterable[AtomicData], **factors: float) -> list[AtomicData]:
    """Return copies with labels multiplied."""
    copies = [data.clone() for data in frames]
    for data in copies:
        for name, factor in factors.items():
            setattr(data, name, getattr(data, name) * factor)
    return copies


def named(report: CheckReport, name: str) -> list[Finding]:
    """Return the findings of one check."""
    return [finding for finding in report if finding.check == name]


def judged(judge: Callable[[Subject], str | None], data: AtomicData) -> str:
    """Return what a judge of single structures says; "" for nothing."""
    return judge(subject(data)) or ""
