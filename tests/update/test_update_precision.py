"""Mixed precision: where autocast is open, what the scaler does, and who follows a skipped step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
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
    sgd,
    strategy,
    w_of,
)

from nvalchemi_lightning.context import TrainContext
from nvalchemi_lightning.data import AtomicData, Batch
from nvalchemi_lightning.errors import ConfigurationError, SecondOwnerError, TrainingStateError
from nvalchemi_lightning.hooks import EMAHook, GradientClipHook, MixedPrecisionHook, TrainingUpdateHook
from nvalchemi_lightning.losses import EnergyMSELoss, ForceMSELoss
from nvalchemi_lightning.models import DemoModel, DemoModelWrapper, PaiNN
from nvalchemi_lightning.specs import create_model_spec_from_json
from nvalchemi_lightning.stages import TrainingStage
from nvalchemi_lightning.strategy import TrainingStrategy
from nvalchemi_lightning.validation import ValidationConfig

FLOAT = torch.float32


def autocast_is_on() -> bool:
    return torch.is_autocast_enabled("cpu")


@pytest.fixture(autouse=True)
def _autocast_is_off_afterwards() -> Any:
    yield
    assert not autocast_is_on()


# Configuration


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        ("float32", torch.float32),
        ("torch.bfloat16", torch.bfloat16),
        ("FP16", torch.float16),
        ("bf16", torch.bfloat16),
        ("fp32", torch.float32),
    ],
    ids=str,
)
def test_names_of_precisions(given: Any, dtype: torch.dtype) -> None:
    hook = MixedPrecisionHook(precision=given)
    assert hook.precision is dtype
    assert MixedPrecisionHook(**hook.model_dump()).precision is dtype


@pytest.mark.parametrize("given", ["half", "bf61", torch.float64, 16, None], ids=str)
def test_other_precisions_are_refused(given: Any) -> None:
    message = r"MixedPrecisionHook.precision must be one of \(float32, bfloat16, float16\); got"
    with pytest.raises(ValidationError, match=message):
        MixedPrecisionHook(precision=given)


def test_the_nearest_name_is_given() -> None:
    with pytest.raises(ValidationError, match="did you mean 'bf16'"):
        MixedPrecisionHook(precision="bf61")


def test_the_precision_is_required_by_keyword() -> None:
    with pytest.raises(ValidationError, match="precision"):
        MixedPrecisionHook()
    with pytest.raises(TypeError, match=r"argument like 'bf16'; write MixedPrecisionHook\(precision=\.\.\.\)"):
        MixedPrecisionHook("bf16")  # type: ignore[call-arg]
    with pytest.raises(ValidationError, match="no field 'dtype'"):
        MixedPrecisionHook(precision="bf16", dtype="bf16")


def test_a_job_file_may_use_the_short_names() -> None:
    form = {"cls_path": "nvalchemi_lightning.hooks.MixedPrecisionHook", "precision": "bf16"}
    assert create_model_spec_from_json(form).build().precision is torch.bfloat16
    with pytest.raises(ConfigurationError, match=r"MixedPrecisionHook\.precision does not hold a dtype: 'bf61'"):
        create_model_spec_from_json({**form, "precision": "bf61"})


def test_two_precisions_are_refused() -> None:
    with pytest.raises(ValidationError, match="exclusive key 'MixedPrecisionHook'"):
        strategy(MixedPrecisionHook(precision="bf16"), MixedPrecisionHook(precision="fp16"))


@pytest.mark.parametrize("registered", ["bf16", "fp16"])
def test_the_trainers_mixed_precision_is_refused_beside_the_hook(registered: str) -> None:
    what = network(MixedPrecisionHook(precision=registered))
    message = r"precision='bf16-mixed'\) would be a second owner .* leave it out and use hooks=\[MixedPrecisionHook"
    with pytest.raises(SecondOwnerError, match=message):
        run(what, batches(2, dtype=FLOAT), precision="bf16-mixed")


@pytest.mark.parametrize("trainers", ["bf16-true", "64-true"])
def test_one_party_sets_the_precision(trainers: Any) -> None:
    what = network(MixedPrecisionHook(precision="bf16"))
    message = (
        rf"Trainer\(precision='{trainers}'\) and the MixedPrecisionHook both set the precision; leave the Trainer's"
    )
    with pytest.raises(ConfigurationError, match=message):
        run(what, batches(2, dtype=FLOAT), precision=trainers)
    assert what.step_count == 0


# Autocast


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_autocast_spans_forward_and_loss_alone(precision: str) -> None:
    seen: list[tuple[str, bool]] = []
    what = network(MixedPrecisionHook(precision=precision), num_steps=2)
    for stage in TrainingStage:
        if not stage.name.startswith("DO_"):
            what.register_hook(At(stage, lambda ctx, stage=stage: seen.append((stage.name, autocast_is_on()))))
    run(what, batches(2, 3, dtype=FLOAT))
    inside = {"BEFORE_BATCH", "BEFORE_FORWARD", "AFTER_FORWARD", "BEFORE_LOSS", "AFTER_LOSS", "BEFORE_BACKWARD"}
    assert len(seen) > 20
    assert all(on is (name in inside and precision != "fp32") for name, on in seen)


@pytest.mark.parametrize("stage", [Stage.BEFORE_FORWARD, Stage.AFTER_LOSS, Stage.AFTER_OPTIMIZER_STEP])
def test_autocast_is_left_when_a_batch_fails(stage: TrainingStage) -> None:
    what = network(MixedPrecisionHook(precision="bf16"))
    what.register_hook(At(stage, lambda ctx: 1 / 0))
    with what:
        with pytest.raises(ZeroDivisionError):
            what.train_batch(batches(2, dtype=FLOAT)[0])
        assert not autocast_is_on()


def test_a_hook_that_is_left_open_closes() -> None:
    hook = MixedPrecisionHook(precision="bf16")
    ctx = TrainContext(batch=None, workflow=strategy(), loss=torch.ones(()))
    hook(ctx, Stage.BEFORE_BATCH, False)
    hook(ctx, Stage.BEFORE_BATCH, False)
    assert autocast_is_on()
    hook.close()
    hook.close()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_default_losses_get_predictions_in_the_labels_precision(precision: str) -> None:
    seen: list[Any] = []

    class Half(Net):
        def forward(self, batch: Any) -> dict[str, Tensor]:
            atoms = self.layers(batch.positions).squeeze(-1)
            seen.append(atoms.dtype)
            return {"energy": atoms.new_zeros(batch.num_graphs).index_add(0, batch.batch_idx, atoms)[:, None]}

    what = network(MixedPrecisionHook(precision=precision), models=Half(), num_steps=1)
    what.register_hook(At(Stage.AFTER_FORWARD, lambda ctx: seen.append(ctx.predictions["predicted_energy"].dtype)))
    run(what, batches(3, dtype=FLOAT))
    assert seen[:2] == [torch.bfloat16 if precision == "bf16" else torch.float16, FLOAT]
    assert all(p.dtype is FLOAT and bool(p.isfinite().all()) for p in what.models["main"].parameters())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_learning_in_reduced_precision(precision: str) -> None:
    losses: list[float] = []
    what = network(MixedPrecisionHook(precision=precision), num_epochs=30)
    what.register_hook(At(Stage.AFTER_BATCH, lambda ctx: losses.append(ctx.loss.item())))
    run(what, batches(4, 4, dtype=FLOAT))
    assert losses[-1] < 0.5 * losses[0]


def molecules(count: int, seed: int = 0) -> Batch:
    """Return water-like structures in float32."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.tensor([[0.0, 0.0, 0.0], [0.96, 0.0, 0.0], [-0.24, 0.93, 0.0]])
    return Batch.from_data_list(
        [
            AtomicData(
                positions=base + 0.1 * torch.randn(3, 3, generator=generator),
                atomic_numbers=torch.tensor([8, 1, 1]),
                energy=torch.randn(1, 1, generator=generator),
                forces=torch.randn(3, 3, generator=generator),
            )
            for _ in range(count)
        ]
    )


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_force_model_is_differentiated_twice(precision: str) -> None:
    """Forces and their gradients under autocast are finite and agree with full precision."""

    def trained(precision: str) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        model = PaiNN(hidden=16, num_layers=2, elements=(1, 8))
        what = TrainingStrategy(
            models=model,
            optimizer_configs=adam(),
            loss_fn=EnergyMSELoss() + ForceMSELoss() * 10.0,
            hooks=[MixedPrecisionHook(precision=precision)],
            num_epochs=1,
        )
        kept: list[Tensor] = []
        what.register_hook(At(Stage.BEFORE_LOSS, lambda ctx: kept.append(ctx.predictions["predicted_forces"].detach())))

        class Keep(TrainingUpdateHook):
            def __call__(self, ctx: Any, stage: TrainingStage, will_skip: bool) -> tuple[bool, Any]:
                if stage is Stage.DO_OPTIMIZER_STEP:
                    kept.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
                return True, ctx.loss

        what.register_hook(Keep())
        run(what, [molecules(4)])
        assert what.step_count == 1
        return kept[0], kept[1]

    forces, gradient = trained(precision)
    exact_forces, exact_gradient = trained("fp32")
    assert bool(forces.isfinite().all())
    assert bool(gradient.isfinite().all())
    assert (forces - exact_forces).norm() < 0.03 * exact_forces.norm()
    assert torch.cosine_similarity(gradient, exact_gradient, dim=0) > 0.99
    assert (forces - exact_forces).norm() > 0.0


