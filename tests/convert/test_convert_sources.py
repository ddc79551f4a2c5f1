"""Reading structures from files and stores (B03, B11, B23, B24, B52, B121)."""

from __future__ import annotations

import gzip
import sqlite3

import pytest
import torch
from convert_rigs import DIALECTS, frame_text, write_frames

from nvalchemi_lightning.data import AtomicDataZarrWriter, Dialect, open_source, read_structures
from nvalchemi_lightning.errors import ConfigurationError, DataError, LabelNotFoundError, StoreError, UnknownNameError

pytest.importorskip("ase")
import ase.db
import ase.io
from ase.build import bulk, molecule
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator


def structures(path, *dialect):
    return [data for _, data in read_structures(path, *dialect)]


@pytest.mark.parametrize("name", DIALECTS)
def test_five_dialects_say_the_same_b23(shared, name):
    folder = shared / "data" / "dialects"
    found = structures(folder / f"{name}.extxyz", DIALECTS[name])
    wanted = structures(folder / "ase_standard.extxyz")
    for one, other in zip(found, wanted, strict=True):
        assert one.field_levels == other.field_levels
        torch.testing.assert_close(one.energy, other.energy, rtol=1e-15, atol=0.0)
        torch.testing.assert_close(one.stress, other.stress, rtol=0.0, atol=1e-15)
        torch.testing.assert_close(one.forces, other.forces, rtol=0.0, atol=3e-7)  # 1e-8 Ha/Bohr: what the text has


@pytest.mark.parametrize("name", [name for name in DIALECTS if name != "ase_standard"])
def test_labels_under_other_names_are_not_passed_over_b03(shared, name):
    path = shared / "data" / "dialects" / f"{name}.extxyz"
    with pytest.raises(
        LabelNotFoundError, match=f"{name}.extxyz has no energy under the key 'energy', but {DIALECTS[name].energy_key}"
    ):
        structures(path)


def test_without_labels_when_that_is_said(shared):
    path = shared / "data" / "dialects" / "ref_prefix_stress9.extxyz"
    found = structures(path, Dialect(energy_key=None, forces_key=None, stress_key=None))
    assert {*found[0].field_levels} == {"positions", "atomic_numbers", "cell", "pbc"}


def test_plain_structures_need_no_labels(tmp_path):
    ase.io.write(tmp_path / "w.xyz", [molecule("H2O")] * 2, format="xyz")
    assert [data.num_nodes for data in structures(tmp_path / "w.xyz")] == [3, 3]


def test_a_label_of_some_structures_is_no_reason_to_refuse_b11(shared):
    found = structures(shared / "data" / "mixed_missing_labels.extxyz.gz")
    counts = {label: sum(label in data for data in found) for label in ("energy", "forces", "stress")}
    assert counts == {"energy": 353, "forces": 343, "stress": 160}


def test_every_legal_frame_is_read_b24(shared):
    found = structures(shared / "data" / "nasty" / "nasty_valid.extxyz")
    assert len(found) == 25
    assert min(data.energy.item() for data in found) < -2.4e6


def test_the_large_energy_keeps_its_digits_b52(shared):
    path = shared / "data" / "nasty" / "nasty_valid.extxyz"
    exact = [atoms.get_potential_energy() for atoms in ase.io.iread(path)]
    source = open_source(path, dtype=torch.float32)
    found = [data for _, data in source]
    assert {data.energy.dtype for data in found} == {torch.float64}
    assert {data.forces.dtype for data in found} == {torch.float32}
    assert [data.energy.item() for data in found] == exact


REFUSED = {
    3: "forces holds .* inf.* at row 3",
    5: "positions holds .*nan.* at row 2",
    7: "the lattice vectors of the periodic directions are zero or linearly dependent",
    8: "the lattice vectors of the periodic directions are zero or linearly dependent",
    9: "cell holds .*nan",
    10: "atomic_numbers holds 0 at row 0: not an element",
    13: "energy is 1e.39 eV, too large for torch.float32",
}


def test_invalid_frames_are_refused_by_number(shared):
    path = shared / "data" / "nasty" / "nasty_invalid.extxyz"
    skips = []
    kept = [
        number
        for number, _ in read_structures(open_source(path, dtype=torch.float32), on_error="skip", on_skip=skips.append)
    ]
    assert kept == [0, 1, 2, 4, 6, 11, 12]
    assert [skip.number for skip in skips] == [*REFUSED]
    for number, reason in skips:
        with pytest.raises(DataError, match=rf"nasty_invalid.extxyz: frame {number}: {REFUSED[number]}"):
            raise reason


