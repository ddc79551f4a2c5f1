"""Data sets: over stores, in memory, several."""

from __future__ import annotations

import pytest
import torch
from feeding_structures import make_structures

from nvalchemi_lightning.data import (
    AtomicDataZarrReader,
    AtomicDataZarrWriter,
    Batch,
    Dataset,
    InMemoryDataset,
    MultiDataset,
)
from nvalchemi_lightning.errors import ConfigurationError, ConfigurationTypeError, DataError


def numbers(batch: Batch) -> list[float]:
    return batch.energy.flatten().tolist()


def doubled(data):
    data.energy = data.energy * 2
    return data


def unlabelled(data):
    data.forces = None
    return data


SOURCES = {
    "store": lambda store: Dataset(AtomicDataZarrReader(store)),
    "list": lambda _: InMemoryDataset(make_structures(20)),
    "batch": lambda _: InMemoryDataset(Batch.from_data_list(make_structures(20))),
    "reader": lambda store: InMemoryDataset(reader=AtomicDataZarrReader(store)),
    "several": lambda store: MultiDataset(
        Dataset(AtomicDataZarrReader(store, fields=["energy", "forces"])), InMemoryDataset(make_structures(3))
    ),
}


@pytest.mark.parametrize("source", SOURCES)
def test_feeding_datasets_give_structures_and_batches(store, source):
    dataset = SOURCES[source](store)
    assert len(dataset) == (23 if source == "several" else 20)
    data = make_structures(20)
    for index in (0, 7, 19):
        assert all(torch.equal(dict(dataset[index])[name], value) for name, value in data[index])
    assert dataset[-1].energy.item() == len(dataset) - 1 if source != "several" else 2.0
    assert numbers(dataset.__getitems__([5, 3, 5])) == [5.0, 3.0, 5.0]
    assert [one.energy.item() for one in dataset][:20] == list(range(20))
    with pytest.raises(IndexError, match=r"out of range|does not exist"):
        dataset[len(dataset)]


def test_feeding_transforms_apply_to_each_structure(store):
    dataset = Dataset(AtomicDataZarrReader(store), transforms=[doubled, unlabelled])
    assert dataset[4].energy.item() == 8.0
    batch = dataset.__getitems__([4, 1])
    assert numbers(batch) == [8.0, 2.0]
    assert "forces" not in batch


def test_feeding_transforms_keep_labels_that_a_whole_batch_lacks(tmp_path):
    """B11: whether a label is there must not depend on which structures meet in a batch."""
    data = make_structures(4)
    for one in data[:2]:
        del one.energy
    AtomicDataZarrWriter(tmp_path / "s").write(data)
    dataset = Dataset(AtomicDataZarrReader(tmp_path / "s"), transforms=[lambda one: one])
    batch = dataset.__getitems__([0, 1])
    assert batch.energy.isnan().all()
    assert batch.energy.shape == (2, 1)
    assert numbers(dataset.__getitems__([2, 3])) == [2.0, 3.0]


def test_feeding_sets_with_different_labels_mix(tmp_path):
    """B49: where a structure has no such label it is NaN, in every batch."""
    first, second = make_structures(5), make_structures(4, seed=3)
    for one in first:
        del one.forces
        one.add_system_property("gap", torch.ones(1, 2))
    AtomicDataZarrWriter(tmp_path / "s").write(first)
    dataset = MultiDataset(Dataset(AtomicDataZarrReader(tmp_path / "s")), InMemoryDataset(second))
    for indices in ([0, 1], [5, 8], [8, 0, 6, 1]):
        batch = dataset.__getitems__(indices)
        assert set(batch.field_levels) == {"positions", "atomic_numbers", "energy", "forces", "gap"}
        from_first = torch.tensor([index < 5 for index in indices])
        assert torch.equal(batch.gap.isnan().all(1), ~from_first)
        assert torch.equal(batch.forces.isnan().all(1), from_first[batch.batch_idx])
        assert numbers(batch) == [float(index if index < 5 else index - 5) for index in indices]
        assert batch.field_levels["gap"] == "system"


def test_feeding_datasets_refuse_what_cannot_be(store):
    with pytest.raises(ConfigurationTypeError, match="reader must have read_batch, got str; for a path use"):
        Dataset(str(store))
    with pytest.raises(ConfigurationError, match=r"either structures or reader=..., not both and not neither"):
        InMemoryDataset()
    with pytest.raises(ConfigurationError, match="not both and not neither"):
        InMemoryDataset(make_structures(1), reader=AtomicDataZarrReader(store))
    with pytest.raises(ConfigurationError, match="MultiDataset needs at least one data set"):
        MultiDataset()
    with pytest.raises(DataError, match="no structures"):
        InMemoryDataset([])
