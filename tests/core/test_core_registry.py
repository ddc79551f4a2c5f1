"""Which hooks are accepted, and when each of them fires."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto
from typing import Any, ClassVar

import pytest
from core_rigs import OBSERVED, At, Recorder, batches, run, sgd, strategy, trainer
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping, StochasticWeightAveraging
from pydantic import BaseModel, ValidationError

from nvalchemi_lightning.context import TrainContext
from nvalchemi_lightning.errors import ConfigurationError, ConfigurationTypeError, SecondOwnerError
from nvalchemi_lightning.feeding import OneLoader
from nvalchemi_lightning.hooks import CheckpointableHook, EMAHook, Hook
from nvalchemi_lightning.hooks.registry import HookRegistry, runs_on
from nvalchemi_lightning.module import AlchemiModule
from nvalchemi_lightning.stages import TrainingStage
from nvalchemi_lightning.validation import ValidationConfig

Stage = TrainingStage


class OtherStage(Enum):
    BEFORE_BATCH = auto()


class AlwaysEqual(Enum):
    """A stage of another engine that claims to equal every stage."""

    DO_BACKWARD = 10

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = Enum.__hash__


class FixedStage(BaseModel):
    """A hook whose stage cannot be assigned."""

    stage: ClassVar[TrainingStage] = Stage.AFTER_BATCH
    frequency: int = 1

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        return None


class ClaimsAll:
    """A hook that decides its stages itself."""

    stage = None
    frequency = 1

    def __init__(self, *stages: TrainingStage) -> None:
        self._stages = stages

    def _runs_on_stage(self, stage: TrainingStage) -> bool:
        return stage in self._stages

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        return None


def nothing(ctx: Any) -> None:
    return None


def observer(stage: Any = Stage.AFTER_BATCH, frequency: Any = 1) -> At:
    return At(stage, nothing, frequency)


# The protocol


@pytest.mark.parametrize("missing", ["frequency", "stage", "__call__"])
def test_a_hook_needs_frequency_stage_and_call(missing: str) -> None:
    members = {"frequency": 1, "stage": Stage.AFTER_BATCH, "__call__": lambda self, ctx, stage: None}
    assert isinstance(type("Whole", (), members)(), Hook)
    del members[missing]
    broken = type("Broken", (), members)()
    assert not isinstance(broken, Hook)
    with pytest.raises(ConfigurationTypeError, match=rf"Broken is no hook: it lacks {missing}.*`stage` and"):
        HookRegistry().register(broken)


@pytest.mark.parametrize("thing", [None, 3, "AFTER_BATCH", lambda ctx, stage: None, object()])
def test_other_objects_are_no_hooks(thing: Any) -> None:
    with pytest.raises(ConfigurationTypeError, match="is no hook: it lacks frequency, stage"):
        strategy(hooks=[thing])


@pytest.mark.parametrize("kind", [FixedStage, EarlyStopping], ids=lambda kind: kind.__name__)
def test_a_class_is_no_hook(kind: type) -> None:
    with pytest.raises(ConfigurationTypeError, match=rf"{kind.__name__} is a class; .*{kind.__name__}\("):
        strategy(hooks=[kind])
    with pytest.raises(ConfigurationTypeError, match=f"{kind.__name__} is a class"):
        strategy().register_hook(kind)


def test_a_hook_with_state_is_checkpointable() -> None:
    members = {"state_dict": lambda self: {}, "load_state_dict": lambda self, state: None}
    assert isinstance(type("Stateful", (), members)(), CheckpointableHook)
    assert not isinstance(observer(), CheckpointableHook)


# Registration: every rule, in the order of the checks


@pytest.mark.parametrize("frequency", [0, -1, 1.5, 1.0, "1", None])
def test_frequency_must_be_a_positive_integer(frequency: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"Hook frequency must be a positive integer, got {frequency!r} \(At"):
        HookRegistry().register(observer(frequency=frequency))


def test_true_is_a_frequency() -> None:
    HookRegistry().register(observer(frequency=True))


def test_frequency_is_checked_before_the_stage() -> None:
    with pytest.raises(ConfigurationError, match="frequency"):
        HookRegistry().register(observer(stage=None, frequency=0))


def test_a_hook_without_a_stage_is_refused() -> None:
    with pytest.raises(
        ConfigurationTypeError, match="At has no stage assigned; set `stage` or register it with stage="
    ):
        HookRegistry().register(observer(stage=None))


def test_a_stage_may_be_given_at_registration() -> None:
    registry, hook = HookRegistry(), observer(stage=None)
    registry.register(hook, Stage.AFTER_LOSS)
    assert hook.stage is Stage.AFTER_LOSS
    assert registry.at(Stage.AFTER_LOSS) == (hook,)


def test_a_stage_at_registration_replaces_the_own_one() -> None:
    registry, hook = HookRegistry(), observer(Stage.AFTER_BATCH)
    registry.register(hook, Stage.AFTER_LOSS)
    assert (registry.at(Stage.AFTER_BATCH), registry.at(Stage.AFTER_LOSS)) == ((), (hook,))


@pytest.mark.parametrize(
    ("stage", "hint"),
    [("BEFORE_BACH", "did you mean 'BEFORE_BATCH'"), ("after_batch", "write TrainingStage.AFTER_BATCH"), (4, "4$")],
)
def test_a_stage_must_be_a_training_stage(stage: Any, hint: str) -> None:
    with pytest.raises(ConfigurationTypeError, match=rf"At: training only accepts TrainingStage stages; got .*{hint}"):
        strategy(hooks=[observer(stage)])


@pytest.mark.parametrize("stage", [OtherStage.BEFORE_BATCH, AlwaysEqual.DO_BACKWARD])
def test_stages_of_other_engines_are_refused(stage: Enum) -> None:
    with pytest.raises(ConfigurationTypeError, match="only accepts TrainingStage stages; got <"):
        strategy().register_hook(observer(stage))


def test_a_hook_that_decides_its_stages_needs_no_stage() -> None:
    registry, hook = HookRegistry(), ClaimsAll(Stage.AFTER_LOSS, Stage.AFTER_BATCH)
    registry.register(hook)
    assert [stage for stage in Stage if registry.at(stage)] == [Stage.AFTER_LOSS, Stage.AFTER_BATCH]
    assert runs_on(hook, Stage.AFTER_LOSS)
    assert not runs_on(hook, Stage.SETUP)


def test_a_hook_that_decides_its_stages_takes_no_other() -> None:
    with pytest.raises(ConfigurationError, match="ClaimsAll decides its stages itself; register it without stage="):
        HookRegistry().register(ClaimsAll(Stage.AFTER_LOSS), Stage.AFTER_BATCH)


def test_a_fixed_stage_is_not_replaced() -> None:
    registry, hook = HookRegistry(), FixedStage()
    with pytest.raises(ConfigurationError, match=r"FixedStage.stage is fixed to .*AFTER_BATCH.*register it without"):
        registry.register(hook, Stage.AFTER_LOSS)
    assert len(registry) == 0
    registry.register(hook)
    assert list(registry) == [hook]


def test_a_refused_hook_keeps_its_stage() -> None:
    hook = observer(Stage.AFTER_BATCH, frequency=0)
    with pytest.raises(ConfigurationError, match="frequency"):
        HookRegistry().register(hook, Stage.AFTER_LOSS)
    assert hook.stage is Stage.AFTER_BATCH


class Registered(At):
    """A hook that notes its registration."""

    def __init__(self, stage: Any = Stage.AFTER_BATCH) -> None:
        super().__init__(stage, nothing)
        self.workflows: list[Any] = []

    def on_register(self, workflow: Any) -> None:
        self.workflows.append(workflow)


def test_on_register_is_called_once_with_the_strategy() -> None:
    hook = Registered()
    what = strategy(hooks=[hook])
    what.register_hook(observer())
    assert hook.workflows == [what]


def test_on_register_sees_a_whole_strategy() -> None:
    seen: list[Any] = []
    hook = Registered()
    hook.on_register = lambda workflow: seen.append((workflow.models, workflow.counters, workflow.loss_fn))
    what = strategy(hooks=[hook], step_count=3)
    assert seen == [(what.models, what.counters, what.loss_fn)]


def test_on_register_must_be_callable() -> None:
    hook = observer()
    hook.on_register = 3
    with pytest.raises(ConfigurationTypeError, match=r"At.on_register must be callable; got 3"):
        HookRegistry().register(hook)


def test_a_failing_on_register_leaves_nothing_behind() -> None:
    hook, what = Registered(), strategy()

    def fail(workflow: Any) -> None:
        raise RuntimeError("no")

    hook.on_register = fail
    with pytest.raises(RuntimeError, match="no"):
        what.register_hook(hook)
    assert list(what.registry) == list(what.hooks) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"optimizer_configs": {"mian": [sgd()]}},
        {"num_epochs": 1, "num_steps": 1},
        {"num_epochs": None, "num_steps": None},
        {"training_fn": 3},
        {"hooks_after": [observer(frequency=0)]},
    ],
    ids=["unknown model", "two durations", "no duration", "no function", "another hook is wrong"],
)
def test_no_hook_is_told_of_a_strategy_that_cannot_be(fields: dict[str, Any]) -> None:
    hook = Registered()
    hooks = [hook, *fields.get("hooks_after", ())]
    with pytest.raises((ValueError, TypeError)):
        strategy(**{"hooks": hooks, **{key: value for key, value in fields.items() if key != "hooks_after"}})
    assert hook.workflows == []


# Duplicates and kinds of collections


def test_a_hook_in_the_list_twice_is_refused() -> None:
    hook = observer()
    with pytest.raises(ValidationError, match=r"At is registered already and would fire twice.*must not contain dup"):
        strategy(hooks=[hook, hook])


def test_a_hook_registered_twice_is_refused() -> None:
    hook = observer()
    what = strategy(hooks=[hook])
    with pytest.raises(ConfigurationError, match="registered already"):
        what.register_hook(hook)
    assert what.hooks == [hook]


def test_equal_hooks_that_are_not_the_same_are_welcome() -> None:
    assert len(strategy(hooks=[FixedStage(), FixedStage()]).hooks) == 2


@pytest.mark.parametrize("kind", [list, tuple, iter, lambda hooks: (hook for hook in hooks)])
def test_hooks_come_in_any_collection(kind: Any) -> None:
    hooks = [observer(), observer()]
    assert strategy(hooks=kind(hooks)).hooks == hooks


@pytest.mark.parametrize("hooks", [None, "hook", 3, b"x"])
def test_what_is_no_collection_is_refused(hooks: Any) -> None:
    with pytest.raises(ValidationError, match="hooks must be a list of hooks; got"):
        strategy(hooks=hooks)


def test_one_hook_without_a_list_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"hooks must be a list of hooks; got \w+, write hooks=\[\.\.\.\]"):
        strategy(hooks=observer())
    with pytest.raises(ValidationError, match="list of hooks; got EMAHook"):
        strategy(hooks=EMAHook())


def test_the_same_hook_may_serve_two_strategies() -> None:
    """B115: hooks are not registered twice by a new strategy."""
    recorder = Recorder([Stage.AFTER_BATCH])
    for _ in range(2):
        run(strategy(hooks=[recorder]), batches(3, 2))
    assert len(recorder.rows) == 4


# Lightning callbacks among the hooks


class Native(Callback):
    """A Lightning callback that counts batches."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.batches += 1


