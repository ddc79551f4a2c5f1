"""Skipping of spikes: what is skipped, what a skipped step leaves alone, and what is told about it."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor
from update_rigs import (
    Accumulate,
    At,
    ConstGrad,
    Noting,
    Potential,
    Stage,
    adam,
    batches,
    constant,
    network,
    run,
    strategy,
    w_of,
)

from nvalchemi_lightning.context import TrainContext
from nvalchemi_lightning.data import AtomicData, Batch, DataLoader
from nvalchemi_lightning.errors import ConfigurationError, TrainingStateError
from nvalchemi_lightning.hooks import (
    CheckpointableHook,
    EMAHook,
    GradientAccumulationHook,
    GradientClipHook,
    MixedPrecisionHook,
    SpikeSkipHook,
    TrainingUpdateHook,
)
from nvalchemi_lightning.hooks.running_bound import RunningBound
from nvalchemi_lightning.losses import ForceMSELoss
from nvalchemi_lightning.models import DemoModel, DemoModelWrapper
from nvalchemi_lightning.strategy import TrainingStrategy

NAN, INF = float("nan"), float("inf")


# Configuration


@pytest.mark.parametrize(
    "options",
    [
        {"factor": 0.0},
        {"factor": INF},
        {"window": 0},
        {"min_history": 0},
        {"max_consecutive": -1},
        {"factr": 1.0},
    ],
    ids=str,
)
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(options))):
        SpikeSkipHook(**options)


def test_a_history_that_is_never_long_enough_is_refused() -> None:
    with pytest.raises(ValidationError, match="min_history=20 is never reached with window=10; give a larger window"):
        SpikeSkipHook(window=10)


def test_a_folder_is_no_quarantine_file(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"is a folder; write '.*quarantine\.jsonl'"):
        SpikeSkipHook(quarantine_file=tmp_path)


def test_two_of_them_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="exclusive key 'SpikeSkipHook'"):
        SpikeSkipHook() + SpikeSkipHook()


# The bound


def bound_of(*values: float, **options: Any) -> float:
    bound = RunningBound(**{"factor": 2.0, "window": 100, "min_history": 1, **options})
    bound.restart(values)
    return bound.bound()


def test_the_bound_is_a_median_and_its_deviation() -> None:
    assert bound_of(1.0, 2.0, 3.0, 4.0, 100.0) == 3.0 + 2.0 * 1.4826 * 1.0
    assert bound_of(5.0, 5.0, 5.0) == 5.0 + 2.0 * 0.5
    assert bound_of(-5.0, -5.0) == -5.0 + 2.0 * 0.5
    assert bound_of(1.0, 1.0, min_history=3) == INF
    assert bound_of(*[9.0] * 5, 1.0, 1.0, window=2) == 1.0 + 2.0 * 0.1


@given(st.lists(st.floats(0.5, 2.0), min_size=5, max_size=20), st.floats(1e3, 1e30))
def test_one_outlier_does_not_lift_the_bound_to_itself(values: list[float], outlier: float) -> None:
    assert bound_of(*values, outlier, factor=10.0) < outlier


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=20), st.sampled_from([0.5, 2.0, 1024.0]))
def test_the_bound_scales_with_its_values(values: list[float], scale: float) -> None:
    assert bound_of(*(value * scale for value in values)) == bound_of(*values) * scale


# What a skipped step leaves alone


class Unmasked(ForceMSELoss):
    """Takes a NaN label for a number."""

    def mask(self, pred: Tensor, target: Tensor, ctx: Any, **metadata: Any) -> Tensor:
        return torch.ones_like(target, dtype=torch.bool)


SCHEDULE = {"scheduler_cls": torch.optim.lr_scheduler.StepLR, "scheduler_kwargs": {"step_size": 2, "gamma": 0.5}}


def everything(what: TrainingStrategy, ema: EMAHook) -> dict[str, Any]:
    """Return all that a step changes."""
    (optimizer,), (scheduler,) = what.flat_optimizers()
    moments = [value for state in optimizer.state.values() for value in state.values()]
    averaged = ema.get_averaged_model().state_dict()
    tensors = [*what.models["main"].state_dict().values(), *moments, *averaged.values()]
    return {
        "tensors": [tensor.clone() for tensor in tensors],
        "counts": (what.step_count, scheduler.last_epoch, scheduler.get_last_lr(), ema.num_updates),
    }


def trained(loader: list[Batch], *hooks: Any, **fields: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    ema = EMAHook(decay=0.5)
    defaults: dict[str, Any] = {
        "models": Potential(),
        "optimizer_configs": adam(**SCHEDULE),
        "loss_fn": Unmasked(),
    }
    what = strategy(ema, *hooks, **{**defaults, **fields})
    run(what, loader, log_every_n_steps=1)
    return everything(what, ema)


def poisoned(batch: Batch, how: str) -> Batch:
    bad = batch.clone()
    if how == "label":
        bad.forces[0, 0] = NAN
    elif how == "model":
        bad.atomic_numbers[-1] = 2
    elif how == "spike":
        bad.forces[0] *= 1e4
    return bad


@pytest.mark.parametrize("how", ["label", "model", "spike"])
@pytest.mark.parametrize("extra", ["alone", "clip", "fp16"])
@pytest.mark.parametrize("place", [3, 5])
def test_a_bad_batch_leaves_everything_as_it_was(how: str, extra: str, place: int) -> None:
    """One bad frame reaches neither weights, moments, averaged weights nor schedulers; no NaN ends the run."""
    good = batches(2, 3, 1, 2, 3, dtype=torch.float32)
    loader = [*good[:place], poisoned(good[0], how), *good[place:]]

    def extras() -> list[Any]:
        scaler = [MixedPrecisionHook(precision="fp16")] if extra == "fp16" else []
        return [*scaler, *([GradientClipHook(max_norm=0.5)] if extra != "alone" else [])]

    hook = SpikeSkipHook(min_history=2, factor=100.0)
    with_bad, without = trained(loader, hook, *extras()), trained(good, *extras())
    assert hook.skipped == 1
    assert with_bad["counts"] == without["counts"]
    # The first scale is too large for this model: the scaler skips the first step, by itself.
    assert without["counts"][0] == (4 if extra == "fp16" else 5)
    for ours, theirs in zip(with_bad["tensors"], without["tensors"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7 if extra == "fp16" else 0)


def test_without_the_hook_the_run_ends_at_the_nan() -> None:
    good = batches(2, 3, dtype=torch.float32)
    with pytest.raises(TrainingStateError, match="the loss is NaN at step 2"):
        trained([good[0], poisoned(good[1], "label")])


@pytest.mark.parametrize("accumulate", [Accumulate, GradientAccumulationHook], ids=["a user's", "the shipped one"])
def test_a_bad_batch_drops_its_window(accumulate: Any) -> None:
    """The whole window, whichever of its batches is bad; the next begins with gradients of its own."""
    good = batches(2, 3, 1, 2, dtype=torch.float32)
    expected = trained(good, accumulate(2))
    for window in ([poisoned(good[0], "label"), good[1]], [good[0], poisoned(good[1], "model")]):
        hook = SpikeSkipHook()
        found = trained([*good[:2], *window, *good[2:]], accumulate(2), hook)
        assert hook.skipped == 1
        assert found["counts"] == expected["counts"]
        assert all(torch.equal(a, b) for a, b in zip(found["tensors"], expected["tensors"], strict=True))


def test_gradients_of_a_skipped_step_are_dropped_at_once() -> None:
    """So an accumulation that vetoes the zeroing that follows, however it counts, cannot carry them on."""

    class NeverZero(TrainingUpdateHook):
        def __call__(self, ctx: Any, stage: Any, will_skip: bool) -> tuple[bool, Any]:
            return stage is not Stage.BEFORE_BATCH, ctx.loss

    seen: list[Any] = []
    what = strategy(SpikeSkipHook(), NeverZero(), Infinite(1), num_epochs=9)
    what.register_hook(At(Stage.AFTER_OPTIMIZER_STEP, lambda ctx: seen.append(ctx.model.w.grad)))
    for batch in constant(2):
        what.train_batch(batch)
    assert seen[0] is None
    assert w_of(what) == -1.0


class Infinite:
    """Makes the gradient of some batches infinite while their loss is finite."""

    frequency = 1
    stage = Stage.AFTER_BACKWARD

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    def __call__(self, ctx: Any, stage: Any) -> None:
        if ctx.batch_count + 1 in self.numbers:
            ctx.model.w.grad.fill_(INF)


def test_an_infinite_gradient_is_skipped_but_left_to_a_scaler() -> None:
    """The scaler looks for its scale by overflowing; that is no fault of the data."""
    hook = SpikeSkipHook()
    what = run(strategy(hook, Infinite(2)), constant(4))
    assert (hook.skipped, what.step_count, w_of(what)) == (1, 3, -3.0)
    beside, scaler = SpikeSkipHook(), MixedPrecisionHook(precision="fp16")
    what = run(strategy(beside, scaler, Infinite(2), models=ConstGrad(torch.float32)), constant(4, torch.float32))
    assert (beside.skipped, what.step_count, w_of(what)) == (0, 3, -3.0)
    assert scaler.state_dict()["scaler"]["scale"] == 2.0**15
    assert beside.state_dict()["norms"] == [1.0, 1.0, 1.0]


def test_a_large_gradient_alone_is_a_spike() -> None:
    def enlarge(ctx: Any) -> None:
        if ctx.batch_count == 4:
            ctx.model.w.grad *= 50.0

    hook = SpikeSkipHook(min_history=3)
    what = run(strategy(hook, At(Stage.AFTER_BACKWARD, enlarge)), constant(6))
    assert (hook.skipped, w_of(what)) == (1, -5.0)


def test_spikes_wait_for_a_history_and_leave_none() -> None:
    def enlarge(ctx: Any) -> None:
        ctx.model.w.grad *= 50.0 if ctx.batch_count in (1, 4) else 1.0

    hook = SpikeSkipHook(min_history=4)
    run(strategy(hook, At(Stage.AFTER_BACKWARD, enlarge)), constant(7))
    assert hook.state_dict()["norms"] == [1.0, 50.0, 1.0, 1.0, 1.0, 1.0]
    assert hook.skipped == 1


def test_a_veto_of_another_hook_is_neither_history_nor_spike() -> None:
    hook = SpikeSkipHook()
    what = strategy(hook, Noting(priority=10, DO_OPTIMIZER_STEP=False), num_epochs=9)
    for batch in constant(2):
        what.train_batch(batch)
    assert hook.state_dict() == SpikeSkipHook().state_dict()


# The end of patience


def test_too_many_in_a_row_end_the_run(tmp_path: Path) -> None:
    bad = poisoned(batches(2, dtype=torch.float32)[0], "label")
    hook = SpikeSkipHook(max_consecutive=2, quarantine_file=tmp_path / "runs" / "bad.jsonl")
    message = (
        r"3 steps in a row were skipped after 1 steps, in epoch 0, the last because the loss is nan; look at "
        r"structure 0 of the batch after 3 \(loss nan\), lower the learning rate, or raise SpikeSkipHook\(factor=30, "
        r"max_consecutive=2\)"
    )
    with pytest.raises(TrainingStateError, match=message):
        trained([batches(2, dtype=torch.float32)[0], *[bad] * 5], hook)
    assert len((tmp_path / "runs" / "bad.jsonl").read_text().splitlines()) == 3


def test_an_accepted_step_begins_the_count_anew() -> None:
    good = batches(2, dtype=torch.float32)[0]
    hook = SpikeSkipHook(max_consecutive=1)
    trained([poisoned(good, "label"), good] * 3, hook)
    assert hook.skipped == 3


# What is told


def lines(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def structures(count: int) -> list[AtomicData]:
    return [data for batch in batches(*[1] * count, dtype=torch.float32) for data in batch.to_data_list()]


def test_the_bad_structure_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By its data set and number there, of all the structures of its batch."""
    data, path = structures(12), tmp_path / "quarantine.jsonl"
    data[7].forces[0, 1] = NAN
    hook = SpikeSkipHook(quarantine_file=path)
    with caplog.at_level(logging.WARNING, "nvalchemi_lightning"):
        trained(DataLoader(data, batch_size=4, shuffle=True), hook, num_epochs=2)  # type: ignore[arg-type]
    first, second = lines(path)
    (suspect,) = first.pop("structures")
    assert (suspect["source"], suspect["number"], suspect["loss"]) == ("the structures in memory", 7, "nan")
    assert first == {
        "step": first["batch"],
        "epoch": 0,
        "batch": first["batch"],
        "reason": "the loss is nan",
        "loss": "nan",
        "norm": "nan",
        "threshold": {"loss": "inf", "norm": "inf"},
    }
    assert (second["epoch"], second["structures"][0]["number"]) == (1, 7)
    assert second["step"] == second["batch"] - 1
    (message, _) = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    assert message == (
        f"a step is skipped after {first['step']} steps, in epoch 0: the loss is nan; look at the structures in memory "
        "number 7 (loss nan)"
    )


