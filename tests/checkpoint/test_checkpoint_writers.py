"""Several writers, killed writers, and writers that the system refuses."""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import signal
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_rigs import Counting, Net, assert_same, contents, rebuilt, restore_warnings, run, state_of, strategy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nvalchemi_lightning.checkpoint import lock, save
from nvalchemi_lightning.checkpoint.lock import sole_writer
from nvalchemi_lightning.checkpoint.pruning import retain
from nvalchemi_lightning.checkpoint.reading import latest_index
from nvalchemi_lightning.checkpoint.snapshot import take_snapshot
from nvalchemi_lightning.checkpoint.writing import write
from nvalchemi_lightning.errors import ConfigurationError, StoreError

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here")

# `nox -s crash` asks for more.
KILLS = int(os.environ.get("NVALCHEMI_KILLS", "200"))


def forked(action: Any) -> int:
    """Run a function in a child process and return its number; it ends with 0, or with 1 on an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forking beside threads
        child = os.fork()
    if child == 0:
        try:
            action()
            os._exit(0)
        finally:
            os._exit(1)
    return child


def exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def loaded(root: Path) -> dict[str, Any]:
    with restore_warnings():
        return state_of(rebuilt(root, hooks=[Counting()]))


def saving_for_ever(root: Path, snapshots: list[Any], kind: str) -> None:
    """Save one state after the other."""
    for turn in itertools.count():
        write(root, snapshots[turn % 2], latest_index(root) if kind == "overwriting" else -1)
        if kind == "pruning":
            retain(root, 2, None)


@needs_fork
@pytest.mark.parametrize("kind", ["counting on", "overwriting", "pruning"])
def test_b01_kills_at_random_moments(tmp_path: Path, kind: str) -> None:
    """B01 (a): SIGKILL at any moment leaves a checkpoint that is one of those saved, bit for bit."""
    states = [strategy(hooks=[Counting()]), run(strategy(hooks=[Counting()]))]
    snapshots, expected = [take_snapshot(each) for each in states], [state_of(each) for each in states]
    root, moments = tmp_path / "root", random.Random(0)
    for index in (0, 1):
        write(root, snapshots[index])
    started = time.perf_counter()
    write(root, snapshots[0])
    one_save = time.perf_counter() - started
    for _ in range(-(-KILLS // 3)):
        child = forked(lambda: saving_for_ever(root, snapshots, kind))
        time.sleep(moments.uniform(0.1, 2.5) * one_save)
        os.kill(child, signal.SIGKILL)
        assert exit_code(child) == -signal.SIGKILL
        found = loaded(root)
        assert_same(found, expected[found["counters"]["step_count"] != 0])
    retain(root, 2, None)
    write(root, snapshots[1])
    assert not list(root.glob(".tmp-*"))
    assert_same(loaded(root), expected[1])


@needs_fork
def test_two_writers_take_turns(tmp_path: Path) -> None:
    """What one has saved the other neither loses nor takes the number of."""
    root, snapshots = tmp_path / "root", [take_snapshot(strategy()), take_snapshot(run(strategy()))]

    def ten(snapshot: Any) -> None:
        for _ in range(10):
            write(root, snapshot)

    children = [forked(lambda snapshot=snapshot: ten(snapshot)) for snapshot in snapshots]
    assert [exit_code(child) for child in children] == [0, 0]
    counts = [rebuilt(root, index).step_count for index in range(20)]
    assert sorted(counts) == [0] * 10 + [3] * 10
    assert latest_index(root) == 19
    assert not list(root.glob(".tmp-*"))


@needs_fork
def test_a_writer_waits_for_another(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with sole_writer(root):
        child = forked(lambda: save(strategy(), root))
        time.sleep(0.2)
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        assert contents(root) == {}
    assert exit_code(child) == 0
    assert latest_index(root) == 0


def test_a_lock_is_released_on_an_error(root: Path) -> None:
    with pytest.raises(KeyError), sole_writer(root):
        raise KeyError
    with sole_writer(root) as locked:
        assert locked == (lock.fcntl is not None)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_written_all_the_same(
    root: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Without a lock nobody removes what may be another writer's."""
    other = root / ".tmp-0-other"
    other.mkdir(parents=True)

    def refuse(*arguments: Any) -> None:
        raise OSError(number, "no locks here")

    with monkeypatch.context() as patch:
        patch.setattr(lock.fcntl, "flock", refuse)
        assert save(strategy(), root) == 0
        patch.setattr(lock, "fcntl", None)
        assert save(strategy(), root) == 1
    assert other.exists()
    assert save(strategy(), root) == 2
    assert not other.exists()


def test_a_lock_that_fails_otherwise_is_reported(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    with pytest.raises(OSError, match="broken") as caught:
        save(strategy(), root)
    assert caught.value.__notes__ == [f"the checkpoint was not written to {root}; the earlier ones there are untouched"]


@needs_fork
@pytest.mark.parametrize("limit", [100, 60_000])
def test_b01_a_limit_of_the_size_of_files(root: Path, limit: int) -> None:
    """B01 (b): a real refusal of the system, in the middle of a tensor, keeps its own words."""
    save(strategy(), root)
    before, large = contents(root), take_snapshot(strategy(models=Net(3000)))

    def limited() -> None:
        import resource

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        with pytest.raises(OSError, match="File too large") as caught:
            write(root, large)
        assert "the checkpoint was not written to" in caught.value.__notes__[0]

    assert exit_code(forked(limited)) == 0
    assert contents(root) == before
    assert not list(root.glob(".tmp-*"))


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_folder_that_is_not_writable(root: Path) -> None:
    save(strategy(), root)
    before = contents(root)
    root.chmod(0o555)
    try:
        with pytest.raises(PermissionError):
            save(strategy(), root)
    finally:
        root.chmod(0o755)
    assert contents(root) == before


def test_an_error_of_torch_that_is_none_of_the_disk_stays(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(torch, "save", refuse)
    with pytest.raises(RuntimeError, match="something else"):
        save(strategy(), root)
    assert contents(root) == {}


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two checkpoints that is never changed."""
    folder = tmp_path_factory.mktemp("pair") / "root"
    save(strategy(), folder)
    save(run(strategy()), folder)
    return folder


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_b01_any_damage_is_seen_and_named(
    pair: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """B01 (c): a bit that flips, or bytes that are missing, in any file of the newest checkpoint."""
    names = [name for name in contents(pair) if "checkpoints/1." in name]
    name = data.draw(st.sampled_from(names))
    before = (pair / name).read_bytes()
    place = data.draw(st.integers(0, len(before) - 1))
    if data.draw(st.booleans()):
        after = before[:place]
    else:
        after = before[:place] + bytes([before[place] ^ 1 << data.draw(st.integers(0, 7))]) + before[place + 1 :]
    root = tmp_path_factory.mktemp("damaged") / "root"
    shutil.copytree(pair, root)
    (root / name).write_bytes(after)
    if name.startswith("lightning/checkpoints/1.json"):  # it has no hash of its own
        with warnings.catch_warnings(record=True) as caught, suppress(ConfigurationError):  # such as a newer version
            warnings.simplefilter("always")
            assert rebuilt(root).step_count == (0 if caught else 3)
        return
    with pytest.warns(UserWarning, match=rf"(?s)checkpoint 1 of .* is not complete: .*{name} is damaged"):
        assert rebuilt(root).step_count == 0
    with pytest.raises(StoreError, match=rf"{name} is damaged"):
        rebuilt(root, 1)