def test_lightning_callbacks_among_the_hooks_go_to_the_trainer() -> None:
    native, recorder = Native(), Recorder([Stage.AFTER_BATCH])
    what = strategy(hooks=[native, recorder])
    assert what.hooks == [native, recorder]
    assert list(what.registry) == [recorder]
    run(what, batches(3, 2))
    assert (native.batches, len(recorder.rows)) == (2, 2)
    run(strategy(hooks=[recorder], num_steps=1), batches(3, 2), callbacks=[native])
    assert native.batches == 3


def test_lightning_callbacks_among_the_hooks_of_a_module_go_to_its_trainer() -> None:
    """Two of one class, one of them the Trainer's: both act, in a second fit too, and none of them twice."""
    native, other = Native(), Native()
    module = AlchemiModule(strategy(hooks=[native], num_steps=None, num_epochs=1))
    fitting = trainer(callbacks=[other], max_epochs=2)
    fitting.fit(module, OneLoader(batches(2)))
    assert (native.batches, other.batches) == (1, 1)
    module.recipe.num_epochs = 2
    fitting.fit(module, OneLoader(batches(2)))
    assert (native.batches, other.batches) == (2, 2)


def test_a_second_owner_among_the_hooks_of_a_module_is_refused() -> None:
    module = AlchemiModule(strategy(hooks=[StochasticWeightAveraging(swa_lrs=1e-3)]))
    with pytest.raises(SecondOwnerError, match=r"StochasticWeightAveraging would be a second owner.*EMAHook"):
        trainer().fit(module, OneLoader(batches(2)))


