"""The numbers of a run in loggers and on the progress bar: values, names, steps and cadence."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from core_rigs import At, Harm, batches, force_loss, run, sgd, strategy, trainer
from lightning.pytorch.callbacks import Callback, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import Logger

from nvalchemi_lightning.context import TrainContext
from nvalchemi_lightning.feeding import OneLoader
from nvalchemi_lightning.module import AlchemiModule
from nvalchemi_lightning.scalars import step_scalars, summary_scalars, to_floats
from nvalchemi_lightning.stages import TrainingStage
from nvalchemi_lightning.validation import ValidationConfig

Stage = TrainingStage


class ListLogger(Logger):
    """A logger that keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "list"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        return None

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self.rows.append((step, dict(metrics)))

    def column(self, name: str) -> list[tuple[int, float]]:
        return [(step, metrics[name]) for step, metrics in self.rows if name in metrics]


def near(rows: list[tuple[int, float]]) -> list[Any]:
    """Return the rows with numbers that compare up to rounding."""
    return [(step, pytest.approx(value)) for step, value in rows]


class Losses:
    """A hook that notes the loss after every executed step."""

    stage = Stage.AFTER_BATCH
    frequency = 1

    def __init__(self) -> None:
        self.rows: list[tuple[int, float]] = []

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        self.rows.append((ctx.step_count, ctx.loss.item()))


def test_every_number_of_a_run_is_logged_at_its_step() -> None:
    """B122: total, components, weights, learning rate and validation; values equal those of a hook."""
    logger, losses = ListLogger(), Losses()
    config = ValidationConfig(validation_data=batches(2, seed=9), every_n_steps=2)
    run(
        strategy(num_epochs=2, hooks=[losses], validation_config=config),
        batches(2, 3),
        logger=logger,
        log_every_n_steps=1,
    )
    assert logger.column("loss/total") == near(losses.rows)
    assert logger.column("optimizer/lr") == [(step, 0.01) for step in (1, 2, 3, 4)]
    assert [value for _, value in logger.column("loss/ForceMSELoss/weight")] == pytest.approx([10 / 11] * 4)
    for step, metrics in logger.rows:
        if "loss/total" in metrics:
            parts = [metrics[f"loss/{name}/unweighted"] * metrics[f"loss/{name}/weight"] for name in COMPONENTS]
            assert sum(parts) == pytest.approx(metrics["loss/total"]), step
    assert [step for step, _ in logger.column("validation/total_loss")] == [2, 4]
    assert {f"validation/{name}" for name in COMPONENTS} <= set().union(*(metrics for _, metrics in logger.rows))
    assert {type(value) for _, metrics in logger.rows for value in metrics.values()} == {float}


COMPONENTS = ("EnergyMSELoss", "ForceMSELoss")


