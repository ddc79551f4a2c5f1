"""Structures and stores for the tests of reading, ordering and loading."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from feeding_structures import make_structures

from nvalchemi_lightning.data import AtomicData, AtomicDataZarrWriter

Make = Callable[..., list[AtomicData]]


@pytest.fixture
def structures() -> Make:
    """Return the function that makes structures."""
    return make_structures


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return a store of 20 structures whose energies are 0 to 19."""
    path = tmp_path / "twenty.zarr"
    AtomicDataZarrWriter(path).write(make_structures(20))
    return path
