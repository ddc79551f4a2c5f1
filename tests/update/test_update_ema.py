"""The moving average: when it is updated, from what, who sees it, and what a checkpoint keeps."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from update_rigs import (
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
    strategy,
    w_of,
)

from nvalchemi_lightning.context import TrainContext
from nvalchemi_lightning.errors import ConfigurationError, LabelNotFoundError, TrainingStateError
from nvalchemi_lightning.hooks import CheckpointableHook, EMAHook
from nvalchemi_lightning.models import DemoModel, DemoModelWrapper
from nvalchemi_lightning.optim import OptimizerConfig
from nvalchemi_lightning.strategy import TrainingStrategy
from nvalchemi_lightning.validation import ValidationConfig


def average_of(hook: EMAHook) -> float:
    value: float = hook.get_averaged_model().w.item()  # type: ignore[union-attr, operator]
    return value


def tensors(hook: EMAHook) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in hook.get_averaged_model().state_dict().items()}


# Configuration


@pytest.mark.parametrize(
    "options",
    [
        {"decay": 1.0},
        {"decay": -0.1},
        {"update_every": 0},
        {"start_step": -1},
        {"num_updates": -1},
        {"model_key": "  "},
        {"decya": 0.9},
    ],
    ids=str,
)
def test_options_are_checked(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ValidationError, match=name):
        EMAHook(**options)


def test_a_key_is_stripped() -> None:
    assert EMAHook(model_key=" main ").model_key == "main"


def test_a_key_that_does_not_exist_is_refused_at_registration() -> None:
    message = r"EMAHook\(model_key='man'\): there is no such model; available keys: \['main'\]; did you mean 'main'"
    with pytest.raises(KeyError, match=message):
        strategy(EMAHook(model_key="man"))


def test_a_key_that_does_not_exist_in_a_context() -> None:
    with pytest.raises(LabelNotFoundError, match="there is no such model"):
        EMAHook()(TrainContext(batch=None, models={"a": ConstGrad()}), Stage.SETUP, False)


def test_there_is_no_average_before_a_run() -> None:
    with pytest.raises(TrainingStateError, match="the average of 'main' does not exist yet"):
        EMAHook().get_averaged_model()


def test_it_is_checkpointable() -> None:
    assert isinstance(EMAHook(), CheckpointableHook)


# Updates


def test_the_first_update_copies_and_the_others_average() -> None:
    hook = EMAHook(decay=0.5)
    what = run(strategy(hook), constant(3))
    assert w_of(what) == -3.0
    assert average_of(hook) == 0.5 * (0.5 * -1.0 + 0.5 * -2.0) + 0.5 * -3.0
    assert hook.num_updates == 3


@pytest.mark.parametrize(
    ("options", "updated_at"),
    [
        ({}, [1, 2, 3, 4, 5, 6]),
        ({"update_every": 2}, [2, 4, 6]),
        ({"start_step": 3}, [3, 4, 5, 6]),
        ({"start_step": 3, "update_every": 2}, [4, 6]),
        ({"start_step": 100}, []),
    ],
    ids=str,
)
def test_steps_that_update(options: dict[str, Any], updated_at: list[int]) -> None:
    hook, seen = EMAHook(**options), [0]
    what = strategy(hook)
    what.register_hook(At(Stage.AFTER_BATCH, lambda ctx: seen.append(hook.num_updates)))
    run(what, constant(6))
    assert [step for step in range(1, 7) if seen[step] > seen[step - 1]] == updated_at


def test_vetoed_steps_update_nothing() -> None:
    hook = EMAHook()
    run(strategy(hook, Accumulate(3), num_steps=2), constant(6))
    assert hook.num_updates == 2
    vetoed = EMAHook()
    strategy(vetoed, Noting(DO_OPTIMIZER_STEP=False)).train_batch(constant(1)[0])
    assert vetoed.num_updates == 0


def test_the_average_is_that_of_torch() -> None:
    hook, seen = EMAHook(decay=0.9), []
    what = network(hook, num_epochs=3)
    reference = torch.optim.swa_utils.AveragedModel(
        what.models["main"], multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    what.register_hook(At(Stage.AFTER_BATCH, lambda ctx: seen.append(reference.update_parameters(ctx.model))))
    run(what, batches(2, 3, dtype=torch.float32))
    for ours, theirs in zip(hook.get_averaged_model().parameters(), reference.module.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("use_buffers", [True, False])
def test_buffers_are_averaged_or_copied(use_buffers: bool) -> None:
    hook = EMAHook(decay=0.9, use_buffers=use_buffers)
    model = Net()
    seen: list[Tensor] = []
    what = network(hook, models=model, num_epochs=2)
    what.register_hook(At(Stage.AFTER_BATCH, lambda ctx: seen.append(ctx.model.mean.clone())))
    run(what, batches(2, 3, dtype=torch.float32))
    expected = seen[0]
    for mean in seen[1:]:
        expected = torch.lerp(expected, mean, 1.0 - 0.9) if use_buffers else mean
    averaged: Any = hook.get_averaged_model()
    assert torch.equal(averaged.mean, expected)
    assert averaged.calls.item() == 4
    assert torch.equal(averaged.mask, model.mask)  # type: ignore[arg-type]


def test_the_live_model_is_not_touched() -> None:
    loader = batches(2, 3, dtype=torch.float32)
    ours, theirs = (run(network(*hooks), loader).models["main"].state_dict() for hooks in ([EMAHook()], []))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_average_is_ready_for_inference() -> None:
    hook = EMAHook()
    what = run(network(hook), batches(2, dtype=torch.float32))
    averaged = hook.get_averaged_model()
    assert not averaged.training
    assert not any(parameter.requires_grad for parameter in averaged.parameters())
    assert what.models["main"].training
    assert averaged is not what.models["main"]


def test_frozen_parameters_stay_as_they_are() -> None:
    """B17: weight decay, the average, and a frozen module with buffers."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.readout = nn.BatchNorm1d(3).eval(), nn.Linear(3, 1)

        def forward(self, batch: Any) -> dict[str, Tensor]:
            atoms = self.readout(self.backbone(batch.positions)).squeeze(-1)
            return {"energy": atoms.new_zeros(batch.num_graphs).index_add(0, batch.batch_idx, atoms)[:, None]}

    torch.manual_seed(0)
    model, hook = Two(), EMAHook(decay=0.5)
    model.backbone.running_mean.normal_()  # type: ignore[union-attr]
    before = copy.deepcopy(model.backbone.state_dict())
    decay = OptimizerConfig(optimizer_cls=torch.optim.AdamW, lr=0.01, optimizer_kwargs={"weight_decay": 0.1})
    what = network(hook, models=model, optimizer_configs=decay, num_steps=10)
    names = {"main.readout.weight", "main.readout.bias"}
    what.set_optimizer_parameter_filter(names)
    what.set_trainable_parameter_filter(names)
    run(what, batches(2, 3, dtype=torch.float32))
    averaged: Any = hook.get_averaged_model()
    for name, value in before.items():
        assert torch.equal(model.backbone.state_dict()[name], value)
        assert torch.equal(averaged.backbone.state_dict()[name], value)
    (optimizer,) = what.flat_optimizers()[0]
    assert {id(p) for p in optimizer.state} == {id(p) for p in model.readout.parameters()}
    assert not torch.equal(averaged.readout.weight, model.readout.weight)


