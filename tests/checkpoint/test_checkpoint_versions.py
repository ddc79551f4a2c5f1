"""Files of every version that was ever written load exactly; those of a newer one say what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_rigs import assert_same, batches, strategy
from golden_rigs import GOLDEN, Golden, everything, golden_strategy
from lightning.pytorch import Trainer

from nvalchemi_lightning.checkpoint import load, migrations, restore, save
from nvalchemi_lightning.checkpoint.migrations import upgraded, versioned
from nvalchemi_lightning.checkpoint.reading import recorded_metrics
from nvalchemi_lightning.errors import ConfigurationError, StoreError
from nvalchemi_lightning.feeding import OneLoader
from nvalchemi_lightning.module import AlchemiModule
from nvalchemi_lightning.specs import trust
from nvalchemi_lightning.strategy import TrainingStrategy

VERSIONS = sorted(path.name for path in GOLDEN.iterdir())


@pytest.fixture(autouse=True)
def _trusted_golden() -> None:
    trust("golden_rigs")


def expected_of(version: str) -> list[dict[str, Any]]:
    return torch.load(GOLDEN / version / "expected.pt", weights_only=True)  # type: ignore[no-any-return]


def test_there_is_a_golden_checkpoint_of_every_version() -> None:
    assert set(VERSIONS) == {f"v{number + 1}" for number in range(migrations._CURRENT["record"])}


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("version", VERSIONS)
def test_folders_load_exactly(version: str, index: int, tmp_path: Path) -> None:
    root = tmp_path / "folder"
    shutil.copytree(GOLDEN / version / "folder", root)
    expected = expected_of(version)[index]
    assert_same(everything(load(TrainingStrategy, root, index, hooks=golden_strategy().hooks)), expected)
    live = golden_strategy()
    restore(live, root, index)
    assert_same(everything(live), expected)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_run_goes_on_from_a_golden_folder(version: str, tmp_path: Path) -> None:
    root = tmp_path / "folder"
    shutil.copytree(GOLDEN / version / "folder", root)
    live = load(TrainingStrategy, root, 0, hooks=golden_strategy().hooks, num_steps=4)
    live.run(batches(), enable_progress_bar=False)
    found, expected = everything(live), expected_of(version)[1]
    assert found["counters"] == expected["counters"]
    # The last digits of a sum may differ from one processor to the next.
    torch.testing.assert_close(found["main"]["weight"], expected["main"]["weight"], rtol=1e-12, atol=1e-12)
    assert save(live, root) == 2


@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path")
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("version", VERSIONS)
def test_files_of_lightning_load_exactly(version: str, place: int) -> None:
    expected, live = expected_of(version)[place], golden_strategy()
    steps = 2 * (place + 1)
    live.num_steps = steps
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = Trainer(max_epochs=-1, accelerator="cpu", strategy="nvalchemi", **quiet)
    trainer.fit(AlchemiModule(live), OneLoader(batches()), ckpt_path=GOLDEN / version / f"{steps}.ckpt")
    assert_same(everything(live), expected)


def test_a_newer_file_says_to_update(root: Path) -> None:
    save(strategy(), root)
    record = root / "lightning/checkpoints/0.json"
    form = json.loads(record.read_text())
    record.write_text(json.dumps({**form, "schema_version": 2}))
    match = r"0\.json has schema version 2, newer than supported \(1\); update nvalchemi-lightning"
    with pytest.raises(ConfigurationError, match=match):
        load(TrainingStrategy, root)
    assert recorded_metrics(root, 0) == {}
    record.unlink()
    torch.save({"schema_version": 5, "ranks": {}}, root / "lightning/checkpoints/0.pt")
    with pytest.raises(ConfigurationError, match=r"0\.pt has schema version 5, newer than supported"):
        load(TrainingStrategy, root)


def test_older_files_are_upgraded_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two made-up changes: a field got another name, then another unit."""
    monkeypatch.setitem(migrations._CURRENT, "record", 3)
    monkeypatch.setitem(migrations._STEPS, ("record", 1), lambda old: {"time": old["seconds"]})
    monkeypatch.setitem(migrations._STEPS, ("record", 2), lambda old: {"time": 1000 * old["time"]})
    assert upgraded("record", {"schema_version": 1, "seconds": 4}, "x") == {"schema_version": 3, "time": 4000}
    assert upgraded("record", {"schema_version": 2, "time": 4}, "x") == {"schema_version": 3, "time": 4000}
    assert upgraded("record", versioned("record", {"time": 4}), "x") == {"schema_version": 3, "time": 4}
    with pytest.raises(ConfigurationError, match=r"x has schema version 4, newer than supported \(3\)"):
        upgraded("record", {"schema_version": 4}, "x")


def test_every_older_version_has_its_step() -> None:
    steps = {(kind, older) for kind, current in migrations._CURRENT.items() for older in range(1, current)}
    assert set(migrations._STEPS) == steps


@pytest.mark.parametrize("version", [None, 0, -1, True, "1", 1.0])
def test_a_file_without_a_version_is_damaged(version: Any) -> None:
    with pytest.raises(StoreError, match="x is damaged: schema_version is"):
        upgraded("resume", {"schema_version": version}, "x")


def test_the_golden_model_is_what_it_was() -> None:
    assert list(Golden().state_dict()) == ["weight", "seen"]