def test_the_structures_of_a_spike_are_listed_by_loss(tmp_path: Path) -> None:
    data, path = structures(10), tmp_path / "quarantine.jsonl"
    data[8].forces *= 1e4
    trained(DataLoader(data, batch_size=2), SpikeSkipHook(min_history=2, quarantine_file=path))  # type: ignore[arg-type]
    (record,) = lines(path)
    assert [suspect["number"] for suspect in record["structures"]] == [8, 9]
    assert record["structures"][0]["loss"] > record["loss"] > record["threshold"]["loss"] > 0.0
    assert record["reason"].startswith("the loss ")


def test_a_batch_that_says_nothing_is_named_by_its_place(tmp_path: Path) -> None:
    good, path = batches(2, dtype=torch.float32)[0], tmp_path / "quarantine.jsonl"
    bad = poisoned(good, "model")
    trained([good, good, good, bad], Accumulate(2), SpikeSkipHook(quarantine_file=path))
    (record,) = lines(path)
    assert record["structures"] == [{"source": None, "number": None, "batch": 3, "position": 1, "loss": "nan"}]


def test_a_loss_that_does_not_tell_names_the_whole_batch(tmp_path: Path) -> None:
    ctx = TrainContext(
        batch=batches(7)[0], loss=torch.tensor(NAN), losses={}, models={"main": ConstGrad()}, optimizers=[]
    )
    hook = SpikeSkipHook(max_consecutive=0, quarantine_file=tmp_path / "quarantine.jsonl")
    with pytest.raises(TrainingStateError, match="structure 4 of the batch after 0 and 2 more, lower"):
        hook(ctx, Stage.DO_OPTIMIZER_STEP, False)
    (record,) = lines(tmp_path / "quarantine.jsonl")
    assert [suspect["loss"] for suspect in record["structures"]] == [None] * 7