def test_methods_are_installed_again_on_the_copy() -> None:
    calls: list[Any] = []

    class Patched(ConstGrad):
        def modify_ema_methods(self) -> None:
            calls.append((self, self.w.item()))

    hook = EMAHook()
    hook.load_state_dict({"averaged_model_state": {"n_averaged": torch.tensor(1), "module.w": torch.tensor(7.0)}})
    run(strategy(hook, models=Patched(), num_steps=1), constant(1))
    assert calls == [(hook.get_averaged_model(), 0.0)]


def test_a_subclass_may_build_the_copy_in_its_own_way() -> None:
    class Own(EMAHook):
        def _build_averaged_model(self, source: nn.Module) -> nn.Module:
            return ConstGrad()

    hook = Own()
    run(strategy(hook), constant(1))
    assert average_of(hook) == -1.0


def test_the_average_of_another_model_is_refused() -> None:
    hook = EMAHook(decay=0.5)
    run(strategy(hook), constant(2))
    message = r"holds the average of another ConstGrad than models\['main'\]; make a new EMAHook"
    with pytest.raises(TrainingStateError, match=message):
        run(strategy(hook), constant(1))
    again = EMAHook(decay=0.5)
    again.load_state_dict(hook.state_dict())
    run(strategy(again), constant(1))
    assert average_of(again) == 0.5 * -1.5 + 0.5 * -1.0


