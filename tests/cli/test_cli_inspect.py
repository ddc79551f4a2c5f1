"""``nvalchemi-lightning data inspect``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import zarr
from cli_rigs import run_here, run_process

from nvalchemi_lightning.data import AtomicData, AtomicDataZarrWriter


def atoms(*numbers: int, **labels: torch.Tensor) -> AtomicData:
    positions = torch.eye(3)[torch.arange(len(numbers)) % 3] * torch.arange(1, len(numbers) + 1).unsqueeze(1)
    return AtomicData(positions=positions, atomic_numbers=torch.tensor(numbers), **labels)


NOTED = {
    "version": "0.1.0",
    "units": {"energy": "eV", "length": "A"},
    "sources": [{"name": "a.xyz", "size": 3}, {"name": "b.xyz", "size": None}],
    "omitted": [],
    "frames": list(range(6)),
}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "train.zarr"
    AtomicDataZarrWriter(path).write([atoms(8, 1, 1, energy=torch.ones(1, 1)), atoms(8, 8), atoms(1)])
    AtomicDataZarrWriter(path).delete([2])
    zarr.open_group(path, mode="r+").attrs["nvalchemi_lightning"] = NOTED
    return path


def test_a_store_is_described(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run_here(capsys, "data", "inspect", store)
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert lines[:3] == [
        f"{store}: 2 structures (1 more are deleted), 5 atoms, 0 edges",
        "atoms in a structure: 2 to 3, median 2.5",
        "periodicity: 2 molecules",
    ]
    assert lines[3].startswith("on disk: ")
    assert lines[4:9] == [
        "version: 0.1.0",
        "units: energy eV, length A",
        "sources: a.xyz, b.xyz",
        "omitted: none",
        "frames: 6",
    ]
    assert "H                 1      2" in lines
    energy = next(line.split() for line in lines if line.startswith("energy"))
    assert energy[:6] == ["energy", "structure", "float32", "1", "1", "0"]


def test_json_holds_the_same(store: Path) -> None:
    outcome = run_process("data", "inspect", store, "--json")
    assert (outcome.code, outcome.err) == (0, "")
    found = json.loads(outcome.out)
    assert (found["structures"], found["deleted"], found["atoms"]) == (2, 1, 5)
    assert found["sizes"] == {"smallest": 2, "median": 2.5, "largest": 3}
    assert found["fields"]["energy"]["complete"] == 1
    assert found["provenance"] == NOTED


def test_a_file_has_no_storage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one.xyz"
    path.write_text('1\nProperties=species:S:1:pos:R:3 energy=-1.0 pbc="F F F"\nH 0 0 0\n')
    outcome = run_here(capsys, "data", "inspect", path)
    assert outcome.code == 0
    assert "codec" not in outcome.out
    assert f"on disk: {path.stat().st_size} B" in outcome.out


def test_nothing_there_is_wrong_input(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run_here(capsys, "data", "inspect", "absent.zarr")
    assert outcome.code == 2
    assert "absent.zarr" in outcome.err
