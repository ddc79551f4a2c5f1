"""Checkpoints that a run writes."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_rigs import (
    At,
    Counting,
    Net,
    adam,
    assert_same,
    batches,
    contents,
    rebuilt,
    run,
    state_of,
    strategy,
)
from pydantic import ValidationError
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from nvalchemi_lightning.checkpoint import writing
from nvalchemi_lightning.context import TrainContext
from nvalchemi_lightning.errors import ConfigurationError, TrainingStateError
from nvalchemi_lightning.hooks import checkpoint as module
from nvalchemi_lightning.hooks.checkpoint import CheckpointHook
from nvalchemi_lightning.hooks.protocol import Hook
from nvalchemi_lightning.losses import EnergyMSELoss, as_composed_loss
from nvalchemi_lightning.specs import create_model_spec, create_model_spec_from_json
from nvalchemi_lightning.stages import TrainingStage
from nvalchemi_lightning.validation import ValidationConfig

SAVES = pytest.mark.parametrize("async_save", [True, False], ids=["async", "sync"])


def saved_steps(root: Path) -> dict[int, int]:
    """Return the number of executed steps of every index."""
    files = sorted((root / "strategy/checkpoints").glob("*.json"), key=lambda path: int(path.stem))
    return {int(path.stem): json.loads(path.read_text())["runtime_state"]["step_count"] for path in files}


class EverySecond:
    """Own the step and take it with every second batch only."""

    stage = TrainingStage.DO_OPTIMIZER_STEP
    frequency = 1

    def __init__(self, every: int = 2) -> None:
        self.every, self.seen = every, 0

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        self.seen += 1
        if self.seen % self.every == 0:
            for optimizer in ctx.optimizers:
                optimizer.step()


# Construction ---------------------------------------------------------------------------------------------------


def test_fields_and_defaults() -> None:
    hook = CheckpointHook("runs/x", step_interval=3)
    assert isinstance(hook, Hook)
    assert hook.checkpoint_dir == Path("runs/x")
    assert hook.model_dump() == {
        "checkpoint_dir": Path("runs/x"),
        "step_interval": 3,
        "epoch_interval": None,
        "async_save": True,
        "rank_zero_only": True,
        "keep_last": None,
        "keep_best": None,
        "save_on_exit": False,
        "last_checkpoint_index": None,
    }
    assert CheckpointHook(checkpoint_dir="runs/x", epoch_interval=1).epoch_interval == 1


@pytest.mark.parametrize("intervals", [{}, {"step_interval": 1, "epoch_interval": 1}])
def test_exactly_one_interval(intervals: Any) -> None:
    with pytest.raises(ValidationError, match="CheckpointHook requires exactly one of step_interval or epoch_interval"):
        CheckpointHook("x", **intervals)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"step_interval": 0}, "greater than 0"),
        ({"epoch_interval": -1}, "greater than 0"),
        ({"step_interval": 1, "last_checkpoint_index": -1}, "greater than or equal to 0"),
        ({"step_intervall": 1}, r"has no field 'step_intervall'; did you mean 'step_interval'\?"),
    ],
)
def test_wrong_fields(fields: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        CheckpointHook("x", **fields)


def test_the_folder_is_given_once() -> None:
    with pytest.raises(TypeError, match="multiple values for argument 'checkpoint_dir'"):
        CheckpointHook("x", checkpoint_dir="y", step_interval=1)
    with pytest.raises(ValidationError, match=r"(?s)checkpoint_dir.*Field required"):
        CheckpointHook(step_interval=1)


def test_a_spec_builds_the_hook() -> None:
    spec = create_model_spec(CheckpointHook, checkpoint_dir="runs/x", epoch_interval=2)
    again = create_model_spec_from_json(json.loads(spec.model_dump_json())).build()
    assert again == CheckpointHook("runs/x", epoch_interval=2)


# Cadence --------------------------------------------------------------------------------------------------------


@SAVES
def test_every_few_steps(root: Path, async_save: bool) -> None:
    hook = CheckpointHook(root, step_interval=2, async_save=async_save)
    what = run(strategy(num_steps=6, hooks=[hook]))
    assert saved_steps(root) == {0: 2, 1: 4, 2: 6}
    assert hook.last_checkpoint_index == 2
    assert_same(state_of(rebuilt(root, 2)), state_of(what))


@SAVES
def test_every_few_epochs(root: Path, async_save: bool) -> None:
    hook = CheckpointHook(root, epoch_interval=2, async_save=async_save)
    run(strategy(num_epochs=5, hooks=[hook]), batches(3))
    assert saved_steps(root) == {0: 6, 1: 12}
    assert rebuilt(root / "epoch_4").counters.epoch_step_count == 0


def test_a_parked_count_saves_once(root: Path) -> None:
    """B-02b of the reference: it saves again with every batch that makes no step."""
    run(strategy(num_steps=3, hooks=[EverySecond(), CheckpointHook(root, step_interval=1)]), batches(10))
    assert saved_steps(root) == {0: 1, 1: 2, 2: 3}


def test_a_parked_count_is_not_saved_again_after_a_resume(root: Path) -> None:
    hooks = [EverySecond(3), CheckpointHook(root, step_interval=2)]
    run(strategy(num_steps=2, hooks=hooks), batches(7))
    again = rebuilt(root, hooks=[EverySecond(3), CheckpointHook(root, step_interval=2)], num_steps=3)
    run(again, batches(7))
    assert saved_steps(root) == {0: 2}


def test_b58_a_hook_that_owns_the_step(root: Path) -> None:
    """B58: steps count, whoever takes them."""
    run(strategy(num_steps=6, hooks=[EverySecond(1), CheckpointHook(root, step_interval=2)]), batches(6))
    assert saved_steps(root) == {0: 2, 1: 4, 2: 6}


def test_b59_a_resumed_run_counts_on(root: Path) -> None:
    """B59: steps 2 and 4, a resume, steps 6 and 8; what was written is not touched."""
    whole = run(strategy(num_steps=8))
    run(strategy(num_steps=4, hooks=[CheckpointHook(root, step_interval=2)]))
    before = {name: data for name, data in contents(root).items() if "checkpoints/" in name}
    known = []
    hook = CheckpointHook(root, step_interval=2)
    first = At(TrainingStage.BEFORE_TRAINING, lambda ctx: known.append(hook.last_checkpoint_index))
    again = run(rebuilt(root, hooks=[hook, first], num_steps=8))
    assert known == [1]
    assert saved_steps(root) == {0: 2, 1: 4, 2: 6, 3: 8}
    after = contents(root)
    assert {name: after[name] for name in before} == before
    assert_same(state_of(again), state_of(whole))
    assert_same(state_of(rebuilt(root)), state_of(whole))


@SAVES
def test_the_plateau_update_of_the_same_point_is_in_the_checkpoint(root: Path, async_save: bool) -> None:
    """B-02 of the reference: it saves before the validation, so the reduced rate is lost on resume."""
    config = adam(scheduler_cls=ReduceLROnPlateau, scheduler_kwargs={"patience": 0, "threshold": 1e9})
    validation = ValidationConfig(validation_data=batches(1, seed=3), every_n_steps=2)
    hook = CheckpointHook(root, step_interval=2, async_save=async_save)
    what = strategy(num_steps=4, optimizer_configs=config, validation_config=validation, hooks=[hook])
    rates = []
    what.register_hook(At(TrainingStage.AFTER_BATCH, lambda ctx: rates.append(ctx.optimizers[0].param_groups[0]["lr"])))
    run(what)
    assert rates == pytest.approx([0.01, 0.01, 0.001, 0.001])
    for index, rate in enumerate([0.001, 0.0001]):
        optimizer, scheduler = rebuilt(root, index, validation_config=validation).optimizers()["main"][0]
        assert scheduler.last_epoch == index + 1
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)


def test_hooks_that_fire_later_at_the_same_point_are_saved_as_they_end(root: Path) -> None:
    counting = Counting()
    run(strategy(num_steps=2, hooks=[CheckpointHook(root, step_interval=1), counting]))
    hook = Counting()
    rebuilt(root, 0, hooks=[hook])
    assert hook.seen == 1


def test_single_batches(root: Path) -> None:
    hook = CheckpointHook(root, step_interval=2)
    what = strategy(num_steps=9, hooks=[hook])
    with what:
        for batch in batches(4):
            what.train_batch(batch)
    assert saved_steps(root) == {0: 2, 1: 4}


def test_a_strategy_that_stops_early_keeps_its_checkpoints(root: Path) -> None:
    def stop(ctx: TrainContext) -> None:
        raise KeyError("own error")

    what = strategy(num_steps=9, hooks=[CheckpointHook(root, step_interval=2), At(TrainingStage.AFTER_EPOCH, stop)])
    with pytest.raises(KeyError, match="own error"):
        run(what)
    assert saved_steps(root) == {0: 2, 1: 4}


# Before the first batch -----------------------------------------------------------------------------------------


def test_b30_what_cannot_be_saved_is_said_before_the_first_batch(root: Path) -> None:
    """B30 and B38: not hours later, at the first checkpoint."""
    seen: list[int] = []
    model = Net()
    del model.hidden
    watch = At(TrainingStage.BEFORE_BATCH, lambda ctx: seen.append(ctx.batch_count))
    what = strategy(models=model, hooks=[CheckpointHook(root, step_interval=2), watch])
    with pytest.raises(ConfigurationError, match=r"Cannot save strategy checkpoint .*'hidden'"):
        run(what)
    assert not seen
    assert not root.exists()


def test_b30_a_lambda_is_warned_about_before_the_first_batch(root: Path) -> None:
    """B30: the run goes on, and the checkpoint loads when the function is passed again."""

    def own_fn(model: nn.Module, batch: Any) -> Any:
        return {"predicted_energy": model(batch)["energy"]}

    what = strategy(training_fn=own_fn, hooks=[CheckpointHook(root, step_interval=3)])
    with pytest.warns(UserWarning, match=r"Omitting non-importable training_fn.*pass training_fn= again"):
        what.prepare_hooks()
    with pytest.warns(UserWarning, match="Omitting non-importable training_fn"):
        run(what)
    with pytest.raises(ConfigurationError, match="training_fn of the spec must be a dotted path"):
        rebuilt(root)
    assert rebuilt(root, training_fn=own_fn).step_count == 3


# The background writer ------------------------------------------------------------------------------------------


class Marked(nn.Module):
    """Many tensors that a hook sets to the number of the step."""

    def __init__(self, count: int = 20) -> None:
        super().__init__()
        self.count = count
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(count))

    def forward(self, batch: Any) -> Any:
        total = torch.stack([weight.sum() for weight in self.weights]).sum()
        return {"energy": total.expand(batch.num_graphs, 1)}

    def mark(self, step: int, optimizer: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            for weight in self.weights:
                weight.fill_(step)
                for value in optimizer.state[weight].values():
                    value.fill_(step)


@pytest.fixture
def slow_writer(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Slow every file down, and count how many saves are under way at once."""
    stage_file, write = writing.stage_file, module.write
    seen = {"now": 0, "most": 0, "saves": 0}

    def slow(*arguments: Any) -> str:
        time.sleep(0.02)
        return stage_file(*arguments)

    def counted(*arguments: Any) -> int:
        seen["now"] += 1
        seen["most"] = max(seen["most"], seen["now"])
        index = write(*arguments)
        seen["now"] -= 1
        seen["saves"] += 1
        assert threading.current_thread() is not threading.main_thread()
        return index

    monkeypatch.setattr(writing, "stage_file", slow)
    monkeypatch.setattr(module, "write", counted)
    return seen


