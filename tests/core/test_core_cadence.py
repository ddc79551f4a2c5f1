"""When validation runs, and what listens to it: metric-driven schedulers, early stopping, native checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from core_rigs import (
    At,
    ConstGrad,
    Harm,
    Recorder,
    batches,
    constant_loss,
    force_loss,
    run,
    sgd,
    strategy,
    trainer,
    w_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from pydantic import ValidationError
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from nvalchemi_lightning.errors import ConfigurationError, LabelNotFoundError
from nvalchemi_lightning.feeding import OneLoader
from nvalchemi_lightning.module import AlchemiModule
from nvalchemi_lightning.optim import OptimizerConfig
from nvalchemi_lightning.stages import TrainingStage
from nvalchemi_lightning.validation import ValidationConfig

Stage = TrainingStage


def config(**fields: Any) -> ValidationConfig:
    return ValidationConfig(**{"validation_data": batches(2, seed=9), **fields})


def validated_at(loader: Any, **fields: Any) -> list[int]:
    recorder = Recorder([Stage.AFTER_VALIDATION])
    run(strategy(hooks=[recorder, *fields.pop("hooks", ())], **fields), loader)
    return [step for _, step, *_ in recorder.rows]


# When


def test_the_interval_runs_on_over_epochs_and_ends_with_the_final_weights() -> None:
    """B97: 7 batches per epoch, every 10 steps, 3 epochs."""
    assert validated_at(batches(*[1] * 7), num_epochs=3, validation_config=config(every_n_steps=10)) == [10, 20, 21]


@pytest.mark.parametrize(
    ("cadence", "duration", "expected"),
    [
        ({}, {"num_steps": 5}, [5]),
        ({"every_n_steps": 2}, {"num_steps": 4}, [2, 4]),
        ({"every_n_steps": 100}, {"num_steps": 4}, [4]),
        ({"every_n_epochs": 1}, {"num_epochs": 3}, [3, 6, 9]),
        ({"every_n_epochs": 2}, {"num_epochs": 3}, [6, 9]),
        ({"every_n_epochs": 1}, {"num_steps": 4}, [3, 4]),
        ({"every_n_epochs": 4}, {"num_epochs": 1}, [3]),
    ],
)
def test_every_due_point_validates_once(cadence: dict[str, int], duration: dict[str, int], expected: list[int]) -> None:
    assert validated_at(batches(1, 1, 1), validation_config=config(**cadence), **duration) == expected


@settings(deadline=None, max_examples=10)
@given(every=st.integers(1, 5), steps=st.integers(1, 8), length=st.integers(1, 4))
def test_steps_are_counted_whatever_the_epochs(every: int, steps: int, length: int) -> None:
    expected = sorted({*range(every, steps + 1, every), steps})
    assert (
        validated_at(batches(*[1] * length), num_steps=steps, validation_config=config(every_n_steps=every)) == expected
    )


def test_a_batch_without_a_step_makes_nothing_due() -> None:
    """B97 with two batches per step: steps count, not batches, and a parked counter does not validate again."""
    every_other = At(Stage.DO_OPTIMIZER_STEP, lambda ctx: ctx.batch_count % 2 and ctx.optimizers[0].step())
    fields = {"num_steps": 11, "hooks": [every_other], "validation_config": config(every_n_steps=5)}
    assert validated_at(batches(*[1] * 7), **fields) == [5, 10, 11]


def test_a_run_without_a_batch_validates_nothing() -> None:
    what = run(strategy(num_steps=2), batches(1))
    what.validation_config = config()
    run(what, batches(1))
    assert what.last_validation is None


def test_a_second_run_validates_its_own_final_weights() -> None:
    recorder = Recorder([Stage.AFTER_VALIDATION])
    what = run(strategy(num_steps=2, validation_config=config(every_n_steps=2), hooks=[recorder]), batches(1))
    what.num_steps = 3
    run(what, batches(1))
    assert [row[1] for row in recorder.rows] == [2, 3]


def test_a_failed_run_does_not_validate_at_its_end() -> None:
    def fail(ctx: Any) -> None:
        raise ZeroDivisionError

    what = strategy(validation_config=config(), hooks=[At(Stage.AFTER_BATCH, fail)])
    with pytest.raises(ZeroDivisionError):
        run(what, batches(1))
    assert what.last_validation is None


TRAINER_CADENCES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "the default is every epoch": ({}, [3, 6]),
    "check_val_every_n_epoch": ({"check_val_every_n_epoch": 2}, [6]),
    "val_check_interval counts executed steps": ({"val_check_interval": 4, "check_val_every_n_epoch": None}, [4, 6]),
}


@pytest.mark.parametrize("name", TRAINER_CADENCES)
def test_the_cadence_of_a_trainer_is_kept(name: str) -> None:
    options, expected = TRAINER_CADENCES[name]
    recorder = Recorder([Stage.AFTER_VALIDATION])
    module = AlchemiModule(models=Harm(), loss_fn=force_loss(), optimizer_configs=sgd(), hooks=[recorder])
    trainer(max_epochs=2, **options).fit(module, OneLoader(batches(1, 1, 1)), OneLoader(batches(2)))
    assert [row[1] for row in recorder.rows] == expected


def test_no_validation_leaves_the_slot_empty(tmp_path: Path) -> None:
    """B109: hooks see None, and loggers and native checkpoints do without."""
    seen: list[Any] = []
    what = strategy(num_epochs=2, hooks=[At(Stage.AFTER_EPOCH, lambda ctx: seen.append(ctx.validation))])
    saver = ModelCheckpoint(tmp_path / "saved", filename="{epoch}")
    run(what, batches(1, 1), callbacks=[saver], enable_checkpointing=True, logger=CSVLogger(tmp_path))
    assert seen == [None, None]
    assert what.last_validation is None
    assert list((tmp_path / "saved").glob("*.ckpt"))


# Metric-driven schedulers


def plateau(lr: float = 1.0, **fields: Any) -> OptimizerConfig:
    return sgd(
        lr,
        scheduler_cls=ReduceLROnPlateau,
        scheduler_kwargs={"patience": 0, "factor": 0.1, **fields.pop("scheduler_kwargs", {})},
        **fields,
    )


def constant(model: Any, batch: Any) -> dict[str, Tensor]:
    return {"predicted_energy": torch.zeros_like(batch.energy)}


def test_a_plateau_scheduler_steps_at_every_validation_and_nowhere_else() -> None:
    """B51: 20 steps, validation every 5, constant loss: four steps, the last at the final weights."""
    rates: list[tuple[int, float]] = []

    def note(ctx: Any) -> None:
        rates.append((ctx.step_count, ctx.optimizers[0].param_groups[0]["lr"]))

    what = strategy(
        models=ConstGrad(),
        loss_fn=constant_loss(),
        optimizer_configs=plateau(),
        num_steps=20,
        validation_config=config(every_n_steps=5, validation_fn=constant),
        hooks=[At(Stage.AFTER_BATCH, note)],
    )
    run(what, batches(*[1] * 4, energies=[-1e6] * 4))
    changes = [step for (step, rate), (_, before) in zip(rates[1:], rates, strict=False) if rate != before]
    assert changes == [11, 16]
    scheduler = what.flat_optimizers()[1][0]
    assert scheduler.last_epoch == 4
    assert what.flat_optimizers()[0][0].param_groups[0]["lr"] == pytest.approx(1e-3)
    assert what.last_validation is not None


def test_every_plateau_scheduler_steps_once_per_validation() -> None:
    def both(models: Any, batch: Any) -> dict[str, Tensor]:
        return {"predicted_energy": models["a"](batch)["energy"] + models["b"](batch)["energy"]}

    what = strategy(
        models={"a": ConstGrad(), "b": ConstGrad()},
        loss_fn=constant_loss(),
        training_fn=both,
        optimizer_configs={"a": [plateau(), sgd()], "b": [plateau()]},
        num_steps=4,
        validation_config=config(every_n_steps=2),
    )
    run(what, batches(1, 1))
    first, none, second = what.flat_optimizers()[1]
    assert none is None
    assert (first.last_epoch, second.last_epoch) == (2, 2)


def test_the_final_pass_steps_the_scheduler_too() -> None:
    what = strategy(optimizer_configs=plateau(1e-3), num_steps=3, validation_config=config(every_n_steps=2))
    run(what, batches(1, 1))
    assert what.flat_optimizers()[1][0].last_epoch == 2


def test_hooks_see_the_summary_before_the_scheduler_acts_and_afterwards() -> None:
    """The summary is never consumed."""
    rates: list[float] = []
    after = At(Stage.AFTER_VALIDATION, lambda ctx: rates.append(ctx.optimizers[0].param_groups[0]["lr"]))
    seen: list[bool] = []
    later = At(Stage.BEFORE_BATCH, lambda ctx: seen.append(ctx.validation is not None))
    what = strategy(
        optimizer_configs=plateau(1e-3),
        num_steps=3,
        validation_config=config(
            every_n_steps=1,
            validation_fn=lambda model, batch: {"predicted_energy": batch.energy + 1, "predicted_forces": batch.forces},
        ),
        hooks=[after, later],
    )
    run(what, batches(1))
    assert rates == pytest.approx([1e-3, 1e-3, 1e-4])
    assert seen == [False, True, True]


def test_validating_by_hand_steps_no_scheduler() -> None:
    what = strategy(optimizer_configs=plateau(1e-3), num_steps=1, validation_config=config())
    what.validate()
    run(what, batches(1))
    scheduler = what.flat_optimizers()[1][0]
    assert scheduler.last_epoch == 1
    what.validate()
    assert scheduler.last_epoch == 1


def test_validating_from_a_hook_steps_no_scheduler() -> None:
    by_hand = At(Stage.AFTER_BATCH, lambda ctx: ctx.step_count == 1 and ctx.workflow.validate())
    what = strategy(optimizer_configs=plateau(1e-3), num_steps=2, validation_config=config(), hooks=[by_hand])
    run(what, batches(1, 1))
    assert what.flat_optimizers()[1][0].last_epoch == 1


def test_the_sanity_check_steps_no_scheduler() -> None:
    module = AlchemiModule(models=Harm(), loss_fn=force_loss(), optimizer_configs=plateau(1e-3))
    trainer(num_sanity_val_steps=2).fit(module, OneLoader(batches(1)), OneLoader(batches(1)))
    assert module.recipe.flat_optimizers()[1][0].last_epoch == 1


@pytest.mark.parametrize(
    "adapter",
    ["total_loss", lambda summary: summary["per_component_unweighted"]["ForceMSELoss"]],
    ids=["key", "function"],
)
def test_what_a_plateau_scheduler_watches(adapter: Any) -> None:
    what = strategy(
        optimizer_configs=plateau(1e-3, scheduler_metric_adapter=adapter), num_steps=1, validation_config=config()
    )
    run(what, batches(1))
    summary: Any = what.last_validation
    expected = summary["total_loss"] if isinstance(adapter, str) else adapter(summary)
    assert what.flat_optimizers()[1][0].best == pytest.approx(expected.item())


def test_an_unknown_metric_is_named_with_those_there_are() -> None:
    what = strategy(
        optimizer_configs=plateau(1e-3, scheduler_metric_adapter="totl_loss"), num_steps=1, validation_config=config()
    )
    message = (
        "Scheduler metric key 'totl_loss' not found in validation summary; did you mean 'total_loss'.*available keys"
    )
    with pytest.raises(LabelNotFoundError, match=message):
        run(what, batches(1))


def test_a_plateau_scheduler_without_validation_is_refused_at_construction() -> None:
    """B51."""
    message = (
        r"optimizer_configs\['main'\] has the scheduler ReduceLROnPlateau, .* the run does not validate: set valid"
    )
    with pytest.raises(ValidationError, match=message):
        strategy(optimizer_configs=plateau())
    module = AlchemiModule(models=Harm(), loss_fn=force_loss(), optimizer_configs=plateau())
    with pytest.raises(ConfigurationError, match=message):
        trainer().fit(module, OneLoader(batches(1)))
    trainer().fit(module, OneLoader(batches(1)), OneLoader(batches(1)))


def test_a_plateau_scheduler_with_validation_switched_off_is_refused() -> None:
    what = strategy(optimizer_configs=plateau(1e-3), num_steps=1, validation_config=config())
    with pytest.raises(ConfigurationError, match=r"ReduceLROnPlateau.*limit_val_batches"):
        run(what, batches(1), limit_val_batches=0)


# Native callbacks that monitor validation


class Worse(nn.Module):
    """A model whose validation error grows with every step."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, batch: Any) -> dict[str, Tensor]:
        return {"energy": self.w.expand(batch.num_graphs, 1)}


