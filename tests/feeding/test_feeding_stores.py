"""Writing stores and reading them back."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from feeding_stores import SMALL_CHUNKS, fields_of
from feeding_structures import make_structures
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.codecs import GzipCodec, ZstdCodec

from nvalchemi_lightning.data import (
    AtomicData,
    AtomicDataZarrReader,
    AtomicDataZarrWriter,
    Batch,
    DataLoader,
    Dataset,
    Reader,
)
from nvalchemi_lightning.data.store.layout import ZarrArrayConfig, ZarrWriteConfig
from nvalchemi_lightning.errors import (
    ConfigurationError,
    ConfigurationTypeError,
    DataError,
    StoreError,
    UnknownNameError,
)

SAMPLES = ("mixed32.zarr", "mols16_zstd_append.zarr", "solids_edges_custom.zarr")


def same(first, second) -> bool:
    return fields_of(first) == fields_of(second)


def read_all(path, **options) -> list[AtomicData]:
    reader = AtomicDataZarrReader(path, **options)
    return reader.read_batch(range(len(reader))).to_data_list() if len(reader) else []


# What the reference wrote ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLES)
def test_feeding_reader_reproduces_the_oracle(shared, name):
    oracle = json.loads((shared / "samples" / "zarr_oracle.json").read_text())[name]
    reader = AtomicDataZarrReader(shared / "samples" / name)
    batch = reader.read_batch(range(len(reader)))
    assert len(reader) == len(oracle) == len(batch)
    for index, expected in enumerate(oracle):
        tensors, origin = reader.read(index)
        assert origin == {
            "index": index,
            "source_file": str(shared / "samples" / name),
            "physical_index": expected["physical_index"],
        }
        for data in (tensors, fields := dict(batch[index])):
            assert data["positions"].shape == (expected["natoms"], 3)
            assert data["energy"].shape == (1, 1)
            assert data["energy"].item() == expected["energy"]
            assert data["forces"].abs().sum().item() == pytest.approx(expected["sum_abs_forces"], rel=1e-6)
            if expected.get("edges_first3") is not None:
                assert data["neighbor_list"][:3].tolist() == expected["edges_first3"]
        if expected.get("stress") is not None:
            assert tensors["stress"].flatten().tolist() == expected["stress"]
        assert reader.get_metadata(index) == (expected["natoms"], len(fields.get("neighbor_list", ())))


@pytest.mark.parametrize("name", SAMPLES)
def test_feeding_writer_makes_the_documented_layout(shared, tmp_path, name):
    """The same structures give the same groups, arrays, dtypes, shapes and attributes as the reference wrote."""
    original = zarr.open_group(shared / "samples" / name, mode="r")
    everything = zarr.open_group(tmp_path / "all", mode="w")
    for path, array in original.members(max_depth=None):
        if isinstance(array, zarr.Array):
            everything.create_array(path, data=array[:])
        else:
            everything.require_group(path)
    everything.attrs.update(original.attrs)
    # Deleted structures are copied as well, with something legal instead of their zeros.
    everything["meta/samples_mask"][:] = True
    everything["core/atomic_numbers"][:] = np.maximum(original["core/atomic_numbers"][:], 1)
    if "core/neighbor_list" in original:
        first = np.repeat(original["meta/atoms_ptr"][:-1], np.diff(original["meta/edges_ptr"][:]))[:, None]
        everything["core/neighbor_list"][:] = np.maximum(original["core/neighbor_list"][:], first)
    custom = original.attrs["fields"]["custom"]
    core = AtomicDataZarrReader(tmp_path / "all", fields=original.attrs["fields"]["core"])

    written = tmp_path / "copy.zarr"
    writer = AtomicDataZarrWriter(written)
    writer.write(core.read_batch(range(len(core))))
    for field, level in custom.items():
        writer.add_custom(field, torch.from_numpy(original["custom"][field][:]), level)
    writer.delete(~original["meta/samples_mask"][:])

    copy = zarr.open_group(written, mode="r")
    assert dict(copy.attrs) == dict(original.attrs)
    members = dict(original.members(max_depth=None))
    assert set(dict(copy.members(max_depth=None))) == set(members)
    for path, expected in members.items():
        found = copy[path]
        assert dict(found.attrs) == {}
        if isinstance(expected, zarr.Array):
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype), path
            assert (found.fill_value, found.shards) == (expected.fill_value, None)
            assert np.array_equal(found[:], expected[:]), path


def test_feeding_store_without_attributes_is_read_by_field_names(shared, tmp_path):
    original = zarr.open_group(shared / "samples" / "mixed32.zarr", mode="r")
    minimal = zarr.open_group(tmp_path / "minimal", mode="w")
    for path in ("meta/atoms_ptr", "meta/edges_ptr", "meta/samples_mask", "core/atomic_numbers", "core/positions"):
        minimal.create_array(path, data=original[path][:])
    minimal.create_array("core/energy", data=original["core/energy"][:])
    minimal.create_array("core/site", data=np.arange(128))
    reader = AtomicDataZarrReader(tmp_path / "minimal")
    assert reader.field_levels == {"atomic_numbers": "node", "energy": "system", "positions": "node", "site": "node"}
    assert len(reader) == 32
    minimal.create_array("custom/origin", data=np.arange(32))
    reader.refresh()
    assert reader.field_levels["origin"] == "system"
    with pytest.raises(StoreError, match="the array meta/atoms_mask is missing"):
        AtomicDataZarrWriter(tmp_path / "minimal").append(reader.read_batch([0]))
    assert len(AtomicDataZarrReader(tmp_path / "minimal")) == 32
    AtomicDataZarrWriter(tmp_path / "minimal").add_custom("gap", torch.arange(32.0), "system")
    assert AtomicDataZarrReader(tmp_path / "minimal").read(7)[0]["gap"].item() == 7.0


# Round trips ----------------------------------------------------------------------------------------------------


@st.composite
def histories(draw):
    """Draw a sequence of writes, appends and deletions, with options."""
    later = st.tuples(st.sampled_from(["append", "delete"]), st.integers(1, 6))
    steps = [("write", draw(st.integers(1, 6))), *draw(st.lists(later, max_size=5))]
    return steps, draw(st.booleans()), draw(st.sampled_from(["list", "batch", "iterator"]))


@settings(deadline=None, max_examples=25)
@given(histories(), st.integers(0, 2**20), st.sampled_from([0, 1000, 2**20]))
def test_feeding_store_equals_a_list_in_memory(history, seed, cache_bytes):
    steps, edges, form = history
    forms = {"list": list, "batch": Batch.from_data_list, "iterator": iter}
    generator = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.zarr"
        writer = AtomicDataZarrWriter(path, SMALL_CHUNKS)
        expected: list[AtomicData | None] = []
        for number, (step, count) in enumerate(steps):
            if step == "delete":
                gone = generator.integers(0, len(expected), min(count, len(expected)))
                writer.delete(gone)
                for index in gone:
                    expected[index] = None
                continue
            # Every second block lacks labels.
            new = make_structures(count, seed=seed + number, edges=edges, labels=number % 2 == 0)
            (writer.write if step == "write" else writer.append)(forms[form](new))
            expected += new
        kept = [data for data in expected if data is not None]
        reader = AtomicDataZarrReader(path, cache_bytes=cache_bytes)
        assert len(reader) == len(kept)
        if kept:
            order = generator.integers(-len(kept), len(kept), 12)
            found = reader.read_batch(order)
            for place, index in enumerate(order):
                assert same(found[place], kept[index])
            for (tensors, _), index in zip(reader.read_many(order), order, strict=True):
                for name, value in kept[index]:
                    assert torch.equal(tensors[name], value)


@pytest.mark.parametrize("edges", [False, True])
def test_feeding_batches_equal_collated_structures(tmp_path, structures, edges):
    data = structures(12, edges=edges)
    AtomicDataZarrWriter(tmp_path / "s", SMALL_CHUNKS).write(data)
    reader = AtomicDataZarrReader(tmp_path / "s")
    chosen = [3, 0, 11, 3, -2]
    found, expected = reader.read_batch(chosen), Batch.from_data_list([data[index] for index in chosen])
    assert found.field_levels == expected.field_levels
    for name, value in expected:
        assert torch.equal(found[name], value), name
        assert found[name].dtype == value.dtype
    assert torch.equal(found.num_edges_per_graph, expected.num_edges_per_graph)
    assert torch.equal(found.num_nodes_per_graph, expected.num_nodes_per_graph)


def test_feeding_indices_of_every_kind(store):
    reader = AtomicDataZarrReader(store)
    mask = np.arange(20) % 7 == 2
    for index in (slice(2, None, 7), [2, 9, 16], range(2, 20, 7), torch.tensor([2, 9, 16]), mask, torch.tensor(mask)):
        assert reader.read_batch(index).energy.flatten().tolist() == [2.0, 9.0, 16.0]
    assert reader.read(-1)[1]["index"] == 19
    assert reader[0][0]["energy"].item() == 0.0


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (20, IndexError, r"twenty.zarr: sample 20 is out of range for 20 samples"),
        ([0, -21], IndexError, r"sample -21 is out of range"),
        (np.ones(3, dtype=bool), IndexError, r"a mask of shape \(3,\) does not fit 20 samples"),
        ([], IndexError, r"cannot make a batch of no samples"),
        ([1.0], ConfigurationTypeError, r"sample indices must be integers, got \[1.0\]"),
        ([[1]], ConfigurationTypeError, r"sample indices must be integers"),
    ],
)
def test_feeding_indices_that_are_none(store, index, error, message):
    with pytest.raises(error, match=message):
        AtomicDataZarrReader(store).read_batch(index)


def test_feeding_appended_neighbor_lists_count_through_the_store(tmp_path, structures):
    """The reference's first defect: appended structures must not come back with negative atom numbers."""
    data = structures(6, edges=True)
    writer = AtomicDataZarrWriter(tmp_path / "s")
    writer.write(data[:2])
    writer.append(data[2])
    writer.append(Batch.from_data_list(data[3:]))
    stored = zarr.open_group(tmp_path / "s", mode="r")
    expected = Batch.from_data_list(data).neighbor_list
    assert stored["core/neighbor_list"][:].tolist() == expected.tolist()
    for found, original in zip(read_all(tmp_path / "s"), data, strict=True):
        assert same(found, original)


