"""Map-style data sets: structures by number, one or a batch at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch.utils.data
from torch import Tensor

from nvalchemi_lightning.data.atomic_data import AtomicData
from nvalchemi_lightning.data.batch import Batch
from nvalchemi_lightning.data.collate import fill_rows
from nvalchemi_lightning.data.fields import Level
from nvalchemi_lightning.data.indices import resolve_indices
from nvalchemi_lightning.data.origins import SampleOrigin, origins_of
from nvalchemi_lightning.data.reader import Reader
from nvalchemi_lightning.data.transforms import SampleTransform, apply_transforms, check_transforms, random_state_of
from nvalchemi_lightning.errors import ConfigurationError, ConfigurationTypeError

__all__ = ["Dataset", "InMemoryDataset", "MultiDataset"]


class Dataset(torch.utils.data.Dataset[AtomicData]):
    """The structures of a reader, changed by transforms.

    Parameters
    ----------
    reader : Reader
        Where they come from, such as an ``AtomicDataZarrReader``.
    transforms : sequence of callable, optional
        Functions ``AtomicData -> AtomicData``, applied in turn to every structure that is read.

    Raises
    ------
    ConfigurationTypeError
        If ``reader`` cannot read batches, or ``transforms`` is not a sequence of functions.

    Notes
    -----
    In a :class:`~nvalchemi_lightning.data.DataLoader`, random transforms draw from a state that depends on seed,
    epoch and batch alone, whatever the number of workers; elsewhere from the global one.
    """

    def __init__(self, reader: Reader, transforms: Sequence[SampleTransform] | None = None) -> None:
        if not hasattr(reader, "read_batch"):
            raise ConfigurationTypeError(
                f"reader must have read_batch, got {type(reader).__name__}; for a path use AtomicDataZarrReader(path), "
                "for structures in memory InMemoryDataset(structures)"
            )
        self.reader = reader
        self.transforms = check_transforms(transforms, "transforms")

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> AtomicData:
        """Return one structure; negative numbers count from the end.

        Raises
        ------
        IndexError
            If there is no such structure.
        DataError
            If a transform fails.
        """
        return self._transformed(self.reader.read_batch([index])[0], index)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return several structures as a batch, read together."""
        batch = self.reader.read_batch(indices)
        if not self.transforms:
            return batch
        single = batch.to_data_list()
        absent = [name for name in batch.field_levels if not any(name in data for data in single)]
        changed = [self._transformed(data, index) for data, index in zip(single, indices, strict=True)]
        return _completed(Batch.from_data_list(changed), _templates(batch, absent))

    def origins(self, indices: Sequence[int]) -> tuple[SampleOrigin, ...]:
        """Return the reader and the number in it of each structure."""
        source = self.reader.name
        return tuple(SampleOrigin(source, int(index)) for index in indices)

    def _transformed(self, data: AtomicData, index: int) -> AtomicData:
        return apply_transforms(self.transforms, data, f"sample {index} of {self.reader.name}")


class _Template(NamedTuple):
    """A field: its level, and no rows of it."""

    level: Level
    like: Tensor


def _templates(batch: Batch, names: Iterable[str]) -> dict[str, _Template]:
    return {name: _Template(batch.field_levels[name], batch[name][:0].clone()) for name in names}


def _completed(batch: Batch, wanted: Mapping[str, _Template]) -> Batch:
    """Return the batch with every wanted field, NaN where none of its structures has the label."""
    levels: dict[Level, dict[str, Tensor]] = {"node": {}, "edge": {}, "system": {}}
    for name, value in batch:
        levels[batch.field_levels[name]][name] = value
    edges = batch.num_edges_per_graph if levels["edge"] else None
    for name, (level, like) in wanted.items():
        if name not in batch:
            levels[level][name] = fill_rows(name, level, batch, like, 0)
    return Batch.from_levels(
        node=levels["node"],
        edge=levels["edge"],
        system=levels["system"],
        num_nodes_per_graph=batch.num_nodes_per_graph,
        num_edges_per_graph=edges,
    )


