"""How batches travel from workers, and workers that stay."""

from __future__ import annotations

import pickle
from itertools import chain

import numpy as np
import pytest
import torch
from feeding_structures import make_structures
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi_lightning.data import (
    AtomicDataZarrReader,
    Batch,
    DataLoader,
    Dataset,
    InMemoryDataset,
    NeighborListTransform,
    differences,
)
from nvalchemi_lightning.data.feeding import parcel as parcel_module
from nvalchemi_lightning.data.feeding.parcel import Parcel, opened, packed
from nvalchemi_lightning.errors import ConfigurationError


class Special(Batch):
    """A class of the user's own."""


def travelled(batch: Batch) -> Batch:
    return opened(pickle.loads(pickle.dumps(packed(batch))))


@settings(deadline=None, max_examples=40)
@given(count=st.integers(1, 6), edges=st.booleans(), labels=st.booleans(), large=st.booleans(), seed=st.integers(0, 99))
def test_feeding_batches_arrive_as_they_were_sent(count, edges, labels, large, seed):
    batch = Special.from_data_list(make_structures(count, seed=seed, edges=edges, labels=labels))
    batch.add_key("mark", [torch.tensor([True])] * count, level="system")
    batch._note = {"any": "thing"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parcel_module, "_LARGEST_IN_PIPE", 0 if large else 10**9)
        arrived = travelled(batch)
    assert type(arrived) is Special
    assert not differences(arrived, batch)
    assert {name: value.dtype for name, value in arrived} == {name: value.dtype for name, value in batch}
    assert arrived._note == {"any": "thing"}
    assert arrived.num_edges_list == batch.num_edges_list
    assert arrived.batch_ptr.tolist() == batch.batch_ptr.tolist()


def test_feeding_edges_that_were_not_counted_are_counted_on_arrival():
    batch = Batch.from_data_list(make_structures(3))
    batch.neighbor_list = torch.tensor([[0, 0], [batch.num_nodes - 1, 0]])
    assert travelled(batch).num_edges_list == [1, 0, 1]


def test_feeding_fields_that_arrived_together_are_changed_apart():
    """A change in place of one field must not look to autograd like a change of another."""
    arrived = travelled(Batch.from_data_list(make_structures(3)))
    arrived.forces.requires_grad_()
    loss = (arrived.forces * arrived.positions).sum()
    arrived.energy += 1
    loss.backward()
    assert torch.equal(arrived.forces.grad, arrived.positions)


def test_feeding_a_parcel_can_be_pinned(monkeypatch):
    batch = Batch.from_data_list(make_structures(3))
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)  # only a machine with a GPU can
    sent = Parcel(batch)
    assert sent.pin_memory() is sent
    assert not differences(sent.open(), batch)
    assert not differences(sent.pin_memory().open(), batch)


def test_feeding_a_batch_elsewhere_is_sent_as_it_is():
    batch = Batch.from_data_list(make_structures(2)).to("meta")
    assert opened(packed(batch)) is batch


class Drawing:
    """A transform that adds what it draws, and remembers its process."""

    def __call__(self, data):
        """Change the energy."""
        data.energy = data.energy + np.random.rand()
        return data


OPTIONS = {"batch_size": 3, "shuffle": True, "seed": 5}


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_feeding_workers_that_stay_read_what_others_read(store, method):
    data = Dataset(AtomicDataZarrReader(store), transforms=[Drawing()])
    options = {**OPTIONS, "num_workers": 1, "multiprocessing_context": method}
    staying, plain = DataLoader(data, **options, persistent_workers=True), DataLoader(data, **OPTIONS)
    for epoch in (0, 1, 5):
        workers = set()
        for loader in (staying, plain):
            loader.set_epoch(epoch)
        for one, two in zip(staying, plain, strict=True):
            assert not differences(one, two)
            workers |= {worker.pid for worker in staying._kept._loader._iterator._workers}
        assert len(workers) == 1


def test_feeding_workers_that_stay_follow_positions_and_survive_a_pass_left_early(store):
    data = Dataset(AtomicDataZarrReader(store))
    loader = DataLoader(data, **OPTIONS, num_workers=2, persistent_workers=True)
    plain = DataLoader(data, **OPTIONS)
    for batch in loader:
        assert len(batch) == 3
        break
    state = loader.state_dict()
    expected = [batch.origins for batch in plain]
    loader.load_state_dict(state)
    assert [batch.origins for batch in loader] == expected[1:]
    following = [batch.origins for batch in plain]
    assert [batch.origins for batch in loader] == following


def test_feeding_two_passes_at_once_do_not_disturb_each_other(store):
    data = Dataset(AtomicDataZarrReader(store))
    loader = DataLoader(data, batch_size=4, num_workers=1, persistent_workers=True)
    seen = [(one.energy[0].item(), two.energy[0].item()) for one in loader for two in loader]
    assert len(seen) == 25
    assert len(set(seen)) == 25


def test_feeding_a_loader_is_copied_without_its_workers(store):
    loader = DataLoader(Dataset(AtomicDataZarrReader(store)), batch_size=4, num_workers=1, persistent_workers=True)
    assert len(list(loader)) == 5
    copy = pickle.loads(pickle.dumps(loader))
    assert copy._kept is None
    assert [*chain(*(batch.energy.flatten().tolist() for batch in copy))] == list(range(20))


def test_feeding_workers_that_stay_must_exist(store):
    with pytest.raises(ConfigurationError, match="persistent_workers=True needs num_workers of at least 1; leave it"):
        DataLoader(Dataset(AtomicDataZarrReader(store)), persistent_workers=True)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_feeding_b21_edges_and_selected_fields_in_workers(store, method):
    """B21: each worker opens the store for itself; what it sends has the fields that were asked for, and edges."""
    reader = AtomicDataZarrReader(store, fields=["energy"])
    reader.read_batch([0])
    data = Dataset(reader, transforms=[NeighborListTransform(1.0)])
    loader = DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context=method)
    direct = InMemoryDataset(reader=reader, prepare=[NeighborListTransform(1.0)])
    for batch, expected in zip(loader, DataLoader(direct, batch_size=8), strict=True):
        assert "forces" not in batch
        assert not differences(batch, expected)
    assert len(pickle.dumps(data)) < 2**20
