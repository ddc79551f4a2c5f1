"""``nvalchemi-lightning data stats``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import zarr
from cli_rigs import run_here, run_process

from nvalchemi_lightning.data import AtomicData, AtomicDataZarrWriter
from nvalchemi_lightning.models import AtomicStatistics, PaiNN


def atoms(*numbers: int, energy: float) -> AtomicData:
    positions = torch.zeros(len(numbers), 3)
    positions[:, 0] = torch.arange(len(numbers))
    return AtomicData(
        positions=positions, atomic_numbers=torch.tensor(numbers), energy=torch.tensor([[energy]], dtype=torch.float32)
    )


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "train.zarr"
    AtomicDataZarrWriter(path).write([atoms(8, 1, 1, energy=-4.0), atoms(8, 8, energy=-4.0)])
    return path


def test_the_statistics_are_shown_and_kept(store: Path) -> None:
    outcome = run_process("data", "stats", store)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.splitlines() == [
        "2 structures, 5 atoms, 2 to 3 in a structure, median 2.5",
        "1.6 neighbors per atom within 5 A",
        "",
        *outcome.out.splitlines()[3:7],
        "",
        "element  atoms  reference energy [eV], fitted  force rms [eV/A]",
        "H            2  -1.000000",
        "O            3  -2.000000",
    ]
    assert PaiNN.from_statistics(store, hidden=4).reference_energies == pytest.approx((-1.0, -2.0))


def test_nothing_is_kept_when_told_so(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(capsys, "data", "stats", store, "--no-save").code == 0
    assert run_here(capsys, "data", "stats", store, store).code == 0
    assert "nvalchemi_lightning_statistics" not in zarr.open_group(store, mode="r").attrs


def test_json_is_what_a_model_starts_from(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run_here(capsys, "data", "stats", store, store, "--json", "--cutoff", "1.5")
    document = json.loads(outcome.out)
    assert document["statistics"]["force_scale"] is None
    assert document["remarks"] == []
    (tmp_path / "stats.json").write_text(outcome.out)
    found = AtomicStatistics.load(tmp_path / "stats.json")
    assert (found.num_structures, found.cutoff) == (4, 1.5)
    assert PaiNN.from_statistics(tmp_path / "stats.json", hidden=4).cutoff == 1.5


def test_references_from_isolated_atoms(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    singles = tmp_path / "atoms.zarr"
    AtomicDataZarrWriter(singles).write([atoms(1, energy=-0.5), atoms(8, energy=-1.5), atoms(8, 8, energy=0.0)])
    outcome = run_here(capsys, "data", "stats", store, "--isolated-atoms", singles)
    assert "reference energy [eV], given" in outcome.out
    assert AtomicStatistics.load(store).reference_energies == (-0.5, -1.5)
    outcome = run_here(capsys, "data", "stats", store, "--isolated-atoms", store)
    assert outcome.code == 2
    assert "train.zarr has no isolated atom with an energy: a single atom without neighbors in 5 A" in outcome.err


def test_isolated_atoms_of_ethanol(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = shared / "data"
    outcome = run_here(
        capsys,
        "data",
        "stats",
        data / "ethanol_val.extxyz.gz",
        "--isolated-atoms",
        data / "ethanol_isolated_atoms.extxyz",
    )
    assert outcome.code == 0
    assert [line.split()[2] for line in outcome.out.splitlines()[-3:]] == ["-13.568422", "-1025.277095", "-2035.570981"]


def test_remarks_follow_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "water.zarr"
    AtomicDataZarrWriter(path).write([atoms(8, 1, 1, energy=-4.0)])
    assert "The compositions determine 1 of 2 reference energies" in run_here(capsys, "data", "stats", path).out


def test_a_picture_is_drawn(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "data.svg"
    assert run_here(capsys, "data", "stats", store, "--plot", picture).code == 0
    assert "<!-- train.zarr: 2 structures -->" in picture.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--cutoff", "-1"), "cutoff must be a positive number of Angstrom"),
        (("--plot", "data.docx"), "data.docx must end in one of"),
        (("--isolated-atoms", "absent.xyz"), "absent.xyz"),
    ],
)
def test_wrong_input_ends_before_the_data_are_read(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = run_here(capsys, "data", "stats", "nothing-there", *words)
    assert outcome.code == 2
    assert message in outcome.err
