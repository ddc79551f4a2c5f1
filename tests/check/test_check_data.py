"""Real data sets: published ones pass, damaged ones are recognised frame by frame."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from check_rigs import changed, named, structure

from nvalchemi_lightning.data import (
    AtomicData,
    AtomicDataZarrWriter,
    CheckReport,
    Dialect,
    check,
    convert,
    open_source,
    read_structures,
)

PUBLISHED = [
    "ethanol_val",
    "methanol_train",
    "mlearn_Si_test",
    "mlearn_Ge_train",
    "mixed_missing_as_nan",
]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sets_have_neither_errors_nor_warnings(shared: Path, name: str) -> None:
    report = check(shared / "data" / f"{name}.extxyz.gz")
    assert [finding for finding in report if finding.severity != "note"] == []


@cache
def structures(path: Path) -> list[AtomicData]:
    return [data for _, data in read_structures(path)]


@pytest.mark.parametrize(
    ("name", "label", "factor"),
    [
        ("methanol_train", "forces", -1.0),
        ("methanol_train", "forces", 23.06),
        ("mlearn_Ge_train", "forces", 1 / 51.42),
        ("mlearn_Ge_train", "stress", -1.0),
        ("mlearn_Ge_train", "stress", 160.2),
        ("mlearn_Ge_train", "energy", 23.06),
    ],
)
def test_other_conventions_are_errors(shared: Path, name: str, label: str, factor: float) -> None:
    """B23."""
    frames = [data for data in structures(shared / "data" / f"{name}.extxyz.gz") if label in data]
    wrong = {"forces": "force_convention", "stress": "stress_convention", "energy": "energy_differences"}[label]
    assert named(check(changed(frames, **{label: factor})), wrong)


def test_symmetric_copies_of_training_structures_are_found_in_a_published_test_set(shared: Path) -> None:
    """Shearing a cubic crystal along another axis, or the other way, gives the same structure, turned."""
    data = shared / "data"
    report = check(data / "mlearn_Si_train.extxyz.gz", against=[data / "mlearn_Si_test.extxyz.gz"])
    leak = next(finding for finding in named(report, "duplicates") if finding.severity == "warning")
    assert leak.count == 3
    assert {place.frame for place in leak.places} == {22, 23, 24}


def test_levels_of_theory_of_molecules_are_told_apart(shared: Path) -> None:
    data = shared / "data"
    xtb = open_source(data / "xtb_molecules.extxyz.gz")
    frames = [frame.read() for frame in xtb.frames() if frame.number % 8 == 0]
    (finding,) = named(check(frames, data / "ethanol_val.extxyz.gz"), "energy_levels")
    assert "-433" in finding.message
    assert not named(check(data / "methanol_train.extxyz.gz", data / "ethanol_val.extxyz.gz"), "energy_levels")


def nasty(shared: Path, name: str) -> Path:
    return shared / "data" / "nasty" / name


def frames_by_check(report: CheckReport) -> set[tuple[str, int]]:
    return {(finding.check, place.frame) for finding in report for place in finding.places}


def test_legal_oddities_are_no_errors(shared: Path) -> None:
    """B24 among others: isolated atoms, no edges, huge finite forces."""
    report = check(nasty(shared, "nasty_valid.extxyz"))
    assert report.is_sensible()
    seen = frames_by_check(report)
    assert {("huge_forces", 20), ("huge_forces", 21), ("close_atoms", 20), ("close_atoms", 21)} <= seen
    assert {("energy_outliers", 24), ("fragments", 18), ("fragments", 19), ("left_handed", 7)} <= seen
    assert {("one_atom_cells", 3), ("one_atom_cells", 23)} <= seen


INVALID = [
    ("partial_labels", 0),
    ("partly_nan", 1),
    ("partial_labels", 2),
    ("unreadable", 3),
    ("partly_nan", 4),
    ("unreadable", 5),
    ("coincident_atoms", 6),
    ("unreadable", 7),
    ("unreadable", 8),
    ("unreadable", 9),
    ("unreadable", 10),
    ("rare_elements", 11),
    ("net_force", 12),
    ("overflow", 13),
]


def test_every_damaged_frame_is_named(shared: Path) -> None:
    report = check(nasty(shared, "nasty_invalid.extxyz"))
    assert not report.is_sensible()
    assert set(INVALID) <= frames_by_check(report)


def test_labels_under_other_names_are_found(shared: Path) -> None:
    """B03: the reader knows a name that looks like a label; asymmetric numbers under it are refused."""
    path = nasty(shared, "asymmetric_stress.extxyz")
    assert "REF_stress may be it" in named(check(path), "unread_labels")[0].message
    report = check(path, dialect=Dialect(stress_key="REF_stress"))
    assert "stress is not symmetric" in named(report, "unreadable")[0].places[0].seen


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"stress_unit": "kbar", "stress_sign": "vasp"}, set()),
        ({"stress_unit": "kbar"}, {"stress_convention"}),
        ({"stress_unit": "GPa", "stress_sign": "vasp"}, {"stress_convention"}),
        ({"stress_sign": "vasp"}, {"stress_convention"}),
    ],
)
def test_a_dialect_read_wrongly_is_found(shared: Path, options: dict[str, str], wrong: set[str]) -> None:
    """B23: VASP's kbar, positive under compression."""
    dialect = Dialect(
        energy_key="energy_kcal_mol",
        energy_unit="kcal/mol",
        forces_key="forces_kcal_mol_A",
        force_unit="kcal/mol/A",
        stress_key="vasp_stress_kB",
        stress_order="vasp",
        **options,
    )
    report = check(shared / "data" / "dialects" / "kcal_and_vasp_kbar.extxyz", dialect=dialect)
    assert {finding.check for finding in report if finding.severity == "error"} == wrong