def test_feeding_fields_on_request(store):
    reader = AtomicDataZarrReader(store, fields=["energy"])
    assert reader.field_names == ["positions", "atomic_numbers", "energy"]
    assert "forces" not in reader.read_batch([0])
    with pytest.raises(UnknownNameError, match="has no field 'force'; did you mean 'forces'"):
        AtomicDataZarrReader(store, fields=["force"])


def test_feeding_store_in_a_dictionary(structures):
    memory: dict = {}
    data = structures(5)
    AtomicDataZarrWriter(memory).write(data)
    AtomicDataZarrWriter(memory).append(data)
    assert AtomicDataZarrReader(memory).name == "<dict>"
    assert all(same(a, b) for a, b in zip(read_all(memory), data * 2, strict=True))
    with pytest.raises(FileExistsError, match="<dict> exists"):
        AtomicDataZarrWriter(memory).write(data)


@pytest.mark.parametrize(
    "options",
    [
        {"compressors": None},
        {"compressors": GzipCodec()},
        {"compressors": [ZstdCodec(level=3), GzipCodec()], "chunk_size": 4},
        {"chunk_size": 2, "shard_size": 6},
        {"chunk_size": 5, "write_empty_chunks": False},
    ],
    ids=["plain", "gzip", "two", "shards", "sparse"],
)
def test_feeding_codecs_chunks_and_shards(tmp_path, structures, options):
    data = structures(9)
    config = ZarrWriteConfig(core=ZarrArrayConfig(**options), field_overrides={"energy": ZarrArrayConfig(chunk_size=7)})
    AtomicDataZarrWriter(tmp_path / "s", config).write(data)
    assert all(same(a, b) for a, b in zip(read_all(tmp_path / "s"), data, strict=True))
    stored = zarr.open_group(tmp_path / "s", mode="r")
    assert stored["core/energy"].chunks == (7, 1)
    if "chunk_size" in options:
        assert stored["core/forces"].chunks == (options["chunk_size"], 3)


