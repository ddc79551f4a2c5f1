"""Names and links of strangers: nothing outside the folder is read, written or removed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoint_rigs import Counting, Net, contents, rebuilt, run, strategy
from hostile_rigs import RECORD, STRATEGY, edited

from nvalchemi_lightning.checkpoint import save
from nvalchemi_lightning.checkpoint.pruning import prune
from nvalchemi_lightning.checkpoint.reading import latest_index, read_manifest
from nvalchemi_lightning.checkpoint.schemas import check_manifest
from nvalchemi_lightning.checkpoint.snapshot import require_savable
from nvalchemi_lightning.errors import (
    ConfigurationError,
    StoreError,
)

NAMES = ["../../outside", "/outside", "..", ".", "", "a/b", "a\\b", "a\0b", "C:x", "x" * 300, "models/../../x", "a\nb"]


@pytest.mark.parametrize("name", NAMES)
def test_names_of_components_are_names_of_folders(name: str) -> None:
    for field in ("models", "optimizers", "schedulers"):
        with pytest.raises(StoreError, match=rf"x is damaged: {field}\.0 is .*no name of a folder"):
            check_manifest({"checkpoint_index": 0, field: [name]}, Path("x"))
    with pytest.raises(StoreError, match=r"(?s)x is damaged: associations.*no name of a folder"):
        check_manifest({"checkpoint_index": 0, "associations": {name: {}}}, Path("x"))
    with pytest.raises(ConfigurationError, match="cannot be a folder name; rename the model"):
        require_savable(SimpleNamespace(models={name: Net()}))


@pytest.mark.parametrize(
    "index", [-1, -7, 10**40, 1.0, True, None, "0", [0], float("nan")], ids=lambda index: repr(index)[:12]
)
def test_an_index_is_a_count(folder: Path, index: Any) -> None:
    edited(folder, "manifest.json", lambda manifest: {**manifest, "checkpoint_index": index})
    with pytest.raises(StoreError, match=r"manifest.json is damaged: checkpoint_index is"):
        read_manifest(folder)
    assert latest_index(folder) == 0, "the files tell"


@pytest.mark.parametrize("name", ["../../outside.pt", "/outside.pt", "models/main/checkpoints/1.pt", "x/0.pt", "0.pt"])
def test_a_record_lists_files_of_its_index_alone(saved: Path, tmp_path: Path, name: str) -> None:
    root = tmp_path / "copy"
    shutil.copytree(saved, root)
    edited(root, RECORD, lambda record: {**record, "files": {**record["files"], name: "0"}})
    with pytest.raises(StoreError, match=rf"{RECORD} is damaged: {name!r} is no file of checkpoint 0"):
        rebuilt(root)


def test_a_record_belongs_to_its_index(saved: Path, tmp_path: Path) -> None:
    root = tmp_path / "copy"
    shutil.copytree(saved, root)
    edited(root, RECORD, lambda record: {**record, "manifest": {**record["manifest"], "checkpoint_index": 3}})
    with pytest.raises(StoreError, match="its manifest is of checkpoint 3"):
        rebuilt(root)


LINKS = ["models", "models/main", "models/main/checkpoints", "strategy", "lightning", "lightning/checkpoints", "hooks"]


@pytest.mark.parametrize("name", LINKS)
def test_a_link_leads_neither_a_save_nor_a_removal_elsewhere(folder: Path, tmp_path: Path, name: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.move(folder / name, elsewhere)
    (folder / name).symlink_to(elsewhere)
    victim = elsewhere if name.endswith("checkpoints") else elsewhere / ("main/checkpoints" if name == "models" else "")
    for index in (0, 1, 2):
        (victim / f"{index}.pt").touch()
    before = contents(elsewhere)
    for act in (
        lambda: save(run(strategy(hooks=[Counting()])), folder),
        lambda: save(run(strategy(hooks=[Counting()])), folder, checkpoint_index=0),
    ):
        with pytest.raises(StoreError, match=rf"{name} is a link; a folder of checkpoints holds its own files"):
            act()
    assert contents(elsewhere) == before
    assert not list(folder.glob(".tmp-*"))


def test_a_removal_does_not_follow_links(root: Path, tmp_path: Path) -> None:
    for _ in range(3):
        save(strategy(), root)
    elsewhere = tmp_path / "elsewhere"
    shutil.move(root / "models/main/checkpoints", elsewhere)
    (root / "models/main/checkpoints").symlink_to(elsewhere)
    before = contents(elsewhere), contents(root)
    with pytest.raises(StoreError, match="models/main/checkpoints is a link"):
        prune(root, keep=[])
    assert (contents(elsewhere), contents(root)) == before


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("models/main/checkpoints/0.pt", r"0\.pt is a link to .*outside of the folder; copy the folder"),
        (STRATEGY, r"0\.json is a link to .*outside of the folder"),
        (RECORD, r"0\.json is a link to .*outside of the folder"),
    ],
)
def test_files_are_not_read_through_links_that_lead_out(saved: Path, tmp_path: Path, name: str, match: str) -> None:
    root = tmp_path / "copy"
    shutil.copytree(saved, root)
    shutil.move(root / name, tmp_path / "secret")
    (root / name).symlink_to(tmp_path / "secret")
    with pytest.raises(StoreError, match=match):
        rebuilt(root)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes here")
@pytest.mark.parametrize("name", ["models/main/checkpoints/0.pt", STRATEGY, RECORD, "manifest.json", "strategy.json"])
def test_a_pipe_does_not_make_a_load_or_a_save_wait(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    if name == "strategy.json":
        assert save(strategy(), folder) == 1
        return
    kind = UserWarning if name == "manifest.json" else StoreError
    with pytest.raises(kind, match=rf"{name} is damaged: it is no regular file"):
        rebuilt(folder)


def test_a_folder_may_itself_be_reached_through_a_link(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert save(rebuilt(tmp_path / "link", hooks=[Counting()]), tmp_path / "link") == 1
