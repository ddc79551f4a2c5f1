"""Frames of extended XYZ files say what ASE says that they say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from convert_rigs import frame_text, write_frames
from hypothesis import given
from hypothesis import strategies as st

from nvalchemi_lightning.data import AtomicData, read_structures
from nvalchemi_lightning.data.sources.extxyz import frame_texts
from nvalchemi_lightning.data.sources.extxyz_comment import parse_comment
from nvalchemi_lightning.errors import DataError

pytest.importorskip("ase")
import ase.io
from ase.io.extxyz import key_val_str_to_dict

NUMBERS = st.one_of(st.integers(-(10**22), 10**22).map(str), st.floats(allow_nan=False).map(repr))
WORDS = st.one_of(NUMBERS, st.sampled_from(["T", "F", "true", "FALSE", "water", "PBE-D3", "300K", "1_0", "a,b", "t"]))
QUOTED = st.lists(WORDS, min_size=1, max_size=4).map(lambda words: f'"{" ".join(words)}"')
KEYS = st.sampled_from(["energy", "pbc", "uid", "my-key", "config_type", "x.y", "Properties2"])
ODD = st.sampled_from(["flag", 'a="b\\"c"', "a={1 2 3}", "a=[1,2]", "a='x y'", "a=1=2", 'a=""', 'b="_JSON [1, 2]"'])
LINES = st.lists(st.one_of(st.tuples(KEYS, st.one_of(WORDS, QUOTED)).map("=".join), ODD), min_size=1, max_size=5).map(
    " ".join
)


@given(LINES)
def test_comments_mean_what_they_mean_to_ase(line):
    found, wanted = parse_comment(line), key_val_str_to_dict(line)
    assert [*found] == [*wanted]
    for key, value in wanted.items():
        assert type(found[key]) is type(value)
        np.testing.assert_array_equal(found[key], value)


@pytest.mark.parametrize("key", ["Lattice", "stress", "virial"])
def test_matrices_are_nine_numbers(key):
    line = f'{key}="1 2 3 4 5 6 7 8 9.5"'
    np.testing.assert_array_equal(parse_comment(line)[key], key_val_str_to_dict(line)[key])
    for numbers in ("1 2 3", "a b c d e f g h i"):
        with pytest.raises(ValueError, match=f"{key} must be nine numbers, got '{numbers}'"):
            parse_comment(f'{key}="{numbers}"')


FILES = ["emt_CuAlAu", "mixed_missing_as_nan", "3bpa_300K", "mlearn_Si_test", "xtb_molecules"]


@pytest.mark.parametrize("name", FILES)
def test_structures_are_those_of_ase(shared, tmp_path, name):
    texts = [text for text, _ in zip(frame_texts(shared / "data" / f"{name}.extxyz.gz"), range(60), strict=False)]
    path = write_frames(tmp_path / "some.extxyz", *texts)
    found = [data for _, data in read_structures(path)]
    for data, atoms in zip(found, ase.io.iread(path), strict=True):
        wanted = AtomicData.from_atoms(atoms, dtype=torch.float64)
        assert data == wanted
        assert data.info.keys() == wanted.info.keys()


@pytest.mark.parametrize(
    "properties",
    [
        "species:S:1:pos:R:3:forces:R:3:extra:I:1",
        "pos:R:3:species:S:1:forces:R:3:extra:R:1",
        "Z:I:1:pos:R:3:forces:R:3:extra:R:1",
        "species:S:1:pos:R:3:forces:R:3:charge:R:1",
        "species:S:1:pos:R:3:velo:R:3:masses:R:1",
        "species:S:1:pos:R:3:forces:R:3:flag:L:1",
    ],
)
@pytest.mark.parametrize("pbc", ['pbc="T F T"', "pbc=T", ""])
def test_columns_of_every_kind(tmp_path, properties, pbc):
    """Some are read here and some by ASE; none may differ."""
    kinds = properties.split(":")[1::3]
    rows = []
    for number in range(3):
        words = {"S": "O", "R": f"{number}.0", "I": f"{number + 1}", "L": "T"}
        counts = map(int, properties.split(":")[2::3])
        rows.append(" ".join(word for kind, count in zip(kinds, counts, strict=True) for word in [words[kind]] * count))
    text = "\n".join(["3", f'Lattice="9 0 0 1 8 0 0 0 7" Properties={properties} energy=-1 {pbc}', *rows, ""])
    path = write_frames(tmp_path / "c.extxyz", text)
    (data,) = [data for _, data in read_structures(path)]
    assert data == AtomicData.from_atoms(ase.io.read(path), dtype=torch.float64)


def test_periodicity_that_is_text_is_what_ase_makes_of_it(tmp_path):
    path = write_frames(tmp_path / "p.extxyz", frame_text(head="Properties=species:S:1:pos:R:3:forces:R:3 pbc=maybe"))
    with pytest.raises(DataError, match="frame 0: the lattice vectors of the periodic directions are zero"):
        list(read_structures(path))


def test_more_columns_than_are_named_are_passed_over_as_by_ase(tmp_path):
    path = write_frames(tmp_path / "m.extxyz", frame_text(row=" 7 8"))
    (data,) = [data for _, data in read_structures(path)]
    assert data == AtomicData.from_atoms(ase.io.read(path), dtype=torch.float64)
