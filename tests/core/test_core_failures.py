"""After a failure anywhere, hooks are left, guards are gone, and models are as they were."""

from __future__ import annotations

from typing import Any

import pytest
from core_rigs import (
    OBSERVED,
    At,
    BoomError,
    Harm,
    Scoped,
    assert_usable,
    batches,
    force_loss,
    raising,
    run,
    sgd,
    strategy,
    structures,
    trainer,
    two_models,
)
from torch.utils.data import BatchSampler
from torch.utils.data import DataLoader as TorchLoader

from nvalchemi_lightning.data import DataLoader
from nvalchemi_lightning.feeding import OneLoader
from nvalchemi_lightning.module import AlchemiModule
from nvalchemi_lightning.stages import TrainingStage
from nvalchemi_lightning.training_fn import default_training_fn
from nvalchemi_lightning.validation import ValidationConfig

Stage = TrainingStage


@pytest.mark.parametrize("kind", [BoomError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("stage", TrainingStage, ids=lambda stage: stage.name)
def test_a_failure_at_any_stage_leaves_everything_as_it_was(stage: TrainingStage, kind: type[BaseException]) -> None:
    models, forward = two_models()
    log: list[str] = []
    config = ValidationConfig(
        validation_data=batches(2),
        every_n_steps=1,
        validation_fn=lambda models, batch: default_training_fn(models["student"][0], batch),
    )
    what = strategy(
        models=models,
        optimizer_configs={"student": [sgd()]},
        training_fn=forward,
        num_steps=2,
        validation_config=config,
        hooks=[Scoped("a", log), raising(stage, kind("boom"))],
    )
    with pytest.raises(kind):
        run(what, batches(2, 3))
    assert log.count("enter a") == 1
    assert log[-1] == f"exit[{kind.__name__}] a"
    assert [module.training for module in models["student"].modules()] == [True, True, False]
    assert models["teacher"].training
    assert not models["student"][1].bias.requires_grad
    assert models["teacher"].w.requires_grad
    assert_usable(what)


@pytest.mark.parametrize("stage", [Stage.SETUP, Stage.AFTER_BACKWARD, Stage.DO_BACKWARD, Stage.AFTER_BATCH])
def test_a_strategy_runs_again_after_a_failure(stage: TrainingStage) -> None:
    """The failed batch advances nothing, so the second run trains it again."""
    failures = [BoomError("once")]

    def fail_once(ctx: Any) -> None:
        if failures:
            raise failures.pop()
        if stage is Stage.DO_BACKWARD:
            ctx.loss.backward()

    loader = batches(2, 3)
    what = strategy(hooks=[At(stage, fail_once)])
    with pytest.raises(BoomError):
        run(what, loader)
    run(what, loader)
    assert (what.step_count, what.epoch_count, what.epoch_step_count) == (2, 1, 0)
    assert what.models["main"].w == run(strategy(), loader).models["main"].w


@pytest.mark.parametrize("stage", OBSERVED, ids=lambda stage: stage.name)
def test_train_batch_leaves_everything_as_it_was_after_a_failure(stage: TrainingStage) -> None:
    log: list[str] = []
    what = strategy(hooks=[Scoped("a", log), raising(stage)])
    what.models["main"].eval()
    if stage is not Stage.SETUP and not Stage.BEFORE_BATCH.value <= stage.value <= Stage.AFTER_BATCH.value:
        what.train_batch(batches(2)[0])
        assert log == ["enter a", "call a", "exit a"]
        return
    with pytest.raises(BoomError):
        what.train_batch(batches(2)[0])
    assert log[-1] == "exit[BoomError] a"
    assert not what.models["main"].training
    assert_usable(what)


def test_hooks_are_left_when_lightning_ends_the_interpreter() -> None:
    """With a Trainer of one's own an interrupt is a SystemExit, as Lightning has it; `run` hands on the interrupt."""
    log: list[str] = []
    what = strategy(hooks=[Scoped("a", log), raising(Stage.AFTER_LOSS, KeyboardInterrupt())])
    with pytest.raises(SystemExit):
        trainer().fit(AlchemiModule(what), OneLoader(batches(2, 3)))
    assert log == ["enter a", "exit[KeyboardInterrupt] a"]
    assert_usable(what)


def test_the_guards_go_with_the_run() -> None:
    what = run(strategy(), batches(2, 3))
    assert_usable(what)
    what.train_batch(batches(2)[0])
    assert_usable(what)


def test_a_run_keeps_optimizers_and_their_state() -> None:
    what = run(strategy(num_steps=1), batches(2, 3))
    first = what.flat_optimizers()[0][0]
    what.num_steps = 2
    run(what, batches(2, 3))
    assert what.flat_optimizers()[0][0] is first


# Exceptions that Lightning's loops take for the end of a loader


class Exhausted:
    """Raises StopIteration a few times, and something else if that goes unnoticed."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *_: Any, **__: Any) -> Any:
        self.calls += 1
        if self.calls > 3:
            raise AssertionError("a StopIteration was taken for the end of the loader")
        return next(iter(()))


@pytest.mark.parametrize("stage", TrainingStage, ids=lambda stage: stage.name)
def test_a_stop_iteration_is_an_error(stage: TrainingStage) -> None:
    """As in a generator, it becomes a RuntimeError instead of an early or endless end."""
    config = ValidationConfig(validation_data=batches(1), every_n_steps=1)
    exhausted = Exhausted()
    what = strategy(num_steps=2, hooks=[At(stage, exhausted)], validation_config=config)
    with pytest.raises(RuntimeError, match="StopIteration") as caught:
        run(what, batches(1, 1))
    assert isinstance(caught.value.__cause__, StopIteration)
    assert exhausted.calls == 1
    assert_usable(what)


@pytest.mark.parametrize("name", ["training_fn", "loss_target_assembler", "validation_fn", "batch_callback"])
def test_a_stop_iteration_of_a_function_is_an_error(name: str) -> None:
    exhausted = Exhausted()
    validating = {name: exhausted} if name in ValidationConfig.model_fields else {}
    training = {} if validating else {name: exhausted}
    config = ValidationConfig(validation_data=batches(1), every_n_steps=1, **validating)
    what = strategy(num_steps=2, validation_config=config, **training)
    with pytest.raises(RuntimeError, match="StopIteration"):
        run(what, batches(1, 1))
    assert exhausted.calls == 1
    exhausted.calls = 0
    calls = {True: what.validate, False: lambda: what.train_batch(batches(1)[0])}
    with pytest.raises(RuntimeError, match="StopIteration"):
        calls[bool(validating)]()


def test_loader_classes_are_as_before_after_a_loader_failed() -> None:
    """Lightning wraps them while it requests loaders; left behind, every loader would keep all it is ever assigned."""

    class Broken(AlchemiModule):
        def train_dataloader(self) -> Any:
            raise BoomError("no data")

    module = Broken(models=Harm(), optimizer_configs=sgd(), loss_fn=force_loss())
    for _ in range(2):
        with pytest.raises(BoomError, match="no data"):
            trainer().fit(module)
    for cls in (TorchLoader, DataLoader, BatchSampler):
        assert not [name for name in vars(cls) if name.startswith("__old")]
    loader = DataLoader(structures(2))
    loader.seed = 4
    assert not [name for name in vars(loader) if name.startswith("__pl")]
