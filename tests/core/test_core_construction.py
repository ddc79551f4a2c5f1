"""What a strategy accepts, and what it says to everything else."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from core_rigs import At, ConstGrad, Harm, batches, force_loss, run, sgd, strategy, w_of
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn.parallel import DataParallel

from nvalchemi_lightning import EnergyMSELoss, ForceMSELoss, OptimizerConfig, TrainingStrategy, ValidationConfig
from nvalchemi_lightning.errors import (
    ConfigurationError,
    ConfigurationTypeError,
    MissingPredictionError,
    MissingTargetError,
)
from nvalchemi_lightning.losses import ComposedLossFunction, LinearWeight, StressMSELoss
from nvalchemi_lightning.stages import TrainingStage
from nvalchemi_lightning.training_fn import default_training_fn


def test_the_example_of_the_guide() -> None:
    model, val_loader, train_loader = Harm(), batches(2, seed=9), batches(2, 3)

    loss_fn = EnergyMSELoss() + ForceMSELoss() * 10.0

    strategy = TrainingStrategy(
        models=model,
        optimizer_configs=OptimizerConfig(lr=1e-4),
        loss_fn=loss_fn,
        validation_config=ValidationConfig(validation_data=val_loader, every_n_epochs=1),
        num_epochs=20,
    )

    strategy.run(train_loader, enable_progress_bar=False)
    assert (strategy.epoch_count, strategy.step_count) == (20, 40)
    assert isinstance(strategy.flat_optimizers()[0][0], torch.optim.AdamW)
    assert w_of(strategy) == pytest.approx(1.0 + 40 * 1e-4, rel=1e-3)


def test_the_logger_hook_of_the_guide(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("guide")

    class ProgressLogger:
        stage = TrainingStage.AFTER_BATCH
        frequency = 1

        def __call__(self, ctx, stage):  # type: ignore[no-untyped-def]
            logger.info(
                "epoch=%s batch=%s step=%s",
                ctx.epoch,
                ctx.batch_count,
                ctx.step_count,
            )

    with caplog.at_level(logging.INFO, "guide"):
        run(strategy(hooks=[ProgressLogger()]), batches(1, 1))
    lines = [record.getMessage() for record in caplog.records if record.name == "guide"]
    assert lines == ["epoch=0 batch=1 step=1", "epoch=0 batch=2 step=2"]


def test_the_distillation_of_the_guide() -> None:
    def training_fn(models: Any, batch: Any) -> dict[str, Tensor]:
        student_out = models["student"](batch)
        with torch.no_grad():
            teacher_out = models["teacher"](batch)
        return {"student_energy": student_out["energy"], "teacher_energy": teacher_out["energy"].detach()}

    def teacher_targets(
        loss_fn: Any,
        predictions: Mapping[str, Tensor],
        batch: Any,
        *,
        workflow: object | None = None,
        target_keys: Any = None,
        batch_label: str = "Batch",
    ) -> Mapping[str, Tensor]:
        return {"teacher_energy": predictions["teacher_energy"]}

    models = {"student": ConstGrad(), "teacher": ConstGrad()}
    models["teacher"].w.data += 5.0
    what = strategy(
        models=models,
        optimizer_configs={"student": [sgd(0.5)]},
        training_fn=training_fn,
        loss_target_assembler=teacher_targets,
        loss_fn=EnergyMSELoss(prediction_key="student_energy", target_key="teacher_energy"),
        validation_config=ValidationConfig(validation_data=batches(2)),
    )
    run(what, batches(2))
    assert (w_of(what, "student"), w_of(what, "teacher")) == (5.0, 5.0)
    assert what.last_validation["total_loss"] == 0.0  # type: ignore[index]


# Models


def test_one_bare_model_is_main() -> None:
    model = Harm()
    what = strategy(models=model)
    assert what.models == {"main": model}
    assert what.single_model_input is True
    assert what.training_fn is default_training_fn
    assert isinstance(what.loss_fn, ComposedLossFunction)
    assert what.devices == [torch.device("cpu")]
    assert (what.epoch_step_modifier, what.hooks, what.validation_config, what.last_validation) == (1.0, [], None, None)


@pytest.mark.parametrize("kind", [dict, nn.ModuleDict])
def test_named_models_keep_their_names_and_identity(kind: Any) -> None:
    models = {"a": Harm(), "b": Harm()}
    what = strategy(models=kind(models), optimizer_configs={"a": [sgd()]}, training_fn=lambda models, batch: {})
    assert what.models == models
    assert type(what.models) is dict
    assert what.single_model_input is False


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ({}, "models must contain at least one model"),
        (nn.ModuleDict(), "models must contain at least one model"),
        ({"a": 3}, r"map names to nn.Module instances; models\['a'\] is 3"),
        ("model", r"map names to nn.Module instances; models\['main'\] is 'model'"),
        (None, r"map names to nn.Module instances; models\['main'\] is None"),
        ([Harm()], r"map names to nn.Module instances; models\['main'\] is \[Harm\(\)\]"),
        (Harm, r"map names to nn.Module instances; models\['main'\] is <class .*Harm"),
        (DataParallel(Harm()), r"models\['main'\] is wrapped in DataParallel; pass the bare model"),
    ],
    ids=["empty", "empty ModuleDict", "number", "text", "none", "list", "class", "wrapped"],
)
def test_what_is_no_model_is_refused(models: Any, message: str) -> None:
    named = (
        {"optimizer_configs": {}, "training_fn": lambda models, batch: {}}
        if isinstance(models, (dict, nn.ModuleDict))
        else {}
    )
    fields = {"models": models, "loss_fn": force_loss(), "num_steps": 1, **{k: v for k, v in named.items() if v}}
    with pytest.raises((ValidationError, ConfigurationTypeError), match=message):
        TrainingStrategy(**fields)


def test_models_are_required() -> None:
    with pytest.raises(ValidationError, match="models"):
        TrainingStrategy(loss_fn=force_loss(), num_steps=1)


# Keywords


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("modles", "models"),
        ("optimizer_config", "optimizer_configs"),
        ("loss", "loss_fn"),
        ("n_epochs", "num_epochs"),
        ("max_steps", "num_steps"),
        ("validation", "validation_config"),
        ("hook", "hooks"),
        ("step_counts", "step_count"),
    ],
)
def test_a_misspelt_keyword_names_the_nearest(wrong: str, right: str) -> None:
    with pytest.raises(ValidationError, match=f"TrainingStrategy has no field '{wrong}'; did you mean '{right}"):
        strategy(**{wrong: 1})


def test_an_unknown_keyword_lists_what_there_is() -> None:
    with pytest.raises(ValidationError, match=r"has no field 'zzz' \(fields: .*loss_fn, .*models"):
        strategy(zzz=1)


def test_a_misspelt_attribute_is_refused() -> None:
    with pytest.raises((ValueError, AttributeError), match="num_step"):
        strategy().num_step = 3


# Optimizers


def test_the_accepted_forms_of_optimizers() -> None:
    config = sgd()
    for form in (config, [config], (config,), {"main": [config]}, {"main": config}, {0: [config]}):
        assert strategy(optimizer_configs=form).optimizer_configs == {"main": [config]}
    several = strategy(optimizer_configs=[config, sgd(0.1)]).optimizer_configs
    assert several["main"][0] is config
    assert strategy(optimizer_configs=[{"lr": 1e-3}]).optimizer_configs["main"][0].lr == 1e-3
    assert strategy(optimizer_configs={"main": [{"lr": 1e-3}]}).optimizer_configs["main"][0].lr == 1e-3


def two(**fields: Any) -> TrainingStrategy:
    return strategy(**{"models": {"a": Harm(), "b": Harm()}, "training_fn": lambda models, batch: {}, **fields})


@pytest.mark.parametrize("form", [sgd(), [sgd()]], ids=["one", "list"])
def test_named_models_need_keyed_optimizers(form: Any) -> None:
    with pytest.raises(
        ValidationError, match=r"Unkeyed optimizer_configs require single-model input; .*'<model name>'"
    ):
        two(optimizer_configs=form)


def test_an_optimizer_for_a_model_that_does_not_exist_is_refused() -> None:
    with pytest.raises(
        ValidationError, match=r"has key 'mian', not present in models; did you mean 'main'\?; available"
    ):
        strategy(optimizer_configs={"mian": [sgd()]})


@pytest.mark.parametrize(("form", "where"), [({}, ""), ([], " for 'main'"), ({"main": []}, " for 'main'"), (None, "")])
def test_no_optimizer_at_all_is_refused(form: Any, where: str) -> None:
    with pytest.raises(
        ValidationError,
        match=f"optimizer_configs is empty{where}; give at least one" if form is not None else "optimizer_configs",
    ):
        strategy(optimizer_configs=form)


def test_a_wrong_optimizer_is_refused() -> None:
    with pytest.raises((ValidationError, ConfigurationTypeError), match="optimizer_configs"):
        strategy(optimizer_configs=torch.optim.SGD)
    with pytest.raises((ValidationError, ConfigurationTypeError), match="optimizer_configs"):
        strategy(optimizer_configs=3)


def test_a_configured_model_without_trainable_parameters_is_refused() -> None:
    model = Harm()
    model.w.requires_grad_(False)
    with pytest.raises(
        ConfigurationError, match=r"Configured model 'main' has no trainable parameters \(requires_grad=Tr"
    ):
        run(strategy(models=model), batches(1))


# Duration


@pytest.mark.parametrize("name", ["num_epochs", "num_steps"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "many"])
def test_a_duration_is_a_positive_integer(name: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=name):
        strategy(**{name: value})


def test_exactly_one_duration() -> None:
    message = "Exactly one of num_epochs or num_steps must be set; got"
    with pytest.raises(ValidationError, match=f"{message} num_epochs=1, num_steps=2"):
        strategy(num_epochs=1, num_steps=2)
    with pytest.raises(ValidationError, match=f"{message} neither"):
        strategy(num_epochs=None)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_the_step_modifier_is_positive_and_finite(value: float) -> None:
    with pytest.raises(ValidationError, match="epoch_step_modifier"):
        strategy(epoch_step_modifier=value)


@pytest.mark.parametrize(("modifier", "steps"), [(0.5, 3), (0.4, 3), (2.0, 12), (1.0, 6)])
def test_the_step_modifier_changes_the_target(modifier: float, steps: int) -> None:
    what = run(strategy(num_epochs=2, epoch_step_modifier=modifier), batches(1, 1, 1))
    assert what.step_count == steps


# Losses, assembler, devices


def test_a_leaf_loss_is_wrapped() -> None:
    leaf = EnergyMSELoss()
    assert list(strategy(loss_fn=leaf).loss_fn.components) == [leaf]


@pytest.mark.parametrize(
    "loss", [None, 3, nn.MSELoss(), EnergyMSELoss, [EnergyMSELoss()]], ids=lambda loss: type(loss).__name__
)
def test_what_is_no_loss_is_refused(loss: Any) -> None:
    with pytest.raises(ConfigurationTypeError, match="loss_fn must be a BaseLossFunction or ComposedLossFunction; got"):
        strategy(loss_fn=loss)


def test_a_loss_is_required() -> None:
    with pytest.raises(ValidationError, match="loss_fn"):
        TrainingStrategy(models=Harm(), num_steps=1)


def test_an_assembler_must_be_callable() -> None:
    with pytest.raises((ValidationError, ConfigurationTypeError), match=r"(?s)loss_target_assembler.*callable"):
        strategy(loss_target_assembler=3)


def test_an_assembler_provides_the_targets() -> None:
    seen: list[Any] = []

    def targets(
        loss_fn: Any,
        predictions: Mapping[str, Tensor],
        batch: Any,
        *,
        workflow: Any = None,
        target_keys: Any = None,
        batch_label: str = "Batch",
    ) -> dict[str, Tensor]:
        seen.append((workflow, target_keys, batch_label))
        return {"energy": predictions["predicted_energy"].detach(), "forces": batch.forces}

    what = strategy(
        loss_target_assembler=targets, num_steps=1, validation_config=ValidationConfig(validation_data=batches(1))
    )
    run(what, batches(1))
    assert [(workflow, label) for workflow, _, label in seen] == [(what, "Batch"), (what, "Validation batch")]
    assert seen[0][1] == ("energy", "forces")
    assert seen[1][1] in (None, seen[0][1])
    assert what.last_validation["per_component_unweighted"]["EnergyMSELoss"] == 0.0  # type: ignore[index]


def test_a_missing_label_is_named_before_the_model_is_called() -> None:
    called: list[int] = []

    class Counting(Harm):
        def forward(self, batch: Any) -> dict[str, Tensor]:
            called.append(1)
            return super().forward(batch)

    what = strategy(models=Counting(), loss_fn=force_loss() + StressMSELoss())
    with pytest.raises(
        MissingTargetError, match="Batch is missing target attribute 'stress' required by StressMSELoss"
    ):
        run(what, batches(1))
    assert called == []


def test_a_missing_prediction_is_named() -> None:
    what = strategy(training_fn=lambda model, batch: {"predicted_enrgy": batch.energy})
    with pytest.raises(MissingPredictionError, match="predicted_energy"):
        run(what, batches(1))


@pytest.mark.parametrize("devices", ["cpu", torch.device("cpu"), ["cpu"], [torch.device("cpu")], ("cpu",)])
def test_the_accepted_forms_of_devices(devices: Any) -> None:
    assert strategy(devices=devices).devices == [torch.device("cpu")]


def test_devices_are_one_or_one_per_model() -> None:
    configs = {"a": [sgd()]}
    assert len(two(optimizer_configs=configs, devices=["cpu", "cpu"]).devices) == 2
    with pytest.raises(ValidationError, match=r"devices must hold 1 or 2 devices \(one per model\); got 3"):
        two(optimizer_configs=configs, devices=["cpu"] * 3)
    with pytest.raises(ValidationError, match=r"devices must hold 1.* devices?.*; got 0"):
        strategy(devices=[])


def test_named_models_train_on_one_device() -> None:
    with pytest.raises(
        ValidationError, match=r"training across distinct devices is unsupported; got \['cpu', 'meta'\]"
    ):
        two(optimizer_configs={"a": [sgd()]}, devices=["cpu", "meta"])


@pytest.mark.parametrize("device", ["gpuu", "cpu:x"])
def test_a_device_that_does_not_exist_is_refused(device: str) -> None:
    with pytest.raises((ValidationError, ConfigurationError), match=f"devices.*{device}|{device}.*devices"):
        strategy(devices=[device])


def test_a_strategy_is_its_own_validated_form() -> None:
    what = strategy()
    assert TrainingStrategy.model_validate(what) is what
    with pytest.raises(ValidationError, match="TrainingStrategy"):
        TrainingStrategy.model_validate(3)


def test_the_loss_is_told_step_and_epoch_before_they_advance() -> None:
    weights: list[float] = []
    loss = EnergyMSELoss() + LinearWeight(start=0.0, end=1.0, num_steps=4) * ForceMSELoss()
    loss.normalize_weights = False
    hook = At(TrainingStage.AFTER_BATCH, lambda ctx: weights.append(ctx.losses["per_component_weight"]["ForceMSELoss"]))
    run(strategy(loss_fn=loss, num_steps=4, hooks=[hook]), batches(1, 1))
    assert weights == pytest.approx([0.0, 0.25, 0.5, 0.75])


def test_the_context_names_its_strategy_and_models() -> None:
    seen: list[Any] = []
    what = strategy(hooks=[At(stage, seen.append) for stage in (TrainingStage.SETUP, TrainingStage.AFTER_LOSS)])
    run(what, batches(1))
    for ctx in seen:
        assert ctx.workflow is what
        assert ctx.models is what.models
        assert ctx.model is what.models["main"]
        assert ctx.global_rank == 0
    what = two(
        optimizer_configs={"a": [sgd()]},
        hooks=[At(TrainingStage.AFTER_LOSS, seen.append)],
        training_fn=lambda models, batch: default_training_fn(models["a"], batch),
    )
    run(what, batches(1))
    assert seen[-1].model is None
    assert len(seen[-1].optimizers) == len(seen[-1].lr_schedulers) == 1


def test_losses_stay_those_of_the_loss_function() -> None:
    """What a hook does to the loss before backward is not what is reported afterwards."""
    seen: list[float] = []

    def double(ctx: Any) -> None:
        seen.append(ctx.loss.item())
        ctx.loss = ctx.loss * 2

    hooks = [At(TrainingStage.BEFORE_BACKWARD, double)]
    hooks.append(At(TrainingStage.AFTER_BATCH, lambda ctx: seen.append(ctx.loss.item())))
    run(strategy(hooks=hooks), batches(1))
    assert seen[0] == seen[1]
