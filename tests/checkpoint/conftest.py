"""What every checkpoint test shares."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_rigs import Counting, run, strategy
from hostile_rigs import RECORD

from nvalchemi_lightning.checkpoint import save
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


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint that is never changed."""
    folder = tmp_path_factory.mktemp("stranger") / "saved"
    save(run(strategy(hooks=[Counting()])), folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """Return a copy of it that a stranger may change; without the record, whose hashes they would make themselves."""
    shutil.copytree(saved, tmp_path / "stranger")
    (tmp_path / "stranger" / RECORD).unlink()
    return tmp_path / "stranger"


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """Return a file that exists if anything of a stranger ran."""
    return tmp_path / "canary"
