"""Literal lists of the stages of whole runs, with the counters that hooks see (step, batch, epoch, epoch step)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from core_rigs import At, Recorder, Row, Unsized, adam, batches, golden, run, sgd, strategy
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from nvalchemi_lightning.context import HookContext, TrainContext
from nvalchemi_lightning.stages import REPLACEMENT_STAGES, STAGES, TrainingStage
from nvalchemi_lightning.validation import ValidationConfig

Stage = TrainingStage

STEP = (
    "BEFORE_BATCH BEFORE_FORWARD AFTER_FORWARD BEFORE_LOSS AFTER_LOSS BEFORE_BACKWARD AFTER_BACKWARD "
    "BEFORE_OPTIMIZER_STEP AFTER_OPTIMIZER_STEP"
)
PASS = "[BEFORE_FORWARD] [AFTER_FORWARD]"


def traced(loader: Any, **fields: Any) -> list[Row]:
    recorder = Recorder()
    hooks = [recorder, *fields.pop("hooks", ())]
    run(strategy(hooks=hooks, **fields), loader)
    return recorder.rows


def validation(**fields: Any) -> ValidationConfig:
    return ValidationConfig(validation_data=batches(2, seed=9), **fields)


def test_the_eighteen_stages_in_their_order() -> None:
    assert [(stage.name, stage.value) for stage in TrainingStage] == [
        ("SETUP", 1),
        ("BEFORE_TRAINING", 2),
        ("BEFORE_EPOCH", 3),
        ("BEFORE_BATCH", 4),
        ("BEFORE_FORWARD", 5),
        ("AFTER_FORWARD", 6),
        ("BEFORE_LOSS", 7),
        ("AFTER_LOSS", 8),
        ("BEFORE_BACKWARD", 9),
        ("DO_BACKWARD", 10),
        ("AFTER_BACKWARD", 11),
        ("BEFORE_OPTIMIZER_STEP", 12),
        ("DO_OPTIMIZER_STEP", 13),
        ("AFTER_OPTIMIZER_STEP", 14),
        ("AFTER_BATCH", 15),
        ("AFTER_EPOCH", 16),
        ("AFTER_TRAINING", 17),
        ("AFTER_VALIDATION", 18),
    ]


def test_the_table_describes_every_stage_once() -> None:
    assert list(STAGES) == list(TrainingStage)
    assert all(info.stage is stage for stage, info in STAGES.items())
    assert REPLACEMENT_STAGES == (Stage.DO_BACKWARD, Stage.DO_OPTIMIZER_STEP)
    counted = {info.counted_by for info in STAGES.values()}
    assert counted == {"run", "epoch", "step", "validation"}
    with pytest.raises(TypeError, match="does not support item assignment"):
        STAGES[Stage.SETUP] = STAGES[Stage.AFTER_BATCH]  # type: ignore[index]


def test_contexts_are_keyword_only_and_own_their_lists() -> None:
    with pytest.raises(TypeError, match="positional"):
        HookContext(None)  # type: ignore[misc]
    with pytest.raises(TypeError, match="batch"):
        TrainContext()  # type: ignore[call-arg]
    first, second = TrainContext(batch=None), TrainContext(batch=None)
    first.optimizers.append(None)  # type: ignore[arg-type]
    assert second.optimizers == []
    counts = (first.step_count, first.global_step_count, first.batch_count, first.epoch_step_count, first.epoch)
    assert counts == (0, 0, 0, 0, 0)
    absent = ("model", "workflow", "predictions", "loss", "losses", "models", "gradients", "grad_scaler", "validation")
    assert all(getattr(first, name) is None for name in absent)
    assert first.validating is False


def test_two_epochs_with_validation_after_each() -> None:
    rows = traced(batches(3, 2), num_epochs=2, validation_config=validation(every_n_epochs=1))
    assert rows == golden("""
        0 0 0 0: SETUP BEFORE_TRAINING BEFORE_EPOCH
        0 0 0 0: BEFORE_BATCH BEFORE_FORWARD AFTER_FORWARD BEFORE_LOSS AFTER_LOSS BEFORE_BACKWARD
        0 0 0 0: AFTER_BACKWARD BEFORE_OPTIMIZER_STEP AFTER_OPTIMIZER_STEP
        1 1 0 1: AFTER_BATCH
        1 1 0 1: BEFORE_BATCH BEFORE_FORWARD AFTER_FORWARD BEFORE_LOSS AFTER_LOSS BEFORE_BACKWARD
        1 1 0 1: AFTER_BACKWARD BEFORE_OPTIMIZER_STEP AFTER_OPTIMIZER_STEP
        2 2 0 2: AFTER_BATCH
        2 2 1 0: AFTER_EPOCH [BEFORE_FORWARD] [AFTER_FORWARD] AFTER_VALIDATION
        2 2 1 0: BEFORE_EPOCH
        2 2 1 0: BEFORE_BATCH BEFORE_FORWARD AFTER_FORWARD BEFORE_LOSS AFTER_LOSS BEFORE_BACKWARD
        2 2 1 0: AFTER_BACKWARD BEFORE_OPTIMIZER_STEP AFTER_OPTIMIZER_STEP
        3 3 1 1: AFTER_BATCH
        3 3 1 1: BEFORE_BATCH BEFORE_FORWARD AFTER_FORWARD BEFORE_LOSS AFTER_LOSS BEFORE_BACKWARD
        3 3 1 1: AFTER_BACKWARD BEFORE_OPTIMIZER_STEP AFTER_OPTIMIZER_STEP
        4 4 1 2: AFTER_BATCH
        4 4 2 0: AFTER_EPOCH [BEFORE_FORWARD] [AFTER_FORWARD] AFTER_VALIDATION
        4 4 2 0: AFTER_TRAINING
    """)


ONE_EPOCH = f"""
    0 0 0 0: SETUP BEFORE_TRAINING BEFORE_EPOCH {STEP}
    1 1 0 1: AFTER_BATCH {STEP}
    2 2 0 2: AFTER_BATCH
    2 2 1 0: AFTER_EPOCH AFTER_TRAINING
