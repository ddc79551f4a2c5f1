"""The owner of the update by itself: permits, guards and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from core_rigs import (
    At,
    ConstGrad,
    batches,
    constant_loss,
    run,
    sgd,
    strategy,
)
from torch import Tensor, nn

from nvalchemi_lightning.errors import SecondOwnerError
from nvalchemi_lightning.hooks.registry import HookRegistry
from nvalchemi_lightning.stages import TrainingStage
from nvalchemi_lightning.update import UpdateOwner
from nvalchemi_lightning.validation import ValidationConfig

Stage = TrainingStage


def plain_owner() -> tuple[UpdateOwner, nn.Parameter, torch.optim.Optimizer]:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    owner = UpdateOwner.plain(HookRegistry())
    owner.attach([parameter], [optimizer], [None])
    return owner, parameter, optimizer


def test_permits_are_one_shot() -> None:
    owner, _, _ = plain_owner()
    for action in ("backward", "optimizer_step"):
        with pytest.raises(SecondOwnerError, match=f"{action} was called outside a batch, but"):
            owner.consume(action)


def test_an_error_in_backward_takes_the_permit_back() -> None:
    owner, parameter, _ = plain_owner()

    class Ctx:
        window = None
        loss = torch.zeros(2, requires_grad=True)

    with pytest.raises(RuntimeError, match="only for scalar outputs"):
        owner.backward(Ctx())  # type: ignore[arg-type]
    with pytest.raises(SecondOwnerError, match="backward was called at DO_BACKWARD"):
        owner.consume("backward")
    with pytest.raises(SecondOwnerError, match="was accumulated"):
        parameter.sum().backward()


def test_an_error_in_the_step_takes_the_permit_back() -> None:
    owner, parameter, optimizer = plain_owner()

    def fail(*_: Any) -> None:
        raise KeyError("in the step")

    handle = optimizer.register_step_post_hook(fail)
    parameter.grad = torch.ones(1)
    with pytest.raises(KeyError, match="in the step"):
        owner.step(None)  # type: ignore[arg-type]
    handle.remove()
    with pytest.raises(SecondOwnerError, match=r"SGD.step\(\) was called"):
        optimizer.step()


def test_detaching_twice_is_harmless() -> None:
    owner, parameter, optimizer = plain_owner()
    owner.detach()
    owner.detach()
    parameter.sum().backward()
    optimizer.step()
    assert parameter == 0.0


def test_attaching_again_does_not_guard_twice() -> None:
    owner, parameter, optimizer = plain_owner()
    owner.attach([parameter], [optimizer], [None])
    owner.detach()
    parameter.sum().backward()
    optimizer.step()


def test_every_parameter_in_charge_is_zeroed() -> None:
    owner, parameter, _ = plain_owner()
    owner.detach()
    parameter.grad = torch.ones(1)
    owner.zero_gradients()
    assert parameter.grad is None


def test_gradients_do_not_add_up_over_batches() -> None:
    gradients: list[float] = []
    what = strategy(
        models=ConstGrad(),
        loss_fn=constant_loss(),
        optimizer_configs=sgd(1.0),
        hooks=[At(Stage.AFTER_BACKWARD, lambda ctx: gradients.append(float(ctx.model.w.grad)))],
    )
    run(what, batches(1, 1, 1, energies=[-1e6] * 3), callbacks=[])
    assert gradients == [1.0, 1.0, 1.0]


def test_validation_keeps_the_gradients_of_training() -> None:
    kept: list[bool] = []

    def compare(ctx: Any) -> None:
        kept.append(torch.equal(ctx.model.w.grad, before[-1]))

    before: list[Tensor] = []
    what = strategy(
        num_steps=2,
        validation_config=ValidationConfig(validation_data=batches(2), every_n_steps=1, grad_mode="enabled"),
        hooks=[
            At(Stage.AFTER_BATCH, lambda ctx: before.append(ctx.model.w.grad.clone())),
            At(Stage.AFTER_VALIDATION, compare),
        ],
    )
    run(what, batches(1, 1))
    assert kept == [True, True]