def test_the_number_of_skipped_steps_is_logged() -> None:
    seen: list[Any] = []
    what = strategy(SpikeSkipHook(), Infinite(1, 3))
    what.register_hook(At(Stage.AFTER_BATCH, lambda ctx: seen.append(what.requests.scalars.get("spikes/skipped"))))
    run(what, constant(3))
    assert seen == [1.0, 1.0, 2.0]


@pytest.mark.parametrize("clipped", [False, True])
def test_the_host_waits_once_per_step(monkeypatch: pytest.MonkeyPatch, clipped: bool) -> None:
    """Of the hook's part of a step, one transfer; of clipping, none."""
    waits: list[str] = []
    hooks = [*([GradientClipHook(max_norm=1.0, per_model=True)] if clipped else []), SpikeSkipHook()]
    model = Potential()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    trains = [torch.optim.SGD(model.parameters(), lr=1.0)]
    ctx = TrainContext(
        batch=batches(2)[0], loss=torch.tensor(1.0), losses={}, models={"main": model}, optimizers=[*trains]
    )
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__"):
        method = getattr(Tensor, name)
        monkeypatch.setattr(
            Tensor, name, lambda *args, name=name, method=method: (waits.append(name), method(*args))[1]
        )
    for stage in (Stage.BEFORE_BATCH, Stage.DO_BACKWARD, Stage.DO_OPTIMIZER_STEP, Stage.AFTER_OPTIMIZER_STEP):
        for hook in hooks:
            hook(ctx, stage, False)
    assert waits == ["tolist"]


