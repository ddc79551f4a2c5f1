"""Times from stage to stage: which intervals there are, how many, and their statistics."""

from __future__ import annotations

import csv
import itertools
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from watch_rigs import BoomError, Failing, batches, run, strategy, validation

from nvalchemi_lightning.errors import ConfigurationError, ConfigurationTypeError, UnknownNameError
from nvalchemi_lightning.hooks import GradientAccumulationHook, StageTimingHook
from nvalchemi_lightning.hooks.intervals import Mark, Span
from nvalchemi_lightning.stages import TrainingStage

Stage = TrainingStage


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every look at the clock take one second."""
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))


def counts(timing: StageTimingHook) -> dict[str, float]:
    return {name: numbers["n_samples"] for name, numbers in timing.summary().items()}


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as lines:
        return list(csv.DictReader(lines))


def test_every_interval_of_a_run_is_there() -> None:
    """B-24: pairs that end in AFTER_BATCH, and SETUP, which has no batch."""
    timing = StageTimingHook("all")
    run(strategy(timing, num_steps=3))
    assert counts(timing) == {
        "SETUP->BEFORE_TRAINING": 1,
        "BEFORE_TRAINING->BEFORE_EPOCH": 1,
        "BEFORE_EPOCH->BEFORE_BATCH": 1,
        "BEFORE_BATCH->BEFORE_FORWARD": 3,
        "BEFORE_FORWARD->AFTER_FORWARD": 3,
        "AFTER_FORWARD->BEFORE_LOSS": 3,
        "BEFORE_LOSS->AFTER_LOSS": 3,
        "AFTER_LOSS->BEFORE_BACKWARD": 3,
        "BEFORE_BACKWARD->AFTER_BACKWARD": 3,
        "AFTER_BACKWARD->BEFORE_OPTIMIZER_STEP": 3,
        "BEFORE_OPTIMIZER_STEP->AFTER_OPTIMIZER_STEP": 3,
        "AFTER_OPTIMIZER_STEP->AFTER_BATCH": 3,
        "AFTER_BATCH->BEFORE_BATCH": 2,
        "AFTER_BATCH->AFTER_EPOCH": 1,
        "AFTER_EPOCH->AFTER_TRAINING": 1,
    }


@pytest.mark.usefixtures("clock")
def test_the_numbers_by_hand() -> None:
    """The clock is read at two stages of every batch: each interval takes one second."""
    timing = StageTimingHook("step")
    run(strategy(timing, num_steps=3))
    one = {"mean_s": 1.0, "std_s": 0.0, "min_s": 1.0, "max_s": 1.0}
    assert timing.summary() == {
        "BEFORE_BATCH->AFTER_BATCH": {**one, "total_s": 3.0, "n_samples": 3},
        "AFTER_BATCH->BEFORE_BATCH": {**one, "total_s": 2.0, "n_samples": 2},
    }
    assert str(timing).splitlines() == [
        "interval                   n   mean/ms  std/ms  total/s",
        "BEFORE_BATCH->AFTER_BATCH  3  1000.000   0.000    3.000",
        "AFTER_BATCH->BEFORE_BATCH  2  1000.000   0.000    2.000",
    ]
    timing.reset()
    assert timing.summary() == {}


def test_validation_is_measured_apart_and_not_as_waiting_for_data() -> None:
    """B-24: validation forwards were mixed into those of training."""
    timing = StageTimingHook([Stage.BEFORE_FORWARD, "AFTER_FORWARD", Stage.AFTER_BATCH])
    run(strategy(timing, num_steps=4, validation_config=validation(every_n_steps=2)), count=4)
    assert counts(timing) == {
        "BEFORE_FORWARD->AFTER_FORWARD": 4,
        "AFTER_FORWARD->AFTER_BATCH": 4,
        "AFTER_BATCH->BEFORE_FORWARD": 2,
        "validation: BEFORE_FORWARD->AFTER_FORWARD": 2,
    }


def test_the_time_of_a_validation_is_an_interval_of_its_own_if_wanted() -> None:
    timing = StageTimingHook([Stage.BEFORE_BATCH, Stage.AFTER_BATCH, Stage.AFTER_VALIDATION])
    run(strategy(timing, num_steps=4, validation_config=validation(every_n_steps=2)), count=4)
    assert counts(timing) == {
        "BEFORE_BATCH->AFTER_BATCH": 4,
        "AFTER_BATCH->BEFORE_BATCH": 2,
        "AFTER_BATCH->AFTER_VALIDATION": 2,
        "AFTER_VALIDATION->BEFORE_BATCH": 1,
    }


@pytest.mark.parametrize(("frequency", "timed"), [(2, 3), (3, 2), (7, 1)])
def test_frequency_counts_batches(frequency: int, timed: int) -> None:
    """Of six batches, of which three make a step; the wait after a timed batch is timed too."""
    timing = StageTimingHook("step", frequency=frequency)
    run(strategy(timing, GradientAccumulationHook(2), num_steps=3), count=6)
    found = counts(timing)
    assert found["BEFORE_BATCH->AFTER_BATCH"] == timed
    assert found["AFTER_BATCH->BEFORE_BATCH"] == timed


def test_single_batches_are_timed() -> None:
    timing = StageTimingHook("step")
    what = strategy(timing)
    (batch,) = batches(1)
    what.train_batch(batch)
    assert counts(timing) == {"BEFORE_BATCH->AFTER_BATCH": 1}
    with what:
        what.train_batch(batch)
        what.train_batch(batch)
    assert counts(timing) == {"BEFORE_BATCH->AFTER_BATCH": 3, "AFTER_BATCH->BEFORE_BATCH": 1}


def test_a_second_run_appends_to_the_file(tmp_path: Path) -> None:
    """B-24: it was truncated."""
    path = tmp_path / "timing" / "stages.csv"
    timing = StageTimingHook("step", log_path=path)
    assert not path.parent.exists()
    what = run(strategy(timing))
    written = rows(path)
    assert [(row["rank"], row["step"], row["stage"]) for row in written] == [
        ("0", "0", "BEFORE_BATCH->AFTER_BATCH"),
        ("0", "1", "AFTER_BATCH->BEFORE_BATCH"),
        ("0", "1", "BEFORE_BATCH->AFTER_BATCH"),
    ]
    what.num_steps = 3
    run(what)
    assert rows(path)[:3] == written
    assert len(rows(path)) == 4
    measured = [float(row["t_since_init_s"]) for row in rows(path)]
    assert measured == sorted(measured)
    assert sum(float(row["delta_s"]) for row in rows(path)) == pytest.approx(
        sum(numbers["total_s"] for numbers in timing.summary().values())
    )


def test_other_ranks_write_a_file_of_their_own(tmp_path: Path) -> None:
    timing = StageTimingHook("step", log_path=tmp_path / "stages.csv")
    ctx = strategy().context(batches(1)[0], global_rank=2)
    timing(ctx, Stage.BEFORE_BATCH)
    timing(ctx, Stage.AFTER_BATCH)
    timing.close()
    assert [row["rank"] for row in rows(tmp_path / "stages_rank2.csv")] == ["2"]


def test_a_failed_run_leaves_what_was_measured(tmp_path: Path) -> None:
    timing = StageTimingHook("detailed", log_path=tmp_path / "stages.csv")
    what = strategy(timing, Failing(1))
    with pytest.raises(BoomError):
        run(what)
    assert len(rows(tmp_path / "stages.csv")) == 6
    run(strategy(timing))
    assert counts(timing)["BEFORE_BATCH->BEFORE_FORWARD"] == 3
    assert counts(timing)["AFTER_BATCH->BEFORE_BATCH"] == 1


class Event:
    """A CUDA event that a test drives."""

    def __init__(self, at: float) -> None:
        self.at, self.reached, self.waits = at, False, 0

    def query(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        self.waits += 1

    def elapsed_time(self, later: Event) -> float:
        return later.at - self.at


def test_events_of_the_device_are_waited_for_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = StageTimingHook("step", enable_nvtx=False)
    events = iter([Event(5.0), Event(25.0)])
    ctx = strategy().context(batches(1)[0])
    marks: list[Mark] = []

    def mark(ctx: Any, stage: TrainingStage) -> Mark:
        marks.append(Mark(stage.name, 0, 0, 0.0, next(events)))
        return marks[-1]

    monkeypatch.setattr(timing, "_mark", mark)
    timing(ctx, Stage.BEFORE_BATCH)
    timing(ctx, Stage.AFTER_BATCH)
    assert marks[1].event.waits == 0
    assert timing.summary()["BEFORE_BATCH->AFTER_BATCH"]["mean_s"] == pytest.approx(0.020)
    assert marks[1].event.waits == 1


def test_on_cuda_intervals_are_marked_for_nsight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device in name only: events and ranges go where they should."""
    ranges: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Recorded())
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", ranges.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: ranges.append("end"))
    timing = StageTimingHook("step", timer_backend="cuda_event")
    ctx = strategy().context(batches(1)[0])
    timing(ctx, Stage.BEFORE_BATCH)
    timing(ctx, Stage.AFTER_BATCH)
    timing.close()
    timing.close()
    assert ranges == ["after BEFORE_BATCH", "end", "after AFTER_BATCH", "end"]
    assert timing.summary()["BEFORE_BATCH->AFTER_BATCH"]["mean_s"] == pytest.approx(0.001)


