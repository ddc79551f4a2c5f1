"""Accumulation windows in a run: literal lists of stages, the ends of epochs and runs, and the five counters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from core_rigs import (
    At,
    ConstGrad,
    Recorder,
    Row,
    StopAfter,
    Unsized,
    batches,
    config,
    constant_loss,
    golden,
    run,
    sgd,
    strategy,
    trainer,
    w_of,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nvalchemi_lightning import update
from nvalchemi_lightning.counters import Counters
from nvalchemi_lightning.errors import TrainingStateError
from nvalchemi_lightning.feeding import OneLoader
from nvalchemi_lightning.hooks import GradientAccumulationHook, MixedPrecisionHook, TrainingUpdateHook
from nvalchemi_lightning.module import AlchemiModule
from nvalchemi_lightning.stages import TrainingStage
from nvalchemi_lightning.strategy import TrainingStrategy

Stage = TrainingStage

STEP = (
    "BEFORE_BATCH BEFORE_FORWARD AFTER_FORWARD BEFORE_LOSS AFTER_LOSS BEFORE_BACKWARD AFTER_BACKWARD "
    "BEFORE_OPTIMIZER_STEP AFTER_OPTIMIZER_STEP"
)
PASS = "[BEFORE_FORWARD] [AFTER_FORWARD] AFTER_VALIDATION"


def constant(count: int) -> list[Any]:
    """Return batches for `ConstGrad`: labels lie far below, so the gradient of w is 1."""
    return batches(*[1] * count, energies=[-1000.0] * count)


def stepping(*hooks: Any, **fields: Any) -> TrainingStrategy:
    """Return a strategy whose weight is minus the number of steps."""
    defaults: dict[str, Any] = {"models": ConstGrad(), "optimizer_configs": sgd(1.0), "loss_fn": constant_loss()}
    return strategy(**{**defaults, **fields}, hooks=list(hooks))


def traced(loader: Any, *hooks: Any, **fields: Any) -> list[Row]:
    recorder = Recorder()
    run(stepping(recorder, *hooks, **fields), loader)
    return recorder.rows


class Veto(TrainingUpdateHook):
    """Veto the steps of the batches with these numbers."""

    priority = 40

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    def __call__(self, ctx: Any, stage: TrainingStage, will_skip: bool) -> tuple[bool, Tensor | None]:
        return stage is not Stage.DO_OPTIMIZER_STEP or ctx.batch_count not in self.numbers, ctx.loss


class VetoAll(TrainingUpdateHook):
    """Veto every step."""

    def __call__(self, ctx: Any, stage: TrainingStage, will_skip: bool) -> tuple[bool, Tensor | None]:
        return stage is not Stage.DO_OPTIMIZER_STEP, ctx.loss


# Literal lists

FLUSHED = f"""
    0 0 0 0: SETUP BEFORE_TRAINING BEFORE_EPOCH {STEP}
    0 1 0 1: AFTER_BATCH {STEP}
    1 2 0 2: AFTER_BATCH {STEP}
    2 3 0 3: AFTER_BATCH
    2 3 1 0: AFTER_EPOCH BEFORE_EPOCH {STEP}
    2 4 1 1: AFTER_BATCH {STEP}
    3 5 1 2: AFTER_BATCH {STEP}
    4 6 1 3: AFTER_BATCH
    4 6 2 0: AFTER_EPOCH AFTER_TRAINING
