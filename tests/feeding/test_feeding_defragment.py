"""Rewriting stores: what stays, what goes, and what an interruption leaves."""

from __future__ import annotations

import os
import shutil

import numpy as np
import pytest
import torch
import zarr
from feeding_stores import SMALL_CHUNKS, contents, fields_of
from feeding_structures import make_structures
from zarr.codecs import GzipCodec

from nvalchemi_lightning.data import AtomicDataZarrReader, AtomicDataZarrWriter
from nvalchemi_lightning.data.conversion.provenance import (
    Provenance,
    SourceRecord,
    origin_of,
    provenance_of,
    write_origins,
    write_provenance,
)
from nvalchemi_lightning.data.origins import SampleOrigin
from nvalchemi_lightning.data.store import writer as zarr_writer
from nvalchemi_lightning.data.store.layout import ZarrArrayConfig, ZarrWriteConfig
from nvalchemi_lightning.errors import ConfigurationError, StoreError, StoreWriteError


def deleted_store(path, config=SMALL_CHUNKS):
    """Make a store of 20 structures with edges and custom fields; return what is left of them."""
    data = make_structures(20, edges=True)
    writer = AtomicDataZarrWriter(path, config)
    writer.write(data)
    atoms = sum(one.num_nodes for one in data)
    writer.add_custom("gap", torch.arange(20.0, dtype=torch.float64), "system")
    writer.add_custom("tag", torch.arange(atoms, dtype=torch.int16), "atom")
    writer.delete([0, 3, 4, 19])
    return contents(path)


@pytest.mark.parametrize("config", [None, ZarrWriteConfig(core=ZarrArrayConfig(compressors=GzipCodec(), chunk_size=5))])
def test_feeding_defragment_keeps_what_is_not_deleted(tmp_path, config):
    path = tmp_path / "s"
    before = deleted_store(path)
    old = zarr.open_group(path, mode="r")
    chunks = {name: (array.chunks, array.compressors) for name, array in old["core"].arrays()}
    AtomicDataZarrWriter(path).defragment(config)
    assert contents(path) == before
    new = zarr.open_group(path, mode="r")
    assert new["meta/samples_mask"][:].tolist() == [True] * 16
    assert new["core/positions"].shape[0] == new["meta/atoms_ptr"][16] == new["meta/atoms_mask"].shape[0]
    assert dict(new.attrs) == {**dict(old.attrs), "num_samples": 16}
    assert new["custom/tag"].dtype == np.int16
    if config is None:
        assert {name: (array.chunks, array.compressors) for name, array in new["core"].arrays()} == chunks
    else:
        assert new["core/forces"].chunks == (5, 3)
    assert [entry.name for entry in tmp_path.iterdir()] == ["s"]
    AtomicDataZarrReader(path).check_integrity()


def test_feeding_defragment_rebases_neighbor_lists(tmp_path):
    """The reference's second defect."""
    deleted_store(tmp_path / "s")
    AtomicDataZarrWriter(tmp_path / "s").defragment()
    stored = zarr.open_group(tmp_path / "s", mode="r")
    batch = AtomicDataZarrReader(tmp_path / "s").read_batch(range(16))
    assert stored["core/neighbor_list"][:].tolist() == batch.neighbor_list.tolist()


@pytest.mark.parametrize("name", ["mixed32.zarr", "mols16_zstd_append.zarr", "solids_edges_custom.zarr"])
def test_feeding_defragment_keeps_stores_of_the_reference(shared, tmp_path, name):
    path = tmp_path / name
    shutil.copytree(shared / "samples" / name, path)
    AtomicDataZarrWriter(path).delete([1, 5])
    before = contents(path)
    AtomicDataZarrWriter(path).defragment()
    assert contents(path) == before