def test_feeding_default_chunks_suit_random_access(store):
    """B113: about 64 kB a chunk, whatever a row is."""
    stored = zarr.open_group(store, mode="r")
    for path, array in stored.members(max_depth=None):
        if isinstance(array, zarr.Array):
            size = int(np.prod(array.chunks)) * array.dtype.itemsize
            assert 64 * 1024 - 100 < size <= 64 * 1024, path


def test_feeding_shards_hold_whole_chunks():
    with pytest.raises(ValueError, match="shard_size=7 must be a multiple of chunk_size, which is 2"):
        ZarrArrayConfig(chunk_size=2, shard_size=7)
    with pytest.raises(ValueError, match="did you mean 'chunk_size'"):
        ZarrArrayConfig(chunksize=2)


# Missing labels and mismatches ----------------------------------------------------------------------------------


def test_feeding_missing_labels_are_nan(tmp_path, structures):
    """B11, B49: a store has a field if any structure has it; the others read NaN, never zero."""
    data = structures(8)
    del data[1].energy, data[6].forces
    data[7].cell, data[7].pbc = torch.eye(3)[None], torch.ones(1, 3, dtype=torch.bool)
    data[7].stress = torch.ones(1, 3, 3)
    AtomicDataZarrWriter(tmp_path / "s", SMALL_CHUNKS).write(iter(data))
    batch = AtomicDataZarrReader(tmp_path / "s").read_batch(range(8))
    assert batch.energy.isnan().flatten().tolist() == [index == 1 for index in range(8)]
    assert batch.forces.isnan().all(1).tolist() == (batch.batch_idx == 6).tolist()
    assert batch.stress.isnan().flatten(1).all(1).tolist() == [True] * 7 + [False]
    assert not batch.cell[:7].any()
    assert not batch.pbc[:7].any()
    assert same(batch[7], data[7])