def test_b64_a_snapshot_does_not_change_while_it_is_written(root: Path, slow_writer: dict[str, int]) -> None:
    """B64: every tensor of an index is that of its step, however slow the disk."""
    model = Marked()
    mark = At(TrainingStage.AFTER_OPTIMIZER_STEP, lambda ctx: model.mark(ctx.step_count + 1, ctx.optimizers[0]))
    counting = Counting()
    hook = CheckpointHook(root, step_interval=1)
    run(strategy(models=model, optimizer_configs=adam(), num_steps=5, hooks=[mark, counting, hook]))
    assert slow_writer == {"now": 0, "most": 1, "saves": 5}
    for index in range(5):
        state = torch.load(root / f"models/main/checkpoints/{index}.pt", weights_only=True)
        moments = torch.load(root / f"optimizers/main_optimizer/checkpoints/{index}.pt", weights_only=True)["state"]
        values = [*state.values(), *(value for entry in moments.values() for value in entry.values())]
        assert len(values) == 20 * 4
        assert {float(number) for value in values for number in value.flatten()} == {float(index + 1)}
        hooks = torch.load(root / f"hooks/checkpoints/{index}.pt", weights_only=True)
        assert hooks["checkpoint_rigs.Counting:0"]["seen"] == index + 1


def test_training_goes_on_while_a_checkpoint_is_written(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, released, batches_seen = module.write, threading.Event(), []

    def held(*arguments: Any) -> int:
        assert released.wait(timeout=30)
        return write(*arguments)

    def release(ctx: TrainContext) -> None:
        batches_seen.append(hook.last_checkpoint_index)
        if ctx.step_count == 3:
            released.set()

    monkeypatch.setattr(module, "write", held)
    hook = CheckpointHook(root, step_interval=2)
    run(strategy(num_steps=4, hooks=[hook, At(TrainingStage.AFTER_BATCH, release)]))
    assert batches_seen[:3] == [None, None, None]
    assert saved_steps(root) == {0: 2, 1: 4}


@pytest.fixture
def failing_writer(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let every write fail, and tell when one has."""
    failed = threading.Event()

    def fail(*arguments: Any) -> int:
        failed.set()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write", fail)
    return failed


def test_a_failed_write_surfaces_after_the_next_batch(root: Path, failing_writer: threading.Event) -> None:
    seen: list[int] = []

    def wait(ctx: TrainContext) -> None:
        seen.append(ctx.step_count)
        if ctx.step_count >= 2:
            assert failing_writer.wait(timeout=30)
            time.sleep(0.05)

    hooks = [At(TrainingStage.BEFORE_BATCH, wait), CheckpointHook(root, step_interval=2)]
    with pytest.raises(OSError, match="No space left on device"):
        run(strategy(num_steps=9, hooks=hooks), batches(9))
    assert seen == [0, 1, 2]
    assert hooks[1].last_checkpoint_index is None


@SAVES
@pytest.mark.usefixtures("failing_writer")
def test_a_failed_last_write_surfaces_at_the_end(root: Path, async_save: bool) -> None:
    hook = CheckpointHook(root, step_interval=3, async_save=async_save)
    with pytest.raises(OSError, match="No space left on device"):
        run(strategy(num_steps=3, hooks=[hook]))
    assert hook._writer is None


@pytest.mark.usefixtures("failing_writer")
def test_a_failed_write_does_not_hide_the_error_of_the_run(root: Path) -> None:
    def stop(ctx: TrainContext) -> None:
        raise KeyError("own error")

    hooks = [At(TrainingStage.AFTER_TRAINING, stop), CheckpointHook(root, step_interval=1)]
    with pytest.raises(KeyError, match="own error") as caught:
        run(strategy(num_steps=1, hooks=hooks), batches(1))
    assert any("A checkpoint could not be written either: OSError(28" in note for note in caught.value.__notes__)


# Called by hand -------------------------------------------------------------------------------------------------


def test_an_asynchronous_hook_needs_its_context(root: Path) -> None:
    what = strategy(step_count=2, batch_count=2, epoch_step_count=2)
    with pytest.raises(TrainingStateError, match="async writer is not initialized"):
        CheckpointHook(root, step_interval=2)(what.context(None), TrainingStage.AFTER_BATCH)


def test_a_hook_needs_a_strategy(root: Path) -> None:
    with pytest.raises(TrainingStateError, match="saves a strategy, but the context has none"):
        CheckpointHook(root, step_interval=2)(TrainContext(batch=None, step_count=2), TrainingStage.AFTER_BATCH)


class Plain:
    """A workflow that knows no later moment."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "defer":
            raise AttributeError(name)
        return getattr(self._inner, name)


def test_a_workflow_without_later_saves_at_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    what = strategy(step_count=2, batch_count=2, epoch_step_count=2)
    ctx = what.context(None)
    ctx.workflow = Plain(what)
    saved = []
    monkeypatch.setattr(module, "take_snapshot", lambda workflow, *_: saved.append(workflow))
    monkeypatch.setattr(module, "write", lambda folder, snapshot: 4)
    hook = CheckpointHook(root, step_interval=2, async_save=False)
    hook(ctx, TrainingStage.AFTER_BATCH)
    assert saved == [ctx.workflow]
    assert hook.last_checkpoint_index == 4


@pytest.mark.parametrize(("rank_zero_only", "folder"), [(True, None), (False, "rank_1")])
def test_other_ranks(root: Path, rank_zero_only: bool, folder: str | None) -> None:
    what = strategy(step_count=2, batch_count=2, epoch_step_count=2)
    ctx = what.context(None, global_rank=1)
    hook = CheckpointHook(root, step_interval=2, async_save=False, rank_zero_only=rank_zero_only)
    hook(ctx, TrainingStage.AFTER_BATCH)
    what.requests.run_deferred()
    assert root.exists() is (folder is not None)
    if folder is not None:
        assert saved_steps(root / folder) == {0: 2}


def test_a_recipe_is_described_again_when_it_has_other_parts(root: Path) -> None:
    """The recipe of a snapshot is that of its moment, though it is not written down for every one."""

    def lengthen(ctx: TrainContext) -> None:
        if ctx.step_count == 3:
            ctx.workflow.num_steps = 5
            ctx.workflow.loss_fn = as_composed_loss(EnergyMSELoss() * 2.0)

    run(strategy(num_steps=9, hooks=[At(TrainingStage.AFTER_BATCH, lengthen), CheckpointHook(root, step_interval=1)]))
    forms = [json.loads((root / f"strategy/checkpoints/{index}.json").read_text()) for index in range(4)]
    assert [form["num_steps"] for form in forms] == [9, 9, 5, 5]
    assert [form["runtime_state"]["step_count"] for form in forms] == [1, 2, 3, 4]
    assert forms[1]["loss_fn_spec"] != forms[2]["loss_fn_spec"]