# State


def test_it_is_checkpointable() -> None:
    assert isinstance(SpikeSkipHook(), CheckpointableHook)


def test_a_longer_history_is_cut() -> None:
    hook = SpikeSkipHook(window=2, min_history=1)
    hook.load_state_dict({"losses": [1.0, 2.0, 3.0], "norms": [4.0, 5.0, 6.0], "skipped": 3, "consecutive": 1})
    assert hook.state_dict() == {"losses": [2.0, 3.0], "norms": [5.0, 6.0], "skipped": 3, "consecutive": 1}


def test_the_history_survives_a_resume(tmp_path: Path) -> None:
    """A spike right after the resume is one, as it would have been."""

    def fresh(steps: int) -> tuple[TrainingStrategy, SpikeSkipHook]:
        torch.manual_seed(0)
        hook, model = SpikeSkipHook(min_history=4), DemoModelWrapper(DemoModel(hidden_dim=8))
        return network(hook, models=model, num_epochs=None, num_steps=steps), hook

    loader = batches(*[3] * 8, dtype=torch.float32)
    loader[5].energy.fill_(1e5)
    whole, straight = fresh(6)
    run(whole, loader)
    half, _ = fresh(5)
    run(half, loader)
    half.save_checkpoint(tmp_path)
    torch.load(tmp_path / "hooks/checkpoints/0.pt", weights_only=True)
    resumed = SpikeSkipHook(min_history=4)
    what = TrainingStrategy.load_checkpoint(tmp_path, hooks=[resumed], num_steps=6)
    run(what, loader)
    assert straight.skipped == resumed.skipped == 1
    assert resumed.state_dict() == straight.state_dict()
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            what.models["main"].state_dict().values(), whole.models["main"].state_dict().values(), strict=True
        )
    )
    assert all(math.isfinite(value) for value in resumed.state_dict()["losses"])
