"""Saves that end too early, and files that are damaged afterwards."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_rigs import (
    Counting,
    assert_same,
    contents,
    counted_operations,
    disk_full,
    rebuilt,
    restore_warnings,
    run,
    state_of,
    strategy,
)

from nvalchemi_lightning.checkpoint import restore, save
from nvalchemi_lightning.checkpoint.files import _sync_folder
from nvalchemi_lightning.checkpoint.snapshot import take_snapshot
from nvalchemi_lightning.checkpoint.writing import write
from nvalchemi_lightning.errors import StoreError

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here")


def two_strategies() -> tuple[Any, Any]:
    old, new = strategy(hooks=[Counting()]), run(strategy(hooks=[Counting()]))
    return old, new


def copy_of(root: Path, target: Path) -> Path:
    shutil.copytree(root, target)
    return target


def operations_of_a_save(root: Path, snapshot: Any, patch: pytest.MonkeyPatch) -> int:
    seen = []
    with counted_operations(patch, lambda operation, _: seen.append(operation)):
        write(root, snapshot, 1)
    return len(seen)


def killed_save(root: Path, snapshot: Any, operation: int, patch: pytest.MonkeyPatch) -> None:
    """Fill slot 1 in a child process that dies before its n-th file operation."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forking beside threads
        child = os.fork()
    if child == 0:
        try:
            with counted_operations(patch, lambda done, _: os._exit(1) if done == operation else None):
                write(root, snapshot, 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 1


@needs_fork
@pytest.mark.parametrize("overwriting", [False, True], ids=["next", "overwriting"])
def test_b01_a_kill_between_any_two_file_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwriting: bool
) -> None:
    """B01 (a): whenever the writer dies, the next load gives the previous checkpoint or the new one, exactly."""
    old, new = two_strategies()
    old_state, new_state, snapshot = state_of(old), state_of(new), take_snapshot(new)
    before = tmp_path / "before"
    for _ in range(1 + overwriting):
        save(old, before)
    total = operations_of_a_save(copy_of(before, tmp_path / "counted"), snapshot, monkeypatch)
    assert total > 20
    outcomes = []
    for operation in range(total):
        root = copy_of(before, tmp_path / f"{operation}")
        killed_save(root, snapshot, operation, monkeypatch)
        live = strategy(seed=7, hooks=[Counting()])
        with restore_warnings():
            restore(live, root)
        outcomes.append(live.step_count == new.step_count)
        assert_same(state_of(live), new_state if outcomes[-1] else old_state)
        save(new, root)
        assert_same(state_of(rebuilt(root, hooks=[Counting()])), new_state)
        assert not list(root.glob(".tmp-*"))
    assert outcomes == sorted(outcomes), "once the new checkpoint counts, it counts for good"
    assert not outcomes[0]


def test_b01_a_killed_process(root: Path) -> None:
    """B01 (a): SIGKILL in the middle of a real save in a real process."""
    save(strategy(), root)
    before = contents(root)
    script = f"""
        import sys, time
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from checkpoint_rigs import strategy
        from nvalchemi_lightning.checkpoint import save, files
        sync = files.os.fsync
        def slow(handle):
            sync(handle)
            print("file", flush=True)
            time.sleep(0.5)
        files.os.fsync = slow
        save(strategy(), {str(root)!r})
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    assert list(root.glob(".tmp-*"))
    for name, data in before.items():
        assert (root / name).read_bytes() == data
    assert rebuilt(root).step_count == 0
    assert save(strategy(), root) == 1
    assert not list(root.glob(".tmp-*"))


@pytest.mark.parametrize("after", [3, 6])
def test_b01_a_full_disk_leaves_the_earlier_checkpoint_untouched(
    root: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """B01 (b): the failure is reported, and not a byte of what was there has changed."""
    old, new = two_strategies()
    save(old, root)
    before = contents(root)
    with (
        counted_operations(monkeypatch, disk_full(after)),
        pytest.raises(OSError, match="No space left on device") as caught,
    ):
        save(new, root)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.__notes__ == [f"the checkpoint was not written to {root}; the earlier ones there are untouched"]
    assert contents(root) == before
    assert save(new, root) == 1
    assert_same(state_of(rebuilt(root, hooks=[Counting()])), state_of(new))


def test_files_reach_the_disk_before_they_count(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file is flushed before the first is moved, every folder before the manifest is, which comes last."""
    calls: list[str] = []
    with counted_operations(monkeypatch, lambda _, name: calls.append(name)):
        save(strategy(), root)
    moves = [i for i, name in enumerate(calls) if name == "replace"]
    files = len(contents(root))
    assert len(moves) == files
    assert calls[: moves[0]].count("fsync") == files
    assert "fsync" not in calls[moves[0] : moves[-2]]
    assert calls[moves[-2] : moves[-1]].count("fsync") > 3
    assert calls[moves[-1] :].count("fsync") == 1
    assert (
        max((root / name).stat().st_ctime_ns for name in contents(root)) == (root / "manifest.json").stat().st_ctime_ns
    )


def test_folders_are_not_flushed_where_they_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = Path("absent")
    with pytest.raises(FileNotFoundError):
        _sync_folder(absent)
    monkeypatch.setattr(os, "name", "nt")
    _sync_folder(absent)


