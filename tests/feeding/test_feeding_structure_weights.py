"""B111: weights of single structures weigh nothing, and a line says so."""

from __future__ import annotations

import logging

import pytest
import torch
from ase.build import molecule
from feeding_structures import make_structures

from nvalchemi_lightning.data import AtomicData, DataLoader
from nvalchemi_lightning.data.feeding.structure_weights import _tell


@pytest.fixture(autouse=True)
def _nothing_told():
    _tell.cache_clear()
    yield
    _tell.cache_clear()


def weighted():
    structures = make_structures(4)
    for data in structures:
        data.add_system_property("energy_weight", torch.ones(1, 1))
    return structures


def test_feeding_weights_of_structures_are_noticed_once_per_name_b111(caplog):
    with caplog.at_level(logging.WARNING):
        atoms = molecule("H2O")
        atoms.info.update(config_weight=2.0, temperature=300.0)
        for _ in range(3):
            AtomicData.from_atoms(atoms)
        loader = DataLoader(weighted(), batch_size=2)
        for _ in range(2):
            assert len(list(loader)) == 2
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        "the structures have 'config_weight'",
        "the structures have 'energy_weight'",
    ]
    assert "losses do not weight single structures" in caplog.text


def test_feeding_nothing_is_said_without_weights_b111(caplog):
    with caplog.at_level(logging.WARNING):
        AtomicData.from_atoms(molecule("H2O"))
        assert len(list(DataLoader(make_structures(4)))) == 4
    assert not caplog.records