"""


def test_one_epoch() -> None:
    assert traced(batches(3, 2), num_epochs=1) == golden(ONE_EPOCH)


def test_two_named_models_with_an_optimizer_each() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(Tensor([0.0]).double())

    def forward(models: Any, batch: Any) -> dict[str, Tensor]:
        energy = batch.energy * 0 + models["a"].shift + models["b"].shift
        return {"predicted_energy": energy, "predicted_forces": batch.forces}

    models = {"a": Half(), "b": Half()}
    fields = {"models": models, "optimizer_configs": {"a": [sgd()], "b": [adam()]}, "training_fn": forward}
    assert traced(batches(3, 2), num_epochs=1, **fields) == golden(ONE_EPOCH)


def test_several_optimizers_on_one_model_make_one_step() -> None:
    assert traced(batches(3, 2), num_epochs=1, optimizer_configs=[sgd(), sgd(lr=0.001)]) == golden(ONE_EPOCH)


def test_claimed_replacement_stages_fire_between_their_neighbors() -> None:
    recorder = Recorder()
    claims = [
        At(Stage.DO_BACKWARD, lambda ctx: (recorder(ctx, Stage.DO_BACKWARD), ctx.loss.backward())),
        At(Stage.DO_OPTIMIZER_STEP, lambda ctx: (recorder(ctx, Stage.DO_OPTIMIZER_STEP), ctx.optimizers[0].step())),
    ]
    run(strategy(num_steps=1, hooks=[recorder, *claims]), batches(3, 2))
    assert recorder.rows == golden("""
        0 0 0 0: SETUP BEFORE_TRAINING BEFORE_EPOCH
        0 0 0 0: BEFORE_BATCH BEFORE_FORWARD AFTER_FORWARD BEFORE_LOSS AFTER_LOSS BEFORE_BACKWARD DO_BACKWARD
        0 0 0 0: AFTER_BACKWARD BEFORE_OPTIMIZER_STEP DO_OPTIMIZER_STEP AFTER_OPTIMIZER_STEP
        1 1 0 1: AFTER_BATCH AFTER_TRAINING
    """)


def test_validation_by_steps_comes_after_the_batch() -> None:
    rows = traced(batches(3, 2, 2), num_steps=4, validation_config=validation(every_n_steps=2))
    assert rows == golden(f"""
        0 0 0 0: SETUP BEFORE_TRAINING BEFORE_EPOCH {STEP}
        1 1 0 1: AFTER_BATCH {STEP}
        2 2 0 2: AFTER_BATCH {PASS} AFTER_VALIDATION {STEP}
        3 3 0 3: AFTER_BATCH
        3 3 1 0: AFTER_EPOCH BEFORE_EPOCH {STEP}
        4 4 1 1: AFTER_BATCH {PASS} AFTER_VALIDATION AFTER_TRAINING
    """)


def test_the_final_weights_are_validated_after_training() -> None:
    rows = traced(batches(3, 2, 2), num_steps=3, validation_config=validation(every_n_steps=2))
    assert rows == golden(f"""
        0 0 0 0: SETUP BEFORE_TRAINING BEFORE_EPOCH {STEP}
        1 1 0 1: AFTER_BATCH {STEP}
        2 2 0 2: AFTER_BATCH {PASS} AFTER_VALIDATION {STEP}
        3 3 0 3: AFTER_BATCH
        3 3 1 0: AFTER_EPOCH AFTER_TRAINING {PASS} AFTER_VALIDATION
    """)


class StopCallback(Callback):
    """A native callback that asks the Trainer to stop."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        trainer.should_stop = True