def test_a_lightning_callback_twice_is_refused() -> None:
    native = Native()
    with pytest.raises(ConfigurationError, match="Native is registered already"):
        strategy(hooks=[native, native])


def test_a_lightning_callback_has_no_stage() -> None:
    with pytest.raises(ConfigurationError, match=r"Native.*stage"):
        strategy().register_hook(Native(), stage=Stage.AFTER_BATCH)


# Claims of the replacement stages


@pytest.mark.parametrize("stage", [Stage.DO_BACKWARD, Stage.DO_OPTIMIZER_STEP])
@pytest.mark.parametrize("how", ["stage", "override", "decides"])
def test_a_replacement_stage_has_one_owner(stage: TrainingStage, how: str) -> None:
    registry = HookRegistry()
    registry.register(At(stage, nothing))
    message = rf"At most one hook may claim {stage.name}; got 2: At, .*BEFORE_.*AFTER_.*subclass TrainingUpdateHook"
    second: dict[str, tuple[Any, ...]] = {
        "stage": (At(stage, nothing),),
        "override": (observer(), stage),
        "decides": (ClaimsAll(stage),),
    }
    with pytest.raises(ConfigurationError, match=message):
        registry.register(*second[how])
    assert len(registry) == 1


def test_both_replacement_stages_may_have_the_same_owner() -> None:
    hook = ClaimsAll(Stage.DO_BACKWARD, Stage.DO_OPTIMIZER_STEP)
    registry = HookRegistry()
    registry.register(hook)
    assert registry.claimant(Stage.DO_BACKWARD) is registry.claimant(Stage.DO_OPTIMIZER_STEP) is hook


