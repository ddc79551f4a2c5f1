"""What ran, as the trace has it, and the order that was resolved before."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor
from watch_rigs import BoomError, Failing, Logger, One, batches, run, strategy, validation

from nvalchemi_lightning.errors import ConfigurationError
from nvalchemi_lightning.feeding import OneLoader
from nvalchemi_lightning.hooks import EMAHook, GradientAccumulationHook, TraceEvent, TraceHook, TrainingUpdateHook
from nvalchemi_lightning.losses import EnergyMSELoss
from nvalchemi_lightning.module import AlchemiModule
from nvalchemi_lightning.optim import OptimizerConfig
from nvalchemi_lightning.stages import STAGES, TrainingStage

Stage = TrainingStage

BATCH = (
    "BEFORE_BATCH BEFORE_FORWARD AFTER_FORWARD BEFORE_LOSS AFTER_LOSS BEFORE_BACKWARD DO_BACKWARD AFTER_BACKWARD "
    "BEFORE_OPTIMIZER_STEP DO_OPTIMIZER_STEP AFTER_OPTIMIZER_STEP"
)


class Claimant(Logger):
    """A hook that owns the step."""

    def __init__(self) -> None:
        super().__init__(Stage.DO_OPTIMIZER_STEP)

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        for optimizer in ctx.optimizers:
            optimizer.step()


class First(TrainingUpdateHook):
    """An update hook in front of accumulation."""

    priority = 5

    def __call__(self, ctx: Any, stage: TrainingStage, will_skip: bool) -> tuple[bool, Tensor | None]:
        return True, ctx.loss


# The trace ----------------------------------------------------------------------------------------------------------


def test_a_plain_run_has_every_stage_in_order() -> None:
    trace = TraceHook()
    run(strategy(trace), count=2)
    assert trace.lines() == [
        f"0 0 0 0: SETUP BEFORE_TRAINING BEFORE_EPOCH {BATCH}",
        f"1 1 0 1: AFTER_BATCH {BATCH}",
        "2 2 0 2: AFTER_BATCH",
        "2 2 1 0: AFTER_EPOCH AFTER_TRAINING",
    ]
    assert str(trace) == "\n".join(trace.lines())


def test_hooks_and_validation_batches_are_where_they_ran() -> None:
    trace = TraceHook()
    hooks = (Logger(frequency=2), trace, Logger(Stage.BEFORE_FORWARD))
    run(strategy(*hooks, validation_config=validation(every_n_steps=2)), count=2)
    batch = BATCH.replace("BEFORE_FORWARD", "BEFORE_FORWARD(Logger)")
    assert trace.lines() == [
        f"0 0 0 0: SETUP BEFORE_TRAINING BEFORE_EPOCH {batch}",
        f"1 1 0 1: AFTER_BATCH {batch}",
        "2 2 0 2: AFTER_BATCH(Logger) [BEFORE_FORWARD](Logger) [AFTER_FORWARD] AFTER_VALIDATION",
        "2 2 1 0: AFTER_EPOCH AFTER_TRAINING",
    ]


def test_update_hooks_are_noted_one_by_one_and_windows_show_in_the_counters() -> None:
    trace = TraceHook()
    run(strategy(EMAHook(), trace, GradientAccumulationHook(2), num_steps=1), count=2)
    both = "(GradientAccumulationHook, EMAHook)"
    stages = ("BEFORE_BATCH", "DO_BACKWARD", "DO_OPTIMIZER_STEP", "AFTER_OPTIMIZER_STEP")
    batch = " ".join(name + both if name in stages else name for name in BATCH.split())
    assert trace.lines()[:3] == [
        f"0 0 0 0: SETUP{both} BEFORE_TRAINING BEFORE_EPOCH {batch}",
        f"0 1 0 1: AFTER_BATCH {batch}",
        "1 2 0 2: AFTER_BATCH",
    ]


def test_the_last_event_says_who_failed() -> None:
    trace = TraceHook()
    what = strategy(trace, Failing(1))
    with pytest.raises(BoomError):
        run(what)
    assert trace.events[-1] == TraceEvent("AFTER_BATCH", "Failing", 1, 1, 0, 1, validating=False)
    assert what.registry.watcher is None


def test_single_batches_and_a_trainer_of_the_users_are_traced_too() -> None:
    trace = TraceHook()
    strategy(trace).train_batch(batches(1)[0])
    assert trace.lines() == [f"0 0 0 0: SETUP {BATCH}", "1 1 0 0: AFTER_BATCH"]
    fitted = TraceHook()
    module = AlchemiModule(models=One(), optimizer_configs=OptimizerConfig(), loss_fn=EnergyMSELoss(), hooks=[fitted])
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(strategy="nvalchemi", accelerator="cpu", max_epochs=1, enable_model_summary=False, **quiet)
    trainer.fit(module, OneLoader(batches(1)))
    assert fitted.lines()[0] == f"0 0 0 0: SETUP BEFORE_TRAINING BEFORE_EPOCH {BATCH}"
    assert fitted.events[-1].counters == (1, 1, 1, 0)


def test_the_newest_events_are_kept_until_they_are_cleared() -> None:
    trace = TraceHook(keep=2)
    what = run(strategy(trace))
    assert trace.lines() == ["2 2 0 2: AFTER_BATCH AFTER_TRAINING"]
    trace.clear()
    assert str(trace) == ""
    what.num_steps = 3
    run(what)
    assert [event.stage for event in trace.events] == ["AFTER_EPOCH", "AFTER_TRAINING"]


def test_a_trace_that_begins_within_a_stage_still_shows_it() -> None:
    trace = TraceHook(keep=2)
    with pytest.raises(BoomError):
        run(strategy(trace, Logger(), Failing(1)))
    assert trace.lines() == ["1 1 0 1: AFTER_BATCH(Logger, Failing)"]


def test_a_trace_that_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"TraceHook\(keep=0\) keeps nothing; give a positive number"):
        TraceHook(keep=0)
    with pytest.raises(ConfigurationError, match=r"keep='5'"):
        TraceHook(keep="5")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="the strategy has a TraceHook already; one trace holds everything"):
        strategy(TraceHook(), TraceHook())


def test_without_a_trace_stages_without_a_hook_have_no_callback() -> None:
    module = AlchemiModule(strategy(Logger()))
    from nvalchemi_lightning.callbacks.stage import stage_callbacks

    assert [callback.stage for callback in stage_callbacks(module)] == [Stage.AFTER_BATCH]
    assert module.recipe.registry.watcher is None


# The resolved order -------------------------------------------------------------------------------------------------


def test_the_order_of_a_plain_strategy() -> None:
    order = strategy(Logger(frequency=10)).lifecycle()
    assert [entry.stage for entry in order.stages] == [stage.name for stage in STAGES]
    assert {entry.stage: entry.owner for entry in order.stages if entry.owner} == {
        "DO_BACKWARD": "strategy",
        "DO_OPTIMIZER_STEP": "strategy",
    }
    assert (order.batches_per_step, order.validation) == (1, "none")
    often = {entry.stage: entry.often for entry in order.stages}
    assert often["SETUP"] == "once per run"
    assert often["BEFORE_FORWARD"] == "once per step, and per validation batch"
    assert often["AFTER_EPOCH"] == "once per epoch"
    assert often["AFTER_VALIDATION"] == "once per validation"
    assert dict(zip(often, order.rows(), strict=True))["AFTER_BATCH"][3] == "Logger (every 10 steps)"


def test_the_order_under_accumulation_is_that_of_the_priorities() -> None:
    what = strategy(EMAHook(), Logger(Stage.AFTER_EPOCH, frequency=2), GradientAccumulationHook(4), First())
    order = what.lifecycle()
    assert order.batches_per_step == 4
    rows = {stage: (often, owner, hooks) for stage, often, owner, hooks in order.rows()}
    asked = "First[5], GradientAccumulationHook[10], EMAHook[50]"
    assert rows["DO_OPTIMIZER_STEP"] == ("4 times per step", "strategy", asked)
    assert rows["AFTER_EPOCH"] == ("once per epoch", "", "Logger (every 2 epochs)")
    what.register_hook(Logger(Stage.AFTER_TRAINING, frequency=3))
    assert what.lifecycle().rows()[16][3] == "Logger"


def test_a_claimant_is_the_owner() -> None:
    order = strategy(Claimant()).lifecycle()
    assert order.stages[12].owner == "Claimant"
    assert order.stages[9].owner == "strategy"


@pytest.mark.parametrize(
    ("cadence", "text"),
    [
        ({}, "at the end"),
        ({"every_n_steps": 5}, "every 5 steps, and at the end"),
        ({"every_n_epochs": 1}, "every epoch, and at the end"),
    ],
)
def test_the_order_says_when_the_run_validates(cadence: dict[str, int], text: str) -> None:
    assert strategy(validation_config=validation(**cadence)).lifecycle().validation == text


def test_the_order_prints_as_a_table_and_is_json() -> None:
    order = strategy(Logger()).lifecycle()
    lines = str(order).splitlines()
    assert lines[0].split() == ["stage", "fires", "owner", "hooks,", "in", "order"]
    assert lines[15] == "AFTER_BATCH            once per step" + " " * 38 + "Logger"
    assert lines[-1] == "validation: none"
    assert json.loads(json.dumps(order.data()))["stages"][14] == {
        "stage": "AFTER_BATCH",
        "often": "once per step",
        "owner": None,
        "hooks": [{"name": "Logger", "priority": None, "often": "every time"}],
    }


@pytest.mark.parametrize("window", [1, 2])
def test_what_was_resolved_is_what_runs(window: int) -> None:
    """Every stage of the order fires, as often as it says, with the hooks that it lists."""
    torch.manual_seed(0)
    trace = TraceHook()
    accumulation = [GradientAccumulationHook(window)] if window > 1 else []
    what = strategy(Logger(), trace, EMAHook(), *accumulation, validation_config=validation(every_n_epochs=1))
    order = what.lifecycle()
    run(what, count=2 * window)
    for entry in order.stages:
        fired = [event for event in trace.events if event.stage == entry.stage and not event.hook]
        trained = [event for event in fired if not event.validating]
        assert len(trained) == (2 * window if "per step" in entry.often else 1), entry.stage
        called = [event.hook for event in trace.events if event.stage == entry.stage and event.hook]
        names = [hook.name for hook in entry.hooks if hook.name != "TraceHook"]
        assert called[: len(names)] == names
        assert len(called) == len(names) * len(trained)
