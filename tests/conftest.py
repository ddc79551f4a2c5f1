"""Fixtures shared by every test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared() -> Path:
    """Return the folder of reference samples and data sets, or skip where it is absent."""
    default = Path(__file__).resolve().parents[2] / "shared"
    folder = Path(os.environ.get("NVALCHEMI_SHARED", default))
    if not folder.is_dir():
        pytest.skip("the reference samples are absent (set NVALCHEMI_SHARED to their folder)")
    return folder


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test in an empty folder, so that nothing can be written beside the sources."""
    monkeypatch.chdir(tmp_path)