@pytest.mark.parametrize(
    "name", ["truncated_mid_frame.extxyz", "wrong_atom_count.extxyz", "text_in_force_column.extxyz"]
)
def test_damaged_text_is_a_finding(shared: Path, name: str) -> None:
    report = check(nasty(shared, f"malformed/{name}"))
    assert named(report, "unreadable")
    assert not report.is_sensible()


def test_structures_of_stores_are_named_by_their_files(tmp_path: Path) -> None:
    lines = "2\nProperties=species:S:1:pos:R:3:forces:R:3 energy={0}\nH 0 0 0 0 0 0.5\nF 0 0 {1} 0 0 -0.5\n"
    (tmp_path / "raw.xyz").write_text(lines.format(-1.0, 0.9) + lines.format(-1.0, 0.02))
    convert([tmp_path / "raw.xyz"], tmp_path / "a.zarr")
    (place,) = named(check(tmp_path / "a.zarr"), "coincident_atoms")[0].places
    assert place.origin == f"{tmp_path / 'raw.xyz'}: frame 1"
    assert str(place).startswith(f"{tmp_path / 'a.zarr'}: frame 1 ({tmp_path / 'raw.xyz'}: frame 1): H 0 and F 1")


def test_a_dialect_is_for_files_alone(tmp_path: Path) -> None:
    """Stores have fixed names and units, so that files and stores can be compared in one go."""
    text = "1\nProperties=species:S:1:pos:R:3 E=-1.0\nH 0 0 0\n"
    (tmp_path / "raw.xyz").write_text(text)
    dialect = Dialect(energy_key="E")
    convert([tmp_path / "raw.xyz"], tmp_path / "a.zarr", dialect)
    report = check(tmp_path / "raw.xyz", tmp_path / "a.zarr", dialect=dialect)
    assert [one.labels for one in report.sets] == [{"energy": 1}] * 2


def test_a_store_without_origins_is_named_by_itself(tmp_path: Path) -> None:
    AtomicDataZarrWriter(tmp_path / "a.zarr").write([structure([[0, 0, 0], [0, 0, 0]], [1, 1], energy=0.0)])
    (place,) = named(check(tmp_path / "a.zarr"), "coincident_atoms")[0].places
    assert place.origin == ""