def sprung(batch: Batch) -> Batch:
    """Label structures of three atoms as if springs of length 1 A joined all of them."""
    positions = batch.positions.clone().requires_grad_(True)
    energy = sum((positions[i::3] - positions[j::3]).norm(dim=1).sub(1.0).square() for i, j in ((0, 1), (0, 2), (1, 2)))
    batch.forces = -torch.autograd.grad(energy.sum(), positions)[0]
    batch.energy = energy.detach()[:, None]
    return batch


TOLERANCE = {"bf16": 0.03, "fp16": 0.01}
"""Of forces, relative to float32: bfloat16 keeps 8 bits of every factor, float16 11."""


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_forces_are_learnt_in_reduced_precision(precision: str) -> None:
    """B42: fifty steps on eight small molecules with energies and forces."""
    torch.manual_seed(0)
    model, batch, losses = PaiNN(hidden=16, num_layers=2, elements=(1, 8)), sprung(molecules(8)), []
    hook = MixedPrecisionHook(precision=precision)
    what = TrainingStrategy(
        models=model,
        optimizer_configs=adam(0.003),
        loss_fn=EnergyMSELoss() + ForceMSELoss() * 10.0,
        hooks=[hook],
        num_steps=50,
    )
    what.register_hook(At(Stage.AFTER_BATCH, lambda ctx: losses.append((ctx.loss.dtype, ctx.loss.item()))))
    run(what, [batch])
    assert what.step_count == 50
    assert {dtype for dtype, _ in losses} == {FLOAT}
    assert all(math.isfinite(loss) for _, loss in losses)
    assert losses[-1][1] < 0.5 * losses[0][1]
    assert precision == "bf16" or hook.state_dict()["scaler"]["scale"] > 1.0
    exact = model.eval()(batch)["forces"]
    with hook.inference_autocast("cpu"):
        reduced = model(batch)["forces"].float()
    assert (reduced - exact).norm() < TOLERANCE[precision] * exact.norm()


