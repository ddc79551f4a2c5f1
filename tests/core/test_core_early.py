"""What is refused early, and what a run notices while it goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from core_rigs import At, Harm, batches, config, force_loss, run, sgd, strategy, structures, trainer
from pydantic import ValidationError
from torch import Tensor

from nvalchemi_lightning import AlchemiModule, TrainingStrategy
from nvalchemi_lightning.data import AtomicData, Batch, DataLoader
from nvalchemi_lightning.errors import (
    ConfigurationError,
    ConfigurationTypeError,
    DataError,
    MissingTargetError,
    TrainingStateError,
)
from nvalchemi_lightning.losses import EnergyMSELoss
from nvalchemi_lightning.models import DemoModel, DemoModelWrapper, PaiNN
from nvalchemi_lightning.stages import TrainingStage as Stage
from nvalchemi_lightning.training_fn import default_training_fn


@pytest.mark.parametrize(("name", "value"), [("num_epochs", -3), ("num_epochs", 1.5), ("num_steps", 0)])
def test_a_duration_that_was_assigned_is_checked_before_a_run(name: str, value: Any) -> None:
    what = strategy(**{name: 1})
    setattr(what, name, value)
    with pytest.raises(ConfigurationError, match=f"{name} must be an integer >= 1; got {value}"):
        run(what, batches(1))


def test_two_durations_that_were_assigned_are_refused() -> None:
    what = strategy(num_epochs=1)
    what.num_steps = 5
    with pytest.raises(ConfigurationError, match="Exactly one of num_epochs or num_steps"):
        run(what, batches(1))


def test_the_loader_of_torch_is_named() -> None:
    loader = torch.utils.data.DataLoader(structures(3), batch_size=2)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationTypeError, match=r"use nvalchemi_lightning\.data\.DataLoader"):
        run(strategy(), loader)


def test_a_loss_that_is_nan_ends_the_run_at_the_next_logging() -> None:
    """B13."""

    def poisoned(model: Any, batch: Any) -> dict[str, Tensor]:
        return {key: value * torch.nan for key, value in default_training_fn(model, batch).items()}

    with pytest.raises(TrainingStateError, match="the loss is NaN at step 2 of epoch 0"):
        run(strategy(training_fn=poisoned, num_epochs=5), batches(1, 2))


def test_validation_data_without_a_target_is_refused_before_training() -> None:
    whole = structures(2)
    data = [Batch.from_data_list([AtomicData(positions=s.positions, atomic_numbers=s.atomic_numbers) for s in whole])]
    model = Harm()
    what = strategy(models=model, validation_config=config(1), loss_fn=force_loss())
    what.validation_config.validation_data = data
    with pytest.raises(MissingTargetError, match="Validation batch is missing target attribute"):
        run(what, batches(1, 1))
    assert model.w.item() == 1.0


def test_validation_data_that_is_no_batch_is_refused_before_training() -> None:
    model = Harm()
    what = strategy(models=model, validation_config=config(1))
    what.validation_config.validation_data = structures(2)
    with pytest.raises(DataError, match="list yielded AtomicData"):
        run(what, batches(1, 1))
    assert model.w.item() == 1.0


def test_validation_data_read_by_workers_is_not_peeked_at() -> None:
    loader = DataLoader(structures(2), batch_size=1, num_workers=1)
    what = strategy(validation_config=config(1), num_epochs=1)
    what.validation_config.validation_data = loader
    assert run(what, batches(1)).last_validation["num_structures"] == 2


def test_devices_that_are_not_there_are_named() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(ConfigurationError, match=r"devices=\['cuda'\], but torch sees no CUDA device"):
        run(strategy(devices="cuda"), batches(1))


@pytest.mark.parametrize("fields", [{}, {"models": {}}])
def test_models_are_asked_for_first(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"needs models=|models must contain at least one model"):
        TrainingStrategy(**fields, optimizer_configs=sgd(), loss_fn=EnergyMSELoss(), num_steps=1)


def test_a_loss_class_is_no_loss() -> None:
    with pytest.raises(ConfigurationTypeError, match=r"a class; pass an instance, EnergyMSELoss\(\)"):
        strategy(loss_fn=EnergyMSELoss)


def test_elements_are_numbers() -> None:
    with pytest.raises(ConfigurationError, match="atomic numbers such as"):
        PaiNN(elements=["H", "C"])  # type: ignore[list-item]


def test_a_hook_validates_under_a_trainer_of_ones_own() -> None:
    seen: list[float] = []
    what = strategy(validation_config=config(2), num_epochs=1)
    what.register_hook(At(Stage.AFTER_BATCH, lambda ctx: seen.append(float(ctx.workflow.validate()["total_loss"]))))
    trainer(max_epochs=1).fit(AlchemiModule(what), DataLoader(structures(4), batch_size=2))
    assert len(seen) == 2
    with pytest.raises(TrainingStateError, match="validation_config"):
        strategy().validate()


def test_recipes_go_through_json() -> None:
    what = strategy(models=DemoModelWrapper(DemoModel(hidden_dim=4)), training_fn=default_training_fn, num_steps=7)
    again = TrainingStrategy.from_spec_dict(json.loads(json.dumps(what.to_spec_dict())))
    assert (again.num_steps, again.training_fn) == (7, default_training_fn)
    form = json.loads(json.dumps(what.to_checkpoint_dict()))
    assert TrainingStrategy.from_checkpoint_dict(form).counters == what.counters


ORDERS = {
    "module first": "from nvalchemi_lightning import AlchemiModule\nfrom lightning.pytorch import Trainer",
    "lightning first": "from lightning.pytorch import Trainer\nimport nvalchemi_lightning",
    "data module": "from nvalchemi_lightning import AtomicDataModule\nfrom lightning.pytorch import Trainer",
}


@pytest.mark.parametrize("order", ORDERS)
def test_the_strategies_are_known_whatever_is_imported_first(order: str, tmp_path: Path) -> None:
    code = f"{ORDERS[order]}\nprint(type(Trainer(strategy='nvalchemi', accelerator='cpu').strategy).__name__)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "SingleOwner", done.stderr
