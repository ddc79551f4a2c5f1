"""Transforms and the random numbers that they draw."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from nvalchemi_lightning.data import InMemoryDataset
from nvalchemi_lightning.data.feeding.transforms import apply_transforms, check_transforms, mixed_seed, random_state_of
from nvalchemi_lightning.errors import ConfigurationTypeError, DataError


def draws() -> tuple[float, float, float, float]:
    return torch.rand(()).item(), np.random.rand(), np.random.normal(), random.random()


def test_feeding_random_state_is_a_function_of_the_seed_and_is_restored():
    np.random.normal()  # leaves half of a pair behind, which must come back too
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    with random_state_of(5):
        first = draws()
    with random_state_of(6):
        other = draws()
    with random_state_of(5):
        assert draws() == first
    assert all(a != b for a, b in zip(first, other, strict=True))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert str(np.random.get_state()) == str(states[1])
    assert random.getstate() == states[2]


def test_feeding_mixed_seeds_differ():
    seeds = {mixed_seed(a, b) for a in range(10) for b in range(10)} | {mixed_seed(a) for a in range(10)}
    assert len(seeds) == 110
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_feeding_transforms_are_functions():
    assert check_transforms(None, "transforms") == ()
    assert check_transforms([abs], "transforms") == (abs,)
    with pytest.raises(ConfigurationTypeError, match="transforms must be a list of functions, got builtin_function"):
        check_transforms(abs, "transforms")
    with pytest.raises(ConfigurationTypeError, match="batch_transforms must hold functions, got 3"):
        check_transforms([abs, 3], "batch_transforms")


def test_feeding_transforms_run_in_turn():
    assert apply_transforms((lambda x: x + 1, lambda x: x * 10), 2, "here") == 30


def broken(data):
    raise ZeroDivisionError("boom")


def test_feeding_failing_transform_names_itself_and_the_sample(structures):
    dataset = InMemoryDataset(structures(3), transforms=[broken])
    with pytest.raises(DataError, match=r"transform broken failed on sample 2 of .*ZeroDivisionError: boom") as caught:
        dataset[2]
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(DataError, match="transform broken failed on sample 1 of"):
        dataset.__getitems__([1, 2])


class Forgetful:
    """A transform that does not return what it changed."""

    def __call__(self, data):
        """Change nothing and return nothing."""


def test_feeding_transform_must_return_its_kind(structures):
    dataset = InMemoryDataset(structures(3), transforms=[Forgetful()])
    with pytest.raises(DataError, match=r"transform Forgetful returned NoneType for sample 0 .*return the AtomicData"):
        dataset[0]
