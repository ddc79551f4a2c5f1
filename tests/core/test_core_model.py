"""A model of the loop in a few lines predicts the stages and counters of any run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from core_rigs import OBSERVED, At, Recorder, Row, Unsized, batches, run, strategy
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi_lightning.stages import TrainingStage
from nvalchemi_lightning.validation import ValidationConfig

Stage = TrainingStage

IN_BATCH = [stage.name for stage in OBSERVED if Stage.BEFORE_BATCH.value <= stage.value < Stage.AFTER_BATCH.value]


@dataclass(frozen=True)
class Plan:
    """A run, and possibly a second one of the same strategy."""

    length: int
    sized: bool
    targets: tuple[int, ...]
    every_n_steps: int | None
    every_n_epochs: int | None
    validates: bool
    batches_per_step: int
    stop_at_batch: int | None


@dataclass
class Loop:
    """The loop of the contract, without training."""

    plan: Plan
    step: int = 0
    batch: int = 0
    epoch: int = 0
    position: int = 0
    validated_at: int | None = None
    stopped: bool = False

    def at(self, *names: str) -> Iterator[Row]:
        for name in names:
            yield name, self.step, self.batch, self.epoch, self.position

    def run(self, target: int) -> Iterator[Row]:
        self.stopped, self.validated_at = False, None
        yield from self.at("SETUP")
        if self.step >= target:
            return
        yield from self.at("BEFORE_TRAINING")
        while self.step < target and not self.stopped:
            yield from self.one_pass(target)
        yield from self.at("AFTER_TRAINING")
        if self.plan.validates:
            yield from self.validation()

    def one_pass(self, target: int) -> Iterator[Row]:
        while self.position < self.plan.length and self.step < target and not self.stopped:
            if self.position == 0:
                yield from self.at("BEFORE_EPOCH")
            yield from self.one_batch()
        if self.position == self.plan.length:
            self.epoch, self.position = self.epoch + 1, 0
            yield from self.at("AFTER_EPOCH")
            if self.plan.every_n_epochs and self.epoch % self.plan.every_n_epochs == 0:
                yield from self.validation()

    def one_batch(self) -> Iterator[Row]:
        yield from self.at(*IN_BATCH)
        self.batch, self.position = self.batch + 1, self.position + 1
        stepped = self.batch % self.plan.batches_per_step == 0
        self.step += stepped
        yield from self.at("AFTER_BATCH")
        self.stopped |= self.batch == self.plan.stop_at_batch
        if stepped and self.plan.every_n_steps and self.step % self.plan.every_n_steps == 0:
            yield from self.validation()

    def validation(self) -> Iterator[Row]:
        if self.validated_at != self.step:
            self.validated_at = self.step
            yield from self.at("[BEFORE_FORWARD]", "[AFTER_FORWARD]", "AFTER_VALIDATION")


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    first = draw(st.integers(1, 7))
    cadence = draw(st.sampled_from(["steps", "epochs", "end", "none"]))
    return Plan(
        length=draw(st.integers(1, 4)),
        sized=draw(st.booleans()),
        targets=(first, *draw(st.lists(st.integers(first, 10), max_size=1))),
        every_n_steps=draw(st.integers(1, 4)) if cadence == "steps" else None,
        every_n_epochs=draw(st.integers(1, 3)) if cadence == "epochs" else None,
        validates=cadence != "none",
        batches_per_step=draw(st.sampled_from([1, 1, 2, 3])),
        stop_at_batch=draw(st.none() | st.integers(1, 8)),
    )


def fields_of(plan: Plan, recorder: Recorder) -> dict[str, Any]:
    hooks: list[Any] = [recorder]
    if plan.batches_per_step > 1:
        due = plan.batches_per_step - 1
        step = At(
            Stage.DO_OPTIMIZER_STEP,
            lambda ctx: ctx.batch_count % plan.batches_per_step == due and ctx.optimizers[0].step(),
        )
        hooks.append(step)
    if plan.stop_at_batch is not None:
        hooks.append(
            At(Stage.AFTER_BATCH, lambda ctx: ctx.batch_count == plan.stop_at_batch and ctx.workflow.stop("enough"))
        )
    config = ValidationConfig(
        validation_data=batches(1, seed=9), every_n_steps=plan.every_n_steps, every_n_epochs=plan.every_n_epochs
    )
    return {"hooks": hooks, "validation_config": config if plan.validates else None, "num_steps": plan.targets[0]}


@settings(deadline=None, max_examples=40)
@given(plan=plans())
def test_the_model_predicts_every_stage_and_counter(plan: Plan) -> None:
    recorder, loop = Recorder(), Loop(plan)
    what = strategy(**fields_of(plan, recorder))
    items = batches(*[1] * plan.length)
    expected: list[Row] = []
    for target in plan.targets:
        what.num_steps = target
        run(what, items if plan.sized else Unsized(items))
        expected += loop.run(target)
    assert recorder.rows == expected
    counters = what.counters
    assert (counters.step_count, counters.batch_count) == (loop.step, loop.batch)
    assert (counters.epoch_count, counters.epoch_step_count) == (loop.epoch, loop.position)


@settings(deadline=None, max_examples=10)
@given(epochs=st.integers(1, 3), length=st.integers(1, 3), modifier=st.sampled_from([0.3, 0.5, 1.0, 1.5]))
def test_epochs_are_a_number_of_steps(epochs: int, length: int, modifier: float) -> None:
    what = run(strategy(num_epochs=epochs, epoch_step_modifier=modifier), batches(*[1] * length))
    target = math.ceil(epochs * length * modifier)
    assert (what.step_count, what.epoch_count, what.epoch_step_count) == (target, *divmod(target, length))
