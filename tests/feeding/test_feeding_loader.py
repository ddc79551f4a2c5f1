"""The loader: order, position, workers, random numbers, refusals."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from itertools import chain

import numpy as np
import pytest
import torch
import torch.distributed as dist
from feeding_structures import make_structures
from torch.utils.data import DistributedSampler, RandomSampler, Subset

from nvalchemi_lightning.data import (
    AtomicDataZarrReader,
    AtomicDataZarrWriter,
    Batch,
    DataLoader,
    Dataset,
    EpochSampler,
    InMemoryDataset,
)
from nvalchemi_lightning.errors import ConfigurationError, ConfigurationTypeError, UnknownNameError

OPTIONS = {"batch_size": 3, "shuffle": True, "seed": 5}


@pytest.fixture(scope="module")
def dataset() -> InMemoryDataset:
    return InMemoryDataset(make_structures(20))


def ids(batches) -> list[list[int]]:
    return [batch.energy.flatten().int().tolist() for batch in batches]


def flat(batches) -> list[int]:
    return [number for batch in ids(batches) for number in batch]


def pretend_rank(patch: pytest.MonkeyPatch, rank: int, world: int) -> None:
    patch.setattr(dist, "is_initialized", lambda: True)
    patch.setattr(dist, "get_rank", lambda: rank)
    patch.setattr(dist, "get_world_size", lambda: world)


# Order ----------------------------------------------------------------------------------------------------------


def test_feeding_batches_come_in_order(dataset):
    loader = DataLoader(dataset, batch_size=8)
    assert ids(loader) == [[*range(8)], [*range(8, 16)], [*range(16, 20)]]
    assert all(isinstance(batch, Batch) for batch in loader)
    assert len(loader) == 3
    assert len(DataLoader(dataset, batch_size=8, drop_last=True)) == 2
    assert ids(DataLoader(dataset, batch_size=8, drop_last=True)) == [[*range(8)], [*range(8, 16)]]


@pytest.mark.parametrize(
    "kind", [list, tuple, Batch.from_data_list, lambda data: Subset(InMemoryDataset(data), [0, 1, 2])]
)
def test_feeding_loader_takes_what_holds_structures(kind):
    assert flat(DataLoader(kind(make_structures(3)), batch_size=2)) == [0, 1, 2]


class Plain(torch.utils.data.Dataset):
    """A data set of a user's own, without reading together."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def test_feeding_loader_takes_data_sets_of_ones_own():
    assert flat(DataLoader(Plain(make_structures(5)), batch_size=2)) == [0, 1, 2, 3, 4]
    with pytest.raises(ConfigurationTypeError, match="the data set must hold AtomicData, but an item is int"):
        list(DataLoader(Plain([1, 2])))


def test_feeding_each_pass_is_an_epoch_unless_told_otherwise(dataset):
    loader = DataLoader(dataset, **OPTIONS)
    passes = [flat(loader) for _ in range(3)]
    assert len({tuple(order) for order in passes}) == 3
    assert all(sorted(order) == list(range(20)) for order in passes)
    for epoch in (1, 1, 0, 2):
        loader.set_epoch(epoch)
        assert flat(loader) == passes[epoch]
    assert flat(DataLoader(dataset, **{**OPTIONS, "seed": 6})) != passes[0]
    with pytest.raises(ConfigurationError, match="epoch must be 0 or more, got -1"):
        loader.set_epoch(-1)


def test_feeding_nothing_happens_before_the_first_batch(dataset):
    loader, expected = DataLoader(dataset, **OPTIONS), DataLoader(dataset, **OPTIONS)
    late = iter(loader)
    loader.sampler.set_epoch(3)
    loader.set_epoch_step(2)
    expected.set_epoch(3)
    assert isinstance(late, Iterator)
    assert ids(late) == ids(expected)[2:]


# Position -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("delivered", [1, 4, 6])
def test_feeding_resume_continues_with_the_next_batch(dataset, workers, delivered):
    loader = DataLoader(dataset, **OPTIONS, num_workers=workers)
    loader.set_epoch(2)
    expected, following = ids(loader), ids(loader)
    loader.set_epoch(2)
    running = iter(loader)
    assert loader.state_dict() == {"epoch": 2, "batches": 0}
    seen = ids(next(running) for _ in range(delivered))
    state = loader.state_dict()
    assert state == {"epoch": 2, "batches": delivered, "samples": 3 * delivered}
    resumed = DataLoader(dataset, **OPTIONS)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    resumed.sampler.set_epoch(2)  # as Lightning does
    assert seen + ids(resumed) == expected
    assert ids(resumed) == following