def worsening(**fields: Any) -> Any:
    """Train towards labels far below while validation labels are 0."""
    return strategy(
        models=Worse(),
        loss_fn=constant_loss(),
        optimizer_configs=sgd(1.0),
        validation_config=ValidationConfig(
            validation_data=batches(2, energies=[0.0, 0.0]), **{"every_n_steps": 2, **fields.pop("cadence", {})}
        ),
        **fields,
    )


FAR_BELOW = batches(*[1] * 4, energies=[-1e6] * 4)


@pytest.mark.parametrize(("patience", "stopped_at"), [(1, 4), (2, 6), (3, 8)])
def test_early_stopping_stops_at_a_validation(patience: int, stopped_at: int) -> None:
    """The best is at step 2; validation runs every 2 steps, also within an epoch of 4."""
    recorder = Recorder([Stage.AFTER_VALIDATION, Stage.AFTER_EPOCH, Stage.AFTER_TRAINING])
    stopper = EarlyStopping("validation/total_loss", patience=patience)
    what = run(worsening(num_steps=100, hooks=[recorder]), FAR_BELOW, callbacks=[stopper])
    epochs, position = divmod(stopped_at, 4)
    assert (what.step_count, what.epoch_count, what.epoch_step_count) == (stopped_at, epochs, position)
    assert stopper.best_score.item() == pytest.approx(2.0)
    assert recorder.names.count("AFTER_VALIDATION") == stopped_at // 2
    assert recorder.names.count("AFTER_EPOCH") == epochs
    assert recorder.names[-1] == "AFTER_TRAINING"


