"""Writers that die, or are refused by the file system, at every moment of every operation."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import zarr
import zarr.storage._local as local_store
from feeding_stores import SMALL_CHUNKS, contents
from feeding_structures import make_structures

from nvalchemi_lightning.data import AtomicDataZarrReader, AtomicDataZarrWriter, repair_store
from nvalchemi_lightning.data.store.layout import ZarrWriteConfig
from nvalchemi_lightning.errors import StoreWriteError

CONFIG = ZarrWriteConfig(chunk_bytes=256, block_size=3)


class Killed(BaseException):
    """Stands for the end of the process."""


class FailingDisk:
    """Counts what changes the file system; from call number ``at`` on, calls fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Callable[[], BaseException], *, once: bool) -> None:
        self.calls = 0
        self.at = -1
        self._once = once
        self._error = error
        for owner, name in (
            (local_store, "_put"),
            (Path, "rename"),
            (Path, "unlink"),
            (os, "link"),
            (os, "fsync"),
            (shutil, "copy2"),
            (shutil, "rmtree"),
        ):
            monkeypatch.setattr(owner, name, self._watched(getattr(owner, name)))

    def _watched(self, original):
        def call(*args, **kwargs):
            number, self.calls = self.calls, self.calls + 1
            if number == self.at or (number > self.at >= 0 and not self._once):
                error = self._error()
                if isinstance(error, OSError) and kwargs.get("ignore_errors"):
                    return None
                raise error
            return original(*args, **kwargs)

        return call

    def arm(self, at: int) -> None:
        self.calls, self.at = 0, at


def base(path: Path) -> None:
    AtomicDataZarrWriter(path, CONFIG).write(make_structures(4, edges=True))


def damage(path: Path) -> None:
    """Let the atom numbers of the last two structures begin anew, and the energies be short."""
    group = zarr.open_group(path, mode="r+")
    begin, atoms = int(group["meta/edges_ptr"][2]), int(group["meta/atoms_ptr"][2])
    pairs = group["core/neighbor_list"][:]
    pairs[begin:] -= atoms
    group["core/neighbor_list"][:] = pairs
    group["core/energy"].resize((3, 1))


OPERATIONS = {
    "write": (None, lambda path: AtomicDataZarrWriter(path, CONFIG).write(make_structures(4, edges=True))),
    "append": (base, lambda path: AtomicDataZarrWriter(path, CONFIG).append(tagged(4))),
    "add_custom": (base, lambda path: AtomicDataZarrWriter(path, CONFIG).add_custom("gap", torch.ones(4), "system")),
    "delete": (base, lambda path: AtomicDataZarrWriter(path, CONFIG).delete([1, 2])),
    "defragment": (
        lambda path: (base(path), AtomicDataZarrWriter(path).delete([0])),
        lambda path: AtomicDataZarrWriter(path, CONFIG).defragment(),
    ),
    "repair": (lambda path: (base(path), damage(path)), lambda path: repair_store(path, fill_short=True)),
}


def tagged(count):
    """Return structures with a field that the store lacks."""
    data = make_structures(count, seed=3, edges=True)
    for one in data:
        one.add_system_property("gap", torch.ones(1))
    return data


def state(path: Path):
    """Return what a reader sees, None where there is nothing, "damaged" where it refuses."""
    if not path.exists():
        return None
    try:
        return contents(path)
    except ValueError:
        return "damaged"