# Validation


class Spy(Net):
    """Notes the dtype of its matrix products."""

    seen: ClassVar[list[Any]] = []

    def forward(self, batch: Any) -> dict[str, Tensor]:
        self.seen.append(self.layers[0](batch.positions).dtype)
        return super().forward(batch)


@pytest.mark.parametrize("use", ["auto", "always", "never"])
@pytest.mark.parametrize("averaged", [False, True])
def test_validation_runs_in_the_precision_that_it_states(use: Any, averaged: bool) -> None:
    """B117."""
    config = ValidationConfig(
        validation_data=batches(2, seed=5, dtype=FLOAT), every_n_epochs=1, use_mixed_precision=use
    )
    Spy.seen.clear()
    hooks = [MixedPrecisionHook(precision="bf16"), *([EMAHook()] if averaged else [])]
    what = run(network(*hooks, models=Spy(), validation_config=config), batches(2, dtype=FLOAT))
    summary = what.last_validation
    assert summary is not None
    assert summary["model_source"] == ("ema" if averaged else "live")
    expected = FLOAT if use == "never" else torch.bfloat16
    assert summary["precision"] == str(expected).removeprefix("torch.")
    assert Spy.seen[-1] is expected
    assert Spy.seen[0] is torch.bfloat16


def test_inference_never_touches_the_scaler() -> None:
    hook = MixedPrecisionHook(precision="fp16")
    with hook.inference_autocast("cpu"):
        assert autocast_is_on()
    with MixedPrecisionHook(precision="fp32").inference_autocast(torch.device("cpu")):
        assert not autocast_is_on()
    assert hook.state_dict() == {}


