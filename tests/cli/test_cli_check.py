"""``nvalchemi-lightning data check``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_rigs import run_here, run_process

FRAME = """2
Properties=species:S:1:pos:R:3:forces:R:3 energy={energy}
H 0.0 0.0 0.0 0.0 0.0 {force}
{second} 0.0 0.0 {distance} 0.0 0.0 -{force}
"""


def write(path: Path, *frames: dict[str, object]) -> Path:
    defaults: dict[str, object] = {"energy": -1.0, "force": 0.5, "second": "F", "distance": 0.95}
    path.write_text("".join(FRAME.format(**{**defaults, **frame}) for frame in frames))
    return path


def apart(count: int, start: float = 0.9) -> list[dict[str, object]]:
    return [{"distance": start + 0.01 * number, "energy": -1.0 + 0.1 * number} for number in range(count)]


def test_a_sane_set_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run_here(capsys, "data", "check", write(tmp_path / "a.xyz", *apart(3)))
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert lines[0].split() == ["set", "for", "structures", "atoms", "elements", "labels"]
    assert lines[1].split()[1:] == ["training", "3", "6", "H", "F", "energy", "3,", "forces", "3"]
    assert lines[-1] == "0 errors, 0 warnings, 1 note"


def test_an_error_is_named_and_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frames = [*apart(1), *[{"distance": 0.02 + 0.001 * number} for number in range(9)]]
    path = write(tmp_path / "a.xyz", *frames)
    outcome = run_here(capsys, "data", "check", path)
    assert outcome.code == 1
    assert f"error: {path}: atoms at one place (9 structures) [coincident_atoms]\n  frame 1: H 0 and F 1" in outcome.out
    assert "\n  and 1 more\n  Drop the structures" in outcome.out


def test_strict_makes_warnings_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.xyz", *apart(2), {"force": 80.0})
    assert run_here(capsys, "data", "check", path).code == 0
    outcome = run_here(capsys, "data", "check", path, "--strict")
    assert outcome.code == 1
    assert "1 warning, " in outcome.out


def test_held_out_sets_are_given_one_by_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = write(tmp_path / "train.xyz", *apart(3))
    held_out = write(tmp_path / "val.xyz", apart(1)[0])
    test = write(tmp_path / "test.xyz", {"second": "Cl", "distance": 1.3})
    outcome = run_here(capsys, "data", "check", train, "--against", held_out, "--against", test)
    assert outcome.code == 1
    assert f"error: {test}: Cl is not among H, F" in outcome.out
    assert f"warning: {train}, {held_out}: the same structure again, in training and held-out data" in outcome.out
    assert f"  {held_out}: frame 0: as {train}: frame 0" in outcome.out


def test_json_is_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.xyz", {"distance": 0.02})
    outcome = run_here(capsys, "data", "check", path, "--json")
    report = json.loads(outcome.out)
    assert outcome.code == 1
    assert report["sets"][0]["labels"] == {"energy": 1, "forces": 1}
    assert report["findings"][0]["check"] == "coincident_atoms"
    assert report["findings"][0]["places"][0]["frame"] == 0


def test_keys_say_where_labels_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.xyz", *apart(3))
    path.write_text(path.read_text().replace(" energy=", " REF_energy=").replace(":forces:", ":REF_forces:"))
    outcome = run_here(capsys, "data", "check", path)
    assert outcome.code == 1
    assert "energy_key='REF_energy'" in outcome.out
    keys = ["--energy-key", "REF_energy", "--forces-key", "REF_forces"]
    assert run_here(capsys, "data", "check", path, *keys).code == 0


def test_wrong_input_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run_here(capsys, "data", "check", tmp_path / "absent.xyz")
    assert outcome.code == 2
    assert "there is no file or store at" in outcome.err
    path = write(tmp_path / "a.xyz", *apart(1))
    outcome = run_here(capsys, "data", "check", path, "--against", path)
    assert outcome.code == 2
    assert "is given twice; give each set once" in outcome.err


def test_it_runs_as_a_command(tmp_path: Path) -> None:
    outcome = run_process("data", "check", write(tmp_path / "a.xyz", *apart(3)))
    assert (outcome.code, outcome.err) == (0, "")
