"""The table of fields and what is derived from it."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import torch

from nvalchemi_lightning import data
from nvalchemi_lightning.data.atomic_data import AtomicData
from nvalchemi_lightning.data.batch import Batch
from nvalchemi_lightning.data.elements import ATOMIC_MASSES, MAX_ATOMIC_NUMBER, standard_masses
from nvalchemi_lightning.data.fields import FIELDS, known_levels, level_of
from nvalchemi_lightning.data.segments import Segments

CONTRACT = {
    "node": "positions atomic_numbers atomic_masses atom_categories velocities forces momenta charges kinetic_energies "
    "node_alpha_spins node_beta_spins node_attrs node_embeddings neighbor_matrix neighbor_matrix_shifts num_neighbors",
    "edge": "neighbor_list neighbor_list_shifts shifts edge_embeddings",
    "system": "energy cell pbc stress virial dipole charge spin graph_embeddings graph_alpha_spins",
}


def test_levels_are_those_of_the_contract():
    for level, names in CONTRACT.items():
        assert {name for name, field in FIELDS.items() if field.level == level} == set(names.split())


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("positions", "(V, 3)"),
        ("atomic_numbers", "(V,)"),
        ("neighbor_matrix_shifts", "(V, K, 3)"),
        ("neighbor_list", "(E, 2)"),
        ("energy", "(1, 1)"),
        ("cell", "(1, 3, 3)"),
    ],
)
def test_shape_with_letters(name, shape):
    assert FIELDS[name].shape == shape


@pytest.mark.parametrize(
    ("name", "shape", "rows", "fits"),
    [
        ("forces", (4, 3), 4, True),
        ("forces", (4, 3), None, True),
        ("forces", (4, 3), 5, False),
        ("forces", (4,), 4, False),
        ("node_attrs", (4, 9), 4, True),
        ("node_attrs", (4,), 4, False),
        ("neighbor_matrix_shifts", (4, 7, 3), 4, True),
        ("neighbor_matrix_shifts", (4, 7, 2), 4, False),
        ("charges", (4,), 4, True),
        ("charges", (), 4, False),
    ],
)
def test_fits(name, shape, rows, fits):
    assert FIELDS[name].fits(torch.Size(shape), rows) is fits


@pytest.mark.parametrize("owner", [AtomicData, Batch])
def test_no_field_hides_behind_a_class_attribute(owner):
    assert not [name for name in FIELDS if hasattr(owner, name)]


def test_level_of_custom_fields():
    assert level_of("mine") == "system"
    assert level_of("mine", {"mine": "node"}) == "node"
    assert level_of("forces") == "node"
    assert known_levels(["forces", "energy"]) is known_levels(("forces", "energy"))


def test_masses_agree_with_ase():
    ase_data = pytest.importorskip("ase.data")
    assert ase_data.atomic_masses_iupac2016[1 : MAX_ATOMIC_NUMBER + 1].tolist() == list(ATOMIC_MASSES[1:])
    masses = standard_masses(torch.tensor([1, 8, 118], dtype=torch.int32), torch.float64)
    assert masses.tolist() == [1.008, 15.999, 294.214]
    assert standard_masses(torch.tensor([0]), torch.float32).isnan().all()


def test_segments_survive_pickling_without_their_caches():
    segments = Segments.from_sizes([2, 0, 3])
    assert segments.index.tolist() == [0, 0, 2, 2, 2]
    copy = pickle.loads(pickle.dumps(segments))
    assert copy.sizes == [2, 0, 3]
    assert copy.total == 5
    assert copy.ptr.tolist() == [0, 2, 2, 5]


def test_offsets_first_read_in_inference_mode_can_be_trained_with():
    segments = Segments.from_sizes([2, 1])
    with torch.inference_mode():
        assert segments.index.tolist() == [0, 0, 1]
        assert segments.ptr.tolist() == [0, 2, 3]
    assert not segments.index.is_inference()
    assert not segments.ptr.is_inference()


def test_public_names_are_imported_when_used():
    assert data.AtomicData is AtomicData
    assert {"Batch", "DataLoader"} <= set(dir(data))
    for name in data.__all__:
        assert hasattr(data, name), name
    with pytest.raises(AttributeError, match="has no attribute 'Btch'; did you mean 'Batch'"):
        _ = data.Btch


def test_importing_the_objects_is_light():
    heavy = "('ase', 'zarr', 'lightning', 'pydantic')"
    code = f"import sys, nvalchemi_lightning.data.batch; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
