"""Hooks are entered and left once whatever happens, and a run leaves models and optimizers as it found them."""

from __future__ import annotations

from typing import Any

import pytest
from core_rigs import (
    At,
    BoomError,
    Closable,
    Scoped,
    assert_usable,
    batches,
    raising,
    run,
    strategy,
)
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from nvalchemi_lightning.hooks.lifecycle import HookLifecycle
from nvalchemi_lightning.hooks.registry import HookRegistry
from nvalchemi_lightning.stages import TrainingStage
from nvalchemi_lightning.validation import ValidationConfig

Stage = TrainingStage


def lifecycle(*hooks: Any) -> HookLifecycle:
    registry = HookRegistry()
    for hook in hooks:
        registry.register(hook)
    return HookLifecycle(registry)


# The context alone


def test_hooks_are_entered_in_order_and_left_in_reverse() -> None:
    log: list[str] = []
    with lifecycle(Scoped("a", log), Closable("b", log), At(Stage.AFTER_BATCH, print), Scoped("c", log)) as scope:
        assert scope.active
        assert log == ["enter a", "enter c"]
    assert not scope.active
    assert log[2:] == ["exit c", "close b", "exit a"]


def test_nested_contexts_enter_and_leave_once() -> None:
    log: list[str] = []
    scope = lifecycle(Scoped("a", log))
    with scope, scope:
        with scope:
            pass
        assert scope.active
    assert log == ["enter a", "exit a"]


def test_a_failure_on_the_way_in_leaves_those_that_were_entered() -> None:
    log: list[str] = []
    scope = lifecycle(Scoped("a", log), Scoped("b", log, fail_in="enter"), Scoped("c", log))
    with pytest.raises(BoomError, match="enter b"):
        scope.__enter__()
    assert not scope.active
    assert log == ["enter a", "enter b", "exit[BoomError] a"]


def test_after_a_failure_on_the_way_in_the_context_can_be_used_again() -> None:
    log: list[str] = []
    hook = Scoped("a", log, fail_in="enter")
    scope = lifecycle(hook)
    with pytest.raises(BoomError):
        scope.__enter__()
    hook.fail_in = ""
    log.clear()
    with scope:
        assert scope.active
    assert not scope.active
    assert log == ["enter a", "exit a"]


def test_a_failure_on_the_way_out_leaves_the_others_too() -> None:
    log: list[str] = []
    hooks = [Scoped("a", log), Scoped("b", log, fail_in="exit"), Scoped("c", log)]
    with pytest.raises(BoomError, match="exit b"), lifecycle(*hooks):
        pass
    assert log == ["enter a", "enter b", "enter c", "exit c", "exit b", "exit[BoomError] a"]


def test_a_hook_does_not_suppress_the_exception() -> None:
    log: list[str] = []
    with pytest.raises(BoomError, match="of the run"), lifecycle(Scoped("a", log)):
        raise BoomError("of the run")
    assert log == ["enter a", "exit[BoomError] a"]


def test_a_failure_on_the_way_out_of_an_exception_keeps_both() -> None:
    with (
        pytest.raises(BoomError, match="exit") as caught,
        lifecycle(Scoped("a", [], fail_in="exit")),
    ):
        raise KeyError("of the run")
    assert isinstance(caught.value.__context__, KeyError)


def test_leaving_without_entering_and_closing_twice_are_harmless() -> None:
    log: list[str] = []
    scope = lifecycle(Scoped("a", log))
    scope.close()
    scope.__exit__(None, None, None)
    with scope:
        scope.close()
        scope.close()
    assert log == ["enter a", "exit a"]
    with scope:
        pass
    assert log == ["enter a", "exit a"] * 2


# The context of a strategy


def test_a_run_enters_prepares_and_leaves() -> None:
    log: list[str] = []
    hook = Scoped("a", log, stage=Stage.SETUP)
    hook.prepare_strategy = lambda workflow: log.append(f"prepare {type(workflow).__name__}")
    run(strategy(hooks=[hook]), batches(1))
    assert log == ["enter a", "prepare TrainingStrategy", "call a", "exit a"]


def test_validating_enters_and_leaves() -> None:
    log: list[str] = []
    config = ValidationConfig(validation_data=batches(1))
    what = strategy(hooks=[Scoped("a", log, stage=Stage.AFTER_VALIDATION)], validation_config=config)
    what.validate()
    assert log == ["enter a", "call a", "exit a"]
    log.clear()
    with what:
        what.validate()
        what.validate()
    assert log == ["enter a", "call a", "call a", "exit a"]


