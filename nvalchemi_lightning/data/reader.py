"""What a data set reads from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from nvalchemi_lightning.data.atomic_data import AtomicData
from nvalchemi_lightning.data.batch import Batch
from nvalchemi_lightning.data.fields import Level
from nvalchemi_lightning.data.indices import IndexLike, resolve_indices
from nvalchemi_lightning.errors import ConfigurationTypeError

__all__ = ["BatchSource", "Reader"]


class BatchSource(Protocol):
    """A source of structures by number: all that a data set needs."""

    @property
    def name(self) -> str:
        """What messages call it."""

    def __len__(self) -> int: ...

    def read_batch(self, indices: Sequence[int]) -> Batch:
        """Return the structures at these positions, in this order, as one batch.

        Raises
        ------
        IndexError
            If there is no such structure.
        """


class Reader(ABC):
    """Base of readers for a format of your own.

    A subclass has ``__len__`` and either ``_load_sample(index)`` or, where several together are faster,
    ``_load_many_samples(indices)``; both get numbers from 0 on. A sample is an ``AtomicData`` or a mapping of field
    names to tensors, with system fields of one row.
    """

    field_levels: Mapping[str, Level] = {}
    """Levels of fields of your own; those that are not named belong to the system."""

    @property
    def name(self) -> str:
        """What messages call it."""
        return type(self).__name__

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of structures."""

    def _load_sample(self, index: int) -> AtomicData | Mapping[str, Tensor]:
        raise ConfigurationTypeError(f"{type(self).__name__} needs _load_sample(index) or _load_many_samples(indices)")

    def _load_many_samples(self, indices: Sequence[int]) -> Sequence[AtomicData | Mapping[str, Tensor]]:
        return [self._load_sample(index) for index in indices]

    def read_batch(self, indices: IndexLike) -> Batch:
        """Return several structures as one batch.

        Parameters
        ----------
        indices : int, slice, sequence of int, array, tensor or boolean mask
            Positions in any order; duplicates are kept.

        Raises
        ------
        IndexError
            If there is no such structure.
        """
        return Batch.from_data_list(self._loaded(indices), field_levels=self.field_levels)

    def read(self, index: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors of one structure, and where it comes from.

        Raises
        ------
        IndexError
            If there is no such structure.
        """
        (position,) = resolve_indices(index, len(self), self.name)
        (sample,) = self._loaded(index)
        tensors = dict(sample) if isinstance(sample, AtomicData) else dict(sample.items())
        return tensors, {"index": int(position), "source_file": self.name}

    __getitem__ = read

    def _loaded(self, indices: IndexLike) -> Sequence[AtomicData | Mapping[str, Tensor]]:
        return self._load_many_samples(resolve_indices(indices, len(self), self.name).tolist())