# The scaler


class Poison:
    """Makes the gradient of one batch infinite."""

    frequency = 1
    stage = Stage.AFTER_BACKWARD

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        if ctx.batch_count + 1 in self.numbers:
            for parameter in ctx.model.parameters():
                parameter.grad.fill_(float("inf"))


SCHEDULE = {"scheduler_cls": torch.optim.lr_scheduler.ConstantLR, "scheduler_kwargs": {"factor": 1.0}}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scheduled", [False, True])
def test_nothing_advances_with_a_step_that_the_scaler_skips(fused: bool, scheduled: bool) -> None:
    """B26: five batches, an infinite gradient in the third."""
    scaler, ema, log = MixedPrecisionHook(precision="fp16"), EMAHook(decay=0.5), Noting()
    weights: list[float] = []
    options = {"fused": True} if fused else {}
    what = strategy(
        scaler,
        ema,
        log,
        Poison(3),
        GradientClipHook(max_norm=10.0),
        models=ConstGrad(FLOAT),
        optimizer_configs=adam(optimizer_kwargs=options, **(SCHEDULE if scheduled else {})),
        num_steps=4,
    )
    what.register_hook(At(Stage.AFTER_BATCH, lambda ctx: weights.append(w_of(what))))
    run(what, constant(5, FLOAT))
    assert (what.step_count, what.counters.batch_count, ema.num_updates) == (4, 5, 4)
    if scheduled:
        assert what.flat_optimizers()[1][0].last_epoch == 4
    skipped = [skip for _, skip in log.notes(Stage.AFTER_OPTIMIZER_STEP)]
    assert skipped == [False, False, True, False, False]
    assert scaler.state_dict()["scaler"]["scale"] == 2.0**15
    assert weights[1] == weights[2]
    assert len(set(weights)) == 4


def test_only_the_optimizer_that_overflowed_is_held_back() -> None:
    def pair(models: Any, batch: Any) -> dict[str, Tensor]:
        return {"predicted_energy": models["a"](batch)["energy"] + models["b"](batch)["energy"]}

    def poison(ctx: Any) -> None:
        ctx.models["a"].w.grad.fill_(float("nan"))

    what = strategy(
        MixedPrecisionHook(precision="fp16"),
        At(Stage.AFTER_BACKWARD, poison),
        models={"a": ConstGrad(FLOAT), "b": ConstGrad(FLOAT)},
        optimizer_configs={"a": sgd(**SCHEDULE), "b": sgd(**SCHEDULE)},
        training_fn=pair,
        num_epochs=9,
    )
    what.train_batch(constant(1, FLOAT)[0])
    assert what.step_count == 0
    assert [scheduler.last_epoch for scheduler in what.flat_optimizers()[1]] == [0, 1]
    assert (what.models["a"].w.item(), what.models["b"].w.item()) == (0.0, -1.0)


