"""What update hooks may answer, and in which order they are asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from update_rigs import UPDATE_STAGES, Noting, Stage

from nvalchemi_lightning.context import TrainContext
from nvalchemi_lightning.errors import ConfigurationError, ConfigurationTypeError
from nvalchemi_lightning.hooks import Hook, TrainingUpdateHook, TrainingUpdateOrchestrator
from nvalchemi_lightning.hooks.update import fold


class Exclusive(TrainingUpdateHook):
    _exclusive_update_key = "K"


class Other(Exclusive):
    pass


def context(loss: float = 1.0) -> TrainContext:
    return TrainContext(batch=None, loss=torch.tensor(loss))


def test_an_update_hook_is_no_hook_but_the_orchestrator_is() -> None:
    assert not isinstance(TrainingUpdateHook(), Hook)
    assert isinstance(TrainingUpdateOrchestrator(), Hook)
    assert TrainingUpdateHook.priority == 50


@pytest.mark.parametrize("stage", list(Stage))
def test_the_stages_of_update_hooks(stage: Stage) -> None:
    assert TrainingUpdateHook()._runs_on_stage(stage) is (stage in UPDATE_STAGES)
    assert TrainingUpdateOrchestrator()._runs_on_stage(stage) is (stage in (*UPDATE_STAGES, Stage.SETUP))


@pytest.mark.parametrize("stage", [Stage.SETUP, *UPDATE_STAGES])
def test_the_default_changes_nothing(stage: Stage) -> None:
    ctx = context()
    proceed, loss = TrainingUpdateHook()(ctx, stage, False)
    assert proceed is True
    assert loss is ctx.loss


# Composition


def test_hooks_are_sorted_by_priority_and_registration() -> None:
    a, b, c = Noting("a", priority=50), Noting("b", priority=10), Noting("c", priority=50)
    assert list(TrainingUpdateOrchestrator(a, b, c).iter_hooks()) == [b, a, c]


def test_a_sum_is_a_new_flat_orchestrator_of_the_same_hooks() -> None:
    a, b, c, d = (Noting(name) for name in "abcd")
    pair = a + b
    assert pair.hooks == (a, b)
    assert (pair + c).hooks == (a, b, c)
    assert (c + pair).hooks == (c, a, b)
    assert (pair + (c + d)).hooks == (a, b, c, d)
    assert pair.hooks == (a, b)


@pytest.mark.parametrize("one", [Noting(), TrainingUpdateOrchestrator()], ids=["hook", "orchestrator"])
def test_a_sum_with_something_else_is_refused(one: Any) -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        one + 1


@pytest.mark.parametrize(
    ("argument", "got"), [([Noting()], "got list"), (1, "got int"), (Noting, "got the class Noting")], ids=str
)
def test_arguments_are_hooks(argument: Any, got: str) -> None:
    message = rf"argument 1 must be .* {got}\. Pass .* call TrainingUpdateOrchestrator\(\*hooks\)"
    with pytest.raises(ConfigurationTypeError, match=message):
        TrainingUpdateOrchestrator(Noting(), argument)


def test_a_key_is_exclusive() -> None:
    message = "Only one update hook with exclusive key 'K' may be registered; got Exclusive and Other."
    with pytest.raises(ConfigurationError, match=message):
        Exclusive() + Other()


def test_a_hook_is_there_once() -> None:
    """B-18 of the contract: an average updated twice per step."""
    hook = Noting()
    with pytest.raises(ConfigurationError, match=r"Noting is registered already .* must not contain duplicates"):
        TrainingUpdateOrchestrator(hook, hook)


def test_the_frequency_is_always_one() -> None:
    """B-19 of the contract: batches without zeroing, backward and step."""
    orchestrator = TrainingUpdateOrchestrator()
    orchestrator.frequency = 1
    with pytest.raises(ConfigurationError, match="frequency is always 1, got 2: on other batches nobody would"):
        orchestrator.frequency = 2
    assert orchestrator.frequency == 1


def test_only_one_orchestrator_is_composed_by_hand() -> None:
    by_hand = TrainingUpdateOrchestrator(Noting())
    assert fold(None, by_hand) is by_hand
    folded = fold(by_hand, Noting())
    assert len(folded.hooks) == 2
    with pytest.raises(
        ConfigurationError, match=r"Only one TrainingUpdateOrchestrator is allowed; compose .* with `\+`"
    ):
        fold(folded, TrainingUpdateOrchestrator())
    bare = fold(None, Noting())
    assert len(fold(bare, by_hand).hooks) == 2


# Answers


@pytest.mark.parametrize("stage", [Stage.BEFORE_BATCH, Stage.DO_OPTIMIZER_STEP])
def test_everybody_is_asked_and_sees_earlier_vetoes(stage: Stage) -> None:
    log: list[Any] = []
    hooks = [Noting("a", log), Noting("b", log, **{stage.name: False}), Noting("c", log)]
    orchestrator = TrainingUpdateOrchestrator(*hooks)
    orchestrator(context(), stage)
    assert log == [("a", stage.name, False), ("b", stage.name, False), ("c", stage.name, True)]
    assert orchestrator.zeroing_skipped is (stage is Stage.BEFORE_BATCH)
    assert orchestrator.optimizer_step_skipped is (stage is Stage.DO_OPTIMIZER_STEP)


def test_a_veto_lasts_for_one_dispatch() -> None:
    hook = Noting(DO_OPTIMIZER_STEP=False)
    orchestrator = TrainingUpdateOrchestrator(hook, Noting("b"))
    assert orchestrator.optimizer_step_skipped is False
    orchestrator(context(), Stage.DO_OPTIMIZER_STEP)
    assert (orchestrator.optimizer_step_skipped, orchestrator.vetoed_by) == (True, "Noting")
    hook.answers = {}
    orchestrator(context(), Stage.DO_OPTIMIZER_STEP)
    assert (orchestrator.optimizer_step_skipped, orchestrator.vetoed_by) == (False, "")


def test_after_the_step_everybody_learns_whether_it_ran() -> None:
    hooks = [Noting("a", DO_OPTIMIZER_STEP=False), Noting("b", AFTER_OPTIMIZER_STEP=None)]
    orchestrator = TrainingUpdateOrchestrator(*hooks)
    for stage in (Stage.SETUP, Stage.DO_OPTIMIZER_STEP, Stage.AFTER_OPTIMIZER_STEP):
        orchestrator(context(), stage)
    for hook in hooks:
        assert hook.notes(Stage.SETUP, Stage.AFTER_OPTIMIZER_STEP) == [("SETUP", False), ("AFTER_OPTIMIZER_STEP", True)]


class Times(TrainingUpdateHook):
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, ctx: Any, stage: Stage, will_skip: bool) -> Any:
        assert will_skip is False
        return "ignored", ctx.loss * self.factor + 1.0


def test_the_loss_is_threaded_through() -> None:
    ctx = context(1.0)
    TrainingUpdateOrchestrator(Times(2.0), Times(10.0))(ctx, Stage.DO_BACKWARD)
    assert ctx.loss is not None
    assert ctx.loss.item() == 31.0


@pytest.mark.parametrize("stage", [Stage.BEFORE_BATCH, Stage.DO_OPTIMIZER_STEP])
@pytest.mark.parametrize("answer", [1, 0, None, "yes", [True], torch.tensor(True)], ids=str)
def test_a_decision_is_a_bool(stage: Stage, answer: Any) -> None:
    message = (
        rf"Noting.__call__\(stage={stage.name}\) must return \(bool, Tensor \| None\); proceed got "
        rf"{type(answer).__name__}"
    )
    with pytest.raises(ConfigurationTypeError, match=message):
        TrainingUpdateOrchestrator(Noting(**{stage.name: answer}))(context(), stage)


@pytest.mark.parametrize("answer", [None, True, (True,), (True, None, None)], ids=str)
def test_an_answer_is_a_pair(answer: Any) -> None:
    class Odd(TrainingUpdateHook):
        def __call__(self, ctx: Any, stage: Stage, will_skip: bool) -> Any:
            return answer

    message = r"Odd.__call__\(stage=BEFORE_BATCH\) must return .* got .*Return \(True, ctx.loss\)"
    with pytest.raises(ConfigurationTypeError, match=message):
        TrainingUpdateOrchestrator(Odd())(context(), Stage.BEFORE_BATCH)


def test_a_loss_is_a_tensor() -> None:
    hook = Noting(DO_BACKWARD=(True, None))
    message = "Noting did not provide a Tensor loss for DO_BACKWARD; got None"
    with pytest.raises(ConfigurationTypeError, match=message):
        TrainingUpdateOrchestrator(hook)(context(), Stage.DO_BACKWARD)


def test_a_loss_stays_on_the_graph() -> None:
    hook = Noting(DO_BACKWARD=(True, torch.tensor(1.0)))
    ctx = context()
    ctx.loss = torch.tensor(1.0, requires_grad=True) * 2
    with pytest.raises(
        ConfigurationTypeError, match=r"Noting returned a loss at DO_BACKWARD that is cut off from the weights"
    ):
        TrainingUpdateOrchestrator(hook)(ctx, Stage.DO_BACKWARD)


# Entering and leaving


class Scoped(Noting):
    def __enter__(self) -> None:
        self.log.append(f"enter {self.name}")

    def __exit__(self, *error: Any) -> None:
        self.log.append(f"exit {self.name}")


class Closable(Noting):
    def close(self) -> None:
        self.log.append(f"close {self.name}")

    def end_batch(self) -> None:
        self.log.append(f"end {self.name}")


def test_hooks_are_entered_in_order_and_left_in_reverse() -> None:
    log: list[Any] = []
    with TrainingUpdateOrchestrator(Scoped("b", log), Closable("c", log), Scoped("a", log, 10)) as orchestrator:
        assert log == ["enter a", "enter b"]
        orchestrator.close()
    assert log[2:] == ["close c", "exit b", "exit a"]


def test_hooks_that_were_not_entered_can_be_closed() -> None:
    log: list[Any] = []
    orchestrator = TrainingUpdateOrchestrator(Closable("a", log), Scoped("b", log), Closable("c", log))
    orchestrator.close()
    orchestrator.end_batch()
    assert log == ["close c", "close a", "end a", "end c"]