"""


def test_the_last_window_of_an_epoch_is_flushed() -> None:
    """B46: two epochs of a window of two batches and one of a single batch."""
    assert traced(constant(3), GradientAccumulationHook(2), num_epochs=2) == golden(FLUSHED)


def test_a_loader_of_unknown_length_flushes_too() -> None:
    rows = traced(Unsized(constant(3)), GradientAccumulationHook(2), num_steps=4)
    assert rows == golden(FLUSHED)


def test_steps_and_validations_of_windows() -> None:
    rows = traced(
        constant(4), GradientAccumulationHook(2), num_steps=3, validation_config=config(1, every_n_steps=2)
    )  # fmt: skip
    assert rows == golden(f"""
        0 0 0 0: SETUP BEFORE_TRAINING BEFORE_EPOCH {STEP}
        0 1 0 1: AFTER_BATCH {STEP}
        1 2 0 2: AFTER_BATCH {STEP}
        1 3 0 3: AFTER_BATCH {STEP}
        2 4 0 4: AFTER_BATCH {PASS}
        2 4 1 0: AFTER_EPOCH BEFORE_EPOCH {STEP}
        2 5 1 1: AFTER_BATCH {STEP}
        3 6 1 2: AFTER_BATCH AFTER_TRAINING {PASS}
    """)


def test_a_veto_at_the_end_of_a_window_drops_it() -> None:
    rows = traced(constant(4), GradientAccumulationHook(2), Veto(1, 2), num_epochs=1)
    assert rows == golden(f"""
        0 0 0 0: SETUP BEFORE_TRAINING BEFORE_EPOCH {STEP}
        0 1 0 1: AFTER_BATCH {STEP}
        0 2 0 2: AFTER_BATCH {STEP}
        0 3 0 3: AFTER_BATCH {STEP}
        1 4 0 4: AFTER_BATCH
        1 4 1 0: AFTER_EPOCH AFTER_TRAINING
    """)


class Infinite(TrainingUpdateHook):
    """Make the gradient of one batch infinite."""

    priority = 15

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, ctx: Any, stage: TrainingStage, will_skip: bool) -> tuple[bool, Tensor | None]:
        spoils = stage is Stage.DO_BACKWARD and ctx.batch_count == self.number
        return True, ctx.loss * float("inf") if spoils else ctx.loss


@pytest.mark.parametrize("number", [0, 1])
def test_a_scaler_skips_the_window_with_an_infinite_gradient(number: int) -> None:
    """B26, B18: wherever in the window it is; the scale halves once, and gradients are unscaled once per window."""
    precision = MixedPrecisionHook(precision="fp16")
    recorder = Recorder()
    what = stepping(recorder, GradientAccumulationHook(2), Infinite(number), precision, num_epochs=1)
    run(what, constant(4))
    assert recorder.rows == golden(f"""
        0 0 0 0: SETUP BEFORE_TRAINING BEFORE_EPOCH {STEP}
        0 1 0 1: AFTER_BATCH {STEP}
        0 2 0 2: AFTER_BATCH {STEP}
        0 3 0 3: AFTER_BATCH {STEP}
        1 4 0 4: AFTER_BATCH
        1 4 1 0: AFTER_EPOCH AFTER_TRAINING
    """)
    assert w_of(what) == -1.0
    assert precision.state_dict()["scaler"]["scale"] == 2.0**15


def test_a_request_to_stop_waits_for_the_end_of_the_window() -> None:
    stop = At(Stage.AFTER_BATCH, lambda ctx: ctx.batch_count == 1 and ctx.workflow.stop("enough"))
    rows = traced(constant(6), GradientAccumulationHook(3), stop, num_epochs=5)
    assert rows == golden(f"""
        0 0 0 0: SETUP BEFORE_TRAINING BEFORE_EPOCH {STEP}
        0 1 0 1: AFTER_BATCH {STEP}
        0 2 0 2: AFTER_BATCH {STEP}
        1 3 0 3: AFTER_BATCH AFTER_TRAINING
    """)


def test_train_batch_counts_calls() -> None:
    recorder = Recorder()
    what = stepping(recorder, GradientAccumulationHook(2, normalize="batch"), num_steps=1)
    for batch in constant(3):
        what.train_batch(batch)
    assert recorder.rows == golden(f"""
        0 0 0 0: SETUP {STEP}
        0 1 0 0: AFTER_BATCH SETUP {STEP}
        1 2 0 0: AFTER_BATCH SETUP {STEP}
        1 3 0 0: AFTER_BATCH
    """)


# The ends of epochs and runs


@pytest.mark.parametrize("normalize", ["labels", "graphs", "atoms", "batch"])
@pytest.mark.parametrize("sized", [True, False])
def test_a_flushed_window_has_its_true_length(normalize: Any, sized: bool) -> None:
    """B46: CONST-GRAD, windows of 2 in epochs of 5."""
    weights: list[float] = []
    note = At(Stage.AFTER_EPOCH, lambda ctx: weights.append(ctx.model.w.item()))
    limit = {"num_epochs": 2} if sized else {"num_steps": 6}
    loader = constant(5) if sized else Unsized(constant(5))
    what = run(stepping(GradientAccumulationHook(2, normalize=normalize), note, **limit), loader)
    assert weights == [-3.0, -6.0]
    assert what.step_count == 6


@pytest.mark.parametrize("steps", [3, 5, 7, 50])
def test_epochs_are_passes(steps: int) -> None:
    what = run(stepping(GradientAccumulationHook(steps), num_epochs=2), constant(5))
    per_epoch = -(-5 // steps)
    assert what.counters == Counters(2 * per_epoch, 2 * per_epoch, 10, 2, 0)
    assert w_of(what) == -2.0 * per_epoch


def fit(hook: Any, loader: Any, **options: Any) -> tuple[Any, Any]:
    """Train with a Trainer of the user's own."""
    module = AlchemiModule(
        models=ConstGrad(), optimizer_configs=sgd(1.0), loss_fn=constant_loss(), hooks=[hook], num_epochs=None
    )
    used = trainer(**options)
    used.fit(module, OneLoader(loader))
    return module.recipe, used


@pytest.mark.parametrize("loader", [constant(9), Unsized(constant(9))], ids=["sized", "unsized"])
def test_a_limit_of_the_trainer_ends_the_window(loader: Any) -> None:
    recipe, used = fit(GradientAccumulationHook(2), loader, limit_train_batches=3, max_epochs=2)
    assert (recipe.step_count, recipe.batch_count, w_of(recipe), used.global_step) == (4, 6, -4.0, 4)


