"""Structures, batches, stores and loaders."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nvalchemi_lightning.errors import nearest

if TYPE_CHECKING:
    from nvalchemi_lightning.data.atomic_data import AtomicData as AtomicData
    from nvalchemi_lightning.data.batch import Batch as Batch
    from nvalchemi_lightning.data.compare import differences as differences
    from nvalchemi_lightning.data.dataloader import DataLoader as DataLoader
    from nvalchemi_lightning.data.dataset import Dataset as Dataset
    from nvalchemi_lightning.data.dataset import InMemoryDataset as InMemoryDataset
    from nvalchemi_lightning.data.dataset import MultiDataset as MultiDataset
    from nvalchemi_lightning.data.edge_transform import NeighborListTransform as NeighborListTransform
    from nvalchemi_lightning.data.fields import FIELDS as FIELDS
    from nvalchemi_lightning.data.fields import Field as Field
    from nvalchemi_lightning.data.sampler import EpochSampler as EpochSampler
    from nvalchemi_lightning.data.zarr_reader import AtomicDataZarrReader as AtomicDataZarrReader
    from nvalchemi_lightning.data.zarr_reader import Reader as Reader
    from nvalchemi_lightning.data.zarr_writer import AtomicDataZarrWriter as AtomicDataZarrWriter
    from nvalchemi_lightning.data.zarr_writer import ZarrArrayConfig as ZarrArrayConfig
    from nvalchemi_lightning.data.zarr_writer import ZarrWriteConfig as ZarrWriteConfig

_HOMES = {
    "AtomicData": "atomic_data",
    "AtomicDataZarrReader": "zarr_reader",
    "AtomicDataZarrWriter": "zarr_writer",
    "Batch": "batch",
    "DataLoader": "dataloader",
    "Dataset": "dataset",
    "EpochSampler": "sampler",
    "FIELDS": "fields",
    "Field": "fields",
    "InMemoryDataset": "dataset",
    "MultiDataset": "dataset",
    "NeighborListTransform": "edge_transform",
    "Reader": "zarr_reader",
    "ZarrArrayConfig": "zarr_writer",
    "ZarrWriteConfig": "zarr_writer",
    "differences": "compare",
}
"""Public name to module. A module is imported when a name of it is first used."""

__all__ = [*_HOMES]  # noqa: PLE0604  the keys are the public names


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{nearest(name, _HOMES)}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names."""
    return list(__all__)