def test_feeding_append_without_a_stored_label_writes_nan(tmp_path, structures):
    """The reference's third defect: the array must not be left short."""
    writer = AtomicDataZarrWriter(tmp_path / "s")
    writer.write(structures(3))
    writer.append(structures(2, labels=False))
    writer.append(structures(2))
    batch = AtomicDataZarrReader(tmp_path / "s").read_batch(range(7))
    assert batch.energy.isnan().flatten().tolist() == [False] * 3 + [True] * 2 + [False] * 2


def with_custom(structures, count, dtype=torch.float32):
    data = structures(count)
    for one in data:
        one.add_system_property("gap", torch.ones(1, 1, dtype=dtype))
        one.add_node_property("tag", torch.ones(one.num_nodes, dtype=dtype))
    return data


def test_feeding_append_of_a_new_floating_field_fills_the_old_rows(tmp_path, structures):
    writer = AtomicDataZarrWriter(tmp_path / "s", SMALL_CHUNKS)
    writer.write(structures(3))
    writer.append(with_custom(structures, 2))
    reader = AtomicDataZarrReader(tmp_path / "s")
    assert (reader.field_levels["gap"], reader.field_levels["tag"]) == ("system", "node")
    batch = reader.read_batch(range(5))
    assert batch.gap.isnan().flatten().tolist() == [True] * 3 + [False] * 2
    assert batch.tag.isnan().tolist() == (batch.batch_idx < 3).tolist()


def test_feeding_defaults_fill_both_ways(tmp_path, structures):
    plain, full = structures(2), structures(3, seed=1)
    for data in full:
        data.atomic_masses = data.atomic_masses * 2
        data.velocities = torch.ones_like(data.positions)
    for first, second, order in ((plain, full, [*plain, *full]), (full, plain, [*full, *plain])):
        path = tmp_path / f"{len(first)}"
        AtomicDataZarrWriter(path).write(first)
        AtomicDataZarrWriter(path).append(second)
        for found, data in zip(read_all(path), order, strict=True):
            assert torch.equal(found.atomic_masses, data.atomic_masses)
            assert torch.equal(found.velocities, data.velocities)


def changed(structures, change):
    (data,) = structures(1, seed=5)
    change(data)
    return data


MISFITS = [
    (lambda d: d.add_system_property("origin", torch.ones(1, dtype=torch.int64)), "'origin' is new to .* 6 structures"),
    (lambda d: setattr(d, "neighbor_list", torch.zeros(1, 2, dtype=torch.int64)), "'neighbor_list' is new to"),
    (lambda d: d.add_system_property("gap", torch.ones(1, 2)), r"'gap' has rows of shape \(2,\) .* they have \(1,\)"),
    (lambda d: d.add_node_property("gap", torch.ones(d.num_nodes, 1)), "'gap' is on the level 'node' .*on 'system'"),
    (lambda d: d.add_system_property("kind", torch.ones(1, dtype=torch.bfloat16)), "'kind' is bfloat16"),
]


@pytest.mark.parametrize(("change", "message"), MISFITS, ids=[message.split("'")[1] for _, message in MISFITS])
def test_feeding_append_refuses_what_does_not_fit(tmp_path, structures, change, message):
    writer = AtomicDataZarrWriter(tmp_path / "s")
    writer.write(with_custom(structures, 4))
    before = [fields_of(data) for data in read_all(tmp_path / "s")]
    with pytest.raises(DataError, match=message):
        writer.append(iter([Batch.from_data_list(with_custom(structures, 2)), changed(structures, change)]))
    assert [fields_of(data) for data in read_all(tmp_path / "s")] == before


def test_feeding_append_never_loses_digits(tmp_path, structures):
    writer = AtomicDataZarrWriter(tmp_path / "s")
    writer.write(structures(2))
    with pytest.raises(DataError, match=r"'positions' is float64 but .* stores it as float32, which would lose digits"):
        writer.append(structures(2, dtype=torch.float64))
    wide = AtomicDataZarrWriter(tmp_path / "wide")
    wide.write(structures(2, dtype=torch.float64))
    wide.append(structures(2))
    assert AtomicDataZarrReader(tmp_path / "wide").read_batch(range(4)).dtype == torch.float64


