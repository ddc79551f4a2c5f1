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
    from nvalchemi_lightning.data.conversion.provenance import Provenance as Provenance
    from nvalchemi_lightning.data.conversion.provenance import origin_of as origin_of
    from nvalchemi_lightning.data.conversion.provenance import provenance_of as provenance_of
    from nvalchemi_lightning.data.conversion.run import Conversion as Conversion
    from nvalchemi_lightning.data.conversion.run import convert as convert
    from nvalchemi_lightning.data.feeding.dataloader import DataLoader as DataLoader
    from nvalchemi_lightning.data.feeding.dataset import Dataset as Dataset
    from nvalchemi_lightning.data.feeding.dataset import InMemoryDataset as InMemoryDataset
    from nvalchemi_lightning.data.feeding.edge_transform import NeighborListTransform as NeighborListTransform
    from nvalchemi_lightning.data.feeding.multi_dataset import MultiDataset as MultiDataset
    from nvalchemi_lightning.data.feeding.multi_sampler import MultiDatasetBatchSampler as MultiDatasetBatchSampler
    from nvalchemi_lightning.data.feeding.multi_sampler import MultiDatasetSampler as MultiDatasetSampler
    from nvalchemi_lightning.data.feeding.sampler import EpochSampler as EpochSampler
    from nvalchemi_lightning.data.fields import FIELDS as FIELDS
    from nvalchemi_lightning.data.fields import Field as Field
    from nvalchemi_lightning.data.inspection.report import Inspection as Inspection
    from nvalchemi_lightning.data.inspection.run import inspect_data as inspect_data
    from nvalchemi_lightning.data.origins import SampleOrigin as SampleOrigin
    from nvalchemi_lightning.data.reader import Reader as Reader
    from nvalchemi_lightning.data.sources.dialect import Dialect as Dialect
    from nvalchemi_lightning.data.sources.opening import open_source as open_source
    from nvalchemi_lightning.data.sources.opening import read_structures as read_structures
    from nvalchemi_lightning.data.sources.source import Source as Source
    from nvalchemi_lightning.data.store.reader import AtomicDataZarrReader as AtomicDataZarrReader
    from nvalchemi_lightning.data.store.reader import FieldSchema as FieldSchema
    from nvalchemi_lightning.data.store.repair import RepairReport as RepairReport
    from nvalchemi_lightning.data.store.repair import StoreProblem as StoreProblem
    from nvalchemi_lightning.data.store.repair import repair_store as repair_store
    from nvalchemi_lightning.data.store.writer import AtomicDataZarrWriter as AtomicDataZarrWriter
    from nvalchemi_lightning.data.store.writer import ZarrArrayConfig as ZarrArrayConfig
    from nvalchemi_lightning.data.store.writer import ZarrWriteConfig as ZarrWriteConfig

_HOMES = {
    "AtomicData": "data.atomic_data",
    "AtomicDataZarrReader": "data.store.reader",
    "AtomicDataZarrWriter": "data.store.writer",
    "Batch": "data.batch",
    "CheckReport": "data.checkup.report",
    "CheckedSet": "data.checkup.report",
    "Conversion": "data.conversion.run",
    "DataLoader": "data.feeding.dataloader",
    "Dataset": "data.feeding.dataset",
    "Dialect": "data.sources.dialect",
    "EpochSampler": "data.feeding.sampler",
    "FIELDS": "data.fields",
    "Field": "data.fields",
    "FieldSchema": "data.store.reader",
    "Finding": "data.checkup.report",
    "InMemoryDataset": "data.feeding.dataset",
    "Inspection": "data.inspection.report",
    "MultiDataset": "data.feeding.multi_dataset",
    "MultiDatasetBatchSampler": "data.feeding.multi_sampler",
    "MultiDatasetSampler": "data.feeding.multi_sampler",
    "NeighborListTransform": "data.feeding.edge_transform",
    "Place": "data.checkup.report",
    "Provenance": "data.conversion.provenance",
    "Reader": "data.reader",
    "RepairReport": "data.store.repair",
    "SampleOrigin": "data.origins",
    "Source": "data.sources.source",
    "StoreProblem": "data.store.repair",
    "ZarrArrayConfig": "data.store.writer",
    "ZarrWriteConfig": "data.store.writer",
    "check": "data.checkup.run",
    "convert": "data.conversion.run",
    "differences": "data.compare",
    "inspect_data": "data.inspection.run",
    "open_source": "data.sources.opening",
    "origin_of": "data.conversion.provenance",
    "provenance_of": "data.conversion.provenance",
    "read_structures": "data.sources.opening",
    "repair_store": "data.store.repair",
}
"""Public name to module; a module is imported when a name of it is first used."""

__all__ = [*_HOMES]  # noqa: PLE0604  the keys are the public names

__getattr__, __dir__ = lazy_exports(__name__, _HOMES)