def test_feeding_state_behind_the_last_batch_is_the_next_epoch(dataset):
    loader = DataLoader(dataset, **OPTIONS)
    running = iter(loader)
    last = [next(running) for _ in range(7)][-1]
    assert len(last) == 2
    assert loader.state_dict() == {"epoch": 1, "batches": 0}
    resumed = DataLoader(dataset, **OPTIONS)
    resumed.load_state_dict(loader.state_dict())
    assert next(running, None) is None
    assert loader.state_dict() == {"epoch": 1, "batches": 0}
    assert ids(resumed) == ids(loader)


def test_feeding_state_behind_the_last_whole_batch(dataset):
    loader = DataLoader(dataset, batch_size=3, drop_last=True)
    running = iter(loader)
    states = [loader.state_dict() for _ in zip(range(6), running, strict=False)]
    assert states[-2:] == [{"epoch": 0, "batches": 5, "samples": 15}, {"epoch": 1, "batches": 0}]


def test_feeding_skipping_is_for_one_pass_and_reads_nothing(dataset):
    read: list[list[int]] = []

    class Watching(InMemoryDataset):
        def __getitems__(self, indices):
            read.append(list(indices))
            return super().__getitems__(indices)

    loader = DataLoader(Watching(make_structures(20)), batch_size=6)
    loader.set_epoch_step(2)
    assert flat(loader) == list(range(12, 20))
    assert len(read) == 2
    assert len(flat(loader)) == 20
    with pytest.raises(ConfigurationError, match="batches to skip must be 0 or more, got -1"):
        loader.set_epoch_step(-1)


def test_feeding_position_of_another_epoch_does_not_count(dataset):
    loader = DataLoader(dataset, batch_size=6)
    loader.load_state_dict({"epoch": 1, "batches": 2})
    loader.set_epoch(2)
    assert len(flat(loader)) == 20
    with pytest.raises(ConfigurationError, match=r"the state of a loader has epoch and batches; got {'epoch': 1}"):
        loader.load_state_dict({"epoch": 1})


@pytest.mark.parametrize("world", [1, 2, 3])
def test_feeding_position_holds_for_another_number_of_ranks(dataset, monkeypatch, world):
    whole = flat(DataLoader(dataset, **{**OPTIONS, "batch_size": 1}))
    state = {"epoch": 0, "batches": 2, "samples": 8}
    rest = []
    for rank in range(world):
        pretend_rank(monkeypatch, rank, world)
        loader = DataLoader(dataset, **OPTIONS)
        loader.load_state_dict(state)
        rest.append(flat(loader))
        assert loader.state_dict() == {"epoch": 1, "batches": 0}
    assert len({len(part) for part in rest}) == 1
    assert set(chain(*rest)) >= set(whole[8:])
    assert len([*chain(*rest)]) < 12 + world


# Ranks ----------------------------------------------------------------------------------------------------------


def test_feeding_ranks_share_an_epoch(dataset, monkeypatch):
    single = flat(DataLoader(dataset, **OPTIONS))
    for world, batches in ((2, 4), (3, 3)):
        parts = []
        for rank in range(world):
            pretend_rank(monkeypatch, rank, world)
            loader = DataLoader(dataset, **OPTIONS)
            assert len(loader) == batches == len(ids(loader))
            loader.set_epoch(0)
            parts.append(flat(loader))
        assert [part[0] for part in parts] == single[:world]
        assert set(chain(*parts)) == set(range(20))


def test_feeding_evaluation_sees_each_sample_once(monkeypatch):
    """B10: five samples on two ranks are three and two."""
    data = make_structures(5)
    parts = []
    for rank in range(2):
        pretend_rank(monkeypatch, rank, 2)
        loader = DataLoader(data, batch_size=2)
        parts.append(ids(loader))
        assert len(loader) == len(parts[-1])
    assert parts == [[[0, 2], [4]], [[1, 3]]]
    pretend_rank(monkeypatch, 1, 2)
    empty = DataLoader(data[:1])
    assert (len(empty), list(empty)) == (0, [])
    assert flat(DataLoader(data, distributed_padding=True)) == [1, 3, 0]
    assert len(flat(DataLoader(data, shuffle=True))) == 3
    assert len(flat(DataLoader(data, shuffle=True, distributed_padding=False))) == 2


# Random numbers -------------------------------------------------------------------------------------------------


def noisy(data):
    data.positions = data.positions + torch.randn(3) + np.random.rand() + random.random()
    return data


def scaled(batch):
    batch.energy = batch.energy * torch.rand(())
    return batch


