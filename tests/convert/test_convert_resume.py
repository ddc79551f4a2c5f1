"""Conversions that are interrupted: by errors, full disks and kills; and go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from convert_rigs import frame_text, write_frames

from nvalchemi_lightning.data import (
    AtomicDataZarrReader,
    AtomicDataZarrWriter,
    Dialect,
    ZarrWriteConfig,
    convert,
    origin_of,
    provenance_of,
)
from nvalchemi_lightning.data.conversion import targets as conversion_targets
from nvalchemi_lightning.errors import ConfigurationError, DataError

pytest.importorskip("ase")

SMALL = ZarrWriteConfig(block_size=4)


class StopError(Exception):
    """What interrupts a conversion in these tests."""


def stop_after(count):
    """Return a callback that raises when ``count`` structures have been read."""
    seen = 0

    def advance(amount):
        nonlocal seen
        seen += amount
        if seen >= count:
            raise StopError

    return advance


@pytest.fixture
def files(tmp_path):
    """Return two files, of ten and of five structures."""
    return [
        write_frames(tmp_path / "a.extxyz", *[frame_text(number) for number in range(10)]),
        write_frames(tmp_path / "b.extxyz", *[frame_text(number) for number in range(10, 15)]),
    ]


def interrupt(files, target, count, **options):
    with pytest.raises(StopError):
        convert(files, target, config=SMALL, advance=stop_after(count), **options)


def stored(store):
    return AtomicDataZarrReader(store).read_batch(slice(None))


def same_store(one, other):
    found, wanted = stored(one), stored(other)
    assert found.field_levels == wanted.field_levels
    for name, value in wanted:
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, equal_nan=True)
    assert [origin_of(one, index) for index in range(len(wanted))] == [origin_of(other, i) for i in range(len(wanted))]
    assert provenance_of(one) == provenance_of(other)


@pytest.mark.parametrize("count", range(1, 15))
def test_going_on_gives_the_same_store(files, tmp_path, count):
    convert(files, tmp_path / "whole.zarr", config=SMALL)
    interrupt(files, tmp_path / "w.zarr", count)
    assert not (tmp_path / "w.zarr").exists()
    read = []
    done = convert(files, tmp_path / "w.zarr", config=SMALL, resume=True, advance=read.append)
    assert sum(read) == 15 - (count - 1) // 4 * 4 if count > 4 else 15
    assert done.structures == done.labels["energy"] == 15
    same_store(tmp_path / "w.zarr", tmp_path / "whole.zarr")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.extxyz", "b.extxyz", "w.zarr", "whole.zarr"]


def test_parts_and_skips_go_on_too(files, tmp_path):
    files.append(write_frames(tmp_path / "c.extxyz", frame_text(1), frame_text(2).replace("H", "Hx"), frame_text(3)))
    options = {"split": [0.5, 0.5], "on_error": "skip"}
    convert(files, tmp_path / "whole.zarr", config=SMALL, **options)
    interrupt(files, tmp_path / "w.zarr", 16, **options)
    done = convert(files, tmp_path / "w.zarr", config=SMALL, resume=True, **options)
    assert len(done.omitted) == 1
    for part in ("train", "val"):
        same_store(tmp_path / f"w_{part}.zarr", tmp_path / f"whole_{part}.zarr")


def test_without_resume_it_starts_anew(files, tmp_path):
    interrupt(files, tmp_path / "w.zarr", 9)
    read = []
    convert(files, tmp_path / "w.zarr", advance=read.append)
    assert sum(read) == 15


def test_resume_without_anything_unfinished_starts(files, tmp_path):
    assert convert(files, tmp_path / "w.zarr", resume=True).structures == 15


def test_a_damaged_frame_can_be_left_out_when_going_on(files, tmp_path):
    files.append(write_frames(tmp_path / "c.extxyz", frame_text(1).replace("H", "Hx"), frame_text(3)))
    with pytest.raises(DataError, match=r"c.extxyz: frame 0"):
        convert(files, tmp_path / "w.zarr", config=SMALL)
    read = []
    done = convert(files, tmp_path / "w.zarr", config=SMALL, on_error="skip", resume=True, advance=read.append)
    assert (sum(read), done.structures, len(done.omitted)) == (4, 16, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float64"}, "it was started with dtype='float32', not 'float64'; start anew, without resume"),
        ({"dialect": Dialect(energy_unit="Ha")}, "it was started with dialects="),
        ({"split": [0.5, 0.5]}, "it was started with split=None"),
    ],
)
def test_other_options_cannot_go_on(files, tmp_path, options, message):
    interrupt(files, tmp_path / "w.zarr", 9)
    with pytest.raises(ConfigurationError, match=message):
        convert(files, tmp_path / "w.zarr", resume=True, **options)
    assert convert(files, tmp_path / "w.zarr", config=SMALL, resume=True).structures == 15


def test_other_sources_cannot_go_on(files, tmp_path):
    interrupt(files, tmp_path / "w.zarr", 9)
    with pytest.raises(ConfigurationError, match=r"it was started with dialects|it was started with the sources"):
        convert(files[:1], tmp_path / "w.zarr", resume=True)
    with pytest.raises(ConfigurationError, match="it was started with the sources"):
        convert(files[::-1], tmp_path / "w.zarr", resume=True)
    write_frames(files[0], *[frame_text(number) for number in range(11)])
    with pytest.raises(ConfigurationError, match=r"a.extxyz has changed since; start anew"):
        convert(files, tmp_path / "w.zarr", resume=True)


def test_a_record_that_cannot_be_read(files, tmp_path):
    interrupt(files, tmp_path / "w.zarr", 9)
    (tmp_path / ".w.zarr.partial" / "record.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"record.json cannot be read; start anew"):
        convert(files, tmp_path / "w.zarr", resume=True)


def test_a_full_disk_leaves_what_was_there(files, tmp_path, monkeypatch):
    convert(files[:1], tmp_path / "w.zarr")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("nvalchemi_lightning.data.store.append.Appender.commit", full)
    with pytest.raises(OSError, match="No space left"):
        convert(files, tmp_path / "w.zarr", existing="overwrite", config=SMALL)
    monkeypatch.undo()
    assert len(stored(tmp_path / "w.zarr")) == 10
    assert not [*tmp_path.glob(".*")]


@pytest.mark.parametrize("call", range(3))
def test_interrupted_while_stores_are_moved(files, tmp_path, monkeypatch, call):
    """Every store is the old or the new one, and going on finishes the move."""
    convert(files[:1], tmp_path / "w.zarr", split=[0.5, 0.5])
    moves = []
    rename = conversion_targets.Path.rename

    def stopping(path, place):
        moves.append(path)
        if len(moves) == call + 1:
            raise StopError
        return rename(path, place)

    with monkeypatch.context() as patch:
        patch.setattr(conversion_targets.Path, "rename", stopping)
        with pytest.raises(StopError):
            convert(files, tmp_path / "w.zarr", split=[0.5, 0.5], existing="overwrite", config=SMALL)
    done = convert(files, tmp_path / "w.zarr", split=[0.5, 0.5], existing="overwrite", resume=True)
    assert [len(stored(store)) for store in done.stores] == [8, 7] == [*done.stores.values()]
    assert not [*tmp_path.glob(".*")]


@pytest.mark.parametrize("place", ["write_origins", "write_provenance", "publish"])
def test_interrupted_while_appending_adds_once(files, tmp_path, monkeypatch, place):
    convert(files[:1], tmp_path / "w.zarr")

    def stopping(*_):
        raise StopError

    home = "conversion.run" if place == "publish" else "conversion.targets"
    with monkeypatch.context() as patch:
        patch.setattr(f"nvalchemi_lightning.data.{home}.{place}", stopping)
        with pytest.raises(StopError):
            convert(files[1:], tmp_path / "w.zarr", existing="append", config=SMALL)
    convert(files[1:], tmp_path / "w.zarr", existing="append", config=SMALL, resume=True)
    assert stored(tmp_path / "w.zarr").energy[:, 0].tolist() == [-n - 0.5 for n in range(15)]
    assert origin_of(tmp_path / "w.zarr", 12) == (str(files[1]), 2)
    assert len(provenance_of(tmp_path / "w.zarr").sources) == 2


def test_what_somebody_else_appended_in_the_meantime(files, tmp_path, monkeypatch):
    convert(files[:1], tmp_path / "w.zarr")

    def stopping(*_):
        raise StopError

    with monkeypatch.context() as patch:
        patch.setattr("nvalchemi_lightning.data.conversion.targets.write_provenance", stopping)
        with pytest.raises(StopError):
            convert(files[1:], tmp_path / "w.zarr", existing="append", config=SMALL)
    AtomicDataZarrWriter(tmp_path / "w.zarr").append(stored(tmp_path / "w.zarr")[[0]])
    with pytest.raises(ConfigurationError, match="has 16 structures but had 10 when the conversion began"):
        convert(files[1:], tmp_path / "w.zarr", existing="append", config=SMALL, resume=True)


CHILD = """
import sys
from nvalchemi_lightning.data import ZarrWriteConfig, convert
convert(sys.argv[1], sys.argv[2], config=ZarrWriteConfig(block_size=8), resume=True)
"""


def run_child(*arguments, kill_after=None):
    """Convert in a process of its own and kill it when the record has been written ``kill_after`` times."""
    child = subprocess.Popen([sys.executable, "-c", CHILD, *map(str, arguments)])
    record = arguments[1].with_name(f".{arguments[1].name}.partial") / "record.json"
    seen = set()
    while kill_after is not None and child.poll() is None and len(seen) < kill_after:
        if record.exists():
            seen.add(record.stat().st_mtime_ns)
        time.sleep(0.002)
    if kill_after is not None and child.poll() is None:
        os.kill(child.pid, signal.SIGKILL)
    return child.wait()


@pytest.mark.skipif(os.name == "nt", reason="processes are killed by a signal")
def test_killed_and_gone_on(tmp_path):
    path = write_frames(tmp_path / "n.extxyz", *[frame_text(number) for number in range(160)])
    target = tmp_path / "n.zarr"
    codes = [run_child(path, target, kill_after=after) for after in (1, 7)]
    if codes[-1] != 0:
        assert not target.exists()
        run_child(path, target)
    assert stored(target).energy[:, 0].tolist() == [-n - 0.5 for n in range(160)]
    assert [origin_of(target, index).number for index in (0, 79, 159)] == [0, 79, 159]