def stop_by_workflow(stage: TrainingStage) -> Any:
    return At(stage, lambda ctx: ctx.workflow.stop("enough"))


@pytest.mark.parametrize(
    "stopper",
    [lambda: stop_by_workflow(Stage.AFTER_BATCH), lambda: stop_by_workflow(Stage.BEFORE_FORWARD), StopCallback],
    ids=["workflow.stop after the batch", "workflow.stop within the batch", "trainer.should_stop"],
)
def test_a_request_to_stop_finishes_the_batch_and_validates_once(stopper: Callable[[], Any]) -> None:
    rows = traced(batches(3, 2, 2), num_epochs=5, hooks=[stopper()], validation_config=validation())
    assert rows == golden(f"""
        0 0 0 0: SETUP BEFORE_TRAINING BEFORE_EPOCH {STEP}
        1 1 0 1: AFTER_BATCH AFTER_TRAINING {PASS} AFTER_VALIDATION
    """)


def test_a_stop_at_the_last_batch_closes_the_epoch() -> None:
    stop = At(Stage.AFTER_BATCH, lambda ctx: ctx.epoch_step_count == 2 and ctx.workflow.stop("enough"))
    assert traced(batches(3, 2), num_epochs=5, hooks=[stop]) == golden(ONE_EPOCH)


def test_a_stopped_strategy_remembers_why_and_runs_on() -> None:
    stop = At(Stage.AFTER_BATCH, lambda ctx: ctx.step_count == 1 and ctx.workflow.stop("enough"))
    what = run(strategy(num_steps=3, hooks=[stop]), batches(3, 2))
    assert (what.stop_reason, what.step_count) == ("enough", 1)
    run(what, batches(3, 2))
    assert (what.stop_reason, what.step_count) == (None, 3)


def test_resuming_within_an_epoch_does_not_begin_it_again() -> None:
    recorder = Recorder()
    what = run(strategy(num_steps=3, hooks=[recorder]), batches(3, 2))
    assert recorder.rows == golden(f"""
        0 0 0 0: SETUP BEFORE_TRAINING BEFORE_EPOCH {STEP}
        1 1 0 1: AFTER_BATCH {STEP}
        2 2 0 2: AFTER_BATCH
        2 2 1 0: AFTER_EPOCH BEFORE_EPOCH {STEP}
        3 3 1 1: AFTER_BATCH AFTER_TRAINING
    """)
    recorder.rows.clear()
    what.num_steps = 5
    run(what, batches(3, 2))
    assert recorder.rows == golden(f"""
        3 3 1 1: SETUP BEFORE_TRAINING {STEP}
        4 4 1 2: AFTER_BATCH
        4 4 2 0: AFTER_EPOCH BEFORE_EPOCH {STEP}
        5 5 2 1: AFTER_BATCH AFTER_TRAINING
    """)


def test_a_target_at_the_end_of_an_epoch_closes_it() -> None:
    assert traced(batches(3, 2), num_steps=2) == golden(ONE_EPOCH)


