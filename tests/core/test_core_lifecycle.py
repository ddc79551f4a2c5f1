"""Hooks are entered and left once whatever happens, and a run leaves models and optimizers as it found them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from core_rigs import OBSERVED, At, Harm, batches, run, sgd, strategy, trainer
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import nn

from nvalchemi_lightning.errors import UnknownNameError
from nvalchemi_lightning.feeding import OneLoader
from nvalchemi_lightning.hooks.lifecycle import HookLifecycle
from nvalchemi_lightning.hooks.registry import HookRegistry
from nvalchemi_lightning.module import AlchemiModule
from nvalchemi_lightning.stages import TrainingStage
from nvalchemi_lightning.training_fn import default_training_fn
from nvalchemi_lightning.validation import ValidationConfig

Stage = TrainingStage


class BoomError(Exception):
    """Raised by the hooks of this file."""


class Scoped(At):
    """A hook with a context; it notes what happens to it in a shared log."""

    def __init__(
        self, name: str, log: list[str], *, fail_in: str = "", stage: TrainingStage = Stage.AFTER_BATCH
    ) -> None:
        super().__init__(stage, lambda ctx: log.append(f"call {name}"))
        self.name = name
        self.log = log
        self.fail_in = fail_in

    def __enter__(self) -> Scoped:
        self._act("enter")
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        self._act("exit" if kind is None else f"exit[{kind.__name__}]")
        return True

    def _act(self, what: str) -> None:
        self.log.append(f"{what} {self.name}")
        if self.fail_in and what.startswith(self.fail_in):
            raise BoomError(f"{what} {self.name}")


class Closable(At):
    """A hook that can only be closed."""

    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__(Stage.AFTER_BATCH, lambda ctx: None)
        self.name = name
        self.log = log

    def close(self) -> None:
        self.log.append(f"close {self.name}")


def raising(stage: TrainingStage, error: BaseException | type[BaseException] = BoomError) -> At:
    def fail(ctx: Any) -> None:
        if not ctx.validating:
            raise error

    return At(stage, fail)


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
    assert not what.lifecycle.active


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


# After a failure at any stage


def assert_usable(what: Any) -> None:
    """The guards are gone and hooks are left: anybody may use the optimizers, and a gradient may accumulate."""
    assert not what.lifecycle.active
    for model in what.models.values():
        for parameter in model.parameters():
            parameter.requires_grad_(True)
            parameter.sum().backward()
            parameter.grad = None
    if what._optimizers is not None:
        for optimizer in what.flat_optimizers()[0]:
            optimizer.step()


def two_models() -> tuple[dict[str, nn.Module], Callable[[Any, Any], Any]]:
    """A student that trains with a frozen part, and a teacher without an optimizer."""
    student = nn.Sequential(Harm(), nn.BatchNorm1d(1).double())
    student[1].eval()
    student[1].bias.requires_grad_(False)
    teacher = Harm(2.0)

    def forward(models: Any, batch: Any) -> dict[str, torch.Tensor]:
        assert models["student"].training
        assert not models["student"][1].training
        assert not models["teacher"].training
        assert not models["teacher"].w.requires_grad
        output = models["student"][0](batch)
        energy = output["energy"] + models["student"][1](output["energy"]) * 0
        return {"predicted_energy": energy, "predicted_forces": output["forces"]}

    return {"student": student, "teacher": teacher}, forward


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


# Modes, flags and filters during a run


def test_models_without_an_optimizer_are_frozen_for_the_run() -> None:
    models, forward = two_models()
    run(strategy(models=models, optimizer_configs={"student": [sgd()]}, training_fn=forward), batches(2, 3))
    assert models["teacher"].w == 2.0
    assert models["teacher"].w.requires_grad
    assert models["student"][0].w != 1.0


def test_a_model_in_eval_mode_trains_and_is_back_in_eval_mode_afterwards() -> None:
    model = Harm().eval()
    seen: list[bool] = []
    run(
        strategy(models=model, hooks=[At(Stage.BEFORE_FORWARD, lambda ctx: seen.append(ctx.model.training))]),
        batches(1),
    )
    assert seen == [True]
    assert not model.training


class Pair(nn.Module):
    """Two factors of one well; the second may be kept out of the training."""

    requires_autograd = True

    def __init__(self) -> None:
        super().__init__()
        self.inner = Harm()
        self.scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    def forward(self, batch: Any) -> dict[str, torch.Tensor]:
        return {key: value * self.scale for key, value in self.inner(batch).items()}


def changed(model: Pair) -> dict[str, bool]:
    return {name: bool(parameter != 1.0) for name, parameter in model.named_parameters()}


def test_the_optimizer_filter_keeps_parameters_and_their_gradients_out() -> None:
    model, grads = Pair(), []
    what = strategy(models=model)
    what.register_hook(At(Stage.AFTER_BACKWARD, lambda ctx: grads.append(model.scale.grad.clone())))
    what.set_optimizer_parameter_filter(["main.inner.w"])
    loader = batches(2)
    what.num_epochs, what.num_steps = None, 2
    run(what, loader * 2)
    assert changed(model) == {"scale": False, "inner.w": True}
    reference = Pair()
    reference.inner.w.data.copy_(model.inner.w)
    assert len(grads) == 2
    # The second gradient would hold the first as well if it had not been dropped.
    assert grads[1].abs() < grads[0].abs()


def test_the_trainable_filter_freezes_the_rest_for_the_run() -> None:
    model, seen = Pair(), []
    what = strategy(models=model)
    what.register_hook(At(Stage.BEFORE_BATCH, lambda ctx: seen.append(model.scale.requires_grad)))
    what.set_trainable_parameter_filter(["main.inner.w"])
    run(what, batches(2))
    assert seen == [False]
    assert changed(model) == {"scale": False, "inner.w": True}
    assert model.scale.requires_grad


def test_the_forcing_filter_trains_a_frozen_parameter() -> None:
    model = Pair()
    model.inner.w.requires_grad_(False)
    what = strategy(models=model)
    what.set_trainable_parameter_filter([])
    what.set_force_trainable_parameter_filter(["main.inner.w"])
    run(what, batches(2))
    assert changed(model) == {"scale": False, "inner.w": True}
    assert not model.inner.w.requires_grad
    assert model.scale.requires_grad


def test_filters_are_cleared_with_none() -> None:
    model = Pair()
    what = strategy(models=model)
    what.set_optimizer_parameter_filter(["main.inner.w"])
    what.set_trainable_parameter_filter([])
    what.set_force_trainable_parameter_filter(["main.inner.w"])
    for clear in (
        what.set_optimizer_parameter_filter,
        what.set_trainable_parameter_filter,
        what.set_force_trainable_parameter_filter,
    ):
        clear(None)
    run(what, batches(2))
    assert changed(model) == {"scale": True, "inner.w": True}


@pytest.mark.parametrize(
    "setter",
    ["set_optimizer_parameter_filter", "set_trainable_parameter_filter", "set_force_trainable_parameter_filter"],
)
def test_a_filter_that_names_no_parameter_is_refused(setter: str) -> None:
    model = Pair()
    what = strategy(models=model)
    with pytest.raises(UnknownNameError, match=r"no parameter is called 'main.scal'; did you mean 'main.scale'"):
        getattr(what, setter)(["main.scal", "main.inner.w"])
    run(what, batches(2))
    assert changed(model) == {"scale": True, "inner.w": True}


def test_filters_are_restored_after_a_failure() -> None:
    model = Pair()
    what = strategy(models=model, hooks=[raising(Stage.AFTER_LOSS)])
    what.set_trainable_parameter_filter(["main.inner.w"])
    with pytest.raises(BoomError):
        run(what, batches(2))
    with pytest.raises(BoomError):
        what.train_batch(batches(2)[0])
    assert model.scale.requires_grad
