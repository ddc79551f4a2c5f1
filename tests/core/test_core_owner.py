"""Nobody but the owner runs backward or steps an optimizer, and the Trainer is told so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from core_rigs import (
    At,
    ConstGrad,
    Harm,
    adam,
    batches,
    constant_loss,
    force_loss,
    run,
    sgd,
    strategy,
    trainer,
    w_of,
)
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    Callback,
    LearningRateMonitor,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from nvalchemi_lightning.errors import SecondOwnerError, TrainingStateError
from nvalchemi_lightning.feeding import OneLoader
from nvalchemi_lightning.module import AlchemiModule
from nvalchemi_lightning.stages import TrainingStage

Stage = TrainingStage


class TwoWells(nn.Module):
    """A model with a parameter that the loss does not reach."""

    requires_autograd = True

    def __init__(self) -> None:
        super().__init__()
        self.well = Harm()
        self.other = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, batch: Any) -> dict[str, Tensor]:
        output: dict[str, Tensor] = self.well(batch)
        return output


class Rig:
    """A run through a Trainer of one's own, with everything an attack needs at hand."""

    def __init__(self, *hooks: Any, callbacks: tuple[Callback, ...] = (), **fields: Any) -> None:
        self.model = TwoWells()
        defaults = {"models": self.model, "optimizer_configs": [adam(), sgd()], "loss_fn": force_loss(), "hooks": hooks}
        self.module = AlchemiModule(**{**defaults, **fields})
        self.trainer = trainer(callbacks=list(callbacks), max_epochs=1)

    def fit(self) -> Rig:
        self.trainer.fit(self.module, OneLoader(batches(2, 3)))
        return self

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.module.recipe.flat_optimizers()[0][0]


Attack = Callable[[Rig, Any], Any]

OWNER = (
    "but the strategy is the one owner of backward and optimizer step. Observe with a Hook; change the update with a"
)

HOOK_ATTACKS: dict[str, tuple[TrainingStage, Attack, str]] = {
    "manual_backward": (
        Stage.AFTER_LOSS,
        lambda rig, ctx: rig.module.manual_backward(ctx.loss),
        "backward was called at AFTER_LOSS",
    ),
    "trainer.strategy.backward": (
        Stage.BEFORE_BACKWARD,
        lambda rig, ctx: rig.trainer.strategy.backward(ctx.loss, None),
        "backward was called at BEFORE_BACKWARD",
    ),
    "module.backward": (
        Stage.AFTER_LOSS,
        lambda rig, ctx: rig.module.backward(ctx.loss, retain_graph=True),
        "backward was called at AFTER_LOSS",
    ),
    "LightningOptimizer.step": (
        Stage.AFTER_BACKWARD,
        lambda rig, ctx: rig.module.optimizers()[0].step(),
        "optimizer_step was called at AFTER_BACKWARD",
    ),
    "strategy.optimizer_step": (
        Stage.BEFORE_OPTIMIZER_STEP,
        lambda rig, ctx: rig.trainer.strategy.optimizer_step(rig.optimizer, lambda: None),
        "optimizer_step was called at BEFORE_OPTIMIZER_STEP",
    ),
    "raw step before the batch": (
        Stage.BEFORE_BATCH,
        lambda rig, ctx: ctx.optimizers[0].step(),
        r"Adam.step\(\) was called at BEFORE_BATCH",
    ),
    "raw step of the second optimizer": (
        Stage.AFTER_BACKWARD,
        lambda rig, ctx: ctx.optimizers[1].step(),
        r"SGD.step\(\) was called at AFTER_BACKWARD",
    ),
    "raw step after the step": (
        Stage.AFTER_OPTIMIZER_STEP,
        lambda rig, ctx: ctx.optimizers[0].step(),
        r"Adam.step\(\) was called at AFTER_OPTIMIZER_STEP",
    ),
    "raw step after the batch": (
        Stage.AFTER_BATCH,
        lambda rig, ctx: ctx.optimizers[0].step(),
        r"Adam.step\(\) was called at AFTER_BATCH",
    ),
    "raw step after the epoch": (
        Stage.AFTER_EPOCH,
        lambda rig, ctx: ctx.optimizers[0].step(),
        r"Adam.step\(\) was called at AFTER_EPOCH",
    ),
    "raw step after training": (
        Stage.AFTER_TRAINING,
        lambda rig, ctx: ctx.optimizers[0].step(),
        r"Adam.step\(\) was called at AFTER_TRAINING",
    ),
    "loss.backward after the loss": (
        Stage.AFTER_LOSS,
        lambda rig, ctx: ctx.loss.backward(),
        r"a gradient of shape \(\) was accumulated at AFTER_LOSS",
    ),
    "loss.backward before the backward": (
        Stage.BEFORE_BACKWARD,
        lambda rig, ctx: ctx.losses["total_loss"].backward(retain_graph=True),
        "was accumulated at BEFORE_BACKWARD",
    ),
    "predictions.backward": (
        Stage.AFTER_FORWARD,
        lambda rig, ctx: ctx.predictions["predicted_energy"].sum().backward(),
        "was accumulated at AFTER_FORWARD",
    ),
    "a loss of other parameters alone": (
        Stage.AFTER_OPTIMIZER_STEP,
        lambda rig, ctx: rig.model.other.sum().backward(),
        r"a gradient of shape \(2,\) was accumulated at AFTER_OPTIMIZER_STEP",
    ),
}