def test_feeding_defragment_keeps_what_others_store(tmp_path):
    """Root attributes, levels of the store's own, attributes of arrays, and files."""
    path = tmp_path / "s"
    deleted_store(path)
    group = zarr.open_group(path, mode="r+")
    definitions = {"bond": {"kind": "segmented"}, "frame": {"kind": "uniform"}}
    group.attrs["levels"] = {"version": 1, "definitions": definitions}
    group.attrs["fields"] = {**group.attrs["fields"], "levels": {"order": "bond", "step": "frame"}}
    group.attrs["nvalchemi_lightning"] = {"units": {"energy": "eV"}}
    group["core/energy"].attrs["unit"] = "eV"
    ptr = np.arange(21) * 2
    group.create_array("meta/level_ptrs/bond", data=ptr)
    group.create_array("levels/bond/order", data=np.arange(40))
    group.create_array("levels/frame/step", data=np.arange(20))
    (path / "README").write_text("mine")
    (path / "extra").mkdir()
    (path / "extra" / "note").write_text("too")
    AtomicDataZarrWriter(path).defragment()
    new = zarr.open_group(path, mode="r")
    kept = [index for index in range(20) if index not in (0, 3, 4, 19)]
    assert new["levels/frame/step"][:].tolist() == kept
    assert new["levels/bond/order"][:].tolist() == [row for index in kept for row in (2 * index, 2 * index + 1)]
    assert new["meta/level_ptrs/bond"][:].tolist() == list(range(0, 34, 2))
    assert new.attrs["nvalchemi_lightning"] == {"units": {"energy": "eV"}}
    assert new.attrs["levels"]["definitions"] == definitions
    assert new["core/energy"].attrs["unit"] == "eV"
    assert (path / "README").read_text() == "mine"
    assert (path / "extra" / "note").read_text() == "too"


def test_feeding_defragment_keeps_the_origin_of_each_structure(store):
    group = zarr.open_group(store, mode="r+")
    provenance = Provenance(version="1", sources=(SourceRecord(name="a.xyz"),))
    write_provenance(group, provenance)
    numbers = np.arange(20)
    write_origins(group, 0, {"source": numbers * 0, "frame": numbers + 100}, ZarrWriteConfig())
    writer = AtomicDataZarrWriter(store)
    writer.append(make_structures(2))
    writer.delete([0, 2])
    writer.defragment()
    frames = [origin_of(store, index) for index in (0, 1, 17, 18)]
    assert frames == [SampleOrigin("a.xyz", 101), SampleOrigin("a.xyz", 103), SampleOrigin("a.xyz", 119), None]
    assert provenance_of(store) == provenance


def test_feeding_provenance_survives_every_operation(store):
    """Root attributes that are not ours, such as where a conversion came from."""
    provenance = {"units": {"energy": "eV"}, "level_of_theory": "PBE"}
    zarr.open_group(store, mode="r+").attrs["nvalchemi_lightning"] = provenance
    writer = AtomicDataZarrWriter(store)
    for operate in (
        lambda: writer.append(make_structures(2)),
        lambda: writer.add_custom("gap", torch.zeros(22), "system"),
        lambda: writer.delete(0),
        writer.defragment,
    ):
        operate()
        assert zarr.open_group(store, mode="r").attrs["nvalchemi_lightning"] == provenance


def test_feeding_defragment_drops_unfinished_rows(store):
    before = contents(store)
    marker = dict(zarr.open_group(store, mode="r").attrs)
    AtomicDataZarrWriter(store).append(make_structures(5))
    zarr.open_group(store, mode="r+").attrs.put(marker)
    AtomicDataZarrWriter(store).defragment()
    assert contents(store) == before
    assert zarr.open_group(store, mode="r")["meta/samples_mask"].shape == (20,)


def test_feeding_defragment_of_nothing_leaves_an_empty_store(store):
    writer = AtomicDataZarrWriter(store)
    writer.delete(slice(None))
    writer.defragment()
    assert len(AtomicDataZarrReader(store)) == 0
    writer.append(make_structures(2))
    assert contents(store) == [fields_of(data) for data in make_structures(2)]


def test_feeding_defragment_follows_links(store, tmp_path):
    (tmp_path / "link").symlink_to(store)
    before = contents(store)
    AtomicDataZarrWriter(tmp_path / "link").defragment()
    assert (tmp_path / "link").is_symlink()
    assert contents(tmp_path / "link") == before


