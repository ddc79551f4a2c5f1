"""Structures, batches, stores and loaders."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvalchemi_lightning._lazy import lazy_exports

if TYPE_CHECKING:
    from nvalchemi_lightning.data.atomic_data import AtomicData as AtomicData
    from nvalchemi_lightning.data.batch import Batch as Batch
    from nvalchemi_lightning.data.checkup.report import CheckedSet as CheckedSet
    from nvalchemi_lightning.data.checkup.report import CheckReport as CheckReport
    from nvalchemi_lightning.data.checkup.report import Finding as Finding
    from nvalchemi_lightning.data.checkup.report import Place as Place
    from nvalchemi_lightning.data.checkup.run import check as check
    from nvalchemi_lightning.data.compare import differences as differences
    from nvalchemi_lightning.data.conversion import Conversion as Conversion
    from nvalchemi_lightning.data.conversion import convert as convert
    from nvalchemi_lightning.data.dataloader import DataLoader as DataLoader
    from nvalchemi_lightning.data.dataset import Dataset as Dataset
    from nvalchemi_lightning.data.dataset import InMemoryDataset as InMemoryDataset
    from nvalchemi_lightning.data.dialect import Dialect as Dialect
    from nvalchemi_lightning.data.edge_transform import NeighborListTransform as NeighborListTransform
    from nvalchemi_lightning.data.fields import FIELDS as FIELDS
    from nvalchemi_lightning.data.fields import Field as Field
    from nvalchemi_lightning.data.inspection import inspect_data as inspect_data
    from nvalchemi_lightning.data.inspection_report import Inspection as Inspection
    from nvalchemi_lightning.data.multi_dataset import MultiDataset as MultiDataset
    from nvalchemi_lightning.data.multi_sampler import MultiDatasetBatchSampler as MultiDatasetBatchSampler
    from nvalchemi_lightning.data.multi_sampler import MultiDatasetSampler as MultiDatasetSampler
    from nvalchemi_lightning.data.origins import SampleOrigin as SampleOrigin
    from nvalchemi_lightning.data.provenance import Provenance as Provenance
    from nvalchemi_lightning.data.provenance import origin_of as origin_of
    from nvalchemi_lightning.data.provenance import provenance_of as provenance_of
    from nvalchemi_lightning.data.reader import Reader as Reader
    from nvalchemi_lightning.data.sampler import EpochSampler as EpochSampler
    from nvalchemi_lightning.data.source import Source as Source
    from nvalchemi_lightning.data.sources import open_source as open_source
    from nvalchemi_lightning.data.sources import read_structures as read_structures
    from nvalchemi_lightning.data.zarr_reader import AtomicDataZarrReader as AtomicDataZarrReader
    from nvalchemi_lightning.data.zarr_reader import FieldSchema as FieldSchema
    from nvalchemi_lightning.data.zarr_repair import RepairReport as RepairReport
    from nvalchemi_lightning.data.zarr_repair import StoreProblem as StoreProblem
    from nvalchemi_lightning.data.zarr_repair import repair_store as repair_store
    from nvalchemi_lightning.data.zarr_writer import AtomicDataZarrWriter as AtomicDataZarrWriter
    from nvalchemi_lightning.data.zarr_writer import ZarrArrayConfig as ZarrArrayConfig
    from nvalchemi_lightning.data.zarr_writer import ZarrWriteConfig as ZarrWriteConfig

_HOMES = {
    "AtomicData": "data.atomic_data",
    "AtomicDataZarrReader": "data.zarr_reader",
    "AtomicDataZarrWriter": "data.zarr_writer",
    "Batch": "data.batch",
    "CheckReport": "data.checkup.report",
    "CheckedSet": "data.checkup.report",
    "Conversion": "data.conversion",
    "DataLoader": "data.dataloader",
    "Dataset": "data.dataset",
    "Dialect": "data.dialect",
    "EpochSampler": "data.sampler",
    "FIELDS": "data.fields",
    "Field": "data.fields",
    "FieldSchema": "data.zarr_reader",
    "Finding": "data.checkup.report",
    "InMemoryDataset": "data.dataset",
    "Inspection": "data.inspection_report",
    "MultiDataset": "data.multi_dataset",
    "MultiDatasetBatchSampler": "data.multi_sampler",
    "MultiDatasetSampler": "data.multi_sampler",
    "NeighborListTransform": "data.edge_transform",
    "Place": "data.checkup.report",
    "Provenance": "data.provenance",
    "Reader": "data.reader",
    "RepairReport": "data.zarr_repair",
    "SampleOrigin": "data.origins",
    "Source": "data.source",
    "StoreProblem": "data.zarr_repair",
    "ZarrArrayConfig": "data.zarr_writer",
    "ZarrWriteConfig": "data.zarr_writer",
    "check": "data.checkup.run",
    "convert": "data.conversion",
    "differences": "data.compare",
    "inspect_data": "data.inspection",
    "open_source": "data.sources",
    "origin_of": "data.provenance",
    "provenance_of": "data.provenance",
    "read_structures": "data.sources",
    "repair_store": "data.zarr_repair",
}
"""Public name to module; a module is imported when a name of it is first used."""

__all__ = [*_HOMES]  # noqa: PLE0604  the keys are the public names

__getattr__, __dir__ = lazy_exports(__name__, _HOMES)