def two_checkpoints(root: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    old, new = strategy(), run(strategy())
    save(old, root)
    save(new, root)
    return state_of(old), state_of(new)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGED = [
    "models/main/checkpoints/1.pt",
    "optimizers/main_optimizer/checkpoints/1.pt",
    "schedulers/main_scheduler/checkpoints/1.pt",
    "strategy/checkpoints/1.json",
    "lightning/checkpoints/1.json",
]


@pytest.mark.parametrize("name", DAMAGED)
def test_b01_a_damaged_file_is_named_and_the_previous_checkpoint_read(root: Path, name: str) -> None:
    """B01 (c): a torn newest checkpoint never ends in an unpickling error."""
    old, _ = two_checkpoints(root)
    cut(root / name)
    with pytest.warns(
        UserWarning, match=rf"checkpoint 1 of .* is not complete: .*{name}.* Reading checkpoint 0 instead"
    ):
        again = rebuilt(root)
    assert_same(state_of(again), old)
    with pytest.raises(StoreError, match=rf"{name} is damaged"):
        rebuilt(root, 1)
    assert save(again, root) == 2


@pytest.mark.parametrize("name", DAMAGED[:4])
def test_damage_is_seen_without_a_record_too(root: Path, name: str) -> None:
    """The reference writes no record, so its files must tell by themselves."""
    two_checkpoints(root)
    cut(root / name)
    (root / "lightning/checkpoints/1.json").unlink()
    with pytest.raises(StoreError, match=rf"{name} is damaged"):
        rebuilt(root, 1)
    with pytest.warns(UserWarning, match="Reading checkpoint 0 instead"):
        rebuilt(root)


@pytest.mark.parametrize("with_record", [True, False])
@pytest.mark.parametrize("name", [*DAMAGED[:2], DAMAGED[3]])
def test_a_missing_file_is_named(root: Path, name: str, with_record: bool) -> None:
    two_checkpoints(root)
    (root / name).unlink()
    if not with_record:
        (root / "lightning/checkpoints/1.json").unlink()
    with pytest.raises(StoreError, match=rf"{name} is missing"):
        rebuilt(root, 1)
    with pytest.warns(UserWarning, match="Reading checkpoint 0 instead"):
        rebuilt(root)


def test_two_damaged_checkpoints_fall_back_twice(root: Path) -> None:
    old, _ = two_checkpoints(root)
    save(run(strategy()), root)
    for index in (1, 2):
        cut(root / f"models/main/checkpoints/{index}.pt")
    with pytest.warns(UserWarning, match="is not complete") as caught:
        assert_same(state_of(rebuilt(root)), old)
    assert len(caught) == 2
    cut(root / "models/main/checkpoints/0.pt")
    with pytest.warns(UserWarning, match="Reading"), pytest.raises(StoreError, match=r"0\.pt is damaged"):
        rebuilt(root)


@pytest.mark.parametrize("text", ["", '{"checkpoint_in', "[]", '{"checkpoint_index": "one"}'])
def test_b01_a_damaged_manifest_is_read_from_the_files(root: Path, text: str) -> None:
    """B01 (d): everything but the manifest is intact, so nothing is lost, and the next save mends it."""
    _, new = two_checkpoints(root)
    (root / "manifest.json").write_text(text)
    with pytest.warns(UserWarning, match=r"manifest.json is damaged: .* Going by the files in .* instead"):
        again = rebuilt(root)
    assert_same(state_of(again), new)
    assert save(again, root) == 2
    assert json.loads((root / "manifest.json").read_text())["checkpoint_index"] == 2
    assert_same(state_of(rebuilt(root)), new)


def test_a_checkpoint_of_the_reference_without_counters_is_incomplete(root: Path) -> None:
    """It writes weights, then the manifest, then the counters; killed in between it mixes N with N - 1."""
    old, _ = two_checkpoints(root)
    for name in ("strategy/checkpoints/1.json", "lightning/checkpoints/1.json"):
        (root / name).unlink()
    with pytest.warns(UserWarning, match=r"strategy/checkpoints/1.json is missing.* Reading checkpoint 0 instead"):
        assert_same(state_of(rebuilt(root)), old)


def test_an_index_without_files_is_incomplete(root: Path) -> None:
    two_checkpoints(root)
    manifest = json.loads((root / "manifest.json").read_text())
    empty = {**manifest, "checkpoint_index": 5, "models": [], "optimizers": [], "schedulers": []}
    (root / "manifest.json").write_text(json.dumps(empty))
    with pytest.warns(UserWarning, match=r"holds nothing of checkpoint 5.* Reading checkpoint 1 instead"):
        assert rebuilt(root).step_count == 3


@pytest.mark.parametrize("content", [[1, 2], print])
def test_unsafe_or_foreign_tensor_files_are_named(root: Path, content: Any) -> None:
    save(strategy(), root)
    (root / "lightning/checkpoints/0.json").unlink()
    torch.save(content, root / "models/main/checkpoints/0.pt")
    with pytest.raises(StoreError, match=r"models/main/checkpoints/0.pt is damaged"):
        rebuilt(root)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "it holds no object"),
        ('{"files": {}}', "schema_version is None"),
        ('{"schema_version": 1, "files": []}', r"files is \[\] \(Input should be a valid dictionary\)"),
        ('{"schema_version": 1, "files": {}}', r"manifest is .* \(Field required\)"),
    ],
)
def test_a_record_without_files_is_damaged(root: Path, text: str, reason: str) -> None:
    save(strategy(), root)
    (root / "lightning/checkpoints/0.json").write_text(text)
    with pytest.raises(StoreError, match=rf"lightning/checkpoints/0.json is damaged: {reason}"):
        rebuilt(root)


def test_lookup_by_step_passes_over_damaged_counters(root: Path) -> None:
    two_checkpoints(root)
    cut(root / "strategy/checkpoints/1.json")
    with pytest.raises(FileNotFoundError, match="no checkpoint step_3; it has step_0, epoch_0"):
        rebuilt(root / "step_3")