def test_feeding_append_needs_edges_where_the_store_has_them(tmp_path, structures):
    writer = AtomicDataZarrWriter(tmp_path / "s")
    writer.write(structures(2, edges=True))
    with pytest.raises(DataError, match=r"the structures have no 'neighbor_list' but .* has it"):
        writer.append(structures(2))


def test_feeding_neighbor_matrices_are_not_stored(tmp_path, structures):
    (data,) = structures(1)
    data.neighbor_matrix = torch.zeros(data.num_nodes, 2, dtype=torch.int64)
    AtomicDataZarrWriter(tmp_path / "s").write(data)
    assert "neighbor_matrix" not in AtomicDataZarrReader(tmp_path / "s").field_names


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([], DataError, "no structures to write to .*s"),
        (3, ConfigurationTypeError, "structures must be AtomicData or a Batch, or several; got int"),
        (["x"], ConfigurationTypeError, "structure 0 is str, not AtomicData or a Batch"),
    ],
)
def test_feeding_writer_refuses_what_is_no_structure(tmp_path, given, error, message):
    with pytest.raises(error, match=message):
        AtomicDataZarrWriter(tmp_path / "s").write(given)
    assert list(tmp_path.iterdir()) == []


def test_feeding_batches_and_structures_may_be_mixed(tmp_path, structures):
    data = structures(7)
    AtomicDataZarrWriter(tmp_path / "s").write(iter([*data[:2], Batch.from_data_list(data[2:5]), *data[5:]]))
    assert all(same(a, b) for a, b in zip(read_all(tmp_path / "s"), data, strict=True))


# Paths, custom fields, deletion ---------------------------------------------------------------------------------


def test_feeding_paths_that_exist_or_not(store, tmp_path, structures):
    with pytest.raises(FileExistsError, match=r"twenty.zarr exists; append to it"):
        AtomicDataZarrWriter(store).write(structures(1))
    for use in (AtomicDataZarrReader, lambda path: AtomicDataZarrWriter(path).append(structures(1))):
        with pytest.raises(FileNotFoundError, match=r"there is no Zarr store at .*nowhere"):
            use(tmp_path / "nowhere")
        with pytest.raises(StoreError, match="is not a Zarr group"):
            use(tmp_path)
    AtomicDataZarrWriter(tmp_path / "new" / "folder").write(structures(1))
    zarr.open_group(tmp_path / "other", mode="w")
    with pytest.raises(StoreError, match=r"has no array meta/atoms_ptr, .*core/positions"):
        AtomicDataZarrReader(tmp_path / "other")
    with pytest.raises(ConfigurationError, match="cache_bytes must be 0 or more, got -1"):
        AtomicDataZarrReader(store, cache_bytes=-1)


def test_feeding_custom_fields(store):
    writer = AtomicDataZarrWriter(store)
    atoms = AtomicDataZarrReader(store).read_batch(range(20)).num_nodes
    writer.add_custom("gap", torch.arange(20.0), "system")
    writer.add_custom("tag", torch.arange(atoms), "atom")
    batch = AtomicDataZarrReader(store).read_batch([4, 1])
    assert batch.gap.tolist() == [4.0, 1.0]
    assert batch.tag.dtype == torch.int64
    assert zarr.open_group(store, mode="r").attrs["fields"]["custom"] == {"gap": "system", "tag": "atom"}
    with pytest.raises(ConfigurationError, match="has a field 'gap' already"):
        writer.add_custom("gap", torch.arange(20.0), "system")
    with pytest.raises(DataError, match=r"'short' must have 20 rows, one per stored system, got shape \(3,\)"):
        writer.add_custom("short", torch.arange(3.0), "system")
    with pytest.raises(UnknownNameError, match="level must be one of atom, edge, system, got 'atoms'; did you mean"):
        writer.add_custom("x", torch.arange(3.0), "atoms")
    with pytest.raises(ConfigurationError, match="named like a Python variable, got 'a/b'"):
        writer.add_custom("a/b", torch.arange(20.0), "system")


def test_feeding_deleted_structures_are_skipped_and_zeroed(store):
    writer = AtomicDataZarrWriter(store)
    writer.delete([0, -1, 5, 6])
    writer.delete(5)
    writer.delete([])
    reader = AtomicDataZarrReader(store)
    assert len(reader) == 16
    assert reader.read(4)[1] == {"index": 4, "source_file": str(store), "physical_index": "7"}
    stored = zarr.open_group(store, mode="r")
    assert np.flatnonzero(~stored["meta/samples_mask"][:]).tolist() == [0, 5, 6, 19]
    ptr = stored["meta/atoms_ptr"][:]
    gone = np.concatenate([np.arange(ptr[i], ptr[i + 1]) for i in (0, 5, 6, 19)])
    assert np.flatnonzero(~stored["meta/atoms_mask"][:]).tolist() == gone.tolist()
    assert not stored["core/atomic_numbers"][:][gone].any()
    with pytest.raises(IndexError, match="sample 20 is out of range"):
        writer.delete(20)


