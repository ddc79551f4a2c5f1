"""Which checkpoints are there, and what is wrong with their files."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_rigs import Counting, contents, run, strategy

from nvalchemi_lightning.checkpoint import list_checkpoints, verify_checkpoints
from nvalchemi_lightning.checkpoint.checking import quick_problem
from nvalchemi_lightning.checkpoint.reading import read
from nvalchemi_lightning.errors import StoreError
from nvalchemi_lightning.hooks import EMAHook


@pytest.fixture
def three(root: Path) -> Path:
    """Return a folder of three checkpoints."""
    what = strategy(hooks=[Counting(), EMAHook(decay=0.5)])
    what.save_checkpoint(root)
    run(what)
    for _ in range(2):
        what.save_checkpoint(root)
    return root


def gone(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)


def flip_within(path: Path, tensor: torch.Tensor) -> None:
    """Change a bit of a number: between the parts of the file is padding, where it would not matter."""
    content = bytearray(path.read_bytes())
    content[content.index(tensor.numpy().tobytes()) + 2] ^= 1
    path.write_bytes(content)


def problems(root: Path, index: int | None = None) -> dict[str, str]:
    return {one.file: one.problem for one in verify_checkpoints(root, index) if one.problem is not None}


def is_read(root: Path, index: int) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"):
            read(root, index)
    except StoreError:
        return False
    return True


def test_whole_checkpoints(three: Path) -> None:
    found = verify_checkpoints(three)
    assert not problems(three)
    assert {one.index for one in found} == {None, 0, 1, 2}
    assert {one.file for one in found} == set(contents(three))
    assert {one.index for one in verify_checkpoints(three, 1)} == {None, 1}
    assert {one.index for one in verify_checkpoints(three / "final")} == {None, 2}
    assert {one.index for one in verify_checkpoints(three / "step_0")} == {None, 0}


@pytest.mark.parametrize("harm", [gone, cut, empty])
def test_what_cannot_be_read_is_listed_as_such(three: Path, harm: Callable[[Path], None], tmp_path: Path) -> None:
    """The quick check, the thorough one and the reader agree about every file of a checkpoint."""
    for name in contents(three):
        if "/checkpoints/1." not in name:
            continue
        copy = tmp_path / name.replace("/", "_") / "root"
        shutil.copytree(three, copy)
        harm(copy / name)
        assert (quick_problem(copy, 1) is None) == is_read(copy, 1) == (not problems(copy, 1)), name
        states = [one.problem is None for one in list_checkpoints(copy)]
        assert states == [True, is_read(copy, 1), True], name


def test_damage_is_told_file_by_file(three: Path) -> None:
    model, hooks = "models/main/checkpoints/1.pt", "hooks/checkpoints/2.pt"
    flipped(three / model)
    gone(three / hooks)
    cut(three / "manifest.json")
    (three / "strategy/checkpoints/0.json").write_text("{}")
    found = problems(three)
    assert found.pop("manifest.json").startswith("is damaged: ")
    recorded = "is damaged: its SHA-256 is not the recorded one"
    assert found == {model: recorded, hooks: "is missing", "strategy/checkpoints/0.json": recorded}
    assert quick_problem(three, 1) is None  # bytes are not compared
    assert quick_problem(three, 2) == f"{hooks} is missing"


def test_a_damaged_record(three: Path) -> None:
    record = "lightning/checkpoints/1.json"
    (three / record).write_text('{"files": 3}')
    assert problems(three) == {record: "is damaged: schema_version is None"}
    listed = list_checkpoints(three)[1]
    assert listed.problem == f"{record} is damaged: schema_version is None"
    assert listed.written_by is None


def test_what_must_not_be_loaded_is_damage(three: Path) -> None:
    torch.save({"weight": Path("x")}, three / "models/main/checkpoints/9.pt")
    assert "damaged or not safe to load" in problems(three, 9)["models/main/checkpoints/9.pt"]


def test_the_list(three: Path) -> None:
    first, *_, last = list_checkpoints(three)
    assert [one.index for one in list_checkpoints(three)] == [0, 1, 2]
    assert (first.step, first.epoch, last.step) == (0, 0, 3)
    assert first.weights == {"main": ["raw"]}
    assert last.weights == {"main": ["raw", "averaged"]}
    assert last.written_by.startswith("nvalchemi-lightning ")
    assert last.written.endswith("+00:00")
    assert last.problem is None
    own = [len(content) for name, content in contents(three).items() if "/checkpoints/2." in name]
    assert last.size == sum(own)


@pytest.mark.parametrize("sample", ["ckpt_demo_async", "ckpt_named_models", "ckpt_finetune", "ckpt_components"])
def test_folders_of_the_reference(shared: Path, sample: str) -> None:
    folder = shared / "samples" / sample
    for one in list_checkpoints(folder):
        assert (one.problem, one.written_by, one.written, one.metrics) == (None, "nvalchemi-toolkit", None, {})
        assert one.size > 1000
    assert not problems(folder)


@pytest.mark.parametrize("harm", [gone, cut, empty])
def test_damaged_folders_of_the_reference(shared: Path, root: Path, harm: Callable[[Path], None]) -> None:
    shutil.copytree(shared / "samples/ckpt_demo_async", root)
    name = "models/main/checkpoints/2.pt"
    harm(root / name)
    assert not is_read(root, 2)
    assert name in problems(root)
    assert list_checkpoints(root)[2].problem.startswith(name)


def test_flipped_bits_in_a_file_of_the_reference(shared: Path, root: Path) -> None:
    """There is no recorded hash, but the file has checksums of its own."""
    shutil.copytree(shared / "samples/ckpt_demo_async", root)
    path = root / "models/main/checkpoints/2.pt"
    flip_within(path, torch.load(path, weights_only=True)["model.embedding.weight"])
    assert "another checksum" in problems(root)["models/main/checkpoints/2.pt"]


def test_a_recipe_without_states(shared: Path, root: Path) -> None:
    shutil.copytree(shared / "samples/ckpt_demo_async", root)
    shutil.copy(root / "strategy/checkpoints/2.json", root / "strategy/checkpoints/5.json")
    assert not is_read(root, 5)
    assert quick_problem(root, 5) == "models/*/checkpoints/5.pt is missing"


def test_an_unreadable_manifest_does_not_hide_the_rest(shared: Path, root: Path) -> None:
    shutil.copytree(shared / "samples/ckpt_demo_async", root)
    empty(root / "manifest.json")
    assert [one.problem for one in list_checkpoints(root)] == [None] * 3
    assert [*problems(root)] == ["manifest.json"]


def test_a_newer_version_is_refused(three: Path) -> None:
    (three / "lightning/checkpoints/1.json").unlink()
    manifest = json.loads((three / "manifest.json").read_text())
    (three / "manifest.json").write_text(json.dumps({**manifest, "schema_version": 7}))
    with pytest.raises(ValueError, match="version 7 is newer"):
        list_checkpoints(three)


def test_nothing_there(tmp_path: Path, three: Path) -> None:
    for function in (list_checkpoints, verify_checkpoints):
        with pytest.raises(FileNotFoundError, match="holds no checkpoints; give the folder"):
            function(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match=r"no checkpoint 7; it has \[0, 1, 2\]"):
        verify_checkpoints(three, 7)


def test_a_file_of_lightning(tmp_path: Path) -> None:
    path, weight = tmp_path / "a.ckpt", torch.rand(3)
    torch.save({"state_dict": {"models.main.x": weight}}, path)
    assert [one.problem for one in verify_checkpoints(path)] == [None]
    flip_within(path, weight)
    (found,) = verify_checkpoints(path)
    assert (found.index, found.file) == (None, str(path))
    assert "another checksum" in found.problem
