"""Frames become structures many at a time: the same structures, and the same refusals, as one by one."""

from __future__ import annotations

from contextlib import suppress
from itertools import islice

import numpy as np
import pytest
import torch
from convert_rigs import DIALECTS, frame_text, write_frames
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nvalchemi_lightning.data import Batch, Dialect, convert, open_source, provenance_of
from nvalchemi_lightning.data.sources.extxyz import _parsed_by_ase, frame_texts, parse_frame
from nvalchemi_lightning.data.sources.extxyz_comment import parse_comment
from nvalchemi_lightning.data.sources.raw_structure import RawStructure, symmetric_matrix
from nvalchemi_lightning.errors import DataError

pytest.importorskip("ase")
import ase.io
from ase.build import bulk
from ase.calculators.emt import EMT


def loaded(source):
    """Return the frames of a source, read but not translated, up to what cannot be read."""
    found = []
    with suppress(DataError):
        found.extend((frame.number, frame.load()) for frame in islice(source.frames(), 120))
    return found


def one_by_one(source, frames):
    """Return the structures that are valid, as a batch, and the refusals."""
    structures, refusals = [], []
    for _, raw in frames:
        try:
            structures.append(source.translator(raw))
        except DataError as error:
            refusals.append(str(error))
    return Batch.from_data_list(structures) if structures else None, refusals


def same(found, wanted):
    """Compare bit by bit; a NaN is a NaN."""
    assert found.field_levels == wanted.field_levels
    for name, value in wanted:
        assert found[name].dtype == value.dtype
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, equal_nan=True)
    assert found.num_nodes_list == wanted.num_nodes_list


def compare(path, dialect=None, dtype=torch.float32):
    """Compare both ways, and what they found; return whether there was a block."""
    whole, single = (open_source(path, dialect, dtype=dtype) for _ in range(2))
    frames = loaded(whole)
    wanted, refusals = one_by_one(single, loaded(single))
    batch = whole.translator.block([raw for _, raw in frames]) if frames else None
    if batch is not None:
        assert not refusals
        same(batch, wanted)
        assert whole.findings.to_json() == single.findings.to_json()
    return batch is not None


VALID = ["3bpa_300K", "aspirin_test", "emt_CuAlAu", "ethanol_val", "methanol_train", "mixed_missing_as_nan"]
VALID += ["mixed_missing_labels", "mlearn_Ge_train", "mlearn_Si_test", "xtb_molecules"]


@pytest.mark.parametrize("name", VALID)
def test_blocks_are_the_structures_one_by_one(shared, name):
    for dtype in (torch.float32, torch.float64):
        assert compare(shared / "data" / f"{name}.extxyz.gz", dtype=dtype)


@pytest.mark.parametrize("name", DIALECTS)
def test_blocks_in_every_dialect_b23(shared, name):
    assert compare(shared / "data" / "dialects" / f"{name}.extxyz", DIALECTS[name])


@pytest.mark.parametrize("name", ["nasty_valid", "nasty_invalid", "asymmetric_stress"])
def test_what_is_unusual(shared, name):
    is_valid = name == "nasty_valid"
    assert compare(shared / "data" / "nasty" / f"{name}.extxyz", Dialect(stress_key="REF_stress")) is False or is_valid


def test_every_malformed_file(shared):
    for path in sorted((shared / "data" / "nasty" / "malformed").iterdir()):
        compare(path)


def test_files_of_other_formats(tmp_path):
    frames = [bulk("Cu").repeat((1, 1, number)) for number in (1, 2, 1)]
    for atoms in frames:
        atoms.calc = EMT()
        atoms.get_potential_energy()
    ase.io.write(tmp_path / "c.traj", frames)
    assert compare(tmp_path / "c.traj")
    assert not compare(tmp_path / "c.traj", Dialect(length_unit="Bohr"))  # ASE has converted them already.


NUMBERS = st.one_of(st.floats(-100, 100).map(repr), st.sampled_from(["nan", "0", "1e300", "inf", "-1e39", "3e38", "5"]))
LABELS = {
    "energy": 1,
    "REF_energy": 1,
    "charge": 1,
    "dipole": 3,
    "weight": 1,
    "virials": 9,
    "stress": 6,
}