class Trial:
    """An operation on copies of a store, failing at chosen moments."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._origin = folder / "origin" / "s"
        self._prepare, self.operate = OPERATIONS[name]
        self.name = name
        if self._prepare:
            self._prepare(self._origin)
        self.before = state(self._origin)
        path = self.copy("after")
        self.operate(path)
        self.after = state(path)

    def copy(self, name: object) -> Path:
        path = self._folder / str(name) / "s"
        path.parent.mkdir()
        if self._origin.exists():
            shutil.copytree(self._origin, path)
        return path

    def count(self, monkeypatch: pytest.MonkeyPatch) -> int:
        """Return how many calls change the file system."""
        path = self.copy("count")
        with monkeypatch.context() as patched:
            disk = FailingDisk(patched, Killed, once=True)
            self.operate(path)
        return disk.calls

    def possible(self, first) -> tuple:
        """Return the legal states from ``first`` on; of several deletions some may be done."""
        if self.name == "delete" and first != self.after:
            return (first, self.after, [first[0], *first[2:]], [*first[:2], first[3]])
        return (first, self.after)

    def repair(self, path: Path):
        return repair_store(path, fill_short=self.name == "repair")


def moments(total: int) -> list[int]:
    """Return which calls to fail at; all of them if the environment says so."""
    return (
        list(range(total)) if os.environ.get("ALL_MOMENTS") else [0, total // 3, 2 * total // 3, total - 2, total - 1]
    )


@pytest.mark.parametrize("name", OPERATIONS)
def test_feeding_killed_at_any_moment(tmp_path, monkeypatch, name):
    """What a kill leaves reads as before or after; repair tidies it up, and the operation can be done again."""
    trial = Trial(tmp_path, name)
    for at in moments(trial.count(monkeypatch)):
        path = trial.copy(at)
        with monkeypatch.context() as patched:
            FailingDisk(patched, Killed, once=False).arm(at)
            with pytest.raises(Killed):
                trial.operate(path)
        assert state(path) in (None, *trial.possible(trial.before)), at
        if list(path.parent.iterdir()):
            trial.repair(path)
        assert state(path) in trial.possible(trial.before), at
        assert [entry.name for entry in path.parent.iterdir()] == ["s"] * path.exists()
        if path.exists():
            assert trial.repair(path).found == ()
        if state(path) == trial.before:
            trial.operate(path)
        assert state(path) in trial.possible(trial.after), at


@pytest.mark.parametrize("name", OPERATIONS)
def test_feeding_full_disk_at_any_moment(tmp_path, monkeypatch, name):
    """ENOSPC is a clear error, and the store is what the message says: as before, or to be repaired or repeated."""
    trial = Trial(tmp_path, name)
    messages = []
    for at in moments(trial.count(monkeypatch)):
        path = trial.copy(at)
        with monkeypatch.context() as patched:
            FailingDisk(patched, lambda: OSError(errno.ENOSPC, "No space left on device"), once=True).arm(at)
            try:
                trial.operate(path)
            except StoreWriteError as error:
                messages.append(str(error))
        assert state(path) in trial.possible(trial.before), at
        if list(path.parent.iterdir()):
            trial.repair(path)
        if state(path) == trial.before:
            trial.operate(path)
        assert state(path) in trial.possible(trial.after), at
    assert len(messages) > 2
    for message in messages:
        assert "s could not be written: [Errno 28] No space left on device; " in message


VICTIM = """
import sys
from test_feeding_crashes import OPERATIONS
from pathlib import Path
print("ready", flush=True)
OPERATIONS[sys.argv[2]][1](Path(sys.argv[1]))
"""


@pytest.mark.parametrize("name", ["append", "defragment"])
def test_feeding_killed_process(tmp_path, name):
    """The same with a real SIGKILL at a random moment."""
    trial = Trial(tmp_path, name)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    path = trial.copy("killed")
    command = [sys.executable, "-c", VICTIM, path, name]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as victim:
        assert victim.stdout is not None
        assert victim.stdout.readline() == b"ready\n"
        time.sleep(random.random() * 0.2)
        victim.send_signal(signal.SIGKILL)
    repair_store(path)
    assert contents(path) in (trial.before, trial.after)
    AtomicDataZarrReader(path).check_integrity()


def test_feeding_no_write_outlives_a_failed_operation(store, monkeypatch):
    """Zarr writes chunks side by side; those of a failed append must not meet the next one."""
    original, running, lock = local_store._put, [], threading.Lock()

    def put(path, *args, **kwargs):
        if "forces" not in path.parts or path.name == "zarr.json":
            return original(path, *args, **kwargs)
        with lock:
            running.append(path)
            first = len(running) == 1
        if first:
            raise OSError(errno.ENOSPC, "No space left on device")
        time.sleep(0.1)
        done = original(path, *args, **kwargs)
        running.remove(path)
        return done

    AtomicDataZarrWriter(store).defragment(CONFIG)
    monkeypatch.setattr(local_store, "_put", put)
    with pytest.raises(StoreWriteError, match="No space left on device; the store holds what it did before"):
        AtomicDataZarrWriter(store).append(make_structures(90))
    assert len(running) == 1


def test_feeding_errors_of_the_source_are_its_own(store):
    """What goes wrong while structures are drawn is not taken for a full disk."""

    def source():
        yield from make_structures(3)
        raise FileNotFoundError("frames.xyz")

    before = contents(store)
    with pytest.raises(FileNotFoundError, match=r"^frames.xyz$"):
        AtomicDataZarrWriter(store, SMALL_CHUNKS).append(source())
    assert contents(store) == before


def test_feeding_unfinished_write_without_folders_is_replaced():
    memory: dict = {}

    def source():
        yield from make_structures(3)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        AtomicDataZarrWriter(memory, SMALL_CHUNKS).write(source())
    assert contents(memory) == []
    AtomicDataZarrWriter(memory).write(make_structures(2))
    assert len(contents(memory)) == 2
    with pytest.raises(FileExistsError, match="<dict> exists"):
        AtomicDataZarrWriter(memory).write(make_structures(2))


def test_feeding_additions_to_a_store_without_attributes_do_not_count_early(store, monkeypatch):
    """A legal store may lack the commit marker; it is given one before anything is added."""
    group = zarr.open_group(store, mode="r+")
    group.attrs.put({})
    before = contents(store)
    for operate in (
        lambda: AtomicDataZarrWriter(store, SMALL_CHUNKS).append(make_structures(4)),
        lambda: AtomicDataZarrWriter(store).add_custom("gap", torch.ones(20), "system"),
    ):
        with monkeypatch.context() as patched:
            disk = FailingDisk(patched, Killed, once=False)
            disk.arm(4)
            with pytest.raises(Killed):
                operate()
        assert contents(store) == before