def test_an_optimizer_without_gradients_does_no_harm() -> None:
    def only_a(models: Any, batch: Any) -> Any:
        return {"predicted_energy": models["a"](batch)["energy"]}

    what = strategy(
        MixedPrecisionHook(precision="fp16"),
        models={"a": ConstGrad(FLOAT), "b": ConstGrad(FLOAT)},
        optimizer_configs={"a": sgd(), "b": sgd()},
        training_fn=only_a,
    )
    assert run(what, constant(2, FLOAT)).step_count == 2
    assert (what.models["a"].w.item(), what.models["b"].w.item()) == (-2.0, 0.0)


def test_gradients_are_unscaled_before_they_are_clipped() -> None:
    """B18."""
    clip = GradientClipHook(max_norm=0.25)
    what = strategy(MixedPrecisionHook(precision="fp16"), clip, models=ConstGrad(FLOAT))
    scaled: list[float] = []
    what.register_hook(At(Stage.AFTER_BACKWARD, lambda ctx: scaled.append(ctx.model.w.grad.item())))
    run(what, constant(1, FLOAT))
    assert scaled == [2.0**16]
    assert clip.last_total_norm is not None
    assert clip.last_total_norm.item() == 1.0
    assert w_of(what) == pytest.approx(-0.25, rel=1e-5)


def test_gradients_stay_scaled_inside_a_window() -> None:
    scaler = MixedPrecisionHook(precision="fp16")
    what = strategy(Accumulate(2), scaler, models=ConstGrad(FLOAT), num_steps=1)
    scaled: list[float] = []
    what.register_hook(At(Stage.AFTER_OPTIMIZER_STEP, lambda ctx: scaled.append(ctx.model.w.grad.item())))
    run(what, constant(2, FLOAT))
    assert scaled == [2.0**15, 1.0]
    assert w_of(what) == -1.0


def test_a_later_veto_lets_the_scaler_go_on() -> None:
    """A hook behind the unscaling drops an infinite batch; the scale shrinks and the next batch trains."""

    class Drop(TrainingUpdateHook):
        priority = 40

        def __call__(self, ctx: Any, stage: TrainingStage, will_skip: bool) -> tuple[bool, Any]:
            finite = stage is not Stage.DO_OPTIMIZER_STEP or bool(ctx.model.w.grad.isfinite())
            return finite, ctx.loss

    scaler = MixedPrecisionHook(precision="fp16")
    what = strategy(scaler, Drop(), Poison(1, 2), models=ConstGrad(FLOAT), num_epochs=9)
    with what:
        for batch in constant(3, FLOAT):
            what.train_batch(batch)
    assert (what.step_count, w_of(what)) == (1, -1.0)
    assert scaler.state_dict()["scaler"]["scale"] == 2.0**14


class Scaler:
    """Stands for a gradient scaler; it notes the order of its calls."""

    def __init__(self, *skips: int) -> None:
        self.calls: list[str] = []
        self.skips = skips

    def scale(self, loss: Tensor) -> Tensor:
        self.calls.append("scale")
        return loss

    def step(self, optimizer: Any) -> None:
        self.calls.append("step")
        if self.calls.count("step") not in self.skips:
            optimizer.step()

    def update(self) -> None:
        self.calls.append("update")


class Scaling(TrainingUpdateHook):
    def __init__(self, scaler: Scaler) -> None:
        self.scaler = scaler

    def __call__(self, ctx: Any, stage: TrainingStage, will_skip: bool) -> tuple[bool, Any]:
        ctx.grad_scaler = self.scaler
        return True, self.scaler.scale(ctx.loss) if stage is Stage.DO_BACKWARD else ctx.loss