class InMemoryDataset(Dataset):
    """Structures that are held in memory, as one batch.

    Parameters
    ----------
    structures : Batch or sequence of AtomicData, optional
        The structures.
    reader : Reader, optional
        Where to read them all from instead, such as an ``AtomicDataZarrReader``.
    transforms : sequence of callable, optional
        Functions ``AtomicData -> AtomicData``, applied in turn whenever a structure is taken.

    Raises
    ------
    ConfigurationError
        Unless exactly one of ``structures`` and ``reader`` is given.
    """

    def __init__(
        self,
        structures: Batch | Sequence[AtomicData] | None = None,
        *,
        reader: Reader | None = None,
        transforms: Sequence[SampleTransform] | None = None,
    ) -> None:
        super().__init__(_InMemoryReader(_gathered(structures, reader)), transforms)


def _gathered(structures: Batch | Sequence[AtomicData] | None, reader: Reader | None) -> Batch:
    if (structures is None) == (reader is None):
        raise ConfigurationError("InMemoryDataset needs either structures or reader=..., not both and not neither")
    if reader is not None:
        return reader.read_batch(range(len(reader)))
    return structures if isinstance(structures, Batch) else Batch.from_data_list(structures or ())


class _InMemoryReader:
    """Structures of a batch."""

    name = "the structures in memory"

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return len(self._batch)

    def read_batch(self, indices: Sequence[int]) -> Batch:
        return self._batch.index_select(indices)


class MultiDataset(torch.utils.data.Dataset[AtomicData]):
    """Several data sets one after another.

    They may have different labels: in a batch, a label that a structure lacks is NaN.

    Parameters
    ----------
    *datasets : Dataset
        At least one.

    Raises
    ------
    ConfigurationError
        If there are none.
    """

    def __init__(self, *datasets: Dataset) -> None:
        if not datasets:
            raise ConfigurationError("MultiDataset needs at least one data set")
        self.datasets = datasets
        self._wanted: dict[str, _Template] | None = None
        self._ends = np.cumsum([len(dataset) for dataset in datasets])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> AtomicData:
        """Return one structure; negative numbers count from the end."""
        ((number, local),) = self._located([index])
        return self.datasets[number][local]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return several structures as a batch; each data set reads its own together."""
        located = self._located(indices)
        found: list[AtomicData | None] = [None] * len(located)
        for number, dataset in enumerate(self.datasets):
            places = [place for place, (owner, _) in enumerate(located) if owner == number]
            if places:
                batch = dataset.__getitems__([located[place][1] for place in places])
                for place, data in zip(places, batch.to_data_list(), strict=True):
                    found[place] = data
        return _completed(Batch.from_data_list([data for data in found if data is not None]), self._all_fields())

    def origins(self, indices: Sequence[int]) -> tuple[SampleOrigin, ...]:
        """Return the data set and the number in it of each structure."""
        return tuple(origins_of(self.datasets[number], [local])[0] for number, local in self._located(indices))

    def _all_fields(self) -> dict[str, _Template]:
        """Return what the fields of all the data sets look like."""
        if self._wanted is None:
            self._wanted = {}
            # When this happens must not matter to random transforms of the batch.
            with random_state_of(0):
                for dataset in filter(len, self.datasets):
                    first = dataset.__getitems__([0])
                    self._wanted |= _templates(first, first.field_levels)
        return self._wanted

    def _located(self, indices: Sequence[int]) -> list[tuple[int, int]]:
        """Return the data set and the position in it of each index."""
        positions = resolve_indices(indices, len(self), "MultiDataset")
        owners = np.searchsorted(self._ends, positions, side="right")
        starts = np.concatenate(([0], self._ends[:-1]))
        return list(zip(owners.tolist(), (positions - starts[owners]).tolist(), strict=True))