def test_feeding_defragment_refuses_damage_and_places_without_folders(tmp_path):
    memory: dict = {}
    AtomicDataZarrWriter(memory).write(make_structures(2))
    with pytest.raises(ConfigurationError, match="<dict> is not a local folder, so it cannot be rewritten in place"):
        AtomicDataZarrWriter(memory).defragment()
    with pytest.raises(FileNotFoundError, match="there is no Zarr store at"):
        AtomicDataZarrWriter(tmp_path / "nowhere").defragment()
    path = tmp_path / "s"
    deleted_store(path)
    group = zarr.open_group(path, mode="r+")
    group["core/neighbor_list"][:] = group["core/neighbor_list"][:] - 1
    with pytest.raises(StoreError, match=r"core/neighbor_list of sample \d+ has the pair .* repair_store\(...\)"):
        AtomicDataZarrWriter(path).defragment()
    group["core/energy"].resize((5, 1))
    with pytest.raises(StoreError, match=r"core/energy has 5 rows but needs 19; repair_store"):
        AtomicDataZarrWriter(path).defragment()
    assert group["core/positions"].shape[0] == group["meta/atoms_ptr"][20]
    assert [entry.name for entry in tmp_path.iterdir()] == ["s"]


CHANGES = {
    "rewriting changed energy of samples 0 to 2; the store is untouched": lambda group: changed(group["core/energy"]),
    "rewriting changed node of samples": lambda group: changed(group["meta/atoms_ptr"], slice(1, 2)),
    "has other structures or fields than the original": lambda group: group.attrs.update(num_samples=15),
}


def changed(array, rows=slice(0, 1), by=1):
    array[rows] = array[rows] + by


@pytest.mark.parametrize("message", CHANGES)
def test_feeding_defragment_compares_before_it_replaces(tmp_path, monkeypatch, message):
    path = tmp_path / "s"
    AtomicDataZarrWriter(path, SMALL_CHUNKS).write(make_structures(16))
    before = contents(path)
    original = zarr_writer.copy_active

    def copy_wrongly(path, target, config):
        original(path, target, config)
        CHANGES[message](zarr.open_group(target, mode="r+"))

    monkeypatch.setattr(zarr_writer, "copy_active", copy_wrongly)
    with pytest.raises(StoreError, match=message):
        AtomicDataZarrWriter(path, SMALL_CHUNKS).defragment()
    assert contents(path) == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["s"]


def test_feeding_failed_renaming_restores_the_store(store, monkeypatch):
    before = contents(store)
    original = type(store).rename

    def rename(path, target):
        if path.name.endswith(".partial") and target == store:
            raise OSError("no right")
        return original(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(type(store), "rename", rename)
        with pytest.raises(StoreWriteError, match=r"twenty.zarr could not be written: no right; the store is what"):
            AtomicDataZarrWriter(store).defragment()
    assert contents(store) == before
    assert [entry.name for entry in store.parent.iterdir()] == [store.name]


# Readers that are open ------------------------------------------------------------------------------------------


def test_feeding_open_reader_notices_that_the_store_was_replaced(store):
    """Positions of an open reader must not silently mean other structures."""
    reader = AtomicDataZarrReader(store, cache_bytes=0)
    assert reader.read_batch([5]).energy.item() == 5.0
    AtomicDataZarrWriter(store).delete(2)
    AtomicDataZarrWriter(store).defragment()
    with pytest.raises(StoreError, match=r"twenty.zarr was changed since it was opened: .* refresh\(\)"):
        reader.read_batch([5])
    reader.refresh()
    assert reader.read_batch([5]).energy.item() == 6.0


def test_feeding_reader_in_another_process_notices_deletions(store, monkeypatch):
    """A worker that opens the store later must not give other structures than its parent counts on."""
    reader = AtomicDataZarrReader(store)
    assert len(reader) == 20
    AtomicDataZarrWriter(store).append(make_structures(2))
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert reader.read_batch([19]).energy.item() == 19.0
    AtomicDataZarrWriter(store).delete(2)
    monkeypatch.setattr(os, "getpid", lambda: -2)
    with pytest.raises(StoreError, match="was changed since it was opened: structures were deleted"):
        reader.read_batch([5])
    with pytest.raises(StoreError, match="was changed since it was opened"):
        reader.read_batch([5])


def test_feeding_open_reader_notices_deletions(store):
    reader = AtomicDataZarrReader(store)
    assert len(reader) == 20
    AtomicDataZarrWriter(store).delete(3)
    with pytest.raises(StoreError, match=r"sample 3 has an atomic number of 0 .* deleted after the store was opened"):
        reader.read_batch([3])
