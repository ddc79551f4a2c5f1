"""Training, validation and test sets for a Lightning Trainer."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

from lightning.pytorch import LightningDataModule

import nvalchemi_lightning.owner  # noqa: F401  registers the strategies under their names
from nvalchemi_lightning.data.atomic_data import AtomicData
from nvalchemi_lightning.data.batch import Batch
from nvalchemi_lightning.data.feeding.dataloader import DataLoader
from nvalchemi_lightning.data.feeding.dataset import Dataset, InMemoryDataset
from nvalchemi_lightning.data.feeding.transforms import BatchTransform, SampleTransform, check_transforms
from nvalchemi_lightning.errors import ConfigurationError

__all__ = ["AtomicDataModule", "Source"]

Source: TypeAlias = "str | os.PathLike[str] | Dataset | Batch | Sequence[AtomicData]"


class AtomicDataModule(LightningDataModule):
    """Loaders for the sets of a training.

    Parameters
    ----------
    train, val, test, predict : path, Dataset, Batch or sequence of AtomicData, optional
        The sets; a path is a Zarr store.
    batch_size : int, default 32
        Structures per batch and rank in training.
    eval_batch_size : int, optional
        The same in evaluation; default: ``batch_size``. It does not change results.
    num_workers : int, default 0
        Processes that read ahead, per loader; they stay from one epoch to the next.
    seed : int, default 0
        With the epoch, decides the order of training and what random transforms draw.
    drop_last : bool, default False
        Whether an incomplete last batch of training is left out.
    fields : sequence of str, optional
        Fields to read from stores; default: all of them.
    transforms : sequence of callable, optional
        Functions ``AtomicData -> AtomicData`` for the structures of every set.
    train_transforms : sequence of callable, optional
        More of them for training alone, such as random rotations.
    batch_transforms : sequence of callable, optional
        Functions ``Batch -> Batch`` for the batches of every set.
    pin_memory : bool, default False
        Whether batches come in page-locked memory.

    Notes
    -----
    Training is shuffled anew every epoch and divided evenly among ranks. Evaluation keeps the order and gives every
    structure to exactly one rank.
    """

    def __init__(
        self,
        train: Source | None = None,
        val: Source | None = None,
        test: Source | None = None,
        predict: Source | None = None,
        *,
        batch_size: int = 32,
        eval_batch_size: int | None = None,
        num_workers: int = 0,
        seed: int = 0,
        drop_last: bool = False,
        fields: Sequence[str] | None = None,
        transforms: Sequence[SampleTransform] | None = None,
        train_transforms: Sequence[SampleTransform] | None = None,
        batch_transforms: Sequence[BatchTransform] | None = None,
        pin_memory: bool = False,
    ) -> None:
        super().__init__()
        self._sources = {"train": train, "val": val, "test": test, "predict": predict}
        self._fields = fields
        self._transforms = check_transforms(transforms, "transforms")
        self._train_transforms = check_transforms(train_transforms, "train_transforms")
        self._train_options: dict[str, Any] = {"batch_size": batch_size, "shuffle": True, "drop_last": drop_last}
        self._eval_options: dict[str, Any] = {"batch_size": eval_batch_size or batch_size}
        self._options: dict[str, Any] = {
            "num_workers": num_workers,
            "persistent_workers": num_workers > 0,
            "seed": seed,
            "batch_transforms": batch_transforms,
            "pin_memory": pin_memory,
        }

    def train_dataloader(self) -> DataLoader:
        """Return the loader of the training set.

        Raises
        ------
        ConfigurationError
            If there is no training set, or no batch in it.
        """
        dataset = self._dataset("train", (*self._transforms, *self._train_transforms))
        return DataLoader(dataset, **self._train_options, **self._options)

    @property
    def val_dataloader(self) -> Callable[[], Any]:
        """What returns the loader of the validation set."""
        # To Lightning, a data module whose method is that of the base class has no validation set.
        if self._sources["val"] is None:
            return super().val_dataloader
        return partial(self._evaluation, "val")

    def test_dataloader(self) -> DataLoader:
        """Return the loader of the test set.

        Raises
        ------
        ConfigurationError
            If there is no test set.
        """
        return self._evaluation("test")

    def predict_dataloader(self) -> DataLoader:
        """Return the loader of the structures to predict.

        Raises
        ------
        ConfigurationError
            If there are none.
        """
        return self._evaluation("predict")

    def _evaluation(self, name: str) -> DataLoader:
        return DataLoader(self._dataset(name, self._transforms), **self._eval_options, **self._options)

    def _dataset(self, name: str, transforms: tuple[SampleTransform, ...]) -> Any:
        source = self._sources[name]
        if source is None:
            raise ConfigurationError(f"there is no {name} set; give AtomicDataModule({name}=...)")
        if isinstance(source, (str, os.PathLike)):
            from nvalchemi_lightning.data.store.reader import AtomicDataZarrReader

            return Dataset(AtomicDataZarrReader(source, fields=self._fields), transforms)
        if isinstance(source, Dataset):
            return Dataset(source.reader, (*source.transforms, *transforms)) if transforms else source
        if isinstance(source, (Batch, list, tuple)) and len(source):
            return InMemoryDataset(source, transforms=transforms)
        if transforms:
            raise ConfigurationError(
                f"transforms cannot be added to the {name} set, a {type(source).__name__}; give them to its parts"
            )
        return source
