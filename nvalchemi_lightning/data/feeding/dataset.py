"""Map-style data sets: structures by number, one or a batch at a time."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch.utils.data

from nvalchemi_lightning.data.atomic_data import AtomicData
from nvalchemi_lightning.data.batch import Batch
from nvalchemi_lightning.data.feeding.completion import completed, templates_of
from nvalchemi_lightning.data.feeding.transforms import (
    BatchTransform,
    SampleTransform,
    apply_transforms,
    check_transforms,
)
from nvalchemi_lightning.data.origins import SampleOrigin
from nvalchemi_lightning.data.reader import BatchSource
from nvalchemi_lightning.errors import ConfigurationError, ConfigurationTypeError

__all__ = ["Dataset", "InMemoryDataset"]


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

    def __init__(self, reader: BatchSource, transforms: Sequence[SampleTransform] | None = None) -> None:
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
        return completed(Batch.from_data_list(changed), templates_of(batch, absent))

    def origins(self, indices: Sequence[int]) -> tuple[SampleOrigin, ...]:
        """Return the reader and the number in it of each structure."""
        source = self.reader.name
        return tuple(SampleOrigin(source, int(index)) for index in indices)

    def _transformed(self, data: AtomicData, index: int) -> AtomicData:
        return apply_transforms(self.transforms, data, f"sample {index} of {self.reader.name}")


class InMemoryDataset(Dataset):
    """Structures that are held in memory, as one batch.

    Parameters
    ----------
    structures : Batch or sequence of AtomicData, optional
        The structures.
    reader : Reader, optional
        Where to read them all from instead, such as an ``AtomicDataZarrReader``.
    prepare : sequence of callable, optional
        Functions ``Batch -> Batch``, applied once, now, to all structures together, such as
        ``NeighborListTransform(5.0)``. They must keep number and order of the structures.
    transforms : sequence of callable, optional
        Functions ``AtomicData -> AtomicData``, applied in turn whenever a structure is taken.

    Raises
    ------
    ConfigurationError
        Unless exactly one of ``structures`` and ``reader`` is given.
    ConfigurationTypeError
        If ``prepare`` or ``transforms`` is not a sequence of functions.
    DataError
        If a function of ``prepare`` fails.
    """

    def __init__(
        self,
        structures: Batch | Sequence[AtomicData] | None = None,
        *,
        reader: BatchSource | None = None,
        prepare: Sequence[BatchTransform] | None = None,
        transforms: Sequence[SampleTransform] | None = None,
    ) -> None:
        functions = check_transforms(prepare, "prepare")
        batch = _gathered(structures, reader)
        super().__init__(_InMemoryReader(apply_transforms(functions, batch, "all structures")), transforms)


def _gathered(structures: Batch | Sequence[AtomicData] | None, reader: BatchSource | None) -> Batch:
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

    def fingerprint(self) -> str:
        """Return a text that changes with atoms or energies; it is that of these structures in memory alone."""
        state = blake2b(digest_size=16)
        energy = getattr(self._batch, "energy", None)
        for tensor in (self._batch.batch_ptr, self._batch.atomic_numbers, *(() if energy is None else (energy,))):
            state.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        return state.hexdigest()
