"""Traces of torch's profiler: started, advanced and closed by the stages of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, schedule
from watch_rigs import BoomError, Failing, Logger, batches, run, strategy

from nvalchemi_lightning.errors import ConfigurationError, TrainingStateError, UnknownNameError
from nvalchemi_lightning.hooks import TorchProfilerHook
from nvalchemi_lightning.stages import TrainingStage


def names(trace: Path) -> list[str]:
    """Return the names of the events of a trace."""
    return [event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]]


def hook(folder: Path, **options: Any) -> TorchProfilerHook:
    return TorchProfilerHook(folder, activities=["cpu"], **options)


def assert_idle() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as free:
        torch.zeros(1)
    assert free.key_averages()


def test_a_run_is_recorded_and_a_second_one_too(tmp_path: Path) -> None:
    """B-24: single use in the reference."""
    profiler = hook(tmp_path / "profiles")
    what = run(strategy(profiler))
    what.num_steps = 3
    run(what)
    folder = tmp_path / "profiles" / "rank_0"
    assert profiler.traces == [folder / "trace_000.pt.trace.json", folder / "trace_001.pt.trace.json"]
    assert sorted(folder.iterdir()) == profiler.traces
    first, second = (names(trace).count("Optimizer.step#AdamW.step") for trace in profiler.traces)
    assert (first, second) == (2, 1)


def test_the_schedule_advances_once_per_batch(tmp_path: Path) -> None:
    """Of eight batches, one waits, one warms up, two are recorded, twice."""
    profiler = hook(tmp_path, schedule=schedule(wait=1, warmup=1, active=2, repeat=2))
    run(strategy(profiler, num_steps=8), count=4)
    assert len(profiler.traces) == 2
    assert [names(trace).count("Optimizer.step#AdamW.step") for trace in profiler.traces] == [2, 2]


def test_single_batches_are_recorded_one_by_one_or_together(tmp_path: Path) -> None:
    profiler = hook(tmp_path)
    what = strategy(profiler)
    (batch,) = batches(1)
    what.train_batch(batch)
    what.train_batch(batch)
    assert len(profiler.traces) == 2
    with what:
        what.train_batch(batch)
        what.train_batch(batch)
        assert len(profiler.traces) == 2
    assert len(profiler.traces) == 3
    assert [names(trace).count("Optimizer.step#AdamW.step") for trace in profiler.traces] == [1, 1, 2]


def test_a_failed_run_leaves_its_trace_and_no_profiler(tmp_path: Path) -> None:
    profiler = hook(tmp_path)
    with pytest.raises(BoomError):
        run(strategy(profiler, Failing(1)))
    assert len(profiler.traces) == 1
    assert_idle()


def test_a_trace_that_cannot_be_written_ends_the_run_and_not_the_process(tmp_path: Path) -> None:
    (tmp_path / "rank_0").write_text("a file where the folder should be")
    with pytest.raises(FileExistsError):
        run(strategy(hook(tmp_path, schedule=schedule(wait=0, warmup=1, active=1)), num_steps=3))
    assert_idle()


@pytest.mark.parametrize("plan", [None, schedule(wait=1, warmup=1, active=1)])
def test_another_profiler_is_not_disturbed(tmp_path: Path, plan: Any) -> None:
    profiler = hook(tmp_path, schedule=plan)
    what = strategy(profiler)
    with profile(activities=[ProfilerActivity.CPU]) as other:
        with pytest.raises(
            TrainingStateError, match="another profiler is active, and torch can profile once at a time"
        ):
            run(what)
        torch.zeros(7)
    assert any(event.key == "aten::zeros" for event in other.key_averages())
    assert not profiler.traces
    run(what)


def test_a_profiler_that_begins_while_ours_waits_is_not_disturbed(tmp_path: Path) -> None:
    other = profile(activities=[ProfilerActivity.CPU])

    class Other(Logger):
        def __call__(self, ctx: Any, stage: TrainingStage) -> None:
            other.start()

    what = strategy(Other(TrainingStage.BEFORE_EPOCH), hook(tmp_path, schedule=schedule(wait=1, warmup=1, active=1)))
    with pytest.raises(TrainingStateError, match="another profiler is active"):
        run(what)
    other.stop()
    assert other.key_averages()


def test_activities_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"activities has 'cdua'; did you mean 'cuda'.*; there are 'cpu', 'c"):
        TorchProfilerHook(tmp_path, activities=["cdua"])
    with pytest.raises(UnknownNameError, match="activities has 3; there are"):
        TorchProfilerHook(tmp_path, activities=[3])  # type: ignore[list-item]
    with pytest.raises(ConfigurationError, match="activities is empty, so nothing would be recorded"):
        TorchProfilerHook(tmp_path, activities=[])
    run(strategy(TorchProfilerHook(tmp_path, activities="cpu")))
    run(strategy(TorchProfilerHook(tmp_path, activities=[ProfilerActivity.CPU])))
    assert len(list((tmp_path / "rank_0").iterdir())) == 2


def test_what_cannot_work_is_refused_at_construction(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"schedule must be callable, like torch.profiler.schedule\(...\); got 3"
    ):
        TorchProfilerHook(tmp_path, schedule=3)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigurationError, match="the strategy has a TorchProfilerHook already; torch can profile once"
    ):
        strategy(hook(tmp_path), hook(tmp_path))
    assert not list(tmp_path.iterdir())
