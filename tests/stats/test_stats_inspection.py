"""What a data set is said to be."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from stats_rigs import cut, random_structures, structure

from nvalchemi_lightning.data import AtomicDataZarrWriter, Batch, NeighborListTransform, inspect_data
from nvalchemi_lightning.data.inspection import stores as store_inspection
from nvalchemi_lightning.data.inspection.report import ElementReport
from nvalchemi_lightning.data.inspection.size_range import SizeRange
from nvalchemi_lightning.errors import DataError, StoreError


def coverage(source: object) -> dict[str, tuple[int | None, int | None]]:
    return {name: (field.complete, field.partial) for name, field in inspect_data(source).fields.items()}


def test_the_coverage_of_a_mixed_set(shared: Path, tmp_path: Path) -> None:
    """The counts are those that the data set's own description gives."""
    from nvalchemi_lightning.data import read_structures

    path = shared / "data" / "mixed_missing_labels.extxyz.gz"
    store = tmp_path / "mixed.zarr"
    AtomicDataZarrWriter(store).write(data for _, data in read_structures(path))
    of_file, of_store = inspect_data(path), inspect_data(str(store))
    for found in (of_file, of_store):
        assert found.structures == 423
        assert found.sizes == SizeRange(1, 16.0, 256)
        assert list(found.elements) == ["Al", "Cu", "Au"]
        assert found.periodicity == {"molecules": 63, "wires": 0, "slabs": 60, "bulk": 300}
        labels = {name: (field.complete, field.partial) for name, field in found.fields.items()}
        assert (labels["energy"], labels["forces"], labels["stress"]) == ((353, 0), (343, 0), (160, 0))
        assert labels["positions"] == labels["pbc"] == labels["cell"] == (None, None)
    assert of_file.elements == of_store.elements
    assert (of_file.atoms, of_file.fields["forces"].storage) == (of_store.atoms, None)
    assert of_file.bytes == path.stat().st_size


def test_a_store_in_windows_is_what_its_batches_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_inspection, "_WINDOW", 20)
    structures = random_structures(np.random.default_rng(2), 60)
    store = tmp_path / "train.zarr"
    AtomicDataZarrWriter(store).write(structures)
    AtomicDataZarrWriter(store).delete([0, 7, 59])
    kept = [data for number, data in enumerate(structures) if number not in (0, 7, 59)]
    found, expected = inspect_data(store), inspect_data(cut(kept, [13]))
    assert (found.deleted, found.structures, found.atoms) == (3, 57, sum(data.num_nodes for data in kept))
    assert (found.sizes, found.elements, found.periodicity) == (expected.sizes, expected.elements, expected.periodicity)
    assert expected.source == "the structures"
    for name, field in expected.fields.items():
        other = found.fields[name]
        assert (other.level, other.row, other.complete, other.partial) == (
            field.level,
            field.row,
            field.complete,
            field.partial,
        )
    labelled = sum(data.energy is not None for data in kept)
    assert found.fields["energy"].complete == labelled


def test_labels_in_part_and_labels_of_ones_own() -> None:
    part = structure([1, 8], forces=[[0.0, 0.0, math.nan], [0.0, 0.0, 0.0]])
    whole = structure([1, 1], forces=np.zeros((2, 3)))
    batch = Batch.from_data_list([part, whole, structure([6])])
    batch.add_key("gap", [torch.ones(1, 1), torch.full((1, 1), math.nan), torch.ones(1, 1)], level="system")
    batch.add_key("site", [torch.ones(2, 1), torch.ones(2, 1), torch.ones(1, 1).bfloat16().float()], level="node")
    batch.add_key("tag", [torch.ones(1, 1, dtype=torch.int64)] * 3, level="system")
    assert coverage([batch]) == {
        "positions": (None, None),
        "atomic_numbers": (None, None),
        "forces": (1, 1),
        "gap": (2, 0),
        "site": (3, 0),
        "tag": (None, None),
    }
    assert inspect_data([batch]).elements["H"] == ElementReport(structures=2, atoms=3)


def test_half_precision_is_looked_at_too() -> None:
    batch = Batch.from_data_list([structure([1])])
    batch.add_key("gap", [torch.ones(1, 1, dtype=torch.bfloat16)], level="system")
    field = inspect_data([batch]).fields["gap"]
    assert (field.dtype, field.complete) == ("bfloat16", 1)


def test_edges_and_storage(tmp_path: Path) -> None:
    store = tmp_path / "edges.zarr"
    add_edges = NeighborListTransform(cutoff=2.0)
    AtomicDataZarrWriter(store).write([add_edges(structure([1, 1, 1])), add_edges(structure([8]))])
    zarr.open_group(store, mode="r+").attrs["nvalchemi_lightning"] = {"units": "eV, A"}
    found = inspect_data(store)
    assert found.edges == 4
    storage = found.fields["positions"].storage
    assert (storage.codec, storage.chunk_rows) == ("none", 64 * 1024 // 24)
    files = [file for folder in ("meta", "core") for file in (store / folder).glob("*/**/*") if file.is_file()]
    assert found.bytes == sum(file.stat().st_size for file in files)
    assert storage.bytes == sum(file.stat().st_size for file in files if "positions" in file.parts)
    assert found.provenance == {"units": "eV, A"}


def test_a_damaged_store_is_said_to_be_one(tmp_path: Path) -> None:
    store = tmp_path / "bad.zarr"
    AtomicDataZarrWriter(store).write([structure([1, 1], energy=[[0.0]]), structure([8], energy=[[0.0]])])
    group = zarr.open_group(store, mode="r+")
    group["core/energy"].resize((1, 1))
    with pytest.raises(StoreError, match=r"core/energy has 1 rows but 2 samples need 2; the store is damaged"):
        inspect_data(store)
    group["meta/atoms_ptr"][1] = 5
    with pytest.raises(StoreError, match="the pointers of the node level do not ascend over 2 samples"):
        inspect_data(store)


def test_nothing_is_said_to_be_nothing(tmp_path: Path) -> None:
    store = tmp_path / "empty.zarr"
    AtomicDataZarrWriter(store).write([structure([1])])
    AtomicDataZarrWriter(store).delete([0])
    with pytest.raises(DataError, match=r"empty\.zarr holds no structures; 1 are deleted"):
        inspect_data(store)
    with pytest.raises(DataError, match="the structures holds no structures"):
        inspect_data([])
    with pytest.raises(FileNotFoundError, match="absent"):
        inspect_data(tmp_path / "absent.zarr")