@st.composite
def frame(draw):
    """Draw a frame whose labels may be missing, unknown or invalid."""
    atoms = draw(st.integers(1, 3))
    is_odd = draw(st.integers(0, 7)) == 7
    usual = NUMBERS if is_odd else st.one_of(st.sampled_from(["nan", "2"]), st.floats(-9, 9).map(repr))
    coordinate = NUMBERS if is_odd else st.floats(-9, 9).map(repr)
    more = draw(st.sampled_from(["", ":forces:R:3", ":charge:R:1", ":masses:R:1"]))
    head = [f"Properties=species:S:1:pos:R:3{more}"]
    lattice = draw(st.sampled_from(["", "5 0 0 0 5 0 0 0 5", "5 1 0 0 5 0 0 0 -4", *["5 0 0 0 5 0 0 5 0"] * is_odd]))
    if lattice:
        head += [f'Lattice="{lattice}"', draw(st.sampled_from(["", 'pbc="T T F"', 'pbc="F F F"']))]
    for name in draw(st.sets(st.sampled_from([*LABELS]))):
        number = draw(st.sampled_from(["0", "2", *["0.5"] * is_odd])) if name == "charge" else draw(usual)
        head.append(f'{name}="{" ".join([number] * LABELS[name])}"')
    columns = {"": 0, ":forces:R:3": 3}.get(more, 1)
    kinds = [coordinate] * 3 + [coordinate if "masses" in more else usual] * columns
    rows = [" ".join(["H", *map(draw, kinds)]) for _ in range(atoms)]
    return "\n".join([str(atoms), " ".join(head), *rows, ""])


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(texts=st.lists(frame(), min_size=1, max_size=4))
def test_whatever_frames_say(tmp_path, texts):
    for dialect in (Dialect(), Dialect(length_unit="Bohr", energy_unit="Ha", energy_per_atom=True)):
        compare(write_frames(tmp_path / "f.extxyz", *texts), dialect)


def test_a_frame_in_a_block_is_named_and_left_out_in_its_place(tmp_path):
    texts = [frame_text(number) for number in range(9)]
    texts[2] = texts[2].replace("energy=-2.5", "energy=inf")
    texts[4] = texts[4].replace("O ", "Ox ")
    texts[7] = texts[7].replace("energy=-7.5", "energy=1e39")
    path = write_frames(tmp_path / "f.extxyz", *texts)
    with pytest.raises(DataError, match=r"f.extxyz: frame 2: energy holds \[inf\] at row 0"):
        convert(path, tmp_path / "a.zarr")
    done = convert(path, tmp_path / "a.zarr", on_error="skip")
    assert [(frame.frame, done.structures) for frame in done.omitted] == [(2, 6), (4, 6), (7, 6)]
    assert provenance_of(tmp_path / "a.zarr").omitted == done.omitted


def parsed(parse, text, how):
    """Return what a parser gives, or what it raises."""
    try:
        return parse(text, how)
    except (DataError, ValueError, KeyError) as error:
        return type(error), str(error)


def test_frames_are_parsed_as_ase_parses_them(shared):
    """Bit by bit, for every file; a frame that is refused is refused for the same reason."""
    compared = refused = 0
    for path in sorted((shared / "data").rglob("*xyz*")):
        with suppress(DataError, OSError, EOFError, UnicodeDecodeError):
            for text in islice(frame_texts(path), 25):
                ours, ases = parsed(parse_frame, text, Dialect()), parsed(_parsed_by_ase, text, parse_comment)
                compared += 1
                if isinstance(ours, RawStructure):
                    same_raw(ours, ases)
                else:
                    refused += 1
                    assert ours == ases
    assert (compared > 300, refused > 1) == (True, True)


def same_raw(ours, ases):
    for field in ("numbers", "positions", "cell", "pbc"):
        assert getattr(ours, field).tobytes() == getattr(ases, field).tobytes()
    one, other = ({**raw.info, **raw.arrays, **raw.results} for raw in (ours, ases))
    assert {*one} | {"numbers", "positions"} == {*other} | {"numbers", "positions"}
    for name, value in one.items():
        if name == "stress":  # A matrix, where ASE makes six numbers of it.
            np.testing.assert_array_equal(value, symmetric_matrix(name, other[name])[0])
            continue
        assert np.asarray(value).tobytes() == np.asarray(other[name]).tobytes()
