"""What every test of the update hooks shares."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let tests run a Trainer: Lightning uses a name that torch 2.13 deprecates."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore:.*does not have many workers"))


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test in an empty folder, so that nothing can be written beside the sources."""
    monkeypatch.chdir(tmp_path)
