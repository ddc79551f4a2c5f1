"""Clipping of gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from update_rigs import Accumulate, At, Net, Noting, Stage, adam, batches, constant, network, run, strategy, w_of

from nvalchemi_lightning.context import TrainContext
from nvalchemi_lightning.errors import ConfigurationError, TrainingStateError
from nvalchemi_lightning.hooks import GradientClipHook


@pytest.mark.parametrize("limits", [{}, {"max_norm": 1.0, "max_value": 1.0}], ids=str)
def test_one_limit_is_required(limits: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match="GradientClipHook requires exactly one of max_norm or max_value; got"):
        GradientClipHook(**limits)


@pytest.mark.parametrize("name", ["max_norm", "max_value"])
@pytest.mark.parametrize("limit", [0.0, -1.0, float("inf"), float("nan")])
def test_a_limit_is_positive_and_finite(name: str, limit: float) -> None:
    with pytest.raises(ValidationError, match=r"greater than 0|finite number"):
        GradientClipHook(**{name: limit})


def test_a_misspelt_option_names_the_right_one() -> None:
    with pytest.raises(ValidationError, match="no field 'max_nrom'; did you mean 'max_norm'"):
        GradientClipHook(max_nrom=1.0)


def test_two_clips_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="exclusive key 'GradientClipHook'"):
        GradientClipHook(max_norm=1.0) + GradientClipHook(max_value=1.0)


def test_the_norm_is_clipped_before_the_step() -> None:
    hook = GradientClipHook(max_norm=0.25)
    assert hook.last_total_norm is None
    assert w_of(run(strategy(hook), constant(2))) == pytest.approx(-0.5, rel=1e-5)
    assert hook.last_total_norm is not None
    assert hook.last_total_norm.item() == 1.0


def test_a_small_gradient_is_left_alone() -> None:
    assert w_of(run(strategy(GradientClipHook(max_norm=2.0)), constant(2))) == -2.0


def test_values_are_clamped() -> None:
    hook = GradientClipHook(max_value=0.25)
    assert w_of(run(strategy(hook), constant(2))) == -0.5
    assert hook.last_total_norm is not None


def test_the_norm_is_that_of_torch_over_all_parameters_once() -> None:
    model = Net()
    hook = GradientClipHook(max_norm=0.01)
    what = network(hook, models=model, optimizer_configs=[adam(), adam()])
    seen: list[Any] = []

    def norm(ctx: Any) -> None:
        seen.append(torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()])))

    what.register_hook(At(Stage.BEFORE_OPTIMIZER_STEP, norm))
    what.register_hook(At(Stage.AFTER_OPTIMIZER_STEP, norm))
    run(what, batches(3, dtype=torch.float32))
    torch.testing.assert_close(hook.last_total_norm, seen[0])
    torch.testing.assert_close(seen[1], torch.tensor(0.01), rtol=1e-4, atol=0)


def context(**models: nn.Module) -> TrainContext:
    """Return a context with the gradient of every parameter equal to its value."""
    for model in models.values():
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
    trained = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models.values()]
    return TrainContext(batch=None, models=models, optimizers=trained, loss=torch.zeros(()))


class Weights(nn.Module):
    def __init__(self, *values: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(values))


class Log:
    """A workflow that keeps what is logged."""

    def __init__(self) -> None:
        self.scalars: dict[str, Any] = {}

    def log(self, name: str, value: Any) -> None:
        self.scalars[name] = value.item()


@pytest.mark.parametrize("per_model", [False, True])
def test_models_are_clipped_together_or_one_by_one(per_model: bool) -> None:
    ctx = context(a=Weights(3.0, 4.0), b=Weights(0.0, 12.0))
    ctx.workflow = log = Log()
    hook = GradientClipHook(max_norm=6.5, per_model=per_model)
    hook(ctx, Stage.DO_OPTIMIZER_STEP, False)
    assert ctx.models is not None
    a, b = (model.w.grad for model in ctx.models.values())
    torch.testing.assert_close(a, torch.tensor([3.0, 4.0]) * (1.0 if per_model else 0.5))
    torch.testing.assert_close(b, torch.tensor([0.0, 6.5 if per_model else 6.0]), rtol=1e-5, atol=0)
    assert ctx.gradient_norm is hook.last_total_norm
    assert log.scalars == {
        **({"gradient/norm/a": 5.0, "gradient/norm/b": 12.0} if per_model else {}),
        "gradient/norm": 13.0,
    }


def test_parameters_without_a_gradient_are_passed_over() -> None:
    ctx = context(a=Weights(3.0, 4.0))
    assert ctx.models is not None
    ctx.models["a"].w.grad = None
    hook = GradientClipHook(max_norm=1.0)
    hook(ctx, Stage.DO_OPTIMIZER_STEP, False)
    assert hook.last_total_norm is not None
    assert hook.last_total_norm.item() == 0.0


@pytest.mark.parametrize("stage", [Stage.BEFORE_BATCH, Stage.DO_BACKWARD, Stage.AFTER_OPTIMIZER_STEP, Stage.SETUP])
def test_nothing_is_clipped_at_other_stages(stage: Stage) -> None:
    ctx, hook = context(a=Weights(3.0)), GradientClipHook(max_norm=1.0)
    assert hook(ctx, stage, False) == (True, ctx.loss)
    assert hook.last_total_norm is None


def test_only_gradients_that_are_used_are_clipped() -> None:
    """Once per window, and not where the step was vetoed."""
    hook = GradientClipHook(max_norm=0.25)
    assert w_of(run(strategy(Accumulate(2), hook, num_steps=1), constant(2))) == pytest.approx(-0.25, rel=1e-5)
    vetoed = GradientClipHook(max_norm=0.25)
    what = strategy(Noting(priority=10, DO_OPTIMIZER_STEP=False), vetoed, num_epochs=5)
    what.train_batch(constant(1)[0])
    assert vetoed.last_total_norm is None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_may_be_an_error(value: float) -> None:
    ctx = context(a=Weights(1.0), b=Weights(value))
    ctx.step_count = 7
    with pytest.raises(TrainingStateError, match=r"gradient norm is (nan|inf) after 7 steps, first in b\.w; look at"):
        GradientClipHook(max_norm=1.0, error_if_nonfinite=True)(ctx, Stage.DO_OPTIMIZER_STEP, False)
    GradientClipHook(max_norm=1.0)(ctx, Stage.DO_OPTIMIZER_STEP, False)


def test_finite_gradients_may_be_demanded() -> None:
    hook = GradientClipHook(max_norm=0.5, error_if_nonfinite=True)
    assert w_of(run(strategy(hook), constant(1))) == pytest.approx(-0.5, rel=1e-5)


def test_the_norm_is_logged() -> None:
    seen: list[Any] = []
    what = strategy(GradientClipHook(max_norm=0.25))
    what.register_hook(At(Stage.AFTER_BATCH, lambda ctx: seen.append(what.requests.scalars["gradient/norm"].item())))
    run(what, constant(2))
    assert seen == [1.0, 1.0]