def test_steps_of_the_trainer_are_windows() -> None:
    recipe, used = fit(GradientAccumulationHook(2), constant(9), max_steps=3, max_epochs=-1)
    assert (recipe.step_count, recipe.batch_count, used.global_step) == (3, 6, 3)


def test_a_callback_that_stops_within_a_window_waits_too() -> None:
    recipe, _ = fit(GradientAccumulationHook(4), constant(9), max_epochs=2, callbacks=[StopAfter(2)])
    assert (recipe.step_count, recipe.batch_count) == (1, 4)


class Drawn:
    """A loader that counts what is drawn from it."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.drawn = 0

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Any]:
        for item in self.items:
            self.drawn += 1
            yield item


def test_a_window_is_drawn_together_and_nothing_beyond_the_target() -> None:
    loader, drawn = Drawn(constant(9)), []
    note = At(Stage.BEFORE_BATCH, lambda ctx: drawn.append(loader.drawn))
    run(stepping(GradientAccumulationHook(3), note, num_steps=2), loader)
    assert drawn == [3, 3, 3, 6, 6, 6]
    assert loader.drawn == 6


def test_the_window_tells_where_it_is() -> None:
    seen: list[tuple[int, int, bool, bool]] = []

    def note(ctx: Any) -> None:
        window = ctx.window
        seen.append((window.index, window.size, window.first, window.last))
        assert window.counts.shape == (window.size, 1)
        assert window.own.tolist() == [1.0]

    run(stepping(GradientAccumulationHook(2), At(Stage.AFTER_FORWARD, note)), constant(3))
    assert seen == [(0, 2, True, False), (1, 2, False, True), (0, 1, True, True)]
    without: list[Any] = []
    run(stepping(At(Stage.AFTER_FORWARD, lambda ctx: without.append(ctx.window))), constant(1))
    assert without == [None]


def test_a_position_within_a_window_begins_a_shorter_one() -> None:
    """Counters that come without the gradients of the batches before: windows still end at multiples of 4."""
    what = run(stepping(GradientAccumulationHook(4), num_epochs=1, batch_count=2, epoch_step_count=2), constant(7))
    assert (what.step_count, what.counters.batch_count, w_of(what)) == (2, 7, -2.0)


# Runs without a step


def test_windows_without_a_step_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """B21 of the contract: the batches within a window are not held against it."""
    monkeypatch.setattr(update, "MAX_IDLE_BATCHES", 3)
    what = run(stepping(GradientAccumulationHook(5), num_steps=2), constant(5))
    assert what.step_count == 2
    vetoed = stepping(GradientAccumulationHook(5), VetoAll(), num_steps=1)
    message = "15 batches in a row passed without an optimizer step.*the last one was vetoed by VetoAll"
    with pytest.raises(TrainingStateError, match=message):
        run(vetoed, constant(5))


@settings(max_examples=20, deadline=None)
@given(
    vetoed=st.sets(st.integers(0, 11)),
    length=st.integers(1, 6),
    steps=st.integers(1, 4),
    stop_at=st.integers(1, 14),
    sized=st.booleans(),
)
@example(vetoed=set(), length=3, steps=2, stop_at=1, sized=False)  # the next window is drawn already
def test_counters_agree_with_any_vetoes(vetoed: set[int], length: int, steps: int, stop_at: int, sized: bool) -> None:
    """Two epochs, vetoes anywhere, and a request to stop: weight, schedule and the five counters tell the same."""
    stop = At(Stage.AFTER_BATCH, lambda ctx: ctx.batch_count == stop_at and ctx.workflow.stop("enough"))
    finish = At(Stage.AFTER_EPOCH, lambda ctx: ctx.epoch == 2 and ctx.workflow.stop("two epochs"))
    schedule = {"scheduler_cls": torch.optim.lr_scheduler.ConstantLR, "scheduler_kwargs": {"factor": 1.0}}
    what = stepping(
        GradientAccumulationHook(steps), Veto(*vetoed), stop, finish, optimizer_configs=sgd(1.0, **schedule),
        num_steps=1000,
    )  # fmt: skip
    loader = constant(length)
    run(what, loader if sized else Unsized(loader))
    ends = [i for i in range(2 * length) if (i % length + 1) % steps == 0 or i % length + 1 == length]
    last = next((i for i in ends if i + 1 >= stop_at), ends[-1])
    taken = sum(i <= last and i not in vetoed for i in ends)
    counters = what.counters
    assert (counters.step_count, counters.global_step_count, counters.batch_count) == (taken, taken, last + 1)
    assert (counters.epoch_count, counters.epoch_step_count) == divmod(last + 1, length)
    assert what.flat_optimizers()[1][0].last_epoch == taken
    assert w_of(what) == -taken
