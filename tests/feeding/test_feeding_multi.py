"""Several data sets as one: what batches hold, numbers, and the shares of each set in epochs and batches."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from feeding_structures import make_structures
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi_lightning.data import (
    AtomicDataZarrReader,
    AtomicDataZarrWriter,
    Batch,
    DataLoader,
    Dataset,
    InMemoryDataset,
    MultiDataset,
    MultiDatasetBatchSampler,
    MultiDatasetSampler,
    differences,
)
from nvalchemi_lightning.data.feeding.shares import shares
from nvalchemi_lightning.errors import ConfigurationError, ConfigurationTypeError, DataError, UnknownNameError


def of_sizes(*sizes: int, **options) -> MultiDataset:
    return MultiDataset(*(InMemoryDataset(make_structures(size, seed=size, **options)) for size in sizes if size))


def owners(dataset: MultiDataset, indices) -> Counter:
    return Counter(dataset.to_local_index(index)[0] for index in indices)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch):
    def pretend(rank: int, world: int) -> None:
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        monkeypatch.setattr(dist, "get_world_size", lambda: world)

    return pretend


# Batches --------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_feeding_batches_of_several_sets_equal_their_structures_joined(data):
    """Any sets with any labels: reading together equals reading one by one."""
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    sets = []
    for number, size in enumerate(sizes):
        structures = make_structures(size, seed=number)
        absent = data.draw(st.sets(st.sampled_from(["energy", "forces"])))
        for one in structures:
            for name in absent:
                delattr(one, name)
            if data.draw(st.booleans()):
                one.cell, one.pbc = 5 * torch.eye(3)[None], torch.ones(1, 3, dtype=torch.bool)
        sets.append(InMemoryDataset(structures))
    dataset = MultiDataset(*sets)
    indices = data.draw(st.lists(st.integers(-len(dataset), len(dataset) - 1), min_size=1, max_size=8))
    batch = dataset.__getitems__(indices)
    assert batch.to_data_list() == [dataset[index] for index in indices]
    assert set(batch.field_levels) == set().union(*(one.__getitems__([0]).field_levels for one in sets))


def test_feeding_sets_in_different_precision_mix():
    """B52: whether energies are float64 does not depend on which structures meet in a batch."""
    dataset = MultiDataset(
        InMemoryDataset(make_structures(3)), InMemoryDataset(make_structures(3, dtype=torch.float64))
    )
    for indices in ([0, 1], [4, 5], [5, 0]):
        assert dataset.__getitems__(indices).energy.dtype == torch.float64


def test_feeding_numbers_of_several_sets():
    dataset = of_sizes(3, 5)
    assert dataset.offsets == (0, 3)
    assert [dataset.to_local_index(index) for index in (0, 2, 3, 7, -1)] == [(0, 0), (0, 2), (1, 0), (1, 4), (1, 4)]
    assert [dataset.to_global_index(*place) for place in ((0, 0), (1, 0), (1, -1), (-1, 1))] == [0, 3, 7, 4]
    for dataset_number, index, message in ((2, 0, "the data sets of a Multi"), (1, 5, "data set 1 of a MultiDataset")):
        with pytest.raises(IndexError, match=message):
            dataset.to_global_index(dataset_number, index)
    with pytest.raises(IndexError, match="sample 8 is out of range for 8"):
        dataset.to_local_index(8)


def test_feeding_a_field_without_a_missing_value_is_refused_in_every_batch():
    dataset = MultiDataset(InMemoryDataset(make_structures(3, edges=True)), InMemoryDataset(make_structures(3)))
    for indices in ([0, 1], [3, 4], [0, 4]):
        with pytest.raises(DataError, match="data set 1 has no 'neighbor_list' but others do, and nothing can stand"):
            dataset.__getitems__(indices)


def test_feeding_two_stores_of_which_one_has_stress(tmp_path):
    """B49: shuffled, in workers; every sample once, the sources known, the order reproducible."""
    first, second = make_structures(7), make_structures(9, seed=2)
    for one in first:
        one.stress = torch.ones(1, 3, 3)
    for name, structures in (("stress", first), ("none", second)):
        AtomicDataZarrWriter(tmp_path / name).write(structures)
    dataset = MultiDataset(*(Dataset(AtomicDataZarrReader(tmp_path / name)) for name in ("stress", "none")))
    loader = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=2)
    seen = []
    for batch in loader:
        with_stress = [origin.source.endswith("stress") for origin in batch.origins]
        assert (~batch.stress.isnan()).all((1, 2)).tolist() == with_stress
        seen += batch.origins
    assert len(set(seen)) == len(seen) == 16
    loader.set_epoch(0)
    assert [*chain(*(batch.origins for batch in loader))] == seen


# Shares ---------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.integers(1, 1000), st.lists(st.floats(0, 10), min_size=1, max_size=6).filter(lambda weights: sum(weights) > 1)
)
def test_feeding_shares_add_up_and_are_as_near_as_integers_can_be(total, weights):
    counts = shares(total, weights, [1] * len(weights))
    assert sum(counts) == total
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - total * weight / sum(weights)) < 1


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0], r"there are 2 data sets, but 1 shares: \[1.0\]"),
        ([1.0, -1.0], "shares must be 0 or more, finite and not all 0"),
        ([0.0, 0.0], "not all 0"),
        ([1.0, float("nan")], "finite"),
    ],
)
def test_feeding_bad_shares(weights, message):
    with pytest.raises(ConfigurationError, match=message):
        MultiDatasetSampler(of_sizes(3, 5), weights=weights)


def test_feeding_an_empty_set_has_no_share():
    class Empty(InMemoryDataset):
        def __len__(self):
            return 0

    dataset = MultiDataset(Empty(make_structures(1)), InMemoryDataset(make_structures(4)))
    assert len(list(MultiDatasetSampler(dataset))) == 4
    with pytest.raises(ConfigurationError, match=r"data set 0 is empty but has a share of 1; leave it out"):
        MultiDatasetSampler(dataset, weights=[1, 1])
    assert list(MultiDatasetSampler(dataset, weights=[0, 1], shuffle=False)) == [0, 1, 2, 3]


# Epochs ---------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    num_samples=st.integers(1, 60),
    shuffle=st.booleans(),
    seed=st.integers(0, 9),
)
def test_feeding_every_set_gives_its_share_and_repeats_evenly(sizes, num_samples, shuffle, seed):
    dataset = of_sizes(*sizes)
    weights = [1 + number for number in range(len(sizes))]
    sampler = MultiDatasetSampler(dataset, weights=weights, num_samples=num_samples, shuffle=shuffle, seed=seed)
    drawn = list(sampler)
    assert len(drawn) == len(sampler) == num_samples
    found = owners(dataset, drawn)
    assert tuple(found[number] for number in range(len(sizes))) == sampler.samples_per_dataset
    times = Counter(drawn)
    for number, size in enumerate(sizes):
        counts = [times[dataset.to_global_index(number, index)] for index in range(size)]
        assert max(counts) - min(counts) <= 1
    assert drawn == list(sampler)


def test_feeding_weighted_epochs_differ_and_depend_on_seed_and_epoch_alone():
    dataset = of_sizes(6, 20)
    sampler = MultiDatasetSampler(dataset, weights=[1, 1], num_samples=12, seed=3)
    before = torch.get_rng_state()
    orders = []
    for epoch in (0, 1, 2):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    assert torch.equal(torch.get_rng_state(), before)
    assert len({tuple(order) for order in orders}) == 3
    assert all(owners(dataset, order) == {0: 6, 1: 6} for order in orders)
    assert len({index for order in orders for index in order if index >= 6}) > 8
    assert sorted(MultiDatasetSampler(dataset)) == list(range(26))


@pytest.mark.parametrize("delivered", [1, 3])
def test_feeding_weighted_order_resumes_on_another_number_of_ranks(ranks, delivered):
    """The loader treats the sampler as its own: positions hold for any number of ranks."""
    dataset = of_sizes(4, 20)

    def loader():
        return DataLoader(dataset, batch_size=2, sampler=MultiDatasetSampler(dataset, weights=[1, 1], seed=1))

    whole = [batch.origins for batch in loader()]
    assert len(whole) == 12
    one = loader()
    running = iter(one)
    seen = [next(running).origins for _ in range(delivered)]
    state = one.state_dict()
    assert state["samples"] == 2 * delivered
    rest = []
    for rank in (0, 1):
        ranks(rank, 2)
        two = loader()
        two.load_state_dict(state)
        rest += chain(*(batch.origins for batch in two))
    assert seen == whole[:delivered]
    assert Counter(rest) - Counter(chain(*whole[delivered:])) <= Counter(chain(*whole))
    assert set(chain(*whole[delivered:])) == set(rest)


# Batches of a composition ----------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    batch_size=st.integers(4, 12),
    world=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_feeding_balanced_batches_on_all_ranks(sizes, batch_size, world, seed):
    dataset = of_sizes(*sizes)
    with pytest.MonkeyPatch.context() as patch:
        every = []
        for rank in range(world):
            patch.setattr(dist, "is_initialized", lambda: True)
            patch.setattr(dist, "get_rank", lambda rank=rank: rank)
            patch.setattr(dist, "get_world_size", lambda: world)
            sampler = MultiDatasetBatchSampler.balanced(dataset, batch_size, seed=seed)
            batches = list(sampler)
            assert len(batches) == len(sampler)
            every.append(batches)
    assert len({len(batches) for batches in every}) == 1
    counts = sampler.samples_per_dataset
    assert max(counts) - min(counts) <= 1
    for batch in chain(*every):
        assert tuple(owners(dataset, batch)[number] for number in range(len(sizes))) == counts
    times = Counter(chain(*chain(*every)))
    for number, size in enumerate(sizes):
        own = [times[dataset.to_global_index(number, index)] for index in range(size)]
        assert max(own) - min(own) <= 1


@pytest.mark.parametrize(("policy", "batches"), [("dataset_size", 6), ("min_size", 2), ("max_size", 10)])
def test_feeding_when_an_epoch_of_balanced_batches_ends(policy, batches):
    dataset = of_sizes(4, 20)
    sampler = MultiDatasetBatchSampler.balanced(dataset, 4, epoch_policy=policy, shuffle=False)
    assert len(sampler) == batches
    assert next(iter(sampler)) == [0, 1, 4, 5]
    assert len(MultiDatasetBatchSampler(dataset, 4, weights=[1, 1], num_batches=3, epoch_policy=policy)) == 3


def test_feeding_batches_of_given_counts_through_a_loader_resume():
    dataset = of_sizes(4, 20)

    def loader(workers=0):
        batches = MultiDatasetBatchSampler(dataset, samples_per_dataset=[1, 3], seed=2)
        return DataLoader(dataset, batch_sampler=batches, num_workers=workers)

    first = loader()
    epochs = [[batch.origins for batch in first] for _ in range(2)]
    assert [len(epoch) for epoch in epochs] == [6, 6]
    assert epochs[0] != epochs[1]
    resumed = loader(workers=1)
    resumed.load_state_dict({"epoch": 1, "batches": 4})
    assert [batch.origins for batch in resumed] == epochs[1][4:]
    in_proportion = MultiDatasetBatchSampler(dataset, 6)
    assert in_proportion.samples_per_dataset == (1, 5)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ConfigurationError, "give either batch_size, with weights if you like, or samples_per_dataset"),
        ({"batch_size": 4, "samples_per_dataset": [1, 1]}, ConfigurationError, "give either batch_size"),
        ({"samples_per_dataset": [1, 1], "weights": [1, 1]}, ConfigurationError, "give either batch_size"),
        ({"batch_size": 0}, ConfigurationError, "batch_size must be an integer of at least 1, got 0"),
        ({"batch_size": 4, "num_batches": 0}, ConfigurationError, "num_batches must be an integer of at least 1"),
        ({"batch_size": 4, "seed": -1}, ConfigurationError, "seed must be 0 or more, got -1"),
        (
            {"batch_size": 2, "weights": [1, 100]},
            ConfigurationError,
            "a batch of 2 has no place for data set",
        ),
        ({"batch_size": 4, "epoch_policy": "minsize"}, UnknownNameError, "did you mean 'min_size'"),
    ],
)
def test_feeding_batch_sampler_refuses(options, error, message):
    with pytest.raises(error, match=message):
        MultiDatasetBatchSampler(of_sizes(4, 20), **options)


def test_feeding_multi_samplers_need_several_sets():
    for make in (MultiDatasetSampler, lambda data: MultiDatasetBatchSampler(data, 2)):
        with pytest.raises(ConfigurationTypeError, match="dataset must be a MultiDataset, got InMemoryDataset"):
            make(InMemoryDataset(make_structures(2)))
    with pytest.raises(ConfigurationError, match="num_samples must be an integer of at least 1, got 0"):
        MultiDatasetSampler(of_sizes(3), num_samples=0)
    sampler = MultiDatasetBatchSampler(of_sizes(3), 2)
    with pytest.raises(ConfigurationError, match="epoch must be 0 or more"):
        sampler.set_epoch(-1)


def test_feeding_joined_batches_do_not_depend_on_the_order_of_sets():
    one, two = make_structures(3), make_structures(4, seed=1)
    forward = MultiDataset(InMemoryDataset(one), InMemoryDataset(two)).__getitems__([0, 4, 2])
    backward = MultiDataset(InMemoryDataset(two), InMemoryDataset(one)).__getitems__([4, 1, 6])
    assert not differences(forward, backward)
    assert not differences(forward, Batch.from_data_list([one[0], two[1], one[2]]))
