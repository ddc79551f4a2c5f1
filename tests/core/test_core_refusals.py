"""Trainers, options and callbacks that would be a second owner are refused, with what to use instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from core_rigs import (
    QUIET,
    Harm,
    batches,
    force_loss,
    run,
    sgd,
    strategy,
    trainer,
)
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
    WeightAveraging,
)

from nvalchemi_lightning.errors import ConfigurationError, SecondOwnerError
from nvalchemi_lightning.feeding import OneLoader
from nvalchemi_lightning.module import AlchemiModule
from nvalchemi_lightning.owner import SingleOwner, SingleOwnerDDP

REFUSED_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "gradient_clip_val": (
        {"gradient_clip_val": 1.0},
        r"gradient_clip_val=1.0\) .* use hooks=\[GradientClipHook\(max_norm=1.0\)\]",
    ),
    "gradient_clip_val=0": ({"gradient_clip_val": 0.0}, r"GradientClipHook\(max_norm=\.\.\.\)"),
    "gradient_clip_val by value": (
        {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
        r"GradientClipHook\(max_value=1.0\)",
    ),
    "gradient_clip_algorithm": (
        {"gradient_clip_algorithm": "value"},
        r"gradient_clip_algorithm.*GradientClipHook\(max_value=\.\.\.\)",
    ),
    "accumulate_grad_batches": (
        {"accumulate_grad_batches": 2},
        r"batches=2.*GradientAccumulationHook\(2\)",
    ),
    "precision": (
        {"precision": "bf16-mixed"},
        r"precision='bf16-mixed'\) .* use hooks=\[MixedPrecisionHook\(precision='bf16'\)\]",
    ),
}


@pytest.mark.parametrize("name", REFUSED_OPTIONS)
@pytest.mark.parametrize("door", ["run", "fit"])
def test_options_of_a_second_owner_are_refused(name: str, door: str) -> None:
    """B99: no Trainer option is silently ignored; the message names the hook."""
    options, message = REFUSED_OPTIONS[name]
    what = strategy()
    doors = {
        "run": lambda: run(what, batches(1), **options),
        "fit": lambda: trainer(**options).fit(AlchemiModule(what), OneLoader(batches(1))),
    }
    with pytest.raises(SecondOwnerError, match=message):
        doors[door]()
    assert what.step_count == 0


REFUSED_CALLBACKS: dict[str, tuple[Callable[[], Callback], str]] = {
    "accumulation": (
        lambda: GradientAccumulationScheduler({0: 2}),
        "GradientAccumulationScheduler .* GradientAccumulationHook",
    ),
    "swa": (lambda: StochasticWeightAveraging(1e-2), "StochasticWeightAveraging .* use the EMAHook"),
    "averaging": (WeightAveraging, "WeightAveraging .* use the EMAHook"),
    "ema": (EMAWeightAveraging, "EMAWeightAveraging .* use the EMAHook"),
    "lr finder": (LearningRateFinder, r"LearningRateFinder .* OptimizerConfig\(lr=\.\.\.\)"),
    "batch size finder": (BatchSizeFinder, "BatchSizeFinder .* the loader's batch_size"),
}


@pytest.mark.parametrize("name", REFUSED_CALLBACKS)
def test_callbacks_of_a_second_owner_are_refused(name: str) -> None:
    make, message = REFUSED_CALLBACKS[name]
    with pytest.raises(SecondOwnerError, match=f"the callback {message}"):
        run(strategy(hooks=[make()]), batches(1))


def test_a_fractional_validation_interval_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"val_check_interval=0.5\) counts batches; write ValidationConfig"):
        run(strategy(), batches(1), val_check_interval=0.5)


def leave_process_group() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("options", [{}, {"strategy": "auto"}, {"strategy": "ddp"}], ids=["default", "auto", "ddp"])
def test_a_trainer_without_the_owner_is_refused(options: dict[str, Any], request: pytest.FixtureRequest) -> None:
    request.addfinalizer(leave_process_group)
    module = AlchemiModule(models=Harm(), optimizer_configs=sgd(), loss_fn=force_loss())
    with pytest.raises(ConfigurationError, match=r"strategy='nvalchemi'"):
        Trainer(**QUIET, max_epochs=1, **options).fit(module, OneLoader(batches(1)))
    assert module.recipe.step_count == 0


@pytest.mark.parametrize("how", ["validate", "test", "predict"])
def test_an_evaluating_trainer_without_the_owner_is_refused(how: str) -> None:
    module = AlchemiModule(models=Harm(), optimizer_configs=sgd(), loss_fn=force_loss())
    with pytest.raises(ConfigurationError, match=r"strategy='nvalchemi'"):
        getattr(Trainer(**QUIET), how)(module, OneLoader(batches(1)))


def test_one_device_is_one_device() -> None:
    module = AlchemiModule(models=Harm(), optimizer_configs=sgd(), loss_fn=force_loss())
    t = trainer(devices=2)
    with pytest.raises(ConfigurationError, match=r"trains on one device, but devices=2; use strategy='nvalchemi_ddp'"):
        t.fit(module, OneLoader(batches(1)))


def test_the_owner_runs_no_other_module() -> None:
    class Foreign(LightningModule):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            return None

        def configure_optimizers(self) -> None:
            return None

    with pytest.raises(ConfigurationError, match=r"runs an AlchemiModule; got Foreign\. Wrap the models with AlchemiM"):
        trainer().fit(Foreign(), OneLoader(batches(1)))


def test_the_names_are_registered() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    names = StrategyRegistry.available_strategies()
    assert {"nvalchemi", "nvalchemi_ddp", "nvalchemi_ddp_spawn", "nvalchemi_ddp_notebook"} <= set(names)
    assert isinstance(trainer().strategy, SingleOwner)
    assert isinstance(trainer(strategy="nvalchemi_ddp").strategy, SingleOwnerDDP)


def test_the_device_of_the_trainer_is_the_device_of_the_owner() -> None:
    owner = SingleOwner()
    assert owner.root_device == torch.device("cpu")
    owner.parallel_devices = [torch.device("meta")]
    assert owner.root_device == torch.device("meta")


def test_ddp_explains_parameters_without_a_gradient() -> None:
    error = RuntimeError("Expected to have finished reduction in the prior iteration before starting a new one.")
    SingleOwnerDDP().on_exception(error)
    assert "SingleOwnerDDP(find_unused_parameters=True)" in error.__notes__[0]
    other = RuntimeError("something else")
    SingleOwnerDDP().on_exception(other)
    assert not hasattr(other, "__notes__")


def test_a_precision_that_converts_the_module_stays_allowed() -> None:
    what = strategy(models=Harm().float())
    run(what, batches(1), precision="64-true")
    assert what.models["main"].w.dtype is torch.float64
    assert what.step_count == 1


def test_a_list_of_batches_is_no_loader_for_a_trainer() -> None:
    """Lightning takes a list for several loaders; the message says what to write."""
    module = AlchemiModule(models=Harm(), optimizer_configs=sgd(), loss_fn=force_loss())
    with pytest.raises(ConfigurationError, match=r"several loaders.*(OneLoader|DataLoader)"):
        trainer().fit(module, batches(2, 3))