# Crashes and damage ---------------------------------------------------------------------------------------------


def test_feeding_torn_tail_is_ignored_and_overwritten(store, structures):
    """num_samples is the commit marker: rows that an interrupted append left do not count."""
    before = [fields_of(data) for data in read_all(store)]
    marker = dict(zarr.open_group(store, mode="r").attrs)
    writer = AtomicDataZarrWriter(store)
    writer.append(with_custom(structures, 5))
    group = zarr.open_group(store, mode="r+")
    group.attrs.put(marker)
    assert [fields_of(data) for data in read_all(store)] == before
    new = structures(2, seed=9)
    writer.append(new)
    assert [fields_of(data) for data in read_all(store)] == before + [fields_of(data) for data in new]
    assert group["meta/samples_mask"].shape == (22,)
    assert group["core/positions"].shape[0] == group["meta/atoms_ptr"][22] == group["meta/atoms_mask"].shape[0]


def failing(data):
    yield from data
    raise OSError("no space")


def test_feeding_interrupted_write_leaves_nothing(tmp_path, structures):
    with pytest.raises(OSError, match="no space"):
        AtomicDataZarrWriter(tmp_path / "s", SMALL_CHUNKS).write(failing(structures(7)))
    assert list(tmp_path.iterdir()) == []


def test_feeding_interrupted_append_changes_nothing(store, structures):
    before = [fields_of(data) for data in read_all(store)]
    with pytest.raises(OSError, match="no space"):
        AtomicDataZarrWriter(store, SMALL_CHUNKS).append(failing(structures(7)))
    assert [fields_of(data) for data in read_all(store)] == before


KILLED = """
import os, sys
from feeding_stores import SMALL_CHUNKS, fields_of
from feeding_structures import make_structures
from nvalchemi_lightning.data import AtomicDataZarrWriter
from nvalchemi_lightning.data.store.layout import ZarrWriteConfig
def fatal():
    yield from make_structures(7)
    os._exit(9)
writer = AtomicDataZarrWriter(sys.argv[1], ZarrWriteConfig(chunk_bytes=64, block_size=3))
getattr(writer, sys.argv[2])(fatal())
"""


@pytest.mark.parametrize("step", ["write", "append"])
def test_feeding_killed_writer_leaves_what_was_there(tmp_path, structures, step):
    path = tmp_path / "s"
    if step == "append":
        AtomicDataZarrWriter(path).write(structures(4))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", KILLED, path, step], env=environment, check=False, timeout=120)
    assert done.returncode == 9
    assert path.exists() == (step == "append")
    if step == "append":
        assert len(read_all(path)) == 4


def spoiled(store: Path, path: str, change) -> AtomicDataZarrReader:
    array = zarr.open_group(store, mode="r+")[path]
    array[:] = change(array[:])
    return AtomicDataZarrReader(store)


def test_feeding_damaged_neighbor_list_is_found(tmp_path, structures):
    AtomicDataZarrWriter(tmp_path / "s").write(structures(5, edges=True))
    reader = spoiled(tmp_path / "s", "core/neighbor_list", lambda pairs: np.where(pairs > 6, pairs - 7, pairs))
    with pytest.raises(
        StoreError, match=r"s: core/neighbor_list of sample \d has the pair \[.*-\d.* its atoms are 0 to"
    ):
        reader.read_batch(range(5))
    assert len(AtomicDataZarrReader(tmp_path / "s", fields=["energy"]).read_batch(range(5))) == 5


def test_feeding_damaged_pointers_are_found(store):
    reader = spoiled(store, "meta/atoms_ptr", lambda ptr: ptr[::-1].copy())
    with pytest.raises(StoreError, match=r"meta/atoms_ptr does not ascend from 0 over 20 samples"):
        len(reader)


def test_feeding_short_array_is_found(store):
    group = zarr.open_group(store, mode="r+")
    group["core/energy"].resize((15, 1))
    with pytest.raises(StoreError, match=r"core/energy has 15 rows but 20 samples need 20"):
        AtomicDataZarrReader(store).read_batch([0])
    group["meta/atoms_ptr"].resize((10,))
    with pytest.raises(StoreError, match=r"meta/atoms_ptr has 10 rows but 20 samples need one more"):
        AtomicDataZarrWriter(store).append(make_structures(1))


