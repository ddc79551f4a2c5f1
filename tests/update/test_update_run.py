"""Update hooks in a run: what the owner does with their answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor, nn
from update_rigs import (
    UPDATE_STAGES,
    Accumulate,
    At,
    ConstGrad,
    Net,
    Noting,
    Stage,
    adam,
    batches,
    constant,
    network,
    run,
    sgd,
    strategy,
    w_of,
)

from nvalchemi_lightning import update
from nvalchemi_lightning.errors import (
    ConfigurationError,
    ConfigurationTypeError,
    SecondOwnerError,
    TrainingStateError,
)
from nvalchemi_lightning.hooks import EMAHook, TrainingUpdateHook, TrainingUpdateOrchestrator
from nvalchemi_lightning.hooks.registry import HookRegistry
from nvalchemi_lightning.module import AlchemiModule
from nvalchemi_lightning.stages import REPLACEMENT_STAGES, TrainingStage

# Registration


def test_bare_hooks_are_composed_at_the_place_of_the_first() -> None:
    a, b = Noting("a"), Noting("b", priority=10)
    first, between, last = (At(Stage.AFTER_BATCH, print) for _ in range(3))
    what = strategy(first, a, between, b, last)
    assert what.hooks[0] is first
    assert what.hooks[2:] == [between, last]
    policy = what.hooks[1]
    assert isinstance(policy, TrainingUpdateOrchestrator)
    assert policy.hooks == (b, a)
    assert what.registry.policy is policy
    c = Noting("c")
    what.register_hook(c)
    assert what.hooks[1].hooks == (b, a, c)
    assert [*what.registry] == what.hooks


def test_one_orchestrator_is_kept_as_it_is() -> None:
    mine = Noting() + Noting()
    what = strategy(mine)
    assert what.hooks == [mine]
    assert what.registry.policy is mine


def test_no_update_hook_leaves_everything_alone() -> None:
    hook = At(Stage.AFTER_BATCH, print)
    what = strategy(hook)
    assert what.hooks == [hook]
    assert what.registry.policy is None


def test_bare_hooks_join_an_orchestrator() -> None:
    a, b = Noting("a"), Noting("b")
    mine = TrainingUpdateOrchestrator(a)
    assert strategy(mine, b).hooks[0].hooks == (a, b)
    assert mine.hooks == (a,)
    assert strategy(b, mine).hooks[0].hooks == (b, a)


def test_two_orchestrators_are_refused() -> None:
    message = "Only one TrainingUpdateOrchestrator is allowed"
    with pytest.raises(ValidationError, match=message):
        strategy(TrainingUpdateOrchestrator(), TrainingUpdateOrchestrator())
    what = strategy(TrainingUpdateOrchestrator(Noting()), Noting())
    before = [*what.hooks]
    with pytest.raises(ConfigurationError, match=message):
        what.register_hook(TrainingUpdateOrchestrator())
    assert what.hooks == before


@pytest.mark.parametrize("hook", [Noting(), TrainingUpdateOrchestrator()], ids=["hook", "orchestrator"])
def test_a_stage_is_refused(hook: Any) -> None:
    with pytest.raises(ConfigurationError, match="stage= is not supported for TrainingUpdateHook"):
        strategy().register_hook(hook, stage=Stage.AFTER_BATCH)


def test_the_same_hook_twice_is_refused() -> None:
    """B-18 of the contract."""
    hook = EMAHook()
    with pytest.raises(ValidationError, match="EMAHook is registered already"):
        strategy(hook, hook)
    what = strategy(hook)
    with pytest.raises(ConfigurationError, match="EMAHook is registered already"):
        what.register_hook(hook)
    assert what.hooks[0].hooks == (hook,)


class Claims:
    frequency = 1

    def __init__(self, stage: TrainingStage) -> None:
        self.stage = stage

    def __call__(self, ctx: Any, stage: TrainingStage) -> None: ...


@pytest.mark.parametrize("stage", REPLACEMENT_STAGES)
@pytest.mark.parametrize("update_first", [True, False])
def test_a_plain_claimant_beside_update_hooks_is_refused(stage: TrainingStage, update_first: bool) -> None:
    hooks = [Noting(), Claims(stage)] if update_first else [Claims(stage), Noting()]
    message = f"At most one hook may claim {stage.name}; got 2: .*subclass TrainingUpdateHook"
    with pytest.raises(ValidationError, match=message):
        strategy(*hooks)
    what = strategy(hooks[0])
    with pytest.raises(ConfigurationError, match=message):
        what.register_hook(hooks[1])
    assert len(what.hooks) == len(what.registry) == 1


def test_an_orchestrator_that_skips_batches_is_refused() -> None:
    """B-19 of the contract."""

    class Sometimes(TrainingUpdateOrchestrator):
        frequency = 2  # type: ignore[assignment]

    with pytest.raises(ValidationError, match="claims DO_BACKWARD with frequency=2; a claimant acts on every batch"):
        strategy(Sometimes())


def test_on_register_must_be_callable() -> None:
    class Odd(TrainingUpdateHook):
        on_register = 1

    with pytest.raises(ConfigurationTypeError, match=r"Odd.on_register must be callable; got 1"):
        strategy(TrainingUpdateOrchestrator(Odd()))


class Told(Noting):
    def on_register(self, workflow: Any) -> None:
        self.log.append(("on_register", self.name))

    def prepare_strategy(self, workflow: Any) -> None:
        self.log.append(("prepare", self.name))

    def __enter__(self) -> None:
        self.log.append(("enter", self.name))

    def __exit__(self, *error: Any) -> None:
        self.log.append(("exit", self.name))


def test_hooks_inside_are_told_what_other_hooks_are_told() -> None:
    """B-20 of the contract."""
    log: list[Any] = []
    a, b, c = (Told(name, log) for name in "abc")
    what = strategy(a + b)
    what.register_hook(c)
    assert log == [("on_register", name) for name in "abc"]
    log.clear()
    run(what, constant(1))
    told = [entry for entry in log if len(entry) == 2]
    assert told[:3] == [("enter", name) for name in "abc"]
    assert told[3:6] == [("prepare", name) for name in "abc"]
    assert told[6:] == [("exit", name) for name in "cba"]


def test_a_hook_that_is_registered_during_a_run_takes_part() -> None:
    log: list[Any] = []
    late = Told("late", log)
    what = strategy(Told("early", log))
    what.register_hook(At(Stage.AFTER_BATCH, lambda ctx: late not in what.hooks[0].hooks and what.register_hook(late)))
    run(what, constant(2))
    assert late.notes() == [(stage.name, False) for stage in UPDATE_STAGES]
    assert log.count(("enter", "late")) == log.count(("exit", "late")) == 1
    assert log.count(("exit", "early")) == 1


def test_a_hook_that_cannot_be_entered_is_forgotten() -> None:
    class Closed(Noting):
        def __enter__(self) -> None:
            raise OSError("no space")

    early = Noting()
    what = strategy(early)
    with what, pytest.raises(OSError, match="no space"):
        what.register_hook(Closed())
    assert what.hooks[0].hooks == (early,)
    assert what.registry.policy is what.hooks[0]


def test_the_registry_alone_checks_a_list_without_telling_anybody() -> None:
    hook = Told()
    HookRegistry.on_trial([hook, Noting(), At(Stage.AFTER_BATCH, print)])
    assert hook.log == []


# The owner follows


def trace(what: Any) -> list[str]:
    """Record every stage that may be observed, with the five counters."""
    rows: list[str] = []

    def note(stage: TrainingStage) -> Any:
        def act(ctx: Any) -> None:
            rows.append(f"{stage.name} {ctx.step_count},{ctx.batch_count},{ctx.epoch},{ctx.epoch_step_count}")

        return act

    for stage in TrainingStage:
        if stage not in REPLACEMENT_STAGES:
            what.register_hook(At(stage, note(stage)))
    return rows


BATCH = (
    "BEFORE_BATCH",
    "BEFORE_FORWARD",
    "AFTER_FORWARD",
    "BEFORE_LOSS",
    "AFTER_LOSS",
    "BEFORE_BACKWARD",
    "AFTER_BACKWARD",
    "BEFORE_OPTIMIZER_STEP",
    "AFTER_OPTIMIZER_STEP",
)


def test_the_stages_of_a_vetoed_batch_are_those_of_any_other() -> None:
    what = strategy(Noting(DO_OPTIMIZER_STEP=False), num_steps=1, num_epochs=None)
    rows = trace(what)
    what.register_hook(At(Stage.AFTER_BATCH, lambda ctx: what.stop("enough")))
    run(what, constant(2))
    expected = ["SETUP 0,0,0,0", "BEFORE_TRAINING 0,0,0,0", "BEFORE_EPOCH 0,0,0,0"]
    expected += [f"{stage} 0,0,0,0" for stage in BATCH]
    expected += ["AFTER_BATCH 0,1,0,1", "AFTER_TRAINING 0,1,0,1"]
    assert rows == expected


def test_the_stages_of_an_accumulation_window() -> None:
    what = strategy(Accumulate(2), num_steps=1, num_epochs=None)
    rows = trace(what)
    run(what, constant(2))
    expected = ["SETUP 0,0,0,0", "BEFORE_TRAINING 0,0,0,0", "BEFORE_EPOCH 0,0,0,0"]
    expected += [f"{stage} 0,0,0,0" for stage in BATCH]
    expected += ["AFTER_BATCH 0,1,0,1"]
    expected += [f"{stage} 0,1,0,1" for stage in BATCH]
    expected += ["AFTER_BATCH 1,2,0,2", "AFTER_EPOCH 1,2,1,0", "AFTER_TRAINING 1,2,1,0"]
    assert rows == expected
    assert w_of(what) == -1.0


def test_gradients_stay_where_zeroing_is_vetoed() -> None:
    seen: list[float] = []
    what = strategy(Noting(BEFORE_BATCH=False))
    what.register_hook(At(Stage.AFTER_BACKWARD, lambda ctx: seen.append(ctx.model.w.grad.item())))
    run(what, constant(3))
    assert seen == [1.0, 2.0, 3.0]
    assert w_of(what) == -6.0


def test_the_transformed_loss_is_differentiated_and_the_other_one_is_shown() -> None:
    seen: list[Any] = []

    class Scale(TrainingUpdateHook):
        def __call__(self, ctx: Any, stage: TrainingStage, will_skip: bool) -> tuple[bool, Tensor]:
            return True, ctx.loss * 3.0 if stage is Stage.DO_BACKWARD else ctx.loss

    what = strategy(Scale())
    what.register_hook(At(Stage.AFTER_BACKWARD, lambda ctx: seen.append((ctx.loss, ctx.losses["total_loss"]))))
    run(what, constant(1))
    assert w_of(what) == -3.0
    loss, total = seen[0]
    assert loss.item() == total.item() == 1000.0
    assert not loss.requires_grad


def test_a_loss_without_gradient_is_refused() -> None:
    class Cut(TrainingUpdateHook):
        def __call__(self, ctx: Any, stage: TrainingStage, will_skip: bool) -> tuple[bool, Tensor]:
            return True, ctx.loss.detach() if stage is Stage.DO_BACKWARD else ctx.loss

    with pytest.raises(TypeError, match="Cut returned a loss at DO_BACKWARD that is cut off from the weights"):
        run(strategy(Cut()), constant(1))


@pytest.mark.parametrize("stage", UPDATE_STAGES)
@pytest.mark.parametrize("attack", ["step", "backward"])
def test_an_update_hook_is_no_second_owner(stage: TrainingStage, attack: str) -> None:
    class Second(TrainingUpdateHook):
        def __call__(self, ctx: Any, at: TrainingStage, will_skip: bool) -> tuple[bool, Tensor]:
            if at is stage:
                ctx.optimizers[0].step() if attack == "step" else ctx.model.w.square().backward()
            return True, ctx.loss

    with pytest.raises(SecondOwnerError, match=f"at {stage.name}, but the strategy is the one owner"):
        run(strategy(Second()), constant(1))


def test_a_wrong_answer_names_hook_and_stage_and_advances_nothing() -> None:
    what = strategy(Noting(DO_OPTIMIZER_STEP=1))
    with pytest.raises(ConfigurationTypeError, match=r"Noting.__call__\(stage=DO_OPTIMIZER_STEP\) must return"):
        run(what, constant(1))
    assert set(vars(what.counters).values()) == {0}
    assert w_of(what) == 0.0


@settings(max_examples=15, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=6), st.lists(st.booleans(), min_size=6, max_size=6))
def test_counters_agree_with_any_vetoes(steps: list[bool], zeroes: list[bool]) -> None:
    class Script(TrainingUpdateHook):
        n = -1

        def __call__(self, ctx: Any, stage: TrainingStage, will_skip: bool) -> tuple[bool, Tensor]:
            if stage is Stage.BEFORE_BATCH:
                self.n += 1
                return zeroes[self.n], ctx.loss
            return steps[self.n] if stage is Stage.DO_OPTIMIZER_STEP else True, ctx.loss

    schedule = {"scheduler_cls": torch.optim.lr_scheduler.ConstantLR, "scheduler_kwargs": {"factor": 1.0}}
    what = strategy(Script(), optimizer_configs=sgd(**schedule), num_epochs=100)
    with what:
        for batch in constant(len(steps)):
            what.train_batch(batch)
    gradient, w = 0, 0
    for step, zero in zip(steps, zeroes, strict=False):
        gradient = 1 if zero else gradient + 1
        w -= gradient * step
    counters = what.counters
    assert (counters.step_count, counters.global_step_count) == (sum(steps), sum(steps))
    assert (counters.batch_count, counters.epoch_step_count, counters.epoch_count) == (len(steps), 0, 0)
    assert what.flat_optimizers()[1][0].last_epoch == sum(steps)
    assert w_of(what) == w


def test_schedules_advance_per_step_of_an_accumulation_window() -> None:
    """B45: warm-up over 4 steps of 4 batches each."""
    rates: list[float] = []
    warm_up = {"scheduler_cls": torch.optim.lr_scheduler.LinearLR}
    options = {"scheduler_kwargs": {"start_factor": 0.25, "total_iters": 3}}
    what = strategy(Accumulate(4), optimizer_configs=sgd(**warm_up, **options), num_steps=4)

    class Rates(TrainingUpdateHook):
        def __call__(self, ctx: Any, stage: TrainingStage, will_skip: bool) -> tuple[bool, Tensor]:
            if stage is Stage.DO_OPTIMIZER_STEP and not will_skip:
                rates.append(ctx.optimizers[0].param_groups[0]["lr"])
            return True, ctx.loss

    what.register_hook(Rates())
    run(what, constant(16))
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert what.flat_optimizers()[1][0].last_epoch == 4
    assert (what.counters.batch_count, what.step_count) == (16, 4)


def test_an_accumulated_gradient_is_that_of_the_large_batch() -> None:
    def weights(hooks: list[Any], loader: list[Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model = Net(torch.float64)
        run(network(*hooks, models=model, num_steps=1), loader)
        return [parameter.detach() for parameter in model.parameters()]

    parts = batches(3, 3, seed=3)
    whole = type(parts[0]).from_data_list([parts[i][j] for i in range(2) for j in range(3)])
    for ours, theirs in zip(weights([Accumulate(2)], parts), weights([], [whole]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_several_optimizers_step_or_stay_together() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = ConstGrad(), ConstGrad()

        def forward(self, batch: Any) -> dict[str, Tensor]:
            return {"energy": self.a(batch)["energy"] + self.b(batch)["energy"]}

    model = Pair()
    run(strategy(Accumulate(2), models=model, optimizer_configs=[sgd(), sgd()], num_steps=2), constant(4))
    assert model.a.w.item() == model.b.w.item() == -4.0  # both optimizers hold both weights


def test_the_three_doors_take_the_same_steps() -> None:
    from lightning.pytorch import Trainer

    from nvalchemi_lightning.feeding import OneLoader

    def model() -> Net:
        torch.manual_seed(0)
        return Net()

    loader = batches(2, 3, 2, 1, dtype=torch.float32)
    by_run = run(network(Accumulate(2), models=model(), num_steps=2), loader)
    module = AlchemiModule(
        models=model(), optimizer_configs=adam(), loss_fn=by_run.loss_fn, hooks=[Accumulate(2)], num_epochs=1
    )
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = Trainer(strategy="nvalchemi", accelerator="cpu", logger=False, max_epochs=1, **quiet)
    trainer.fit(module, OneLoader(loader))
    by_hand = network(Accumulate(2), models=model())
    for batch in loader:
        by_hand.train_batch(batch)
    assert trainer.global_step == module.recipe.step_count == by_run.step_count == by_hand.step_count == 2
    for one in (module.recipe, by_hand):
        for ours, theirs in zip(one.models["main"].parameters(), by_run.models["main"].parameters(), strict=True):
            assert torch.equal(ours, theirs)


# Runs that would never end


@pytest.fixture
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update, "MAX_IDLE_BATCHES", 5)


def test_the_limit_is_documented() -> None:
    assert update.MAX_IDLE_BATCHES == 1000


@pytest.mark.usefixtures("_few")
def test_a_policy_that_vetoes_every_step_ends_the_run() -> None:
    """B-21 of the contract."""
    what = strategy(Noting(DO_OPTIMIZER_STEP=False), num_steps=1)
    message = "5 batches in a row passed without an optimizer step.*the last one was vetoed by Noting"
    with pytest.raises(TrainingStateError, match=message):
        run(what, constant(2))
    assert what.counters.batch_count == 4


@pytest.mark.usefixtures("_few")
def test_a_claimant_that_never_steps_ends_the_run() -> None:
    with pytest.raises(TrainingStateError, match="Claims claims DO_OPTIMIZER_STEP and stepped no optimizer"):
        run(strategy(Claims(Stage.DO_OPTIMIZER_STEP), num_steps=1), constant(2))


def test_a_run_without_a_step_is_no_success() -> None:
    """B81."""
    what = strategy(Noting(DO_OPTIMIZER_STEP=False), num_epochs=2)
    with pytest.raises(
        TrainingStateError, match=r"4 batches in a row passed without an optimizer step.*vetoed by Noting"
    ):
        run(what, constant(2))


def test_epochs_are_passes_whatever_is_vetoed() -> None:
    what = run(strategy(Accumulate(2), num_epochs=3), constant(4))
    assert (what.epoch_count, what.counters.batch_count, what.step_count) == (3, 12, 6)


@pytest.mark.usefixtures("_few")
def test_a_step_starts_the_count_anew() -> None:
    assert run(strategy(Accumulate(5), num_steps=3), constant(5)).step_count == 3


class EndNoting(Noting):
    def end_batch(self) -> None:
        self.log.append("end")


def test_every_batch_ends_also_one_that_fails() -> None:
    hook = EndNoting()
    what = strategy(hook)
    what.register_hook(At(Stage.AFTER_FORWARD, lambda ctx: 1 / (1 - ctx.batch_count)))
    with pytest.raises(ZeroDivisionError):
        run(what, constant(2))
    assert hook.log.count("end") == 2
