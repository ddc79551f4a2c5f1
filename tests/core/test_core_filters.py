"""Modes, trainable flags and parameter filters hold for a run and no longer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from core_rigs import (
    At,
    BoomError,
    Harm,
    batches,
    raising,
    run,
    sgd,
    strategy,
    two_models,
)
from torch import nn

from nvalchemi_lightning.errors import UnknownNameError
from nvalchemi_lightning.stages import TrainingStage

Stage = TrainingStage


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