@pytest.mark.parametrize("stage", [Stage.DO_BACKWARD, Stage.DO_OPTIMIZER_STEP])
def test_an_owner_acts_on_every_batch(stage: TrainingStage) -> None:
    with pytest.raises(ConfigurationError, match=rf"At claims {stage.name} with frequency=2; .*frequency=1"):
        HookRegistry().register(At(stage, nothing, frequency=2))


def test_observers_of_the_neighbors_claim_nothing() -> None:
    registry = HookRegistry()
    for stage in (Stage.BEFORE_BACKWARD, Stage.AFTER_BACKWARD) * 2:
        registry.register(observer(stage))
    assert registry.claimant(Stage.DO_BACKWARD) is None


# Order and frequency


def test_hooks_fire_in_the_order_of_their_registration() -> None:
    order: list[str] = []
    hooks = [At(Stage.AFTER_BATCH, lambda ctx, name=name: order.append(name)) for name in "abc"]
    what = strategy(hooks=hooks[1:], num_steps=1)
    what.register_hook(hooks[0])
    run(what, batches(2))
    assert order == ["b", "c", "a"]


def test_hooks_leave_things_for_each_other_on_the_context_of_a_batch() -> None:
    contexts: list[Any] = []
    stages = [Stage.BEFORE_EPOCH, Stage.BEFORE_BATCH, Stage.AFTER_LOSS, Stage.AFTER_BATCH, Stage.AFTER_EPOCH]
    run(strategy(hooks=[At(stage, contexts.append) for stage in stages]), batches(2))
    outer, first, *same, after = contexts
    assert all(ctx is first for ctx in same)
    assert len({id(outer), id(first), id(after)}) == 3


