"""Converting files to stores: fields, coverage, parts, origins, refusals (B03, B11, B49, B52, B81)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import zarr
from convert_rigs import DIALECTS, frame_text, write_frames
from hypothesis import given
from hypothesis import strategies as st

from nvalchemi_lightning.data import (
    AtomicData,
    AtomicDataZarrReader,
    AtomicDataZarrWriter,
    DataLoader,
    Dataset,
    Dialect,
    NeighborListTransform,
    ZarrWriteConfig,
    convert,
    open_source,
    origin_of,
    provenance_of,
    read_structures,
)
from nvalchemi_lightning.data.conversion.parts import checked_fractions, part_path, random_parts
from nvalchemi_lightning.data.edge_cutoff import reach_of
from nvalchemi_lightning.errors import ConfigurationError, DataError, LabelNotFoundError, StoreError, UnknownNameError

pytest.importorskip("ase")

SMALL = ZarrWriteConfig(block_size=4)


@pytest.fixture
def water(tmp_path):
    """Return a file of ten structures."""
    return write_frames(tmp_path / "water.extxyz", *[frame_text(number) for number in range(10)])


def energies(store):
    return AtomicDataZarrReader(store).read_batch(slice(None)).energy[:, 0].tolist()


@pytest.mark.parametrize("name", DIALECTS)
def test_five_dialects_make_the_same_store_b23(shared, tmp_path, name):
    folder = shared / "data" / "dialects"
    convert(folder / f"{name}.extxyz", tmp_path / "a.zarr", DIALECTS[name], dtype="float64")
    convert(folder / "ase_standard.extxyz", tmp_path / "b.zarr", dtype="float64")
    found, wanted = (AtomicDataZarrReader(tmp_path / f"{store}.zarr").read_batch(slice(None)) for store in "ab")
    assert found.field_levels == wanted.field_levels
    for label, tolerance in {"energy": 1e-15, "forces": 3e-7, "stress": 1e-15}.items():
        torch.testing.assert_close(found[label], wanted[label], rtol=1e-15, atol=tolerance)


@pytest.mark.parametrize("name", ["mixed_missing_labels", "mixed_missing_as_nan"])
def test_missing_labels_stay_missing_b11_b49(shared, tmp_path, name):
    path = shared / "data" / f"{name}.extxyz.gz"
    done = convert(path, tmp_path / "m.zarr")
    wanted = [data for _, data in read_structures(path)]
    counts = {label: sum(label in data for data in wanted) for label in ("energy", "forces", "stress")}
    assert {label: done.labels[label] for label in counts} == counts
    batch = AtomicDataZarrReader(tmp_path / "m.zarr").read_batch(slice(None))
    assert batch.energy.isfinite().sum() == counts["energy"]
    assert batch.stress.isfinite().all((1, 2)).sum() == counts["stress"]


def test_energies_keep_their_digits_and_the_rest_is_float32_b52(shared, tmp_path):
    path = shared / "data" / "nasty" / "nasty_valid.extxyz"
    convert(path, tmp_path / "n.zarr")
    exact = [data.energy.item() for _, data in read_structures(path)]
    assert energies(tmp_path / "n.zarr") == exact
    batch = next(iter(DataLoader(Dataset(AtomicDataZarrReader(tmp_path / "n.zarr")), batch_size=25)))
    assert (batch.positions.dtype, batch.forces.dtype, batch.energy.dtype) == (
        torch.float32,
        torch.float32,
        torch.float64,
    )


def test_float64_when_that_is_said(water, tmp_path):
    convert(water, tmp_path / "w.zarr", dtype="float64")
    assert AtomicDataZarrReader(tmp_path / "w.zarr").read_batch([0]).forces.dtype == torch.float64


def test_the_result_of_blocks_is_that_of_one_block(shared, tmp_path):
    path = shared / "data" / "mixed_missing_as_nan.extxyz.gz"
    convert(path, tmp_path / "a.zarr", config=ZarrWriteConfig(block_size=7))
    convert(path, tmp_path / "b.zarr")
    found, wanted = (AtomicDataZarrReader(tmp_path / f"{name}.zarr").read_batch(slice(None)) for name in "ab")
    for name, value in wanted:
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, equal_nan=True)


def test_nothing_is_left_beside_the_store(water, tmp_path):
    done = convert(water, tmp_path / "w.zarr")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w.zarr", "water.extxyz"]
    assert done.stores == {str(tmp_path / "w.zarr"): 10}
    assert done.structures == 10


def test_origins_and_provenance(water, tmp_path):
    damaged = write_frames(tmp_path / "d.extxyz", frame_text(20), frame_text(21).replace("H", "Hx"), frame_text(22))
    dialect = Dialect(energy_unit="Ha")
    done = convert([water, damaged], tmp_path / "w.zarr", dialect, on_error="skip", config=SMALL)
    store = tmp_path / "w.zarr"
    assert origin_of(store, 3) == (str(water), 3)
    assert origin_of(store, 10) == (str(damaged), 0)
    assert origin_of(store, 11) == (str(damaged), 2)
    with pytest.raises(IndexError, match=r"w.zarr: there is no structure 12; it has 12"):
        origin_of(store, 12)
    found = provenance_of(store)
    assert [source.name for source in found.sources] == [str(water), str(damaged)]
    assert found.sources[0].dialect == {"energy_unit": "Ha"}
    assert found.sources[0].size == water.stat().st_size
    assert found.units["energy"] == "eV"
    assert [(frame.source, frame.frame) for frame in found.omitted] == [(1, 1)]
    assert "KeyError: 'Hx'" in found.omitted[0].reason
    assert found.omitted == done.omitted


def test_a_store_that_says_nothing_about_itself(water, tmp_path):
    AtomicDataZarrWriter(tmp_path / "w.zarr").write([data for _, data in read_structures(water)])
    assert provenance_of(tmp_path / "w.zarr") is None
    assert origin_of(tmp_path / "w.zarr", 0) is None


def test_structures_that_were_added_without_an_origin(water, tmp_path):
    convert(water, tmp_path / "w.zarr")
    AtomicDataZarrWriter(tmp_path / "w.zarr").append(AtomicDataZarrReader(tmp_path / "w.zarr").read_batch([0]))
    assert origin_of(tmp_path / "w.zarr", 9) == (str(water), 9)
    assert origin_of(tmp_path / "w.zarr", 10) is None


def test_provenance_that_cannot_be_understood(water, tmp_path):
    convert(water, tmp_path / "w.zarr")
    zarr.open_group(tmp_path / "w.zarr").attrs["nvalchemi_lightning"] = {"version": 7}
    with pytest.raises(StoreError, match="nvalchemi_lightning cannot be understood: Input should be a valid str"):
        provenance_of(tmp_path / "w.zarr")


def test_each_source_its_own_dialect(shared, tmp_path):
    folder = shared / "data" / "dialects"
    done = convert({folder / f"{name}.extxyz": dialect for name, dialect in DIALECTS.items()}, tmp_path / "all.zarr")
    assert done.structures == 100
    found = np.array(energies(tmp_path / "all.zarr")).reshape(5, 20)
    np.testing.assert_allclose(found, np.broadcast_to(found[0], found.shape), rtol=1e-14)


def test_stores_can_be_converted_again(water, tmp_path):
    convert(water, tmp_path / "a.zarr")
    AtomicDataZarrWriter(tmp_path / "a.zarr").delete([0])
    convert([tmp_path / "a.zarr", water], tmp_path / "b.zarr", config=SMALL)
    assert energies(tmp_path / "b.zarr") == [*energies(tmp_path / "a.zarr"), *(-n - 0.5 for n in range(10))]
    assert origin_of(tmp_path / "b.zarr", 0) == (str(tmp_path / "a.zarr"), 1)


def test_edges_of_a_store_keep_their_cutoff(water, tmp_path):
    connect = NeighborListTransform(3.0)
    AtomicDataZarrWriter(tmp_path / "a.zarr").write([connect(data) for _, data in read_structures(water)])
    convert([tmp_path / "a.zarr"], tmp_path / "b.zarr", config=SMALL, split=[0.5, 0.5])
    found = AtomicDataZarrReader(tmp_path / "b_val.zarr").read_batch([0])
    place = origin_of(tmp_path / "b_val.zarr", 0).number
    wanted = AtomicDataZarrReader(tmp_path / "a.zarr").read_batch([place])
    assert found.neighbor_list.tolist() == wanted.neighbor_list.tolist()
    assert reach_of(found) == 3.0


def test_numbers_that_are_kept_are_nan_where_they_are_missing(tmp_path):
    head = "Properties=species:S:1:pos:R:3:forces:R:3 energy=1 temperature=300"
    path = write_frames(tmp_path / "k.extxyz", frame_text(0), frame_text(1, head=head))
    assert convert(path, tmp_path / "a.zarr").numbers == ("temperature",)
    done = convert(path, tmp_path / "b.zarr", Dialect(keep=("temperature",)))
    assert done.numbers == ()
    kept = AtomicDataZarrReader(tmp_path / "b.zarr").read_batch([0, 1]).temperature
    assert kept[0].isnan().all()
    assert kept[1].item() == 300.0


def test_keys_that_no_structure_has_are_refused_before_anything_is_written_b03(water, tmp_path):
    with pytest.raises(LabelNotFoundError, match=r"no energy under the key 'Energy', but energy may be it"):
        convert(water, tmp_path / "w.zarr", Dialect(energy_key="Energy"))
    message = (
        r"no structure of .*water.extxyz has the charges 'force'; did you mean 'forces'\? \(there are: energy, forc"
    )
    with pytest.raises(LabelNotFoundError, match=message):
        convert(water, tmp_path / "w.zarr", Dialect(charges_key="force"))
    with pytest.raises(LabelNotFoundError, match="has the number to keep 'temperature'"):
        convert(water, tmp_path / "w.zarr", Dialect(keep=("temperature",)))
    assert [path.name for path in tmp_path.iterdir()] == ["water.extxyz"]


def test_labels_under_other_names_are_found_out_before_anything_is_written_b03(shared, tmp_path):
    with pytest.raises(LabelNotFoundError, match=r"has no energy under the key 'energy', but REF_energy may be it"):
        convert(shared / "data" / "dialects" / "ref_prefix_stress9.extxyz", tmp_path / "w.zarr")
    assert not [*tmp_path.iterdir()]


def test_a_key_may_come_late(tmp_path):
    head = "Properties=species:S:1:pos:R:3:forces:R:3 REF_energy=-1"
    frames = [frame_text(number) for number in range(6)]
    path = write_frames(tmp_path / "l.extxyz", *frames, frame_text(6, head=head))
    done = convert(path, tmp_path / "l.zarr", Dialect(energy_key="REF_energy"))
    assert done.labels["energy"] == 1


def test_names_that_only_later_frames_have_are_found_out_at_the_end_b03(tmp_path):
    plain, named = (f"Properties=species:S:1:pos:R:3:forces:R:3 {more}" for more in ("", "my_energy=-1"))
    path = write_frames(tmp_path / "l.extxyz", frame_text(0, head=plain), frame_text(1, head=named))
    with pytest.raises(LabelNotFoundError, match="but my_energy may be it"):
        convert(path, tmp_path / "l.zarr", config=ZarrWriteConfig(block_size=1))
    assert [path.name for path in tmp_path.iterdir()] == ["l.extxyz"]


def test_names_about_labels_are_not_labels(tmp_path):
    head = "Properties=species:S:1:pos:R:3 energy_weight=1 kinetic_energy=2 energy_text=no energy_ok=T"
    path = write_frames(tmp_path / "l.extxyz", frame_text(0, head=head))
    assert convert(path, tmp_path / "l.zarr").labels["energy"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stress_unit": "GPa"}, "stress_unit is given, but no structure of .*water.extxyz has a label stress"),
        ({"stress_sign": "vasp"}, "stress_sign is given, but no structure"),
        ({"stress_order": "vasp"}, "stress_order is given, but no structure .* has a label stress or virial"),
        ({"dipole_unit": "Debye"}, "dipole_unit is given, but no structure"),
    ],
)
def test_units_of_labels_that_no_structure_has(water, tmp_path, options, message):
    with pytest.raises(ConfigurationError, match=message):
        convert(water, tmp_path / "w.zarr", Dialect(**options))
    assert [path.name for path in tmp_path.iterdir()] == ["water.extxyz"]


def test_a_sign_for_a_virial(tmp_path):
    head = 'Lattice="9 0 0 0 9 0 0 0 9" Properties=species:S:1:pos:R:3:forces:R:3 energy=1 virial="1 0 0 0 1 0 0 0 1"'
    path = write_frames(tmp_path / "v.extxyz", frame_text(head=head))
    with pytest.raises(ConfigurationError, match="stress_sign is given, but no structure"):
        convert(path, tmp_path / "v.zarr", Dialect(virial_key="virial", stress_sign="vasp"))
    convert(path, tmp_path / "v.zarr", Dialect(virial_key="virial", stress_order="vasp"))


def test_what_is_there_is_not_touched(water, tmp_path):
    convert(water, tmp_path / "w.zarr")
    other = write_frames(tmp_path / "o.extxyz", frame_text(77))
    with pytest.raises(FileExistsError, match=r"w.zarr exists; append to it, overwrite it"):
        convert(other, tmp_path / "w.zarr")
    damaged = write_frames(tmp_path / "d.extxyz", frame_text(20), frame_text(21).replace("H", "Hx"))
    with pytest.raises(DataError, match="frame 1: it cannot be read"):
        convert(damaged, tmp_path / "w.zarr", existing="overwrite")
    assert len(energies(tmp_path / "w.zarr")) == 10
    convert(other, tmp_path / "w.zarr", existing="overwrite")
    assert energies(tmp_path / "w.zarr") == [-77.5]


def test_appending(water, tmp_path):
    other = write_frames(tmp_path / "o.extxyz", *[frame_text(number) for number in range(70, 75)])
    convert(water, tmp_path / "w.zarr")
    done = convert(other, tmp_path / "w.zarr", existing="append", config=SMALL)
    assert done.structures == 5
    assert energies(tmp_path / "w.zarr") == [-n - 0.5 for n in (*range(10), *range(70, 75))]
    assert origin_of(tmp_path / "w.zarr", 9) == (str(water), 9)
    assert origin_of(tmp_path / "w.zarr", 12) == (str(other), 2)
    assert len(provenance_of(tmp_path / "w.zarr").sources) == 2


def test_appending_where_origins_are_not_known(water, tmp_path):
    AtomicDataZarrWriter(tmp_path / "w.zarr").write([data for _, data in read_structures(water)])
    convert(water, tmp_path / "w.zarr", existing="append")
    assert origin_of(tmp_path / "w.zarr", 3) is None
    assert origin_of(tmp_path / "w.zarr", 13) == (str(water), 3)


def test_appending_where_digits_would_be_lost(water, tmp_path):
    zeros = AtomicData(
        positions=torch.zeros(1, 3), atomic_numbers=torch.ones(1, dtype=torch.int32), energy=torch.ones(1, 1)
    )
    AtomicDataZarrWriter(tmp_path / "w.zarr").write([zeros])
    with pytest.raises(DataError, match=r"w.zarr stores energy as float32, but they are converted to float64"):
        convert(water, tmp_path / "w.zarr", existing="append")
    with pytest.raises(FileNotFoundError, match="there is no Zarr store at"):
        convert(water, tmp_path / "nowhere.zarr", existing="append")


def test_parts_at_random_are_exact_and_the_same_every_time(water, tmp_path):
    first = convert(water, tmp_path / "a.zarr", split=[0.7, 0.3], seed=5, config=SMALL)
    assert first.stores == {str(tmp_path / "a_train.zarr"): 7, str(tmp_path / "a_val.zarr"): 3}
    convert(water, tmp_path / "b.zarr", split={"train": 0.7, "val": 0.3}, seed=5)
    convert(water, tmp_path / "c.zarr", split=[0.7, 0.3], seed=6)
    parts = {name: [energies(tmp_path / f"{name}_{part}.zarr") for part in ("train", "val")] for name in "abc"}
    assert parts["a"] == parts["b"] != parts["c"]
    assert sorted(parts["a"][0] + parts["a"][1], reverse=True) == [-n - 0.5 for n in range(10)]
    place = energies(tmp_path / "a_val.zarr")[1]
    assert origin_of(tmp_path / "a_val.zarr", 1) == (str(water), int(-place - 0.5))
    assert not (tmp_path / "a.zarr").exists()


def test_parts_that_the_file_names(shared, tmp_path):
    path = shared / "data" / "emt_CuAlAu.extxyz.gz"
    done = convert(path, tmp_path / "e.zarr", split_by="split")
    assert done.stores == {
        str(tmp_path / f"e_{part}.zarr"): n for part, n in {"train": 480, "test": 60, "val": 60}.items()
    }
    wanted = [frame.number for frame in open_source(path).frames() if frame.load().info["split"] == "val"]
    assert [origin_of(tmp_path / "e_val.zarr", index).number for index in (0, 30, 59)] == [
        wanted[0],
        wanted[30],
        wanted[59],
    ]


def test_parts_may_be_numbers(tmp_path):
    heads = [f"Properties=species:S:1:pos:R:3:forces:R:3 energy=1 fold={number % 2}" for number in range(5)]
    path = write_frames(tmp_path / "f.extxyz", *[frame_text(number, head=head) for number, head in enumerate(heads)])
    assert [*convert(path, tmp_path / "f.zarr", split_by="fold").stores.values()] == [3, 2]


def test_a_structure_without_a_part(water, tmp_path):
    with pytest.raises(DataError, match=r"water.extxyz: frame 0 has no 'split' that names its part"):
        convert(water, tmp_path / "w.zarr", split_by="split")
    assert [path.name for path in tmp_path.iterdir()] == ["water.extxyz"]


def test_a_part_with_a_name_that_no_file_can_have(tmp_path):
    head = 'Properties=species:S:1:pos:R:3:forces:R:3 energy=1 split="../up"'
    path = write_frames(tmp_path / "f.extxyz", frame_text(head=head))
    with pytest.raises(ConfigurationError, match=r"'../up' cannot be the name of a part"):
        convert(path, tmp_path / "f.zarr", split_by="split")
    assert [path.name for path in tmp_path.iterdir()] == ["f.extxyz"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"split": [0.99, 0.01]}, ConfigurationError, "10 structures are too few for .*: val would be empty"),
        ({"split": [0.9, 0.2]}, ConfigurationError, "must be positive and add up to 1"),
        ({"split": [1.0]}, ConfigurationError, "split must be fractions for train, val, test"),
        ({"split": {"only": 1.0}}, ConfigurationError, "must be positive and add up to 1"),
        ({"split": {"a/b": 0.5, "c": 0.5}}, ConfigurationError, "'a/b' cannot be the name of a part"),
        ({"split": [0.5, 0.5], "split_by": "fold"}, ConfigurationError, "split and split_by are two ways"),
        (
            {"split": [0.5, 0.5], "existing": "append"},
            ConfigurationError,
            "are divided or appended, not both",
        ),
        ({"existing": "replace"}, UnknownNameError, "existing must be one of refuse, append, overwrite, got 'replace'"),
        ({"on_error": "ignore"}, UnknownNameError, "on_error must be one of raise, skip, got 'ignore'"),
        ({"dtype": "float16"}, UnknownNameError, "dtype must be one of float32, float64, got 'float16'"),
    ],
)
def test_options_that_cannot_work_b81(water, tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        convert(water, tmp_path / "w.zarr", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["water.extxyz"]


def test_nothing_to_convert(water, tmp_path):
    with pytest.raises(ConfigurationError, match="there is nothing to convert: sources is empty"):
        convert([], tmp_path / "w.zarr")
    with pytest.raises(ConfigurationError, match="one dialect for all sources, or a mapping"):
        convert({water: Dialect()}, tmp_path / "w.zarr", Dialect())


def test_when_every_frame_is_left_out(tmp_path):
    path = write_frames(tmp_path / "d.extxyz", frame_text(21).replace("H", "Hx"))
    with pytest.raises(DataError, match=r"no structure could be read; the first reason: .*d.extxyz: frame 0"):
        convert(path, tmp_path / "d.zarr", on_error="skip")
    assert [path.name for path in tmp_path.iterdir()] == ["d.extxyz"]


def test_fields_that_do_not_fit_together_name_the_frames(tmp_path):
    head = 'Properties=species:S:1:pos:R:3:forces:R:3 energy=1 field="{}"'
    path = write_frames(tmp_path / "k.extxyz", *[frame_text(head=head.format(numbers)) for numbers in ("1 2 3", "1 2")])
    with pytest.raises(DataError, match=r"from frame 0 of .*k.extxyz to frame 1 of .*: 'field' of sample 1 has rows"):
        convert(path, tmp_path / "k.zarr", Dialect(keep=("field",)))


@given(st.integers(10, 400), st.lists(st.integers(1, 9), min_size=2, max_size=4), st.integers(0, 5))
def test_parts_are_a_partition_of_the_right_sizes(count, weights, seed):
    fractions = {f"p{index}": weight / sum(weights) for index, weight in enumerate(weights)}
    try:
        parts = random_parts(count, checked_fractions(fractions), seed)
    except ConfigurationError:
        assert min(fractions.values()) * count < 1.0
        return
    assert sorted(np.concatenate([*parts.values()]).tolist()) == [*range(count)]
    assert all(abs(len(parts[name]) - fraction * count) < 1.0 for name, fraction in fractions.items())


def test_places_of_parts(tmp_path):
    assert part_path(tmp_path / "data.zarr", "val").name == "data_val.zarr"
    assert part_path(tmp_path / "data", "val").name == "data_val"