def test_feeding_bad_commit_marker_is_found(store):
    group = zarr.open_group(store, mode="r+")
    group.attrs["num_samples"] = 21
    with pytest.raises(StoreError, match="num_samples is 21 but meta/samples_mask has only 20 rows"):
        len(AtomicDataZarrReader(store))
    group.attrs["num_samples"] = "many"
    with pytest.raises(StoreError, match="num_samples is 'many', which is not a count"):
        len(AtomicDataZarrReader(store))


def test_feeding_missing_array_and_chunk_are_found(store):
    shutil.rmtree(store / "core" / "energy")
    with pytest.raises(StoreError, match="the array core/energy is missing"):
        AtomicDataZarrReader(store).read_batch([0])
    shutil.rmtree(store / "core" / "atomic_numbers" / "c")
    with pytest.raises(StoreError, match="sample 3 has an atomic number of 0 in core/atomic_numbers"):
        AtomicDataZarrReader(store, fields=["forces"]).read_batch([3])


@pytest.mark.parametrize("shard_size", [None, 4])
def test_feeding_undecodable_chunk_is_found(tmp_path, structures, shard_size):
    config = ZarrWriteConfig(core=ZarrArrayConfig(chunk_size=4, shard_size=shard_size))
    AtomicDataZarrWriter(tmp_path / "s", config).write(structures(9))
    (tmp_path / "s" / "core" / "energy" / "c" / "1" / "0").write_bytes(b"nonsense" * 9)
    reader = AtomicDataZarrReader(tmp_path / "s")
    assert reader.read(0)[0]["energy"].item() == 0.0
    with pytest.raises(StoreError, match=r"s: rows 4 to 7 of core/energy cannot be decoded"):
        reader.read(5)


def test_feeding_unknown_levels_are_refused(store, structures):
    group = zarr.open_group(store, mode="r+")
    group.attrs["levels"] = {"version": 1, "definitions": {"bond": {"kind": "segmented"}}}
    assert len(AtomicDataZarrReader(store)) == 20
    with pytest.raises(StoreError, match="has levels of its own beside atom, edge and system"):
        AtomicDataZarrWriter(store).append(structures(1))
    group.attrs["fields"] = {**group.attrs["fields"], "levels": {"angle": "bond"}}
    AtomicDataZarrWriter(store).add_custom("gap", torch.arange(20.0), "system")
    group = zarr.open_group(store, mode="r+")
    assert group.attrs["fields"]["levels"] == {"angle": "bond"}
    assert len(AtomicDataZarrReader(store)) == 20
    group.attrs["fields"] = {"core": {"positions": "atm"}}
    with pytest.raises(StoreError, match="field core/positions has level 'atm'; known are atom, edge, system"):
        AtomicDataZarrReader(store)


# Laziness -------------------------------------------------------------------------------------------------------


def test_feeding_construction_touches_no_chunk(store):
    """B39: opening reads metadata alone, and a reader pickles small."""
    for chunks in store.glob("*/*/c"):
        chunks.rename(chunks.with_name("hidden"))
    reader = AtomicDataZarrReader(store)
    assert len(reader.field_names) == 4
    for chunks in store.glob("*/*/hidden"):
        chunks.rename(chunks.with_name("c"))
    assert len(reader) == 20
    reader.read_batch(range(20))
    assert len(pickle.dumps(reader)) < 1000
    assert len(pickle.loads(pickle.dumps(reader)).read_batch([1, 2])) == 2


def test_feeding_refresh_sees_appended_structures(store, structures):
    with AtomicDataZarrReader(store) as reader:
        assert len(reader) == 20
        AtomicDataZarrWriter(store).append(structures(3))
        assert len(reader) == 20
        reader.refresh()
        assert len(reader) == 23
    assert reader._opened is None
    assert len(reader) == 23


COMPRESSED = ZarrWriteConfig(core=ZarrArrayConfig(compressors=ZstdCodec()), chunk_bytes=64, block_size=3)


def test_feeding_each_chunk_is_decoded_once_per_batch(tmp_path, structures, monkeypatch):
    """B113: even without any cache, and with one that holds everything only once at all."""
    AtomicDataZarrWriter(tmp_path / "s", COMPRESSED).write(structures(30))
    reads: list[Path] = []
    original = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: (reads.append(path), original(path))[1])
    reader = AtomicDataZarrReader(tmp_path / "s", cache_bytes=0)
    reader.read_batch(np.random.default_rng(0).permutation(30))
    chunks = [path for path in reads if path.name != "zarr.json" and "core" in path.parts]
    assert len(chunks) > 30
    assert len(chunks) == len(set(chunks))
    reads.clear()
    reader = AtomicDataZarrReader(tmp_path / "s")
    reader.read_batch(range(30))
    count = len(reads)
    reader.read_batch(range(30))
    assert len(reads) == count