def test_feeding_global_random_state_is_left_alone(dataset):
    before = torch.get_rng_state(), str(np.random.get_state()), random.getstate()
    loader = DataLoader(InMemoryDataset(make_structures(9), transforms=[noisy]), batch_transforms=[scaled], **OPTIONS)
    first = list(loader)
    torch.manual_seed(0)
    loader.set_epoch(0)
    assert all(torch.equal(a.positions, b.positions) for a, b in zip(first, loader, strict=True))
    torch.set_rng_state(before[0])
    for workers in (0, 1):
        list(DataLoader(dataset, **OPTIONS, num_workers=workers))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (str(np.random.get_state()), random.getstate()) == before[1:]


def test_feeding_random_transforms_resume_and_do_not_depend_on_workers():
    """Augmentation depends on seed, epoch and batch alone: neither on workers nor on what was skipped."""
    data = InMemoryDataset(make_structures(12), transforms=[noisy])
    loaders = [DataLoader(data, **OPTIONS, batch_transforms=[scaled], num_workers=workers) for workers in (0, 2)]
    first, second = (list(loader) for loader in loaders)
    assert all(torch.equal(a.positions, b.positions) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a.energy, b.energy) for a, b in zip(first, second, strict=True))
    loaders[1].load_state_dict({"epoch": 0, "batches": 2})
    for found, expected in zip(loaders[1], first[2:], strict=True):
        assert torch.equal(found.positions, expected.positions)
    loaders[0].set_epoch(1)
    assert not torch.equal(next(iter(loaders[0])).energy, first[0].energy)


# Samplers of one's own ------------------------------------------------------------------------------------------


class Recording(RandomSampler):
    """A sampler that records what it is told."""

    def __init__(self, *args):
        super().__init__(*args)
        self.told = []

    def set_epoch(self, epoch):
        self.told.append(epoch)


class Batches:
    """A batch sampler that records what it is told."""

    def __init__(self):
        self.told = []

    def set_epoch(self, epoch):
        self.told.append(epoch)

    def __iter__(self):
        yield from ([0, 1], [2], [3, 4, 5])

    def __len__(self):
        return 3


def test_feeding_own_sampler_is_told_the_epoch(dataset):
    """B119."""
    sampler = Recording(dataset)
    loader = DataLoader(dataset, sampler=sampler, batch_size=4)
    for _ in range(3):
        assert sorted(flat(loader)) == list(range(20))
    assert sampler.told == [0, 1, 2]
    resumed = DataLoader(dataset, sampler=Recording(dataset), batch_size=4)
    resumed.load_state_dict({"epoch": 1, "batches": 0})
    list(resumed), list(resumed)
    assert resumed.sampler.told == [1, 2]


def test_feeding_own_batch_sampler_is_told_the_epoch_and_skipped(dataset):
    """B119."""
    sampler = Batches()
    loader = DataLoader(dataset, batch_sampler=sampler)
    for epoch in range(3):
        loader.set_epoch(epoch)
        assert ids(loader) == [[0, 1], [2], [3, 4, 5]]
    assert sampler.told == [0, 1, 2]
    running = iter(loader)
    next(running)
    state = loader.state_dict()
    assert state == {"epoch": 3, "batches": 1}
    assert ids(running) == [[2], [3, 4, 5]]
    assert loader.state_dict() == {"epoch": 4, "batches": 0}
    loader.load_state_dict(state)
    assert ids(loader) == [[2], [3, 4, 5]]
    assert loader.batch_size is None


def test_feeding_torch_distributed_sampler_works(dataset):
    sampler = DistributedSampler(dataset, num_replicas=2, rank=1, shuffle=True)
    loader = DataLoader(dataset, sampler=sampler, batch_size=4)
    first, second = flat(loader), flat(loader)
    assert len(first) == 10
    assert first != second
    assert sampler.epoch == 1


# Workers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_feeding_workers_finish_after_the_parent_has_read(store, method):
    """B21: workers read a store that is open, and was read, in the parent."""
    reader = AtomicDataZarrReader(store)
    reader.read_batch([0, 1])
    loader = DataLoader(Dataset(reader), **OPTIONS, num_workers=2, multiprocessing_context=method)
    for _ in range(3 if method == "fork" else 1):
        assert sorted(flat(loader)) == list(range(20))
    assert reader.read(3)[0]["energy"].item() == 3.0