def test_an_early_stop_is_a_request_to_stop() -> None:
    what = run(worsening(num_steps=100), FAR_BELOW, callbacks=[EarlyStopping("validation/total_loss", patience=1)])
    assert what.stop_reason is not None
    run(what, FAR_BELOW)
    assert (what.stop_reason, what.step_count) == (None, 100)


def test_early_stopping_of_the_training_loss_without_validation() -> None:
    """Without validation, native callbacks act at the end of an epoch, as they do with Lightning."""
    stopper = EarlyStopping("loss", patience=1, min_delta=1e9)
    what = run(strategy(num_epochs=50), batches(1, 1), callbacks=[stopper], log_every_n_steps=1)
    assert what.epoch_count == 2


def test_early_stopping_by_epochs() -> None:
    stopper = EarlyStopping("validation/total_loss", patience=2)
    what = run(
        worsening(num_epochs=50, cadence={"every_n_steps": None, "every_n_epochs": 1}), FAR_BELOW, callbacks=[stopper]
    )
    assert (what.epoch_count, what.step_count) == (3, 12)


def test_a_native_checkpoint_per_validation(tmp_path: Path) -> None:
    saver = ModelCheckpoint(
        tmp_path,
        monitor="validation/total_loss",
        save_top_k=-1,
        filename="{step}-{validation/total_loss:.1f}",
        auto_insert_metric_name=False,
    )
    what = run(worsening(num_steps=5), FAR_BELOW, callbacks=[saver], enable_checkpointing=True)
    assert what.step_count == 5
    saved = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.ckpt"))
    assert saved == ["2-2.0.ckpt", "4-4.0.ckpt", "5-5.0.ckpt"]
    assert saver.best_model_score.item() == pytest.approx(2.0)
    assert saver.best_model_path.endswith("2-2.0.ckpt")


