"""Every batch of the loader knows where its structures come from."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from feeding_structures import make_structures
from torch.utils.data import Subset

from nvalchemi_lightning.data import (
    AtomicDataZarrReader,
    AtomicDataZarrWriter,
    Batch,
    DataLoader,
    Dataset,
    InMemoryDataset,
    MultiDataset,
    SampleOrigin,
)

MEMORY = "the structures in memory"


def origins(loader) -> list[SampleOrigin]:
    return [origin for batch in loader for origin in batch.origins]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_feeding_a_shuffled_batch_names_its_structures(num_workers):
    loader = DataLoader(make_structures(9), batch_size=4, shuffle=True, num_workers=num_workers)
    batches = list(loader)
    numbers = [number for batch in batches for number in batch.energy.flatten().int().tolist()]
    assert [origin for batch in batches for origin in batch.origins] == [SampleOrigin(MEMORY, n) for n in numbers]
    assert numbers != sorted(numbers)


def test_feeding_a_store_is_named_by_its_path(tmp_path):
    path = tmp_path / "train.zarr"
    AtomicDataZarrWriter(path).write(make_structures(3))
    assert origins(DataLoader(Dataset(AtomicDataZarrReader(path)))) == [SampleOrigin(str(path), i) for i in range(3)]


def test_feeding_data_sets_of_data_sets_name_the_innermost():
    class Own(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int):
            return make_structures(2)[index]

    both = MultiDataset(InMemoryDataset(make_structures(2)), Subset(InMemoryDataset(make_structures(5)), [4, 1]))
    expected = [SampleOrigin(MEMORY, i) for i in (0, 1, 4, 1)]
    assert both.origins([0, 1, 2, 3]) == tuple(expected)
    assert origins(DataLoader(Own())) == [SampleOrigin("Own", 0), SampleOrigin("Own", 1)]


def test_feeding_origins_travel_with_whole_batches_alone():
    (batch,) = DataLoader(make_structures(3), batch_size=3)
    expected = batch.origins
    assert len(expected) == 3
    for same in (batch.to("cpu"), batch.clone(), copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))):
        assert same.origins == expected
    assert batch[:2].origins == ()
    batch.append(make_structures(1)[0])
    assert batch.origins == ()
    assert Batch.from_data_list(make_structures(2)).origins == ()


def test_feeding_a_transform_that_makes_new_batches_keeps_the_origins():
    def anew(batch: Batch) -> Batch:
        return Batch.from_data_list(batch.to_data_list())

    loader = DataLoader(make_structures(2), batch_transforms=[anew])
    assert origins(loader) == [SampleOrigin(MEMORY, 0), SampleOrigin(MEMORY, 1)]
