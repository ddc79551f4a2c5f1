"""Statistics that are kept in a store."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from stats_rigs import random_structures, structure

from nvalchemi_lightning.data import AtomicDataZarrReader, AtomicDataZarrWriter
from nvalchemi_lightning.errors import ConfigurationError, DataError
from nvalchemi_lightning.models import AtomicStatistics, PaiNN

NOTE = "nvalchemi_lightning_statistics"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "train.zarr"
    AtomicDataZarrWriter(path).write(random_structures(np.random.default_rng(5), 30))
    return path


def test_a_model_starts_from_a_store(store: Path) -> None:
    statistics = AtomicStatistics.fit(store, cutoff=4.0)
    statistics.save(store)
    model = PaiNN.from_statistics(store, hidden=8)
    assert model.elements == statistics.elements
    assert model.reference_energies == statistics.reference_energies
    assert model.scale == statistics.force_scale
    assert (model.cutoff, model.neighbors_per_atom) == (4.0, statistics.neighbors_per_atom)


def test_what_is_loaded_is_what_was_saved(store: Path) -> None:
    for cutoff in (None, 3.0):
        statistics = AtomicStatistics.fit(store, cutoff=cutoff)
        statistics.save(store)
        loaded = AtomicStatistics.load(str(store))
        assert loaded.model_dump_json() == statistics.model_dump_json()
        assert math.isnan(loaded.neighbors_per_atom) == (cutoff is None)


def test_readers_do_not_mind_and_the_structures_stay(store: Path) -> None:
    before = AtomicDataZarrReader(store).read_batch(range(30))
    AtomicStatistics.fit(store).save(store)
    after = AtomicDataZarrReader(store).read_batch(range(30))
    for name, value in before:
        torch.testing.assert_close(after[name], value, rtol=0, atol=0, equal_nan=True)


def append(store: Path) -> None:
    AtomicDataZarrWriter(store).append(structure([1, 1], energy=[[0.0]]))


def delete(store: Path) -> None:
    AtomicDataZarrWriter(store).delete([3])


def relabel(store: Path) -> None:
    zarr.open_group(store, mode="r+")["core/energy"][7] = 1.0


def swap(store: Path) -> None:
    append(store)
    delete(store)


@pytest.mark.parametrize("change", [append, delete, relabel, swap])
def test_statistics_of_another_state_are_refused(change: object, store: Path) -> None:
    AtomicStatistics.fit(store).save(store)
    change(store)
    with pytest.raises(DataError, match=r"train\.zarr changed after its nvalchemi_lightning_statistics were computed"):
        AtomicStatistics.load(store)
    AtomicStatistics.fit(store).save(store)
    assert AtomicStatistics.load(store).num_structures == len(AtomicDataZarrReader(store))


def test_statistics_belong_to_their_store(store: Path) -> None:
    with pytest.raises(DataError, match=r"of 1 structures but .*train\.zarr has 30"):
        AtomicStatistics.fit([structure([1])]).save(store)


def test_what_is_not_there_is_said(store: Path, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"holds no statistics; compute them with: nvalchemi-lightning data stats .*zarr"
    ):
        PaiNN.from_statistics(store)
    with pytest.raises(FileNotFoundError, match=r"no Zarr store at .*absent\.zarr"):
        AtomicStatistics.load(tmp_path / "absent.zarr")


@pytest.mark.parametrize("note", [3, {"value": 3}, {"fingerprint": "x"}])
def test_a_foreign_attribute_is_refused(note: object, store: Path) -> None:
    zarr.open_group(store, mode="r+").attrs[NOTE] = note
    with pytest.raises(DataError, match="the attribute nvalchemi_lightning_statistics is not what was written there"):
        AtomicStatistics.load(store)


@pytest.mark.parametrize("damage", [{"rank": "high"}, {"surprise": 1}, {"per_element": None}])
def test_damaged_statistics_are_refused(damage: dict[str, object], store: Path) -> None:
    AtomicStatistics.fit(store).save(store)
    group = zarr.open_group(store, mode="r+")
    note = group.attrs[NOTE]
    group.attrs[NOTE] = {**note, "value": {**note["value"], **damage}}
    with pytest.raises(DataError, match="holds damaged statistics, or those of another version"):
        AtomicStatistics.load(store)


def test_a_file_holds_them_too(store: Path, tmp_path: Path) -> None:
    statistics = AtomicStatistics.fit(store)
    path = tmp_path / "stats.json"
    path.write_text(json.dumps({"statistics": statistics.model_dump(mode="json"), "remarks": []}))
    assert AtomicStatistics.load(path).elements == statistics.elements


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("energy: 1", r"stats\.json is not the JSON that nvalchemi-lightning data stats --json prints"),
        ("[]", r"stats\.json has no entry 'statistics'"),
        ('{"statistics": 3}', r"stats\.json has no entry 'statistics'"),
        ('{"statistics": {}}', r"stats\.json holds damaged statistics"),
    ],
)
def test_other_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "stats.json").write_text(text)
    with pytest.raises(DataError, match=message):
        AtomicStatistics.load(tmp_path / "stats.json")


def test_another_cutoff_than_that_of_the_neighbors_is_refused(store: Path) -> None:
    statistics = AtomicStatistics.fit(store, cutoff=4.0)
    with pytest.raises(ConfigurationError, match=r"within 4\.0 A, but the cutoff of the model is 6\.0 A; compute"):
        PaiNN.from_statistics(statistics, cutoff=6.0)
    assert PaiNN.from_statistics(statistics, cutoff=6.0, neighbors_per_atom=9.0, hidden=4).cutoff == 6.0
    without = AtomicStatistics.fit(store)
    assert PaiNN.from_statistics(without, cutoff=6.0, hidden=4).neighbors_per_atom == 10.0


def test_a_store_without_energies_keeps_them_too(tmp_path: Path) -> None:
    store = tmp_path / "bare.zarr"
    AtomicDataZarrWriter(store).write([structure([1, 8]), structure([1])])
    AtomicStatistics.fit(store).save(store)
    assert AtomicStatistics.load(store).num_energies == 0
    AtomicDataZarrWriter(store).delete([0])
    with pytest.raises(DataError, match="changed after"):
        AtomicStatistics.load(store)