def test_a_run_that_has_reached_its_target_only_sets_up() -> None:
    recorder = Recorder()
    what = run(strategy(num_steps=2, validation_config=validation()), batches(3, 2))
    what.register_hook(recorder)
    run(what, batches(3, 2))
    assert recorder.rows == golden("2 2 1 0: SETUP")


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_an_exception_ends_the_run_where_it_is(kind: type[BaseException]) -> None:
    def fail(ctx: Any) -> None:
        if ctx.step_count == 1:
            raise kind("boom")

    recorder = Recorder()
    what = strategy(num_epochs=2, hooks=[recorder, At(Stage.AFTER_LOSS, fail)], validation_config=validation())
    with pytest.raises(kind):
        run(what, batches(3, 2))
    assert recorder.rows == golden(f"""
        0 0 0 0: SETUP BEFORE_TRAINING BEFORE_EPOCH {STEP}
        1 1 0 1: AFTER_BATCH BEFORE_BATCH BEFORE_FORWARD AFTER_FORWARD BEFORE_LOSS AFTER_LOSS
    """)
    assert (what.step_count, what.batch_count, what.epoch_step_count) == (1, 1, 1)


def test_train_batch_has_no_epochs_and_no_run() -> None:
    recorder = Recorder()
    what = strategy(num_steps=1, hooks=[recorder], validation_config=validation(every_n_steps=1))
    for batch in batches(3, 2):
        what.train_batch(batch)
    assert recorder.rows == golden(f"""
        0 0 0 0: SETUP {STEP}
        1 1 0 0: AFTER_BATCH SETUP {STEP}
        2 2 0 0: AFTER_BATCH
    """)


def test_a_loader_of_unknown_length_closes_epochs_that_it_exhausts() -> None:
    assert traced(Unsized(batches(3, 2)), num_steps=3) == golden(f"""
        0 0 0 0: SETUP BEFORE_TRAINING BEFORE_EPOCH {STEP}
        1 1 0 1: AFTER_BATCH {STEP}
        2 2 0 2: AFTER_BATCH
        2 2 1 0: AFTER_EPOCH BEFORE_EPOCH {STEP}
        3 3 1 1: AFTER_BATCH AFTER_TRAINING
    """)


def test_a_loader_of_unknown_length_may_end_exactly_at_the_target() -> None:
    assert traced(Unsized(batches(3, 2)), num_steps=2) == golden(ONE_EPOCH)


class Contents(Recorder):
    """Notes what the context holds when a stage fires for the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, tuple[bool, bool, str, int, bool]] = {}

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        kind = "none" if ctx.loss is None else "live" if ctx.loss.requires_grad else "detached"
        held = (
            ctx.batch is not None,
            ctx.predictions is not None,
            kind,
            len(ctx.optimizers),
            ctx.validation is not None,
        )
        self.seen.setdefault(stage.name + "/validating" * ctx.validating, held)
        assert (ctx.losses is None) == (ctx.loss is None)


def test_what_the_context_holds_at_each_stage() -> None:
    """Batch, predictions, loss (live or detached), optimizers and validation summary."""
    contents = Contents()
    run(strategy(hooks=[contents], validation_config=validation()), batches(3, 2))
    assert contents.seen == {
        "SETUP": (False, False, "none", 0, False),
        "BEFORE_TRAINING": (True, False, "none", 1, False),
        "BEFORE_EPOCH": (True, False, "none", 1, False),
        "BEFORE_BATCH": (True, False, "none", 1, False),
        "BEFORE_FORWARD": (True, False, "none", 1, False),
        "AFTER_FORWARD": (True, True, "none", 1, False),
        "BEFORE_LOSS": (True, True, "none", 1, False),
        "AFTER_LOSS": (True, True, "live", 1, False),
        "BEFORE_BACKWARD": (True, True, "live", 1, False),
        "AFTER_BACKWARD": (True, True, "detached", 1, False),
        "BEFORE_OPTIMIZER_STEP": (True, True, "detached", 1, False),
        "AFTER_OPTIMIZER_STEP": (True, True, "detached", 1, False),
        "AFTER_BATCH": (True, True, "detached", 1, False),
        "AFTER_EPOCH": (True, False, "detached", 1, False),
        "AFTER_TRAINING": (True, False, "none", 1, False),
        "BEFORE_FORWARD/validating": (True, False, "none", 1, False),
        "AFTER_FORWARD/validating": (True, True, "none", 1, False),
        "AFTER_VALIDATION": (True, False, "detached", 1, True),
    }
