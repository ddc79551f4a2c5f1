"""Functions that change samples or batches on their way to the model, and the random numbers that they draw."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias, TypeVar

import numpy as np
import torch

from nvalchemi_lightning.data.atomic_data import AtomicData
from nvalchemi_lightning.data.batch import Batch
from nvalchemi_lightning.errors import ConfigurationTypeError, DataError

__all__ = ["BatchTransform", "SampleTransform", "apply_transforms", "check_transforms", "mixed_seed", "random_state_of"]

SampleTransform: TypeAlias = Callable[[AtomicData], AtomicData]
BatchTransform: TypeAlias = Callable[[Batch], Batch]

Value = TypeVar("Value")


def check_transforms(
    transforms: Sequence[Callable[[Value], Value]] | None, name: str
) -> tuple[Callable[[Value], Value], ...]:
    """Return the transforms as a tuple, empty for None.

    Parameters
    ----------
    transforms : sequence of callable, or None
        What the user gave.
    name : str
        Name of the option, for the message.

    Raises
    ------
    ConfigurationTypeError
        If it is not a sequence of callables.
    """
    if transforms is None:
        return ()
    if not isinstance(transforms, Sequence):
        raise ConfigurationTypeError(f"{name} must be a list of functions, got {type(transforms).__name__}")
    for transform in transforms:
        if not callable(transform):
            raise ConfigurationTypeError(f"{name} must hold functions, got {transform!r:.80}")
    return tuple(transforms)


def apply_transforms(transforms: Sequence[Callable[[Value], Value]], value: Value, where: str) -> Value:
    """Return ``value`` after each transform in turn.

    Parameters
    ----------
    transforms : sequence of callable
        Each takes what the one before returned.
    value : AtomicData or Batch
        The first input.
    where : str
        What the value is, for messages, such as ``"sample 3"``.

    Raises
    ------
    DataError
        If a transform fails or returns something else than it was given; names the transform and the sample.
    """
    kind = type(value)
    for transform in transforms:
        try:
            value = transform(value)
        # Whatever the user's function raises, the traceback alone would not say which sample it was.
        except Exception as error:
            raise DataError(
                f"transform {_name(transform)} failed on {where}: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(value, kind):
            raise DataError(
                f"transform {_name(transform)} returned {type(value).__name__} for {where}; return the {kind.__name__}"
            )
    return value


def _name(transform: object) -> str:
    return getattr(transform, "__qualname__", None) or type(transform).__qualname__


def mixed_seed(*numbers: int) -> int:
    """Return a seed below 2**63 that depends on all the numbers, which must not be negative.

    Neighboring inputs give unrelated seeds, unlike their sum: seed 1, epoch 0 is not seed 0, epoch 1.
    """
    return int(np.random.SeedSequence((len(numbers), *numbers)).generate_state(1, np.uint64)[0] >> 1)


@contextmanager
def random_state_of(seed: int) -> Iterator[None]:
    """Make ``torch`` (CPU), ``numpy`` and ``random`` draw from ``seed`` inside the block, and restore them after.

    Parameters
    ----------
    seed : int
        Not negative.
    """
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    # The generator itself, because torch.manual_seed would reseed the GPUs as well.
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
