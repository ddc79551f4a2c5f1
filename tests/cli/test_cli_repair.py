"""``nvalchemi-lightning data repair``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import zarr
from cli_rigs import run_here

from nvalchemi_lightning.data import AtomicData, AtomicDataZarrWriter


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return a store of three structures."""
    data = AtomicData(torch.zeros(1, 3), torch.tensor([1]), energy=torch.zeros(1, 1))
    AtomicDataZarrWriter(tmp_path / "a.zarr").write([data] * 3)
    return tmp_path / "a.zarr"


def test_a_sound_store_is_said_to_be(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run_here(capsys, "data", "repair", store)
    assert (outcome.code, outcome.out) == (0, f"{store}: nothing is wrong\n")


def test_damage_is_reported_then_mended(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    del zarr.open_group(store, mode="r+").attrs["num_samples"]
    dry = run_here(capsys, "data", "repair", store, "--dry-run")
    assert dry.code == 1
    assert "would repair: num_samples" in dry.out
    assert "num_samples" not in zarr.open_group(store, mode="r").attrs
    done = run_here(capsys, "data", "repair", store)
    assert done.code == 0
    assert "repaired: num_samples" in done.out
    assert zarr.open_group(store, mode="r").attrs["num_samples"] == 3


def test_what_cannot_be_mended_ends_with_1(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zarr.open_group(store, mode="r+")["core/energy"].resize((2, 1))
    outcome = run_here(capsys, "data", "repair", store, "--json")
    report = json.loads(outcome.out)
    assert outcome.code == 1
    assert (report["store"], report["dry_run"], report["sound"], report["repaired"]) == (str(store), False, False, [])
    assert report["remaining"][0]["where"] == "core/energy"
    assert run_here(capsys, "data", "repair", store, "--fill-short").code == 0


def test_no_store_is_wrong_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run_here(capsys, "data", "repair", tmp_path / "absent.zarr")
    assert outcome.code == 2
    assert "there is no Zarr store at" in outcome.err
