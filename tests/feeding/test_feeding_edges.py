"""Edges that are computed once: how far they reach travels with them, and a model refuses shorter ones."""

from __future__ import annotations

import pytest
import torch
import zarr
from feeding_structures import make_structures

from nvalchemi_lightning.data import (
    AtomicDataZarrReader,
    AtomicDataZarrWriter,
    Batch,
    DataLoader,
    Dataset,
    InMemoryDataset,
    MultiDataset,
    NeighborListTransform,
    differences,
)
from nvalchemi_lightning.data.edge_cutoff import reach_of
from nvalchemi_lightning.errors import ConfigurationTypeError, DataError
from nvalchemi_lightning.models import PaiNN


@pytest.fixture
def edged(tmp_path):
    """Return a store of eight structures with edges up to 3 A."""
    path = tmp_path / "edged.zarr"
    AtomicDataZarrWriter(path).write(map(NeighborListTransform(3.0), make_structures(8)))
    return path


def test_feeding_reach_goes_through_every_operation():
    batch = NeighborListTransform(3.0)(Batch.from_data_list(make_structures(4)))
    longer = NeighborListTransform(4.0)(make_structures(1)[0])
    for made in (batch, batch.clone(), batch.to(dtype=torch.float64), batch[1:3], batch[0], batch.to_data_list()[2]):
        assert reach_of(made) == 3.0
    assert reach_of(Batch.from_data_list([longer, batch[0]])) == 3.0
    assert reach_of(Batch.from_data_list([longer])) == 4.0
    batch.append(longer)
    assert reach_of(batch) == 3.0


def test_feeding_reach_of_other_edges_is_unknown():
    batch = NeighborListTransform(3.0)(Batch.from_data_list(make_structures(4)))
    one = batch[0]
    for changed in (batch, one):
        changed.neighbor_list = changed.neighbor_list
        assert reach_of(changed) is None
    other = NeighborListTransform(3.0)(Batch.from_data_list(make_structures(4)))
    other.append(one)
    assert reach_of(other) is None


def test_feeding_reach_is_kept_in_stores(edged):
    reader = AtomicDataZarrReader(edged)
    assert zarr.open_group(edged).attrs["neighbor_list_cutoff"] == 3.0
    assert reach_of(reader.read_batch([3, 1])) == 3.0
    assert reach_of(AtomicDataZarrReader(edged, fields=["energy"]).read_batch([0])) is None
    writer = AtomicDataZarrWriter(edged)
    writer.append(map(NeighborListTransform(2.5), make_structures(2)))
    assert reach_of(AtomicDataZarrReader(edged).read_batch([0])) == 2.5
    unknown = NeighborListTransform(3.0)(make_structures(1)[0])
    unknown.neighbor_list, unknown.neighbor_list_shifts = unknown.neighbor_list, unknown.neighbor_list_shifts
    shifts = torch.zeros(len(unknown.neighbor_list), 3, dtype=torch.int32)
    unknown.neighbor_list_shifts = shifts
    writer.append(unknown)
    assert reach_of(AtomicDataZarrReader(edged).read_batch([0])) is None
    writer.append(map(NeighborListTransform(9.0), make_structures(2)))
    assert reach_of(AtomicDataZarrReader(edged).read_batch([0])) is None


def test_feeding_a_store_without_edges_notes_nothing(store):
    assert "neighbor_list_cutoff" not in zarr.open_group(store).attrs


def same(data):
    return data


SETS = {
    "store": Dataset,
    "transformed": lambda reader: Dataset(reader, transforms=[same]),
    "memory": lambda reader: InMemoryDataset(reader=reader),
    "several": lambda reader: MultiDataset(Dataset(reader), InMemoryDataset(reader=reader)),
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", SETS)
def test_feeding_a_model_with_a_larger_cutoff_refuses(edged, kind, workers):
    batch = next(iter(DataLoader(SETS[kind](AtomicDataZarrReader(edged)), batch_size=8, num_workers=workers)))
    torch.manual_seed(0)
    with pytest.raises(DataError, match=r"made with a cutoff of 3 A, but the model needs 4 A; .*Transform\(4\)"):
        PaiNN(hidden=8, cutoff=4.0)(batch)
    shorter = PaiNN(hidden=8, cutoff=2.0)
    torch.testing.assert_close(shorter(batch), shorter(without_edges(batch)))


def without_edges(batch):
    return batch.clone(drop=[name for name in ("neighbor_list", "neighbor_list_shifts") if name in batch])


def test_feeding_prepared_structures_are_prepared_once(store):
    calls = []

    def counted(batch):
        calls.append(len(batch))
        return NeighborListTransform(2.0)(batch)

    dataset = InMemoryDataset(reader=AtomicDataZarrReader(store), prepare=[counted])
    every = Dataset(AtomicDataZarrReader(store), transforms=[NeighborListTransform(2.0)])
    for _ in range(2):
        for one, two in zip(DataLoader(dataset, batch_size=7), DataLoader(every, batch_size=7), strict=True):
            assert not differences(one, two)
            assert reach_of(one) == reach_of(two) == 2.0
    assert calls == [20]


def test_feeding_prepare_is_checked(store):
    with pytest.raises(ConfigurationTypeError, match="prepare must be a list of functions"):
        InMemoryDataset(make_structures(2), prepare=same)
    with pytest.raises(DataError, match=r"transform .*<lambda> failed on all structures: ZeroDivisionError"):
        InMemoryDataset(make_structures(2), prepare=[lambda _: 1 / 0])
