"""Several data sets as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch.utils.data
from numpy.typing import NDArray

from nvalchemi_lightning.data.atomic_data import AtomicData
from nvalchemi_lightning.data.batch import Batch
from nvalchemi_lightning.data.feeding.completion import Template, completed, templates_of
from nvalchemi_lightning.data.feeding.dataset import Dataset
from nvalchemi_lightning.data.feeding.transforms import random_state_of
from nvalchemi_lightning.data.indices import resolve_indices
from nvalchemi_lightning.data.origins import SampleOrigin, origins_of
from nvalchemi_lightning.errors import ConfigurationError, DataError

__all__ = ["MultiDataset"]

_Numbers: TypeAlias = NDArray[np.int64]


class MultiDataset(torch.utils.data.Dataset[AtomicData]):
    """Several data sets one after another.

    They may have different labels: every batch has the fields of all of them, and a label that a structure lacks is
    NaN. A field that they hold in different dtypes comes in the wider one.

    Parameters
    ----------
    *datasets : Dataset
        At least one.

    Attributes
    ----------
    datasets : tuple of Dataset
        The data sets.
    offsets : tuple of int
        Number of the first structure of each.

    Raises
    ------
    ConfigurationError
        If there are none.
    """

    def __init__(self, *datasets: Dataset) -> None:
        if not datasets:
            raise ConfigurationError("MultiDataset needs at least one data set")
        self.datasets = datasets
        sizes = np.array([len(dataset) for dataset in datasets], dtype=np.int64)
        self._ends = np.cumsum(sizes)
        self._starts = self._ends - sizes
        self.offsets: tuple[int, ...] = tuple(self._starts.tolist())

    def __len__(self) -> int:
        return int(self._ends[-1])

    def to_local_index(self, index: int) -> tuple[int, int]:
        """Return which data set holds a structure, and its number there.

        Raises
        ------
        IndexError
            If there is no such structure.
        """
        owners, local = self._located([index])
        return int(owners[0]), int(local[0])

    def to_global_index(self, dataset: int, index: int) -> int:
        """Return the number, among all, of a structure of one data set.

        Raises
        ------
        IndexError
            If there is no such data set, or no such structure in it.
        """
        (owner,) = resolve_indices([dataset], len(self.datasets), "the data sets of a MultiDataset")
        (local,) = resolve_indices([index], len(self.datasets[owner]), f"data set {owner} of a MultiDataset")
        return self.offsets[int(owner)] + int(local)

    def __getitem__(self, index: int) -> AtomicData:
        """Return one structure; negative numbers count from the end."""
        owner, local = self.to_local_index(index)
        return self.datasets[owner][local]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return several structures as a batch; each data set reads its own together.

        Raises
        ------
        DataError
            If the data sets do not fit together.
        """
        wanted = self._wanted
        owners, local = self._located(indices)
        parts, places = [], []
        for owner in np.unique(owners).tolist():
            own = np.flatnonzero(owners == owner)
            parts.append(self.datasets[owner].__getitems__(local[own].tolist()))
            places.append(own)
        if len(parts) == 1:
            return completed(parts[0], wanted)
        joined = completed(Batch._joined(parts), wanted)
        return joined.index_select(np.argsort(np.concatenate(places)).tolist())

    def origins(self, indices: Sequence[int]) -> tuple[SampleOrigin, ...]:
        """Return the data set and the number in it of each structure."""
        owners, local = (numbers.tolist() for numbers in self._located(indices))
        return tuple(origins_of(self.datasets[owner], [number])[0] for owner, number in zip(owners, local, strict=True))

    @cached_property
    def _wanted(self) -> dict[str, Template]:
        """What the fields of all the data sets look like."""
        # When this happens must not matter to random transforms of the batch.
        with random_state_of(0):
            firsts = [(number, data.__getitems__([0])) for number, data in enumerate(self.datasets) if len(data)]
        wanted: dict[str, Template] = {}
        for _, first in firsts:
            for name, template in templates_of(first, first.field_levels).items():
                wanted[name] = template.widened(wanted.get(name, template))
        for number, first in firsts:
            _check_completable(number, first, wanted)
        return wanted

    def _located(self, indices: Sequence[int]) -> tuple[_Numbers, _Numbers]:
        """Return the data set of each index and the number in it."""
        positions = resolve_indices(indices, len(self), "MultiDataset")
        owners = np.searchsorted(self._ends, positions, side="right").astype(np.int64)
        return owners, positions - self._starts[owners]


def _check_completable(number: int, first: Batch, wanted: Mapping[str, Template]) -> None:
    for name, template in wanted.items():
        try:
            completed(first, {name: template})
        except DataError as error:
            raise DataError(
                f"data set {number} has no {name!r} but others do, and nothing can stand in for it; give it to all of "
                "them, or leave it out (fields=...)"
            ) from error
