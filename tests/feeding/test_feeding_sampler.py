"""The order of samples and its division among ranks."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from nvalchemi_lightning.data.feeding.sampler import EpochSampler
from nvalchemi_lightning.errors import ConfigurationError


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch):
    """Return a function that makes this process look like one rank of several."""

    def pretend(rank: int, world: int) -> None:
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        monkeypatch.setattr(dist, "get_world_size", lambda: world)

    return pretend


def of_all_ranks(pretend, world: int, count: int, *, epoch: int = 0, start: int = 0, **options) -> list[list[int]]:
    drawn = []
    for rank in range(world):
        pretend(rank, world)
        sampler = EpochSampler(range(count), **options)
        sampler.set_epoch(epoch)
        sampler.start = start
        samples = list(sampler)
        assert len(samples) == sampler.remaining(start)
        if not start:
            assert len(samples) == len(sampler)
        drawn.append(samples)
    return drawn


def interleaved(parts: list[list[int]]) -> list[int]:
    """Put the samples of all ranks back into the order over all ranks."""
    rounds = max(map(len, parts))
    return [part[number] for number in range(rounds) for part in parts if number < len(part)]


@settings(deadline=None, max_examples=60)
@given(
    count=st.integers(1, 40),
    world=st.integers(1, 6),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 1000),
)
def test_feeding_without_padding_every_sample_occurs_once(count, world, shuffle, seed, epoch):
    with pytest.MonkeyPatch.context() as patch:

        def pretend(rank, size):
            patch.setattr(dist, "is_initialized", lambda: True)
            patch.setattr(dist, "get_rank", lambda: rank)
            patch.setattr(dist, "get_world_size", lambda: size)

        parts = of_all_ranks(pretend, world, count, shuffle=shuffle, seed=seed, epoch=epoch, pad=False)
        assert sorted(chain(*parts)) == list(range(count))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        if count >= world:
            padded = of_all_ranks(pretend, world, count, shuffle=shuffle, seed=seed, epoch=epoch)
            assert len({len(part) for part in padded}) == 1
            assert set(chain(*padded)) == set(range(count))
            assert interleaved(padded)[:count] == interleaved(parts)


def test_feeding_five_samples_on_two_ranks_are_three_and_two(ranks):
    """B10: an evaluation sees each sample exactly once, for any number of ranks."""
    losses = [1.0, 2.0, 3.0, 4.0, 100.0]
    for world, sizes in ((1, [5]), (2, [3, 2]), (3, [2, 2, 1])):
        parts = of_all_ranks(ranks, world, 5, shuffle=False, pad=False)
        assert [len(part) for part in parts] == sizes
        assert sum(losses[sample] for part in parts for sample in part) / 5 == 22.0


@pytest.mark.parametrize("pad", [True, False])
@pytest.mark.parametrize("start", [0, 6, 7, 19, 20, 25])
def test_feeding_resume_equals_the_tail(ranks, start, pad):
    whole = interleaved(of_all_ranks(ranks, 1, 20, epoch=3))
    for world in (1, 2, 3):
        tail = interleaved(of_all_ranks(ranks, world, 20, epoch=3, start=start, pad=pad))
        assert tail[: len(whole[start:])] == whole[start:]
        assert len(tail) - len(whole[start:]) < (world if pad else 1)


def test_feeding_start_counts_once():
    sampler = EpochSampler(range(10), shuffle=False)
    sampler.start = 7
    assert [list(sampler), len(list(sampler))] == [[7, 8, 9], 10]


def test_feeding_orders_differ_between_epochs_and_seeds():
    def order(seed, epoch):
        sampler = EpochSampler(range(50), seed=seed)
        sampler.set_epoch(epoch)
        assert sampler.epoch == epoch
        return tuple(sampler)

    orders = {order(seed, epoch) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16
    assert order(2, 3) == order(2, 3)


def test_feeding_sampler_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    order = list(EpochSampler(range(50)))
    torch.manual_seed(123)
    assert list(EpochSampler(range(50))) == order
    torch.set_rng_state(before)
    list(EpochSampler(range(50)))
    assert torch.equal(torch.get_rng_state(), before)


def test_feeding_epoch_counts_that_is_set_at_the_first_sample():
    sampler = EpochSampler(range(50))
    late = iter(sampler)
    sampler.set_epoch(4)
    expected = EpochSampler(range(50))
    expected.set_epoch(4)
    assert list(late) == list(expected)


def test_feeding_rank_is_looked_up_when_iterating(ranks):
    sampler = EpochSampler(range(10), shuffle=False)
    assert len(sampler) == 10
    ranks(1, 2)
    assert list(sampler) == [1, 3, 5, 7, 9]
    assert isinstance(sampler, DistributedSampler)


def test_feeding_sampler_refuses_what_cannot_be(ranks):
    with pytest.raises(ConfigurationError, match="seed must be 0 or more, got -1"):
        EpochSampler(range(3), seed=-1)
    with pytest.raises(ConfigurationError, match="epoch must be 0 or more, got -2"):
        EpochSampler(range(3)).set_epoch(-2)
    ranks(0, 2)
    with pytest.raises(ConfigurationError, match=r"1 sample\(s\) cannot be divided among 2 ranks"):
        list(EpochSampler(range(1)))
    assert list(EpochSampler(range(1), pad=False)) == [0]