def test_monitors_wait_for_the_first_validation() -> None:
    """B108: validation every second epoch, and a run that begins within an epoch."""
    stopper = EarlyStopping("validation/total_loss", patience=50)
    saver = ModelCheckpoint("saved", monitor="validation/total_loss", save_top_k=-1)
    fields = {"cadence": {"every_n_steps": None, "every_n_epochs": 2}}
    what = run(worsening(num_steps=2, **fields), FAR_BELOW, callbacks=[], limit_val_batches=None)
    what.num_steps = 16
    run(what, FAR_BELOW, callbacks=[stopper, saver], enable_checkpointing=True)
    assert what.epoch_count == 4
    assert stopper.best_score.item() == pytest.approx(8.0)
    assert len(list(Path("saved").rglob("*.ckpt"))) == 2


def test_a_misspelt_monitor_names_what_there_is() -> None:
    stopper = EarlyStopping("valid_loss")
    with pytest.raises(RuntimeError, match=r"valid_loss.*validation/total_loss"):
        run(worsening(num_steps=2), FAR_BELOW, callbacks=[stopper])


def test_the_monitored_number_is_the_summary() -> None:
    monitored: list[float] = []

    class Monitor(EarlyStopping):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            monitored.append(float(trainer.callback_metrics["validation/total_loss"]))

    what = run(worsening(num_steps=4), FAR_BELOW, callbacks=[Monitor("validation/total_loss")])
    assert monitored == pytest.approx([2.0, 4.0])
    assert w_of(what) == -4.0