def test_a_copy_of_a_strategy_goes_on_by_itself() -> None:
    hook = EMAHook(decay=0.5)
    what = run(strategy(hook), constant(2))
    copied = copy.deepcopy(what)
    copied.num_epochs = 2
    run(copied, constant(2))
    assert average_of(hook) == -1.5
    assert average_of(copied.hooks[0].hooks[0]) == 0.5 * (0.5 * -1.5 + 0.5 * -3.0) + 0.5 * -4.0


def test_a_late_hook_starts_at_its_first_step() -> None:
    hook = EMAHook()
    what = strategy(num_epochs=2)
    what.register_hook(At(Stage.AFTER_EPOCH, lambda ctx: hook.num_updates or what.register_hook(hook)))
    run(what, constant(2))
    assert hook.num_updates == 2


# Who sees it


def validating(*hooks: Any, **options: Any) -> TrainingStrategy:
    config = ValidationConfig(validation_data=batches(2, seed=9, dtype=torch.float32), **options)
    return network(*hooks, validation_config=config, num_epochs=2)


def test_validation_sees_the_average() -> None:
    hook = EMAHook(decay=0.5)
    what = run(validating(hook, every_n_epochs=1), batches(2, 3, dtype=torch.float32))
    summary = what.last_validation
    assert summary is not None
    assert (summary["model_source"], summary["ema_model_keys"]) == ("ema", ["main"])
    live = network(models=hook.get_averaged_model(), validation_config=what.validation_config).validate()
    assert summary["total_loss"].item() == live["total_loss"].item()


def test_weights_that_were_never_averaged_are_never_validated() -> None:
    """B28: a late start validates the live weights, and the average begins with the weights of that step."""
    hook, seen = EMAHook(start_step=4, decay=0.5), []
    what = validating(hook, every_n_steps=1)
    what.register_hook(At(Stage.AFTER_VALIDATION, lambda ctx: seen.append((ctx.step_count, dict(ctx.validation)))))
    run(what, batches(2, 3, dtype=torch.float32))
    raw: list[Any] = []
    plain = validating(every_n_steps=1)
    plain.register_hook(At(Stage.AFTER_VALIDATION, lambda ctx: raw.append(ctx.validation["total_loss"].item())))
    run(plain, batches(2, 3, dtype=torch.float32))
    assert [summary["model_source"] for _, summary in seen] == ["live", "live", "live", "ema"]
    assert [summary["total_loss"].item() for _, summary in seen] == raw  # the first average is the weights of step 4


def test_named_models_are_averaged_by_name() -> None:
    def both(models: Any, batch: Any) -> dict[str, Tensor]:
        return {"predicted_energy": models["a"](batch)["energy"] + models["b"](batch)["energy"]}

    a, b = EMAHook(model_key="a", decay=0.5), EMAHook(model_key="b", start_step=100)
    what = strategy(
        a,
        b,
        models={"a": ConstGrad(), "b": ConstGrad()},
        optimizer_configs={"a": adam(), "b": adam()},
        training_fn=both,
        validation_config=ValidationConfig(validation_data=constant(1), every_n_epochs=1),
    )
    run(what, constant(2))
    assert what.last_validation is not None
    assert (what.last_validation["model_source"], what.last_validation["ema_model_keys"]) == ("mixed", ["a"])


def test_the_average_follows_its_model_in_dtype() -> None:
    """B92: an average that was restored in one place goes where its model is before the first update."""
    hook = EMAHook(decay=0.5)
    run(strategy(hook, models=ConstGrad(torch.float32)), constant(1, torch.float32))
    again = EMAHook(decay=0.5)
    again.load_state_dict(hook.state_dict())
    what = run(strategy(again, models=ConstGrad(torch.float64)), constant(1))
    averaged: Any = again.get_averaged_model()
    assert averaged.w.dtype is torch.float64
    assert averaged.w.device == what.models["main"].w.device
    assert averaged.w.item() == 0.5 * -1.0 + 0.5 * -1.0
    what.models["main"].to(torch.float32)
    what.num_epochs = 2
    run(what, constant(1, torch.float32))
    assert averaged.w.dtype is torch.float32


