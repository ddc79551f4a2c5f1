"""Reading the batches of a pass, in this process or in workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch.utils.data

from nvalchemi_lightning.data.atomic_data import AtomicData
from nvalchemi_lightning.data.batch import Batch
from nvalchemi_lightning.data.feeding.parcel import Parcel, opened, packed
from nvalchemi_lightning.data.feeding.transforms import BatchTransform, apply_transforms, mixed_seed, random_state_of
from nvalchemi_lightning.data.origins import origins_of
from nvalchemi_lightning.errors import ConfigurationTypeError

__all__ = ["BatchReader", "BatchSource", "Request"]


class Request(NamedTuple):
    """Which samples make up a batch, and the seed of what is drawn for it.

    Attributes
    ----------
    seed : int
        Depends on the epoch.
    indices : sequence of int
        The samples.
    """

    seed: int
    indices: Sequence[int]


class BatchSource(torch.utils.data.Dataset[Batch]):
    """What the workers run: reads, collates and transforms the samples of a batch.

    Parameters
    ----------
    dataset : object
        Anything whose items are ``AtomicData``, read together where it has ``__getitems__``.
    transforms : sequence of callable
        Functions ``Batch -> Batch``.
    """

    def __init__(self, dataset: Any, transforms: Sequence[BatchTransform]) -> None:
        self._dataset = dataset
        self._transforms = transforms
        # A data set that is known to have no transforms draws nothing; the rest may.
        self._may_draw = bool(transforms) or getattr(dataset, "transforms", None) != ()

    def __getitems__(self, request: Request) -> Batch:
        """Return the batch that was asked for.

        Raises
        ------
        ConfigurationTypeError
            If an item of the data set is not a structure.
        DataError
            If a transform fails.
        """
        batch = self._transformed(request)
        batch.__dict__["_origins"] = origins_of(self._dataset, request.indices)
        return batch

    def _transformed(self, request: Request) -> Batch:
        indices = request.indices
        if not self._may_draw:
            return self._read(indices)
        with random_state_of(mixed_seed(request.seed, *(abs(int(index)) for index in indices[:1]))):
            return apply_transforms(
                self._transforms, self._read(indices), f"the batch of samples {list(indices)!r:.60}"
            )

    def _read(self, indices: Sequence[int]) -> Batch:
        read_together = getattr(self._dataset, "__getitems__", None)
        return _collated(read_together(indices) if read_together else [self._dataset[index] for index in indices])


def _collated(found: Any) -> Batch:
    """Return a batch as it is and structures as a batch."""
    if isinstance(found, Batch):
        return found
    for item in found:
        if not isinstance(item, AtomicData):
            raise ConfigurationTypeError(f"the data set must hold AtomicData, but an item is {type(item).__name__}")
    return Batch.from_data_list(found)


class BatchReader:
    """Reads one pass of requests after the other.

    Parameters
    ----------
    source : BatchSource
        What reads.
    num_workers : int
        Processes that read ahead; 0 reads in this one.
    **options
        Those of ``torch.utils.data.DataLoader``.

    Attributes
    ----------
    busy : bool
        Whether a pass is under way; another one would end it.
    """

    def __init__(self, source: BatchSource, *, num_workers: int, **options: Any) -> None:
        self.busy = False
        self._requests = _Pass()
        collate: Any = packed if num_workers else _unchanged
        self._loader: Iterable[Batch | Parcel] = torch.utils.data.DataLoader(
            source,
            batch_sampler=self._requests,  # type: ignore[arg-type]
            num_workers=num_workers,
            collate_fn=collate,
            **options,
        )

    def read(self, requests: Iterable[Request]) -> Iterator[Batch]:
        """Yield the batches of a pass."""
        self._requests.requests = requests
        self.busy = True
        try:
            yield from map(opened, self._loader)
        finally:
            self.busy = False
            self._requests.requests = ()


def _unchanged(batch: Batch) -> Batch:
    return batch


class _Pass:
    """The requests of the pass under way, where Torch expects a batch sampler."""

    requests: Iterable[Request] = ()

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)