@pytest.mark.parametrize("name", HOOK_ATTACKS)
def test_a_hook_is_no_second_owner(name: str) -> None:
    stage, attack, message = HOOK_ATTACKS[name]
    rig = Rig()
    rig.module.recipe.register_hook(At(stage, lambda ctx: attack(rig, ctx)))
    with pytest.raises(SecondOwnerError, match=f"{message}.*{OWNER}"):
        rig.fit()


CALLBACK_ATTACKS: dict[str, tuple[str, Attack, str]] = {
    "loss.backward before backward": (
        "on_before_backward",
        lambda rig, loss: loss.backward(retain_graph=True),
        "was accumulated at DO_BACKWARD",
    ),
    "strategy.backward before backward": (
        "on_before_backward",
        lambda rig, loss: rig.trainer.strategy.backward(loss, None, retain_graph=True),
        "backward was called at DO_BACKWARD",
    ),
    "optimizer.step before backward": (
        "on_before_backward",
        lambda rig, loss: rig.optimizer.step(),
        r"Adam.step\(\) was called at DO_BACKWARD",
    ),
    "optimizer.step after backward": (
        "on_after_backward",
        lambda rig, _: rig.optimizer.step(),
        r"Adam.step\(\) was called at DO_BACKWARD",
    ),
    "manual_backward after backward": (
        "on_after_backward",
        lambda rig, _: rig.module.manual_backward(rig.model.other.sum()),
        "backward was called at DO_BACKWARD",
    ),
    "a gradient after backward": (
        "on_after_backward",
        lambda rig, _: rig.model.other.sum().backward(),
        r"a gradient of shape \(2,\) was accumulated at DO_BACKWARD",
    ),
    "the same optimizer before its step": (
        "on_before_optimizer_step",
        lambda rig, optimizer: optimizer.step(),
        r"Adam.step\(\) was called at DO_OPTIMIZER_STEP",
    ),
    "another optimizer before a step": (
        "on_before_optimizer_step",
        lambda rig, _: rig.module.recipe.flat_optimizers()[0][1].step(),
        r"SGD.step\(\) was called at DO_OPTIMIZER_STEP",
    ),
    "LightningOptimizer before a step": (
        "on_before_optimizer_step",
        lambda rig, _: rig.module.optimizers()[0].step(),
        "optimizer_step was called at DO_OPTIMIZER_STEP",
    ),
    "optimizer.step at the batch's end": (
        "on_train_batch_end",
        lambda rig, *_: rig.optimizer.step(),
        r"Adam.step\(\) was called at AFTER_OPTIMIZER_STEP",
    ),
    "optimizer.step at the batch's start": (
        "on_train_batch_start",
        lambda rig, *_: rig.optimizer.step(),
        r"Adam.step\(\) was called",
    ),
}