def test_a_scaler_of_the_users_own_is_called_in_order() -> None:
    scaler = Scaler(2)
    what = strategy(Scaling(scaler), optimizer_configs=[sgd(), sgd()], num_steps=1)
    run(what, constant(1))
    assert scaler.calls == ["scale", "step", "step", "update"] * (len(scaler.calls) // 4)
    assert what.step_count == 1
    assert what.counters.batch_count == 2
    assert w_of(what) == -3.0


def test_callbacks_hear_of_a_scaled_step() -> None:
    from lightning.pytorch.callbacks import Callback

    heard: list[Any] = []

    class Listener(Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            heard.append(optimizer.param_groups[0]["lr"])

    run(strategy(MixedPrecisionHook(precision="fp16"), Listener(), models=ConstGrad(FLOAT)), constant(2, FLOAT))
    assert heard == [1.0, 1.0]


# State


def test_the_scale_goes_on_over_runs_and_checkpoints(tmp_path: Path) -> None:
    """B-09 of the contract."""
    hook = MixedPrecisionHook(precision="fp16")
    what = strategy(hook, Poison(1, 4), models=ConstGrad(FLOAT), num_steps=2)
    run(what, constant(5, FLOAT))
    assert hook.state_dict()["scaler"]["scale"] == 2.0**15
    what.num_steps = 3
    run(what, constant(5, FLOAT))
    assert hook.state_dict()["scaler"]["scale"] == 2.0**14
    again = MixedPrecisionHook(precision="fp16")
    again.load_state_dict(hook.state_dict())
    assert again.state_dict() == hook.state_dict()
    ctx = TrainContext(batch=None, workflow=what, loss=torch.ones(()))
    again(ctx, Stage.BEFORE_BATCH, False)
    assert ctx.grad_scaler.get_scale() == 2.0**14
    again.end_batch()


def test_a_resumed_run_goes_on_with_the_same_scale(tmp_path: Path) -> None:
    def fresh() -> Any:
        return network(
            MixedPrecisionHook(precision="fp16"), models=DemoModelWrapper(DemoModel(hidden_dim=8)), num_steps=3
        )

    loader = batches(2, 3, 1, dtype=FLOAT)
    half = run(fresh(), loader)
    half.save_checkpoint(tmp_path)
    half.num_steps = 6
    run(half, loader)
    hook = MixedPrecisionHook(precision="fp16")
    again = TrainingStrategy.load_checkpoint(tmp_path, hooks=[hook], num_steps=6)
    assert hook.state_dict()["scaler"]["_growth_tracker"] == 3
    run(again, loader)
    assert hook.state_dict() == half.hooks[0].hooks[0].state_dict()
    for ours, theirs in zip(again.models["main"].parameters(), half.models["main"].parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_failure_between_unscaling_and_step_leaves_the_scaler_usable() -> None:
    clip = GradientClipHook(max_norm=1.0, error_if_nonfinite=True)
    what = strategy(MixedPrecisionHook(precision="fp16"), clip, Poison(1), models=ConstGrad(FLOAT), num_epochs=9)
    with pytest.raises(TrainingStateError, match="gradient norm is inf"):
        what.train_batch(constant(1, FLOAT)[0])
    what.counters.batch_count = 1
    what.train_batch(constant(1, FLOAT)[0])
    assert w_of(what) == pytest.approx(-1.0, rel=1e-5)


def test_another_precision_has_no_use_for_a_scale() -> None:
    hook = MixedPrecisionHook(precision="bf16")
    hook.load_state_dict({"scaler": {"scale": 2.0}})
    assert hook.state_dict() == {}


def test_the_error_type_of_two_owners() -> None:
    with pytest.raises(ConfigurationError, match="Only one update hook with exclusive key"):
        MixedPrecisionHook(precision="bf16") + MixedPrecisionHook(precision="bf16")