MALFORMED = {
    "binary_garbage.extxyz": "frame 0: it cannot be read .UnicodeDecodeError",
    "bom_prefix.extxyz": "frame 0: the file begins with a byte-order mark; save it as UTF-8 without one",
    "empty_file.extxyz": "empty_file.extxyz holds no structures",
    "missing_force_columns.extxyz": "frame 0: atom 0 has 5 columns, but Properties=.* names 7",
    "not_really_gzip.extxyz.gz": "frame 0: it cannot be read .BadGzipFile",
    "text_in_force_column.extxyz": "frame 0: it cannot be read .ValueError: could not convert string to float: 'abc'",
    "truncated.extxyz.gz": "frame 1: it cannot be read .EOFError: Compressed file ended before",
    "truncated_mid_frame.extxyz": "frame 1: the file ends after 8 of 12 atoms",
    "wrong_atom_count.extxyz": "frame 0: atom 2 has 1 columns, but Properties=.* names 7",
    "zero_atoms.extxyz": "frame 0: a structure needs at least one atom",
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_files_are_refused_by_frame(shared, name):
    with pytest.raises(DataError, match=MALFORMED[name]) as error:
        structures(shared / "data" / "nasty" / "malformed" / name)
    assert name in str(error.value)


@pytest.mark.parametrize("name", ["no_pbc_key_no_lattice.extxyz", "plain_xyz.xyz", "windows_line_endings.extxyz"])
def test_unusual_files_are_read(shared, name):
    path = shared / "data" / "nasty" / "malformed" / name
    assert len(structures(path)) == len(ase.io.read(path, ":"))


def test_a_stress_that_is_not_symmetric(shared):
    path = shared / "data" / "nasty" / "asymmetric_stress.extxyz"
    with pytest.raises(DataError, match=r"frame 0: stress is not symmetric, transposed entries differ by 0.05"):
        structures(path, Dialect(stress_key="REF_stress"))


def test_ase_would_take_the_upper_triangle(tmp_path):
    head = 'Lattice="9 0 0 0 9 0 0 0 9" Properties=species:S:1:pos:R:3:forces:R:3 energy=1 stress="1 2 3 0 1 2 0 0 1"'
    path = write_frames(tmp_path / "a.extxyz", frame_text(head=head))
    with pytest.raises(DataError, match="frame 0: stress is not symmetric"):
        structures(path)


@pytest.mark.parametrize("key", ["stress", "dft_stress"])
def test_six_numbers_in_the_order_that_is_given_b23(tmp_path, key):
    head = f'Lattice="9 0 0 0 9 0 0 0 9" Properties=species:S:1:pos:R:3:forces:R:3 energy=1 {key}="1 2 3 4 5 6"'
    path = write_frames(tmp_path / "a.extxyz", frame_text(head=head))
    (data,) = structures(path, Dialect(stress_key=key, stress_order="vasp", stress_sign="vasp"))
    assert data.stress.tolist() == [[[-1, -4, -6], [-4, -2, -5], [-6, -5, -3]]]


def crystal():
    atoms = bulk("Cu", cubic=True)
    atoms.rattle(0.1, seed=1)
    atoms.calc = EMT()
    return atoms


def test_a_virial_becomes_a_stress_b23(tmp_path):
    atoms = crystal()
    stress = atoms.get_stress(voigt=False)
    plain = bulk("Cu", cubic=True)
    plain.positions = atoms.positions
    plain.info["virial"] = -atoms.get_volume() * stress
    ase.io.write(tmp_path / "v.extxyz", plain)
    (data,) = structures(tmp_path / "v.extxyz", Dialect(virial_key="virial"))
    assert "virial" not in data
    torch.testing.assert_close(data.stress[0], torch.tensor(stress), rtol=1e-7, atol=1e-12)


def test_a_virial_without_a_volume_stays_one(tmp_path):
    head = 'Properties=species:S:1:pos:R:3:forces:R:3 energy=1 virial="1 0 0 0 1 0 0 0 1"'
    path = write_frames(tmp_path / "v.extxyz", frame_text(head=head))
    (data,) = structures(path, Dialect(virial_key="virial", virial_unit="meV"))
    assert "stress" not in data
    assert data.virial[0].tolist() == (0.001 * torch.eye(3)).tolist() or data.virial[0].trace().item() == pytest.approx(
        0.003
    )


def test_lengths_are_converted(tmp_path):
    head = 'Lattice="9 0 0 0 9 0 0 0 9" Properties=species:S:1:pos:R:3:forces:R:3 energy=1'
    path = write_frames(tmp_path / "b.extxyz", frame_text(head=head))
    (metric,), (atomic,) = structures(path), structures(path, Dialect(length_unit="Bohr"))
    torch.testing.assert_close(atomic.positions, 0.5291772105638411 * metric.positions, rtol=1e-15, atol=0.0)
    torch.testing.assert_close(atomic.cell, 0.5291772105638411 * metric.cell, rtol=1e-15, atol=0.0)


@pytest.mark.parametrize("suffix", ["traj", "db", "json", "extxyz.gz", "extxyz.bz2", "extxyz.xz", "xyz"])
def test_whatever_ase_reads_b03(tmp_path, suffix):
    atoms = crystal()
    atoms.get_stress()
    path = tmp_path / f"c.{suffix}"
    if suffix in ("db", "json"):
        with ase.db.connect(path) as database:
            database.write(atoms)
    else:
        ase.io.write(path, [atoms], format="extxyz" if "xyz" in suffix else None)
    (data,) = structures(path)
    assert data.energy.item() == pytest.approx(atoms.get_potential_energy(), abs=1e-12)
    torch.testing.assert_close(data.forces, torch.tensor(atoms.get_forces()), rtol=0.0, atol=1e-8)
    torch.testing.assert_close(data.stress[0], torch.tensor(atoms.get_stress(voigt=False)), rtol=0.0, atol=1e-12)


def test_labels_in_key_value_pairs_and_data_of_a_database(tmp_path):
    atoms = molecule("H2O")
    with ase.db.connect(tmp_path / "c.db") as database:
        database.write(atoms, dft_energy=-1.0, data={"dft_forces": torch.ones(3, 3).numpy()})
    dialect = Dialect(energy_key="dft_energy", energy_unit="Ha", forces_key="dft_forces")
    (data,) = structures(tmp_path / "c.db", dialect)
    assert data.energy.item() == pytest.approx(-27.2113860)
    assert data.forces.sum().item() == 9.0


def test_a_database_of_something_else_is_left_alone(tmp_path):
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE invoices (id INTEGER)")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(DataError, match=r"other\.db: frame 0: an SQLite file, but not a database of ASE"):
        structures(path)
    assert path.read_bytes() == before


def test_a_file_that_only_calls_itself_a_database(tmp_path):
    (tmp_path / "no.db").write_bytes(b"no database" * 100)
    with pytest.raises(DataError, match=r"no\.db: frame 0: not an SQLite file"):
        structures(tmp_path / "no.db")


def test_numbers_that_ase_has_converted_take_no_units_b23(tmp_path):
    atoms = molecule("H2O")
    atoms.calc = SinglePointCalculator(atoms, energy=-1.0)
    ase.io.write(tmp_path / "c.traj", atoms)
    with pytest.raises(DataError, match="energy_unit='Ha' cannot be: ASE has converted what it read from traj"):
        structures(tmp_path / "c.traj", Dialect(energy_unit="Ha"))
    with pytest.raises(DataError, match="length_unit='Bohr' cannot be"):
        structures(tmp_path / "c.traj", Dialect(length_unit="Bohr"))


def test_frames_have_numbers_and_can_begin_anywhere(tmp_path):
    path = write_frames(tmp_path / "n.extxyz", *[frame_text(number) for number in range(5)])
    frames = list(open_source(path).frames(start=3))
    assert [frame.number for frame in frames] == [3, 4]
    assert [frame.read().energy.item() for frame in frames] == [-3.5, -4.5]


def test_blank_lines_between_frames_lose_nothing(tmp_path):
    """ASE stops at the first."""
    path = write_frames(tmp_path / "n.extxyz", frame_text(0), "\n  \n", frame_text(1), "\n")
    assert len(structures(path)) == 2
    assert len(ase.io.read(path, ":")) == 1


def test_lattice_vectors_after_the_atoms(tmp_path):
    path = tmp_path / "v.xyz"
    ase.io.write(path, [bulk("Cu", cubic=True)] * 2, format="extxyz", vec_cell=True)
    found = structures(path)
    assert len(found) == 2
    assert found[1].cell[0].diagonal().tolist() == pytest.approx([3.61] * 3)


def test_a_damaged_frame_can_be_skipped(tmp_path):
    damaged = frame_text(1).replace("H", "Hx")
    path = write_frames(tmp_path / "d.extxyz", frame_text(0), damaged, frame_text(2))
    skips = []
    assert [number for number, _ in read_structures(path, on_error="skip", on_skip=skips.append)] == [0, 2]
    assert skips[0].number == 1
    assert [number for number, _ in read_structures(path, on_error="skip")] == [0, 2]
    with pytest.raises(DataError, match=r"d.extxyz: frame 1: it cannot be read .KeyError: 'Hx'"):
        structures(path)


def test_what_follows_a_wrong_count_cannot_be_skipped_to(tmp_path):
    path = write_frames(tmp_path / "d.extxyz", frame_text(0), frame_text(1).replace("3\n", "2\n", 1), frame_text(2))
    skips = []
    assert [number for number, _ in read_structures(path, on_error="skip", on_skip=skips.append)] == [0, 1]
    with pytest.raises(DataError, match="frame 2: expected the number of atoms, got 'H "):
        raise skips[0].reason


def test_iterating_again_begins_again(tmp_path):
    source = open_source(write_frames(tmp_path / "n.extxyz", frame_text(0), frame_text(1)))
    assert [number for number, _ in source] == [number for number, _ in source] == [0, 1]
    assert source.findings.frames == 2


def test_numbers_to_keep(tmp_path):
    head = 'Properties=species:S:1:pos:R:3:forces:R:3 energy=1 temperature=300 field="1 2 3" name=water'
    path = write_frames(tmp_path / "k.extxyz", frame_text(head=head))
    (data,) = structures(path, Dialect(keep=("temperature", "field")))
    assert data.temperature.tolist() == [[300.0]]
    assert data.field.tolist() == [[1.0, 2.0, 3.0]]
    with pytest.raises(DataError, match="frame 0: 'name' is not a number but 'water'"):
        structures(path, Dialect(keep=("name",)))


def test_stores_are_sources(tmp_path):
    path = write_frames(tmp_path / "n.extxyz", *[frame_text(number) for number in range(4)])
    wanted = structures(path)
    for data in wanted:
        data.add_system_property("weight", torch.ones(1, 1))
    writer = AtomicDataZarrWriter(tmp_path / "n.zarr")
    writer.write(wanted)
    writer.delete([1])
    source = open_source(tmp_path / "n.zarr")
    found = dict(source)
    assert [*found] == [0, 2, 3]
    assert all(found[number] == wanted[number] for number in found)
    assert source.findings.seen["energy"] == 3
    assert [frame.number for frame in source.frames(start=2)] == [2, 3]


def test_a_store_has_no_dialect(tmp_path):
    AtomicDataZarrWriter(tmp_path / "n.zarr").write(structures(write_frames(tmp_path / "n.extxyz", frame_text())))
    with pytest.raises(ConfigurationError, match=r"n\.zarr is a store, whose names and units are fixed"):
        open_source(tmp_path / "n.zarr", Dialect(energy_unit="Ha"))


def test_paths_that_are_no_source(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no file or store at .*nowhere"):
        open_source(tmp_path / "nowhere")
    with pytest.raises(StoreError, match="is not a Zarr group"):
        open_source(tmp_path)
    (tmp_path / "letter").write_text("Dear ASE, which format is this?", encoding="utf-8")
    with pytest.raises(DataError, match=r"letter: its format is not recognised .*; name it with format=..."):
        open_source(tmp_path / "letter")


def test_formats_by_name(tmp_path):
    path = write_frames(tmp_path / "frames.traj", frame_text())
    with pytest.raises(DataError, match=r"frames.traj: frame 0: it cannot be read"):
        structures(path)
    assert len(list(open_source(path, format="extxyz"))) == 1
    with pytest.raises(UnknownNameError, match="ASE has no format 'extxzy'; did you mean 'extxyz'"):
        open_source(path, format="extxzy")
    for name in ("postgresql", "gif"):
        with pytest.raises(ConfigurationError, match=f"files of the format '{name}' cannot be read"):
            open_source(path, format=name)


def test_compressed_files_are_read_in_order(tmp_path):
    with gzip.open(tmp_path / "n.extxyz.gz", "wt", encoding="utf-8") as file:
        file.writelines(frame_text(number) for number in range(50))
    assert [data.energy.item() for data in structures(tmp_path / "n.extxyz.gz")] == [-n - 0.5 for n in range(50)]