@pytest.mark.parametrize("name", CALLBACK_ATTACKS)
def test_a_native_callback_is_no_second_owner(name: str) -> None:
    method, attack, message = CALLBACK_ATTACKS[name]

    def act(self: Callback, trainer: Trainer, pl_module: LightningModule, *given: Any) -> None:
        attack(rig, given[0])

    def act_without(self: Callback, trainer: Trainer, pl_module: LightningModule) -> None:
        attack(rig, None)

    body = act_without if method == "on_after_backward" else act
    rig = Rig(callbacks=(type("Attacker", (Callback,), {method: body})(),))
    with pytest.raises(SecondOwnerError, match=message):
        rig.fit()


def test_the_weights_are_those_before_the_refused_step() -> None:
    rig = Rig()
    rig.module.recipe.register_hook(At(Stage.AFTER_BACKWARD, lambda ctx: ctx.optimizers[0].step()))
    with pytest.raises(SecondOwnerError):
        rig.fit()
    assert rig.model.well.w == 1.0
    assert rig.module.recipe.step_count == 0


WITHOUT_TRAINER = [name for name in HOOK_ATTACKS if name.startswith(("raw", "loss", "predictions"))]
WITHOUT_TRAINER = [name for name in WITHOUT_TRAINER if HOOK_ATTACKS[name][0].value <= Stage.AFTER_BATCH.value]


@pytest.mark.parametrize("name", WITHOUT_TRAINER)
def test_train_batch_has_one_owner_too(name: str) -> None:
    stage, attack, message = HOOK_ATTACKS[name]
    hook = At(stage, lambda ctx: attack(None, ctx))  # type: ignore[arg-type]
    what = strategy(models=TwoWells(), optimizer_configs=[adam(), sgd()], hooks=[hook])
    with pytest.raises(SecondOwnerError, match=message):
        what.train_batch(batches(2)[0])
    assert what.models["main"].well.w == 1.0 or stage.value > Stage.AFTER_BACKWARD.value


def test_gradients_for_diagnostics_are_free() -> None:
    norms: list[float] = []

    def measure(ctx: Any) -> None:
        (gradient,) = torch.autograd.grad(ctx.loss, [ctx.models["main"].w], retain_graph=True)
        norms.append(float(gradient.abs()))

    what = run(strategy(hooks=[At(Stage.AFTER_LOSS, measure)]), batches(2, 3))
    assert len(norms) == 2
    assert what.models["main"].w == run(strategy(), batches(2, 3)).models["main"].w


def test_a_hook_may_replace_predictions_and_loss() -> None:
    """The loss reads `ctx.predictions` back, and backward differentiates `ctx.loss`."""

    def double(ctx: Any) -> None:
        ctx.loss = ctx.loss * 2

    def truth(ctx: Any) -> None:
        ctx.predictions = {
            "predicted_energy": ctx.batch.energy + 0 * ctx.predictions["predicted_energy"],
            "predicted_forces": ctx.batch.forces,
        }

    loader = batches(2)
    plain = w_of(run(strategy(), loader)) - 1.0
    doubled = run(strategy(hooks=[At(Stage.BEFORE_BACKWARD, double)]), loader)
    assert w_of(doubled) - 1.0 == pytest.approx(2 * plain)
    perfect = run(strategy(hooks=[At(Stage.AFTER_FORWARD, truth)]), loader)
    assert perfect.models["main"].w == 1.0


# Claimants of the replacement stages


def test_a_claimant_of_backward_replaces_the_default() -> None:
    what = run(strategy(hooks=[At(Stage.DO_BACKWARD, lambda ctx: (2 * ctx.loss).backward())]), batches(2))
    plain = run(strategy(), batches(2))
    assert w_of(what) - 1.0 == pytest.approx(2 * (w_of(plain) - 1.0))


def test_a_claimant_that_runs_no_backward_is_refused() -> None:
    what = strategy(hooks=[At(Stage.DO_BACKWARD, lambda ctx: None)])
    with pytest.raises(
        TrainingStateError, match=r"At claims DO_BACKWARD but accumulated no gradient; call loss\.backw"
    ):
        run(what, batches(2))


def test_a_claimant_that_does_not_step_does_not_count() -> None:
    seen: list[int] = []
    what = strategy(
        num_steps=2,
        hooks=[
            At(Stage.DO_OPTIMIZER_STEP, lambda ctx: ctx.optimizers[0].step() if ctx.batch_count % 2 else None),
            At(Stage.AFTER_BATCH, lambda ctx: seen.append(ctx.step_count)),
        ],
    )
    run(what, batches(2, 2))
    assert seen == [0, 1, 1, 2]
    assert (what.step_count, what.batch_count, what.epoch_count) == (2, 4, 2)