@pytest.mark.parametrize("call", ["run", "train_batch"])
def test_a_failing_preparation_leaves_the_hooks(call: str) -> None:
    def fail(workflow: Any) -> None:
        raise BoomError("prepare")

    log: list[str] = []
    hook = Scoped("a", log)
    hook.prepare_strategy = fail
    what = strategy(hooks=[hook])
    doors = {"run": lambda: run(what, batches(1)), "train_batch": lambda: what.train_batch(batches(1)[0])}
    with pytest.raises(BoomError, match="prepare"):
        doors[call]()
    assert log == ["enter a", "exit[BoomError] a"]
    assert_usable(what)


def test_train_batch_enters_per_call_unless_the_caller_has() -> None:
    log: list[str] = []
    what = strategy(hooks=[Scoped("a", log)], num_steps=4)
    batch = batches(1)[0]
    what.train_batch(batch)
    assert log == ["enter a", "call a", "exit a"]
    log.clear()
    with what:
        what.train_batch(batch)
        what.train_batch(batch)
        run(what, [batch])
    assert log == ["enter a", "call a", "call a", "call a", "exit a"]


def test_train_batch_prepares_and_sets_up_every_time() -> None:
    log: list[str] = []
    hook = At(Stage.SETUP, lambda ctx: log.append(f"setup {ctx.batch}"))
    hook.prepare_strategy = lambda workflow: log.append("prepare")
    what = strategy(hooks=[hook])
    for batch in batches(1, 1):
        what.train_batch(batch)
    assert log == ["prepare", "setup None"] * 2


def test_a_hook_registered_in_an_open_context_is_entered_then() -> None:
    log: list[str] = []
    what = strategy(hooks=[Scoped("a", log)])
    with what:
        what.register_hook(Scoped("late", log))
    assert log == ["enter a", "enter late", "exit late", "exit a"]


def test_a_hook_registered_after_the_context_is_not_left() -> None:
    log: list[str] = []
    what = strategy()
    with what:
        pass
    what.register_hook(Scoped("a", log))
    assert log == []


def test_a_late_hook_that_cannot_be_entered_is_not_registered() -> None:
    log: list[str] = []
    what = strategy(hooks=[Scoped("a", log)])
    with what:
        with pytest.raises(BoomError):
            what.register_hook(Scoped("late", log, fail_in="enter"))
        assert [hook.name for hook in what.hooks] == [hook.name for hook in what.registry] == ["a"]
    assert log == ["enter a", "enter late", "exit a"]


def test_a_failing_enter_fails_the_run_and_the_next_one_works() -> None:
    log: list[str] = []
    first, second = Scoped("a", log), Scoped("b", log, fail_in="enter")
    what = strategy(hooks=[first, second])
    with pytest.raises(BoomError, match="enter b"):
        run(what, batches(1))
    assert log == ["enter a", "enter b", "exit[BoomError] a"]
    second.fail_in = ""
    log.clear()
    run(what, batches(1))
    assert log == ["enter a", "enter b", "call a", "call b", "exit b", "exit a"]


def test_a_failing_exit_fails_the_run_and_leaves_the_others() -> None:
    log: list[str] = []
    what = strategy(hooks=[Scoped("a", log), Scoped("b", log, fail_in="exit")])
    with pytest.raises(BoomError, match="exit b"):
        run(what, batches(1))
    assert [entry for entry in log if "exit" in entry] == ["exit b", "exit[BoomError] a"]
    assert not what.scope.active


def test_a_failing_exit_after_a_failure_keeps_both() -> None:
    log: list[str] = []
    what = strategy(hooks=[Scoped("a", log, fail_in="exit"), raising(Stage.AFTER_LOSS, KeyError("of the run"))])
    with pytest.raises(BoomError) as caught:
        run(what, batches(1))
    errors: list[BaseException | None] = [caught.value]
    while errors[-1] is not None:
        errors.append(errors[-1].__context__)
    assert any(isinstance(error, KeyError) for error in errors)
    assert log.count("exit[KeyError] a") == 1
    assert_usable(what)


def test_a_failure_in_the_clean_up_of_another_callback_does_not_keep_hooks_open() -> None:
    class BadCleaner(Callback):
        def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
            raise BoomError("clean-up")

    log: list[str] = []
    what = strategy(hooks=[Scoped("a", log), BadCleaner(), raising(Stage.AFTER_LOSS, KeyError("of the run"))])
    with pytest.raises(BoomError, match="clean-up"):
        run(what, batches(1))
    assert log == ["enter a", "exit[KeyError] a"]
    assert_usable(what)
