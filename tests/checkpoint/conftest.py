"""What every checkpoint test shares."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvalchemi_lightning.specs.trust import _added, trust


@pytest.fixture(autouse=True)
def _trusted_rigs() -> Iterator[None]:
    """Let specs name the models of the tests, and nothing else beyond what is built in."""
    before = dict(_added)
    trust("checkpoint_rigs")
    yield
    _added.clear()
    _added.update(before)


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flushing matters when the power fails, which no test can show; its order is tested by the calls."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return the path of a checkpoint folder that does not exist yet."""
    return tmp_path / "checkpoints"
