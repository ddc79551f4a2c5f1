"""``nvalchemi-lightning data convert``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_rigs import run_here, run_process

from nvalchemi_lightning.cli.dialect_options import OPTIONS
from nvalchemi_lightning.data import AtomicDataZarrReader, Dialect, origin_of, provenance_of

pytest.importorskip("ase")

WATER = "O 0 0 0 1 0 0\nH 0 0 1 -1 0 0\nH 0 1 0 0 0 0\n"
PLAIN = "3\nProperties=species:S:1:pos:R:3:forces:R:3 energy=-1.5\n" + WATER
NAMED = '3\nProperties=species:S:1:pos:R:3:REF_forces:R:3 REF_energy=-1.5 temperature=300 lot="PBE"\n' + WATER


@pytest.fixture
def plain(tmp_path):
    """Return a file of ten structures under the names of ASE."""
    path = tmp_path / "plain.extxyz"
    path.write_text(10 * PLAIN, encoding="utf-8")
    return path


@pytest.fixture
def named(tmp_path):
    """Return a file of two structures under other names, in Ha and Ha/Bohr."""
    path = tmp_path / "named.extxyz"
    path.write_text(2 * NAMED, encoding="utf-8")
    return path


def test_the_options_are_those_of_a_dialect():
    assert {*OPTIONS} == {*Dialect.model_fields}


def test_help_is_light_and_names_units():
    done = run_process("data", "convert", "--help")
    assert done.code == 0
    for option in OPTIONS:
        assert f"--{option.replace('_', '-')}" in done.out
    assert "(default: eV)" in done.out


def test_a_file_becomes_a_store(capsys, plain):
    done = run_here(capsys, "data", "convert", plain, "p.zarr")
    assert done == (
        0,
        "store   structures\np.zarr          10\n\nlabel   structures\nenergy          10\nforces          10\n",
        "",
    )
    assert len(AtomicDataZarrReader("p.zarr")) == 10
    assert origin_of("p.zarr", 7) == (str(plain), 7)


def test_names_and_units(capsys, named):
    words = [
        "--energy-key",
        "REF_energy",
        "--forces-key",
        "REF_forces",
        "--energy-unit",
        "Ha",
        "--force-unit",
        "Ha/Bohr",
    ]
    done = run_here(capsys, "data", "convert", named, "n.zarr", *words)
    assert "not stored: temperature (--keep NAME keeps a number)" in done.out
    batch = AtomicDataZarrReader("n.zarr").read_batch([0])
    assert batch.energy.item() == pytest.approx(-40.8170790)
    assert batch.forces[0, 0].item() == pytest.approx(51.4220671)
    assert provenance_of("n.zarr").sources[0].dialect["force_unit"] == "Ha/Bohr"
    done = run_here(capsys, "data", "convert", named, "k.zarr", *words, "--keep", "temperature")
    assert "not stored" not in done.out
    assert AtomicDataZarrReader("k.zarr").read_batch([1]).temperature.item() == 300.0


def test_names_that_are_not_given_are_refused_b03(capsys, named):
    done = run_here(capsys, "data", "convert", named, "n.zarr")
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert "but REF_energy may be it; say energy_key='REF_energy' (--energy-key REF_energy)" in done.err
    assert (
        run_here(capsys, "data", "convert", named, "n.zarr", "--energy-key", "none", "--forces-key", "none").code == 0
    )
    assert "energy" not in AtomicDataZarrReader("n.zarr").field_names


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--energy-unit", "kcal"], "'kcal' is not a unit of energy; did you mean 'kcal/mol'"),
        (["--stress-order", "xx"], "stress_order must be 'ase' (xx yy zz yz xz xy), 'vasp'"),
        (["--stress-key", "none", "--stress-unit", "GPa"], "stress_unit says how to read stress, but stress_key=None"),
        (["--append", "--overwrite"], "--append and --overwrite are two things"),
        (["--split", "0.9;0.1"], "--split must be like 0.9,0.1 or train=0.9,val=0.1, got '0.9;0.1'"),
        (["--split", "0.9,0.2"], "must be positive and add up to 1"),
        (["--format", "xzy"], "ASE has no format 'xzy'; did you mean 'xyz'"),
    ],
)
def test_wrong_options_are_one_line(capsys, plain, words, message):
    done = run_here(capsys, "data", "convert", plain, "p.zarr", *words)
    assert done.code == 2
    assert message in done.err
    assert done.err.count("\n") == 1
    assert not Path("p.zarr").exists()


def test_parts(capsys, plain):
    done = run_here(capsys, "data", "convert", plain, "p.zarr", "--split", "0.8,0.1,0.1", "--seed", 3)
    assert done.out.splitlines()[:4] == [
        "store         structures",
        "p_train.zarr           8",
        "p_val.zarr             1",
        "p_test.zarr            1",
    ]
    assert run_here(capsys, "data", "convert", plain, "q.zarr", "--split", "fit=0.5, hold=0.5").code == 0
    assert len(AtomicDataZarrReader("q_hold.zarr")) == 5


def test_what_is_there(capsys, plain):
    for words, code, size in (([], 0, 10), ([], 2, 10), (["--append"], 0, 20), (["--overwrite"], 0, 10)):
        done = run_here(capsys, "data", "convert", plain, "p.zarr", *words)
        assert (done.code, len(AtomicDataZarrReader("p.zarr"))) == (code, size)
    assert run_here(capsys, "data", "convert", plain, "p.zarr").err.startswith("error: p.zarr exists; append to it")


def test_damaged_frames(capsys, plain):
    plain.write_text(PLAIN + PLAIN.replace("energy=-1.5", "energy=inf") * 12 + PLAIN, encoding="utf-8")
    done = run_here(capsys, "data", "convert", plain, "p.zarr")
    assert done.code == 2
    assert done.err.startswith(f"error: {plain}: frame 1: energy holds [inf] at row 0")
    assert not [*Path().glob(".*")]
    done = run_here(capsys, "data", "convert", plain, "p.zarr", "--on-error", "skip")
    assert done.code == 0
    assert "left out: 12 frames that cannot be read" in done.out
    assert done.out.count("energy holds [inf]") == 10
    assert "and 2 more; the store lists them all" in done.out
    assert "omitted: 12" in run_here(capsys, "data", "inspect", "p.zarr").out


def test_json(capsys, plain):
    done = run_here(capsys, "data", "convert", plain, "p.zarr", "--json")
    found = json.loads(done.out)
    assert found["stores"] == {"p.zarr": 10}
    assert found["labels"]["energy"] == 10
    assert found["omitted"] == []


def test_a_file_that_is_not_there(capsys):
    done = run_here(capsys, "data", "convert", "nowhere.xyz", "p.zarr")
    assert (done.code, done.err) == (2, "error: there is no file or store at nowhere.xyz\n")


def test_a_store_says_where_it_is_from(capsys, named):
    words = ["--energy-key", "REF_energy", "--forces-key", "none"]
    run_here(capsys, "data", "convert", named, "n.zarr", *words)
    done = run_here(capsys, "data", "inspect", "n.zarr")
    assert f"sources: {named}" in done.out
    assert "units: energy eV, length A" in done.out


def test_interrupted_from_the_keyboard(capsys, plain, monkeypatch):
    """One line says how to go on, and that does."""

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("nvalchemi_lightning.data.conversion.run.finish", stop)
        done = run_here(capsys, "data", "convert", plain, "p.zarr")
    assert done == (1, "", "interrupted; the same command with --resume goes on where it stopped\n")
    assert run_here(capsys, "data", "convert", plain, "p.zarr", "--resume").code == 0
    assert len(AtomicDataZarrReader("p.zarr")) == 10