class Recorded(Event):
    """An event that is reached a millisecond after the one before."""

    clock = itertools.count()

    def record(self) -> None:
        self.at = float(next(self.clock))

    def __init__(self) -> None:
        super().__init__(0.0)


def test_a_mark_without_an_event_is_measured_by_the_host() -> None:
    first, second = Mark("A", 0, 0, 1.0, None), Mark("B", 0, 0, 3.5, Event(1.0))
    assert first.is_over
    assert not second.is_over
    assert first.seconds_to(second) == second.seconds_to(first) * -1 == 2.5


@given(st.lists(st.floats(0, 1e3), min_size=1))
def test_running_statistics_are_those_of_the_list(seconds: list[float]) -> None:
    span = Span()
    for each in seconds:
        span.add(each)
    mean = math.fsum(seconds) / len(seconds)
    deviation = math.sqrt(math.fsum((each - mean) ** 2 for each in seconds) / len(seconds))
    numbers = span.statistics()
    assert numbers["mean_s"] == pytest.approx(mean, abs=1e-9)
    assert numbers["std_s"] == pytest.approx(deviation, abs=1e-6)
    assert (numbers["min_s"], numbers["max_s"]) == (min(seconds), max(seconds))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"profiled_stages": "detail"},
            UnknownNameError,
            "profiled_stages='detail'; did you mean 'detailed'.*; there are",
        ),
        (
            {"profiled_stages": ["BEFORE_BATCH"]},
            ConfigurationError,
            r"between two stages or more; got \['BEFORE_BATCH'\]",
        ),
        (
            {"profiled_stages": ["BEFOR_BATCH"]},
            UnknownNameError,
            "no stage is called 'BEFOR_BATCH'; did you mean 'BEFORE",
        ),
        ({"profiled_stages": [4, 5]}, ConfigurationTypeError, "profiled_stages holds TrainingStage stages; got 4"),
        (
            {"profiled_stages": [Stage.DO_BACKWARD, Stage.AFTER_BATCH]},
            ConfigurationError,
            "DO_BACKWARD belongs to one owner and cannot be observed; time BEFORE_BACKWARD and AFTER_BACKWARD",
        ),
        ({"frequency": 0}, ConfigurationError, "StageTimingHook.frequency must be a positive integer; got 0"),
        (
            {"timer_backend": "cuda"},
            UnknownNameError,
            "timer_backend='cuda'; did you mean 'cuda_event'.*; there are auto",
        ),
    ],
)
def test_what_cannot_work_is_refused_at_construction(arguments: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        StageTimingHook(**arguments)


def test_events_need_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigurationError, match="timer_backend='cuda_event', but torch sees no CUDA device here"):
        StageTimingHook(timer_backend="cuda_event")
