"""Structures and a small model for the tests of models."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule
from models_rigs import Join, rattled, strained

from nvalchemi_lightning.data import AtomicData, Batch
from nvalchemi_lightning.models import PaiNN


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def join() -> Join:
    def joined(*structures: Atoms, dtype: torch.dtype = torch.float64) -> Batch:
        return Batch.from_data_list([AtomicData.from_atoms(atoms, dtype=dtype) for atoms in structures])

    return joined


@pytest.fixture
def small() -> Callable[..., PaiNN]:
    """Return a maker of small float64 models that know the elements of the structures below."""

    def make(**options: object) -> PaiNN:
        elements = (1, 6, 8, 29, 79)
        defaults = {"hidden": 8, "num_radial": 4, "cutoff": 4.0, "elements": elements, "scale": 1.7}
        defaults["reference_energies"] = tuple(-0.1 * element for element in elements)
        return PaiNN(**{**defaults, **options}).double()  # type: ignore[arg-type]

    return make


@pytest.fixture
def crystal() -> Atoms:
    """Return a skewed, left-handed periodic structure that is smaller than the cutoff."""
    atoms = rattled(bulk("Cu", "sc", a=2.6) * (2, 1, 1))
    atoms.numbers[0] = 79
    return strained(atoms, np.array([[0.04, 0.1, -0.05], [0.0, -0.03, 0.07], [0.0, 0.0, 0.02]]), [0, 2, 1])


@pytest.fixture
def structures(crystal: Atoms) -> list[Atoms]:
    """Return molecules, a crystal, a slab, a wire and a lone atom."""
    slab = rattled(
        Atoms("Cu2", [[0, 0, 0], [1.2, 1.3, 1.9]], cell=[[2.5, 0, 0], [0.3, 2.6, 0], [0, 0, 0]], pbc=[1, 1, 0])
    )
    wire = rattled(Atoms("Au2", [[0, 0, 0], [0, 0.4, 2.3]], cell=[[0, 0, 0], [0, 0, 0], [0.1, 0, 4.1]], pbc=[0, 0, 1]))
    return [rattled(molecule("CH3CH2OH")), crystal, slab, wire, Atoms("H"), rattled(molecule("H2O"), 1)]