def test_feeding_workers_read_through_zarr_after_a_fork(tmp_path):
    """B21: the same where chunks are decoded by Zarr, whose threads do not survive a fork."""
    from nvalchemi_lightning.data.store.layout import ZarrArrayConfig, ZarrWriteConfig

    config = ZarrWriteConfig(core=ZarrArrayConfig(chunk_size=4, shard_size=8))
    AtomicDataZarrWriter(tmp_path / "s", config).write(make_structures(20))
    reader = AtomicDataZarrReader(tmp_path / "s")
    reader.read_batch([0])
    loader = DataLoader(Dataset(reader), **OPTIONS, num_workers=2, multiprocessing_context="fork")
    for _ in range(5):
        assert sorted(flat(loader)) == list(range(20))


def test_feeding_error_in_a_worker_keeps_its_kind(store):
    loader = DataLoader(Plain([1, 2, 3]), num_workers=1)
    with pytest.raises(ConfigurationTypeError, match="the data set must hold AtomicData, but an item is int"):
        list(loader)


def test_feeding_leaving_a_pass_stops_its_workers(dataset):
    loader = DataLoader(dataset, batch_size=2, num_workers=1)
    for batch in loader:
        assert len(batch) == 2
        break
    assert loader.state_dict() == {"epoch": 0, "batches": 1, "samples": 2}
    assert len(flat(loader)) == 20


def test_feeding_pin_memory_without_accelerator_is_quiet(dataset):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(flat(DataLoader(dataset, pin_memory=True))) == 20


# Refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
        ({"batch_size": 2.5}, "batch_size must be an integer of at least 1, got 2.5"),
        ({"num_workers": -1}, "num_workers must be an integer of at least 0, got -1"),
        ({"seed": -1}, "seed must be an integer of at least 0, got -1"),
        ({"prefetch_factor": 2}, "prefetch_factor=2 needs num_workers of at least 1"),
        ({"shuffle": True, "sampler": range(3)}, "shuffle=True and a sampler of your own exclude each other"),
        (
            {"batch_sampler": [[1]], "shuffle": True},
            "batch_sampler excludes sampler, shuffle, drop_last and batch_size",
        ),
        ({"batch_sampler": [[1]], "batch_size": 3}, "batch_sampler excludes"),
        ({"batch_size": 21, "drop_last": True}, r"20 sample\(s\), batch size 21, 1 rank\(s\), drop_last=True; .* 21 "),
    ],
)
def test_feeding_loader_refuses_options(dataset, options, message):
    with pytest.raises(ConfigurationError, match=message):
        DataLoader(dataset, **options)


def test_feeding_loader_refuses_unknown_names(dataset):
    with pytest.raises(UnknownNameError, match="DataLoader has no option 'batchsize'; did you mean 'batch_size'"):
        DataLoader(dataset, batchsize=3)


class Mine(DataLoader):
    def __init__(self, dataset, **options):
        super().__init__(dataset, batch_size=options["size"])


def test_feeding_loader_can_be_derived_from(dataset):
    assert len(Mine(dataset, size=7)) == 3


@pytest.mark.parametrize("wrong", ["data/train.zarr", {"a": 1}, 5, iter([])])
def test_feeding_loader_refuses_what_is_no_data_set(wrong):
    with pytest.raises(ConfigurationTypeError, match="dataset must be a Dataset, a Batch or a list of AtomicData, got"):
        DataLoader(wrong)


def test_feeding_no_batch_is_an_error_before_training(dataset, monkeypatch):
    """B81."""
    with pytest.raises(ConfigurationError, match=r"0 sample\(s\), batch size 1, 1 rank\(s\)"):
        DataLoader([])
    with pytest.raises(ConfigurationError, match=r"3 sample\(s\), batch size 4, 1 rank\(s\), drop_last=True"):
        DataLoader(make_structures(3), batch_size=4, drop_last=True)
    with pytest.raises(ConfigurationError, match=r"0 sample\(s\)"):
        DataLoader([], batch_sampler=[])
    one = DataLoader(make_structures(1), shuffle=True)
    five = DataLoader(make_structures(5), batch_size=3, drop_last=True, shuffle=True)
    evaluation = DataLoader(make_structures(5), batch_size=3, drop_last=True)
    pretend_rank(monkeypatch, 0, 2)
    with pytest.raises(ConfigurationError, match=r"1 sample\(s\), batch size 1, 2 rank\(s\), .* at least 2 sample"):
        len(one)
    with pytest.raises(ConfigurationError, match=r"1 sample\(s\), batch size 1, 2 rank\(s\)"):
        next(iter(one))
    assert len(five) == 1
    with pytest.raises(ConfigurationError, match=r"5 sample\(s\), batch size 3, 2 rank\(s\), .* at least 6 sample"):
        len(evaluation)
    assert isinstance(five.sampler, EpochSampler)