def test_a_hook_that_steps_the_optimizers_itself_moves_every_counter(tmp_path: Path) -> None:
    """B58: global step, native checkpoints, learning-rate monitor and max_steps see steps of a claimant."""
    claim = At(Stage.DO_OPTIMIZER_STEP, lambda ctx: [optimizer.step() for optimizer in ctx.optimizers])
    module = AlchemiModule(models=ConstGrad(), optimizer_configs=sgd(1.0), loss_fn=constant_loss(), hooks=[claim])
    saver = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=2, save_top_k=-1, filename="{step}")
    t = trainer(
        max_epochs=-1,
        max_steps=6,
        logger=CSVLogger(tmp_path),
        callbacks=[saver, LearningRateMonitor("step")],
        enable_checkpointing=True,
        log_every_n_steps=1,
    )
    t.fit(module, OneLoader(batches(1, 1, 1, 1, energies=[-1e6] * 4)))
    assert (t.global_step, module.recipe.step_count, module.recipe.batch_count) == (6, 6, 6)
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["step=2.ckpt", "step=4.ckpt", "step=6.ckpt"]
    assert w_of(module.recipe) == -6.0
    table = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    column = table[0].split(",").index("lr-SGD")
    assert sum(bool(row.split(",")[column]) for row in table[1:]) == 6


# Several optimizers


def two_constants(**fields: Any) -> dict[str, Any]:
    def forward(models: Any, batch: Any) -> dict[str, Tensor]:
        return {"predicted_energy": models["a"](batch)["energy"] + models["b"](batch)["energy"]}

    return {
        "models": {"a": ConstGrad(), "b": ConstGrad()},
        "optimizer_configs": {"a": [sgd(1.0)], "b": [sgd(0.5)]},
        "loss_fn": constant_loss(),
        "training_fn": forward,
        **fields,
    }


def test_two_optimizers_make_one_global_step(tmp_path: Path) -> None:
    """B06: six batches are six steps, and native checkpoints come at 2, 4 and 6."""
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    seen: list[tuple[int, int]] = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            seen.append((trainer.global_step, pl_module.recipe.step_count))

    what = strategy(**two_constants(num_steps=6, hooks=[Watch()]))
    loader = batches(*[1] * 4, energies=[-1e6] * 4)
    run(what, loader, callbacks=[saver], enable_checkpointing=True)
    assert seen == [(step, step) for step in range(1, 7)]
    assert (what.step_count, what.batch_count) == (6, 6)
    assert (w_of(what, "a"), w_of(what, "b")) == (-6.0, -3.0)
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["step=2.ckpt", "step=4.ckpt", "step=6.ckpt"]


def test_the_trainers_max_steps_counts_steps_and_not_optimizers() -> None:
    module = AlchemiModule(**two_constants())
    t = trainer(max_epochs=-1, max_steps=5)
    t.fit(module, OneLoader(batches(*[1] * 3, energies=[-1e6] * 3)))
    assert (t.global_step, module.recipe.step_count) == (5, 5)


def test_a_fresh_trainer_continues_the_global_step() -> None:
    what = run(strategy(num_steps=3), batches(1, 1))
    t = trainer(max_epochs=-1)
    what.num_steps = 5
    t.fit(AlchemiModule(what), OneLoader(batches(1, 1)))
    assert (t.global_step, what.step_count) == (5, 5)


def test_schedulers_step_once_per_executed_step() -> None:
    scheduler = {"scheduler_cls": torch.optim.lr_scheduler.StepLR, "scheduler_kwargs": {"step_size": 2, "gamma": 0.1}}
    rates: list[float] = []
    what = strategy(
        num_steps=4,
        optimizer_configs=sgd(1e-3, **scheduler),
        hooks=[At(Stage.BEFORE_BATCH, lambda ctx: rates.append(ctx.optimizers[0].param_groups[0]["lr"]))],
    )
    run(what, batches(1, 1))
    assert rates == pytest.approx([1e-3, 1e-3, 1e-4, 1e-4])