def test_the_csv_of_a_default_run(tmp_path: Path) -> None:
    """B122."""
    losses = Losses()
    config = ValidationConfig(validation_data=batches(2, seed=9), every_n_epochs=1)
    what = strategy(num_epochs=2, hooks=[losses], validation_config=config)
    run(what, batches(2, 3), logger=CSVLogger(tmp_path))
    with (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").open() as file:
        rows = [{key: value for key, value in row.items() if value} for row in csv.DictReader(file)]
    training = [(int(row["step"]), float(row["loss/total"])) for row in rows if "loss/total" in row]
    # The cadence of 50 steps is longer than an epoch, so the last batch of each is logged.
    assert training == near([losses.rows[1], losses.rows[3]])
    validation = [
        (int(row["step"]), float(row["validation/total_loss"])) for row in rows if "validation/total_loss" in row
    ]
    assert [step for step, _ in validation] == [2, 4]
    assert validation[-1][1] == pytest.approx(what.last_validation["total_loss"].item())  # type: ignore[index]
    assert all("optimizer/lr" in row for row in rows if "loss/total" in row)


@pytest.mark.parametrize(
    ("every", "expected"), [(1, [1, 2, 3, 4, 5, 6, 7]), (2, [2, 3, 4, 6]), (3, [3, 6]), (5, [3, 5, 6])]
)
def test_the_cadence_counts_executed_steps(every: int, expected: list[int]) -> None:
    logger = ListLogger()
    run(strategy(num_steps=7), batches(1, 1, 1), logger=logger, log_every_n_steps=every)
    assert [step for step, _ in logger.column("loss/total")] == expected


def test_batches_without_a_step_are_not_logged() -> None:
    logger = ListLogger()
    every_other = At(Stage.DO_OPTIMIZER_STEP, lambda ctx: ctx.batch_count % 2 and ctx.optimizers[0].step())
    run(strategy(num_steps=3, hooks=[every_other]), batches(1, 1, 1, 1), logger=logger, log_every_n_steps=1)
    assert [step for step, _ in logger.column("loss/total")] == [1, 2, 3]


def test_a_small_last_validation_batch_weighs_what_it_is() -> None:
    """B27: the logged number is the exact one."""
    logger, shown = ListLogger(), []

    class Watch(Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            shown.append(trainer.callback_metrics["validation/total_loss"].item())

    data = batches(4, 4, 1, seed=9)
    what = strategy(validation_config=ValidationConfig(validation_data=data), hooks=[Watch()])
    run(what, batches(2), logger=logger)
    exact = what.last_validation["total_loss"].item()  # type: ignore[index]
    assert logger.column("validation/total_loss") == [(1, pytest.approx(exact, rel=1e-12))]
    assert shown == pytest.approx([exact])


def test_scalars_of_hooks_reach_the_loggers() -> None:
    logger = ListLogger()

    def log(ctx: Any) -> None:
        ctx.workflow.log("mine/tensor", ctx.loss * 0 + ctx.step_count)
        ctx.workflow.log("mine/number", 7)

    run(
        strategy(num_steps=4, hooks=[At(Stage.AFTER_BACKWARD, log)]),
        batches(1, 1, 1, 1),
        logger=logger,
        log_every_n_steps=2,
    )
    assert logger.column("mine/tensor") == [(2, 1.0), (4, 3.0)]
    assert logger.column("mine/number") == [(2, 7.0), (4, 7.0)]


def test_what_a_hook_logs_after_the_batch_is_logged_then() -> None:
    logger = ListLogger()
    hook = At(Stage.AFTER_BATCH, lambda ctx: ctx.workflow.log("mine", ctx.step_count))
    run(strategy(num_steps=3, hooks=[hook]), batches(1, 1, 1), logger=logger, log_every_n_steps=1)
    assert logger.column("mine") == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_a_logged_tensor_keeps_no_graph() -> None:
    what = strategy()
    what.log("mine", what.models["main"].w * 2)
    (value,) = what.requests.take_scalars().values()
    assert isinstance(value, torch.Tensor)
    assert not value.requires_grad
    assert what.requests.take_scalars() == {}


def test_the_bar_shows_loss_and_validation(capfd: pytest.CaptureFixture[str]) -> None:
    """B122."""
    config = ValidationConfig(validation_data=batches(2, seed=9), every_n_epochs=1)
    what = strategy(num_epochs=2, validation_config=config)
    what.run(batches(1, 1))
    printed = "".join(capfd.readouterr())
    total = what.last_validation["total_loss"].item()  # type: ignore[index]
    assert ", loss=" in printed
    assert f"val_loss={total:.3f}" in printed
    assert "v_num" not in printed


@pytest.mark.parametrize("where", ["hooks", "callbacks"])
def test_a_bar_of_ones_own_replaces_ours(where: str, capfd: pytest.CaptureFixture[str]) -> None:
    class Bar(TQDMProgressBar):
        def init_train_tqdm(self) -> Any:
            bar = super().init_train_tqdm()
            bar.set_description("mine")
            return bar

    bar = Bar(refresh_rate=1)
    what = strategy(hooks=[bar] if where == "hooks" else [])
    what.run(batches(1), **({"callbacks": [bar]} if where == "callbacks" else {}))
    assert what.step_count == 1
    assert "mine" in "".join(capfd.readouterr())


def test_a_trainer_of_ones_own_logs_the_same() -> None:
    logger, losses = ListLogger(), Losses()
    module = AlchemiModule(models=Harm(), optimizer_configs=sgd(), loss_fn=force_loss(), hooks=[losses])
    t = trainer(max_epochs=2, logger=logger, log_every_n_steps=1)
    t.fit(module, OneLoader(batches(2, 3)), OneLoader(batches(2, seed=9)))
    assert logger.column("loss/total") == near(losses.rows)
    assert [step for step, _ in logger.column("validation/total_loss")] == [2, 4]
    assert t.callback_metrics["loss"].item() == pytest.approx(losses.rows[-1][1])


def test_several_optimizers_and_groups_have_names_of_their_own() -> None:
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    one = torch.optim.SGD([{"params": weights[:1], "lr": 0.1}, {"params": weights[1:2], "lr": 0.2}], lr=1.0)
    two = torch.optim.SGD(weights[2:], lr=0.3)
    assert step_scalars(TrainContext(batch=None, optimizers=[one])) == {
        "optimizer/group_0/lr": 0.1,
        "optimizer/group_1/lr": 0.2,
    }
    assert step_scalars(TrainContext(batch=None, optimizers=[one, two])) == {
        "optimizer/0/group_0/lr": 0.1,
        "optimizer/0/group_1/lr": 0.2,
        "optimizer/1/lr": 0.3,
    }


def test_a_summary_is_logged_without_what_has_no_label() -> None:
    summary = {
        "name": "holdout",
        "total_loss": torch.tensor(1.0),
        "per_component_unweighted": {"A": torch.tensor(2.0), "B": torch.tensor(float("nan"))},
        "metrics": {"energy_mae": 3.0, "stress_mae": float("nan")},
    }
    assert summary_scalars(summary) == {"holdout/total_loss": 1.0, "holdout/A": 2.0, "holdout/energy_mae": 3.0}


def test_scalars_keep_their_order_and_become_floats() -> None:
    given = {"b": torch.tensor(1, dtype=torch.int64), "a": 2, "c": torch.tensor([3.0])}
    floats = to_floats(given)
    assert list(floats.items()) == [("b", 1.0), ("a", 2.0), ("c", 3.0)]
    assert {type(value) for value in floats.values()} == {float}
    assert to_floats({}) == {}


def test_a_cadence_of_zero_logs_nothing() -> None:
    logger = ListLogger()
    what = run(strategy(num_steps=3), batches(1, 1), logger=logger, log_every_n_steps=0)
    assert what.step_count == 3
    assert logger.column("loss/total") == []
