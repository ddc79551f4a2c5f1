"""Saving when a run ends: as planned, by a signal, by an error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from checkpoint_rigs import At, batches, rebuilt, run, strategy
from resume_rigs import SCENARIOS, Log, Noisy, differing, outcome

from nvalchemi_lightning.hooks import CheckpointHook
from nvalchemi_lightning.specs import trust
from nvalchemi_lightning.stages import TrainingStage
from nvalchemi_lightning.stop_signals import stopping_on_signals
from nvalchemi_lightning.strategy import TrainingStrategy

Stage = TrainingStage


def saving(root: Path, **options: Any) -> CheckpointHook:
    return CheckpointHook(root, **{"step_interval": 100, "save_on_exit": True, **options})


def failing_at(stage: TrainingStage, batch: int, error: type[BaseException] = KeyError) -> At:
    """Return a hook that fails in a batch, counted from 0."""

    def fail(ctx: Any) -> None:
        if ctx.batch_count == batch and not ctx.validating:
            raise error("own error")

    return At(stage, fail)


@pytest.mark.parametrize("async_save", [True, False])
def test_the_end_is_saved_once(root: Path, async_save: bool) -> None:
    what = run(strategy(num_steps=4, hooks=[saving(root, step_interval=3, async_save=async_save)]))
    assert [rebuilt(root, index).step_count for index in (0, 1)] == [3, 4]
    what.num_steps = 6
    run(what)
    assert sorted(path.stem for path in (root / "strategy/checkpoints").iterdir()) == ["0", "1", "2"]
    assert rebuilt(root).step_count == 6


def test_without_the_option_nothing_is_saved_at_the_end(root: Path) -> None:
    run(strategy(num_steps=4, hooks=[CheckpointHook(root, step_interval=3)]))
    assert rebuilt(root).step_count == 3
    assert not (root / "strategy/checkpoints/1.json").exists()


@pytest.mark.parametrize("stage", [Stage.BEFORE_FORWARD, Stage.AFTER_LOSS])
@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_a_failure_early_in_a_batch_saves_the_batches_before(
    root: Path, stage: TrainingStage, error: type[BaseException]
) -> None:
    with pytest.raises(error, match="own error"):
        run(strategy(num_steps=9, hooks=[failing_at(stage, 2, error), saving(root)]))
    assert rebuilt(root).counters.batch_count == 2


def test_a_failure_before_the_first_batch_saves_nothing(root: Path) -> None:
    with pytest.raises(KeyError, match="own error"):
        run(strategy(hooks=[failing_at(Stage.BEFORE_TRAINING, 0), saving(root)]))
    assert not root.exists()


@pytest.mark.parametrize("stage", [Stage.AFTER_BACKWARD, Stage.AFTER_OPTIMIZER_STEP])
def test_a_failure_within_an_update_is_not_saved(root: Path, stage: TrainingStage) -> None:
    with pytest.raises(KeyError, match="own error") as caught:
        run(strategy(num_steps=9, hooks=[failing_at(stage, 2), saving(root)]))
    assert any("failed while the weights were updated" in note for note in caught.value.__notes__)
    assert not root.exists()


def test_a_run_that_failed_goes_on_bit_for_bit(root: Path) -> None:
    """The random numbers of the batch that failed are drawn again."""
    trust("resume_rigs")
    scenario = SCENARIOS["plateau by epochs"]
    whole = scenario.strategy(0)
    whole.run(scenario.loader(), enable_progress_bar=False)
    expected = outcome(whole)
    for batch in (1, 4, 6):
        stopped = scenario.strategy(0, failing_at(Stage.AFTER_LOSS, batch), saving(root / str(batch)))
        with pytest.raises(KeyError, match="own error"):
            stopped.run(scenario.loader(), enable_progress_bar=False)
        again = TrainingStrategy.load_checkpoint(
            root / str(batch), models=Noisy(), hooks=[Log()], validation_config=scenario.validating()
        )
        again.run(scenario.loader(), enable_progress_bar=False)
        assert not differing(outcome(again), expected), batch


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_after_the_batch(root: Path, number: signal.Signals) -> None:
    send = At(Stage.AFTER_LOSS, lambda ctx: ctx.batch_count == 2 and os.kill(os.getpid(), number))
    before = signal.getsignal(number)
    what = run(strategy(num_steps=9, hooks=[send, saving(root)]))
    assert what.stop_reason == f"{number.name} arrived"
    assert rebuilt(root).counters.batch_count == what.batch_count == 3
    assert signal.getsignal(number) is before


def test_the_second_interrupt_is_an_interrupt(root: Path) -> None:
    def interrupt(ctx: Any) -> None:
        if ctx.batch_count == 2:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(strategy(num_steps=9, hooks=[At(Stage.AFTER_LOSS, interrupt), saving(root)]))
    assert rebuilt(root).counters.batch_count == 2


def test_signals_belong_to_the_main_thread() -> None:
    seen: list[Any] = []

    def elsewhere() -> None:
        before = signal.getsignal(signal.SIGTERM)
        with stopping_on_signals(seen.append):
            seen.append(signal.getsignal(signal.SIGTERM) is before)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [True]


@pytest.mark.parametrize("error", [None, KeyError])
def test_an_exit_that_cannot_be_written(root: Path, error: type[BaseException] | None) -> None:
    """The folder becomes a file while training goes on."""
    block = At(Stage.BEFORE_FORWARD, lambda ctx: root.touch())
    if error is None:
        with pytest.raises(NotADirectoryError):
            run(strategy(hooks=[block, saving(root)]))
        return
    with pytest.raises(KeyError, match="own error") as caught:
        run(strategy(hooks=[block, failing_at(Stage.AFTER_LOSS, 1), saving(root)]))
    assert any(
        "A checkpoint could not be written either: NotADirectoryError" in note for note in caught.value.__notes__
    )


SCRIPT = """
import sys, time
from checkpoint_rigs import At, batches, strategy
from nvalchemi_lightning.hooks import CheckpointHook
from nvalchemi_lightning.stages import TrainingStage

def slow(ctx):
    print("batch", flush=True)
    time.sleep(0.05)

hooks = [At(TrainingStage.AFTER_LOSS, slow), CheckpointHook(sys.argv[1], step_interval=10**6, save_on_exit=True)]
what = strategy(num_steps=10**6, hooks=hooks)
what.run(batches(), enable_progress_bar=False)
print("stopped:", what.stop_reason, what.batch_count)
"""


def test_a_process_that_is_terminated_saves_and_ends_well(root: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    words = [sys.executable, "-c", SCRIPT, str(root)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    for _ in range(4):
        process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert rebuilt(root).counters.batch_count == int(printed.split()[-1])
    assert "stopped: SIGTERM arrived" in printed


def test_batches_alone_are_saved_too(root: Path) -> None:
    """`train_batch` within a context: the hook is left with the context."""
    what = strategy(hooks=[saving(root)])
    with what:
        for batch in batches(3):
            what.train_batch(batch)
    assert rebuilt(root).counters.batch_count == 3