@settings(deadline=None, max_examples=60)
@given(frequency=st.integers(1, 7), count=st.integers(0, 12))
def test_the_count_of_a_stage_decides(frequency: int, count: int) -> None:
    registry, fired = HookRegistry(), []
    for stage in OBSERVED:
        registry.register(At(stage, lambda ctx, stage=stage: fired.append(stage), frequency))
    registry.validations = count
    for stage in OBSERVED:
        registry.fire(stage, TrainContext(batch=None, step_count=count, epoch=count))
    once = [Stage.SETUP, Stage.BEFORE_TRAINING, Stage.AFTER_TRAINING]
    assert fired == (list(OBSERVED) if count % frequency == 0 else once)


@settings(deadline=None, max_examples=12)
@given(frequency=st.integers(1, 4), epochs=st.integers(1, 3), length=st.integers(1, 3))
def test_frequency_counts_what_belongs_to_the_stage(frequency: int, epochs: int, length: int) -> None:
    fired: dict[TrainingStage, int] = dict.fromkeys(OBSERVED, 0)

    def hook(stage: TrainingStage) -> At:
        def count(ctx: Any) -> None:
            fired[stage] += 1

        return At(stage, count, frequency)

    config = ValidationConfig(validation_data=batches(1, 1), every_n_epochs=1)
    what = strategy(num_epochs=epochs, hooks=[hook(stage) for stage in OBSERVED], validation_config=config)
    run(what, batches(*[1] * length))
    steps = epochs * length
    once = {Stage.SETUP: 1, Stage.BEFORE_TRAINING: 1, Stage.AFTER_TRAINING: 1}
    per_epoch = {
        Stage.BEFORE_EPOCH: -(-epochs // frequency),
        Stage.AFTER_EPOCH: epochs // frequency,
        Stage.AFTER_VALIDATION: epochs // frequency,
    }
    before = -(-steps // frequency)
    forward = dict.fromkeys((Stage.BEFORE_FORWARD, Stage.AFTER_FORWARD), before + 2 * epochs)
    expected = dict.fromkeys(OBSERVED, before) | once | per_epoch | forward | {Stage.AFTER_BATCH: steps // frequency}
    assert fired == expected


def test_a_late_validation_hook_counts_the_validations_before_it() -> None:
    fired: list[int] = []
    config = ValidationConfig(validation_data=batches(1), every_n_steps=1)
    what = run(strategy(num_steps=1, validation_config=config), batches(1, 1, 1))
    what.register_hook(At(Stage.AFTER_VALIDATION, lambda ctx: fired.append(ctx.step_count), frequency=2))
    what.num_steps = 4
    run(what, batches(1, 1, 1))
    assert fired == [2, 4]


# Hooks that come during a run


def registering(at: TrainingStage, late: Recorder) -> Iterator[At]:
    done: list[bool] = []

    def register(ctx: Any) -> None:
        if not done:
            done.append(True)
            ctx.workflow.register_hook(late)

    yield At(at, register)


@pytest.mark.parametrize("at", [Stage.SETUP, Stage.BEFORE_TRAINING, Stage.BEFORE_BATCH])
def test_a_hook_registered_during_a_run_sees_the_rest_of_it(at: TrainingStage) -> None:
    late = Recorder()
    config = ValidationConfig(validation_data=batches(1), every_n_epochs=1)
    run(strategy(hooks=registering(at, late), validation_config=config), batches(1))
    assert {name for name in late.names if not name.startswith("[")} == {
        stage.name for stage in OBSERVED if stage.value > at.value
    }


def test_registering_keeps_the_state_of_the_optimizers() -> None:
    what = run(strategy(num_steps=1), batches(1, 1))
    before = what.optimizers()["main"][0][0]
    what.register_hook(observer())
    assert what.optimizers()["main"][0][0] is before