def test_a_workflow_without_a_slot_is_no_obstacle() -> None:
    hook, model = EMAHook(), ConstGrad()
    ctx = TrainContext(batch=None, models={"main": model}, workflow=object())
    hook(ctx, Stage.SETUP, False)
    hook(ctx, Stage.AFTER_OPTIMIZER_STEP, False)
    assert hook.num_updates == 1


# Which weights are where


def harmonic() -> tuple[TrainingStrategy, EMAHook]:
    """Return a strategy whose gradient is 1, so that the live weight is minus the number of steps."""
    ema = EMAHook(decay=0.5)
    config = ValidationConfig(validation_data=constant(1), every_n_steps=1)
    return strategy(ema, validation_config=config, num_epochs=None, num_steps=4), ema


def averaged_after(steps: int) -> float:
    value = -1.0
    for step in range(2, steps + 1):
        value = 0.5 * value + 0.5 * -step
    return value


@pytest.mark.parametrize("sanity", [0, 2])
def test_what_is_saved_around_a_validation_are_the_live_weights(tmp_path: Path, sanity: int) -> None:
    """B02: from a hook behind the validation of averaged weights, and by Lightning's own callback that monitors it."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    what, ema = harmonic()
    saved: list[Any] = []

    def save(ctx: Any) -> None:
        average = ema.state_dict()["averaged_model_state"]["module.w"].item()
        saved.append((w_of(what), average, ctx.validation["model_source"]))

    what.register_hook(At(Stage.AFTER_VALIDATION, save))
    native = ModelCheckpoint(tmp_path, monitor="validation/total_loss", save_top_k=-1, filename="{step}")
    what.register_hook(native)
    run(what, constant(4), enable_checkpointing=True, num_sanity_val_steps=sanity)
    assert saved == [(-step, averaged_after(step), "ema") for step in (1, 2, 3, 4)]
    for step in (1, 2, 3, 4):
        state = torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)["state_dict"]
        assert state["models.main.w"].item() == -step


def test_one_can_tell_and_choose_which_weights_are_evaluated(tmp_path: Path) -> None:
    """B103: five steps; the summary says which, a switch gives the other, and an exported file evaluates alike."""

    def checked(use: Any = "auto") -> ValidationConfig:
        return ValidationConfig(validation_data=batches(2, seed=9, dtype=torch.float32), use_ema=use)

    hook = EMAHook(decay=0.99)
    what = run(network(hook, validation_config=checked(), num_steps=5), batches(2, 3, 1, dtype=torch.float32))
    assert what.last_validation is not None
    told = {"averaged": what.last_validation}
    what.validation_config = checked("never")
    told["raw"] = what.validate()
    assert {name: summary["model_source"] for name, summary in told.items()} == {"averaged": "ema", "raw": "live"}
    assert told["averaged"]["total_loss"].item() != told["raw"]["total_loss"].item()
    for name, model in (("averaged", hook.get_averaged_model()), ("raw", what.models["main"])):
        torch.save(model.state_dict(), tmp_path / name)
        loaded = Net()
        loaded.load_state_dict(torch.load(tmp_path / name, weights_only=True))
        again = network(models=loaded, validation_config=checked()).validate()
        assert again["total_loss"].item() == pytest.approx(told[name]["total_loss"].item(), rel=0, abs=1e-10)


def test_a_checkpoint_says_which_weights_it_holds(tmp_path: Path) -> None:
    """B103."""
    hook = EMAHook(start_step=2)
    what = network(hook, models=DemoModelWrapper(DemoModel(hidden_dim=8)), num_steps=1)
    for steps in (1, 2):
        what.num_steps = steps
        run(what, batches(2, dtype=torch.float32))
        what.save_checkpoint(tmp_path)
    records = [json.loads((tmp_path / f"lightning/checkpoints/{i}.json").read_text()) for i in (0, 1)]
    assert [record["weights"] for record in records] == [{"main": ["raw"]}, {"main": ["raw", "averaged"]}]


def test_the_average_shares_nothing_with_the_live_model() -> None:
    hook = EMAHook(decay=0.5)
    what = run(network(hook), batches(2, 3, dtype=torch.float32))
    averaged, live = hook.get_averaged_model(), what.models["main"]
    before = tensors(hook)
    storages = {value.untyped_storage().data_ptr() for value in live.state_dict().values()}
    assert not storages & {value.untyped_storage().data_ptr() for value in averaged.state_dict().values()}
    averaged(batches(1, dtype=torch.float32)[0])["energy"]
    trainable = copy.deepcopy(averaged).requires_grad_(True)
    trainable(batches(1, dtype=torch.float32)[0])["energy"].sum().backward()  # nobody guards these gradients
    with torch.no_grad():
        for parameter in live.parameters():
            parameter.zero_()
    assert all(torch.equal(value, before[name]) for name, value in averaged.state_dict().items())


# Warm-up


def test_the_decay_ramps_up() -> None:
    hook, plain = EMAHook(decay=0.3, warmup=True), EMAHook(decay=0.3)
    run(strategy(hook, plain), constant(5))
    expected = -1.0
    for updates in (1, 2, 3, 4):
        decay = min(0.3, (1 + updates) / (10 + updates))
        expected = decay * expected + (1.0 - decay) * -(updates + 1)
    assert average_of(hook) == pytest.approx(expected, rel=1e-15)
    assert average_of(hook) < average_of(plain)


def test_the_ramp_goes_on_after_a_resume_bitwise() -> None:
    """B15: the count is state, so the average is not wiped by a second warm-up."""
    whole, first, second = (EMAHook(decay=0.9, warmup=True) for _ in range(3))
    run(strategy(whole, num_steps=6), constant(6))
    half = strategy(first, num_steps=3)
    run(half, constant(6))
    second.load_state_dict(first.state_dict())
    rest = strategy(second, models=half.models["main"], num_steps=3)
    run(rest, constant(6))
    assert average_of(second) == average_of(whole)
    assert second.num_updates == whole.num_updates == 6
    with pytest.raises(ConfigurationError, match="warmup=True vs constructor warmup=False; use the saved values"):
        EMAHook(decay=0.9).load_state_dict(first.state_dict())
    with pytest.raises(ConfigurationError, match="warmup=False vs constructor warmup=True"):
        EMAHook(decay=0.9, warmup=True).load_state_dict(EMAHook(decay=0.9).state_dict())


# State


def test_a_run_goes_on_with_the_same_average_bitwise(tmp_path: Path) -> None:
    """B15: six steps, or three, a checkpoint and three more."""

    def fresh(steps: int) -> tuple[TrainingStrategy, EMAHook]:
        torch.manual_seed(0)
        hook = EMAHook(decay=0.9)
        model = DemoModelWrapper(DemoModel(hidden_dim=8))
        return network(hook, models=model, num_epochs=None, num_steps=steps), hook

    loader = batches(2, 3, 1, dtype=torch.float32)
    whole, straight = fresh(6)
    run(whole, loader)
    half, first = fresh(3)
    run(half, loader)
    half.save_checkpoint(tmp_path)
    resumed = EMAHook(decay=0.9)
    what = TrainingStrategy.load_checkpoint(tmp_path, hooks=[resumed], num_steps=6)
    assert resumed.num_updates == 3
    assert all(torch.equal(value, tensors(first)[name]) for name, value in tensors(resumed).items())
    run(what, loader)
    assert resumed.num_updates == straight.num_updates == 6
    assert all(torch.equal(value, tensors(straight)[name]) for name, value in tensors(resumed).items())


def test_a_loaded_average_is_validated_and_ready_at_once(tmp_path: Path) -> None:
    def checked() -> ValidationConfig:
        return ValidationConfig(validation_data=batches(2, seed=9, dtype=torch.float32))

    what = network(EMAHook(decay=0.5), models=DemoModelWrapper(DemoModel(hidden_dim=8)), validation_config=checked())
    run(what, batches(2, 3, dtype=torch.float32))
    what.save_checkpoint(tmp_path)
    hook = EMAHook(decay=0.5)
    again = TrainingStrategy.load_checkpoint(tmp_path, hooks=[hook], validation_config=checked())
    assert not hook.get_averaged_model().training
    summary = again.validate()
    assert what.last_validation is not None
    assert summary["model_source"] == "ema"
    assert summary["total_loss"].item() == what.last_validation["total_loss"].item()


def test_a_state_of_the_reference_goes_in_and_out(shared: Path) -> None:
    path = shared / "samples/ckpt_demo_async/hooks/checkpoints/2.pt"
    state = torch.load(path, weights_only=True)["nvalchemi.training.hooks.ema.EMAHook:0"]
    hook = EMAHook(decay=0.9)
    TrainingStrategy.load_checkpoint(shared / "samples/ckpt_demo_async", hooks=[hook])
    ours = hook.state_dict()
    assert ours.keys() == state.keys()
    assert {key: value for key, value in ours.items() if key != "averaged_model_state"} == {
        key: value for key, value in state.items() if key != "averaged_model_state"
    }
    for name, value in state["averaged_model_state"].items():
        assert torch.equal(ours["averaged_model_state"][name], value)


def test_another_configuration_is_refused() -> None:
    hook = EMAHook(decay=0.999, update_every=2)
    state = {**EMAHook(decay=0.9, num_updates=3).state_dict(), "averaged_model_state": {}}
    message = (
        r"EMAHook checkpoint conflict: decay=0\.9 vs constructor decay=0\.999; "
        r"update_every=1 vs constructor update_every=2; use the saved values"
    )
    with pytest.raises(ConfigurationError, match=message):
        hook.load_state_dict(state)
    assert hook.num_updates == 0


def test_a_state_waits_for_the_model_it_belongs_to() -> None:
    hook = EMAHook(decay=0.5)
    run(strategy(hook), constant(2))
    again = EMAHook(decay=0.5)
    again.load_state_dict(hook.state_dict())
    waiting = again.state_dict()
    assert waiting["num_updates"] == 2
    assert waiting["averaged_model_state"]["module.w"].item() == average_of(hook) == -1.5
    again(TrainContext(batch=None, models={"main": ConstGrad()}), Stage.SETUP, False)
    assert average_of(again) == -1.5


def test_a_state_without_an_average_begins_anew() -> None:
    hook = EMAHook(decay=0.5)
    run(strategy(hook), constant(2))
    hook.load_state_dict({"num_updates": 0})
    with pytest.raises(TrainingStateError, match="does not exist yet"):
        hook.get_averaged_model()
    assert "averaged_model_state" not in hook.state_dict()
    run(strategy(hook), constant(1))
    assert average_of(hook) == -1.0


def test_a_part_of_an_average_is_loaded_only_where_it_says_so() -> None:
    model = Net()
    state = {"averaged_model_state": {"n_averaged": torch.tensor(2), "module.layers.0.bias": torch.ones(8)}}
    ctx = TrainContext(batch=None, models={"main": model})
    partial = EMAHook()
    partial.load_state_dict({**state, "averaged_model_state_load": "partial"})
    partial(ctx, Stage.SETUP, False)
    averaged: Any = partial.get_averaged_model()
    assert torch.equal(averaged.layers[0].bias, torch.ones(8))
    assert torch.equal(averaged.layers[0].weight, model.layers[0].weight)
    whole = EMAHook()
    whole.load_state_dict(state)
    with pytest.raises(RuntimeError, match="Missing key"):
        whole(ctx, Stage.SETUP, False)
    odd = EMAHook()
    odd.load_state_dict({"averaged_model_state": {"module.x": torch.ones(1)}, "averaged_model_state_load": "partial"})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        odd(ctx, Stage.SETUP, False)


def test_several_runs_are_one() -> None:
    hook, whole = EMAHook(decay=0.5), EMAHook(decay=0.5)
    what = run(strategy(hook), constant(2))
    what.num_epochs = 2
    run(what, constant(2))
    run(strategy(whole, num_epochs=2), constant(2))
    assert average_of(hook) == average_of(whole)
    by_hand = EMAHook(decay=0.5)
    again = strategy(by_hand)
    for batch in constant(4):
        again.train_batch(batch)
    assert average_of(by_hand) == average_of(whole)