@pytest.mark.parametrize("compressors", [None, ZstdCodec()])
def test_feeding_cache_is_bounded(tmp_path, structures, compressors):
    """Arrays that fit are kept whole, of the others some chunks; without compression none."""
    config = ZarrWriteConfig(core=ZarrArrayConfig(compressors=compressors), chunk_bytes=64)
    AtomicDataZarrWriter(tmp_path / "s", config).write(structures(60))
    reader = AtomicDataZarrReader(tmp_path / "s", cache_bytes=1000)
    everything = reader.read_batch(range(60))
    cache = reader._here._cache
    held = sum(chunk.nbytes for chunk in cache._chunks.values())
    assert cache._held == held
    assert cache._limit < 1000
    # The chunk that was asked for last is kept whatever its size.
    assert held <= cache._limit or len(cache._chunks) == 1
    assert (held == 0) == (compressors is None)
    order = np.random.default_rng(1).permutation(60)
    assert torch.equal(reader.read_batch(order).energy, everything.energy[order])


def test_feeding_floating_fields_are_stored_as_they_are(store):
    """B113: rows without compression are read alone, and digits hardly compress."""
    stored = zarr.open_group(store, mode="r")
    assert stored["core/forces"].compressors == ()
    assert len(stored["core/atomic_numbers"].compressors) == 1
    (store / "core" / "forces" / "c" / "0" / "0").write_bytes(b"short")
    with pytest.raises(StoreError, match=r"rows 0 to \d+ of core/forces cannot be decoded"):
        AtomicDataZarrReader(store, cache_bytes=0).read(3)
    (store / "core" / "forces" / "c" / "0" / "0").unlink()
    assert not AtomicDataZarrReader(store, cache_bytes=0).read(3)[0]["forces"].any()


def test_feeding_consolidated_metadata_is_not_believed(store, structures):
    """A consolidated copy of the metadata is not told when an array grows."""
    with pytest.warns(UserWarning, match="[Cc]onsolidated"):
        zarr.consolidate_metadata(store)
    AtomicDataZarrWriter(store).append(structures(2))
    assert len(read_all(store)) == 22


# What a reader tells --------------------------------------------------------------------------------------------


def test_feeding_reader_describes_the_store(store):
    AtomicDataZarrWriter(store).delete(3)
    reader = AtomicDataZarrReader(store)
    atoms = reader.level_sizes()["node"]
    assert reader.level_sizes() == {"node": atoms, "edge": 0, "system": 20}
    assert (reader.num_samples, len(reader)) == (20, 19)
    assert reader.schema()["forces"] == ("node", np.dtype("float32"), (3,))
    assert reader.schema()["energy"].level == "system"
    assert reader.field_array("forces").shape == (atoms, 3)
    reader.check_integrity()
    with pytest.raises(UnknownNameError, match="has no field 'force'; did you mean 'forces'"):
        reader.field_array("force")


class Numbered(Reader):
    field_levels = {"site": "node"}  # noqa: RUF012

    def __len__(self):
        return 5

    def _load_sample(self, index):
        return {
            "positions": torch.zeros(2, 3),
            "atomic_numbers": torch.ones(2, dtype=torch.int64),
            "energy": torch.full((1, 1), float(index)),
            "site": torch.arange(2),
        }


class Together(Reader):
    def __len__(self):
        return 20

    def _load_many_samples(self, indices):
        made = make_structures(20)
        return [made[index] for index in indices]


def test_feeding_readers_of_ones_own():
    """A format of one's own needs a length and one method."""
    reader = Numbered()
    assert reader.read_batch([4, -4]).energy.flatten().tolist() == [4.0, 1.0]
    assert reader.read_batch([0]).field_levels["site"] == "node"
    tensors, origin = reader[-1]
    assert tensors["energy"].item() == 4.0
    assert origin == {"index": 4, "source_file": "Numbered"}
    loader = DataLoader(Dataset(Together()), batch_size=8)
    assert [batch.energy.flatten().tolist()[0] for batch in loader] == [0.0, 8.0, 16.0]
    assert Together().read(2)[0]["energy"].item() == 2.0
    with pytest.raises(IndexError, match="Numbered: sample 5 is out of range for 5 samples"):
        reader.read(5)
    incomplete = type("Incomplete", (Reader,), {"__len__": lambda _: 1})()
    with pytest.raises(ConfigurationTypeError, match=r"Incomplete needs _load_sample\(index\) or _load_many_samples"):
        incomplete.read(0)
