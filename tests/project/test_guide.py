"""The examples of the training guide run verbatim, with only the import path changed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from nvalchemi_lightning import (
    CheckpointHook,
    EnergyMSELoss,
    OptimizerConfig,
    TrainingStage,
    TrainingStrategy,
    ValidationConfig,
)
from nvalchemi_lightning.data import AtomicData, DataLoader
from nvalchemi_lightning.models import PaiNN

GUIDE = "000_36df7eac80581f4f.txt"


def page(shared: Path, name: str = GUIDE) -> str:
    """Return a page of the requirements with our import path."""
    text = (shared / "requirements" / name).read_text(encoding="utf-8")
    return text.replace("nvalchemi.training", "nvalchemi_lightning").replace("nvalchemi.", "nvalchemi_lightning.")


def example(text: str, first: str, last: str) -> str:
    """Return the lines from the one that is ``first`` to the next that is ``last``."""
    lines = text.splitlines()
    start = lines.index(first)
    return "\n".join(lines[start : lines.index(last, start) + 1])


def structures(count: int) -> list[AtomicData]:
    generator = torch.Generator().manual_seed(0)
    return [
        AtomicData(
            positions=torch.rand(3, 3, generator=generator) * 2,
            atomic_numbers=torch.tensor([8, 1, 1]),
            energy=torch.rand(1, 1, generator=generator),
            forces=torch.rand(3, 3, generator=generator),
        )
        for _ in range(count)
    ]


def loader() -> DataLoader:
    return DataLoader(structures(4), batch_size=2)


def model() -> PaiNN:
    return PaiNN(hidden=8, num_layers=1, num_radial=4, cutoff=3.0)


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_minimal_example(shared: Path) -> None:
    code = example(page(shared), "from nvalchemi_lightning import (", "strategy.run(train_loader)")
    names: dict[str, Any] = {"model": model(), "train_loader": loader(), "val_loader": loader()}
    exec(code, names)
    strategy = names["strategy"]
    assert (strategy.epoch_count, strategy.step_count) == (20, 40)
    assert strategy.last_validation["num_structures"] == 4
    assert Path("runs/example/checkpoints/manifest.json").is_file()


def test_the_distillation_example(shared: Path) -> None:
    code = example(page(shared), "from collections.abc import Mapping, Sequence", "  )")
    names: dict[str, Any] = {}
    exec(code, names)
    student, teacher = model(), model()
    before = [parameter.clone() for parameter in teacher.parameters()]
    strategy = TrainingStrategy(
        models={"student": student, "teacher": teacher},
        optimizer_configs={"student": [OptimizerConfig(lr=1e-3)]},
        training_fn=names["training_fn"],
        loss_fn=names["loss_fn"],
        loss_target_assembler=names["teacher_targets"],
        num_epochs=2,
    )
    strategy.run(loader(), enable_progress_bar=False)
    assert strategy.step_count == 4
    assert all(torch.equal(new, old) for new, old in zip(teacher.parameters(), before, strict=True))
    assert all(parameter.requires_grad for parameter in teacher.parameters())


def trained(*hooks: Any, **fields: Any) -> TrainingStrategy:
    strategy = TrainingStrategy(
        models=model(),
        optimizer_configs=OptimizerConfig(lr=1e-3),
        loss_fn=EnergyMSELoss(),
        hooks=list(hooks),
        num_epochs=1,
        **fields,
    )
    strategy.run(loader(), enable_progress_bar=False)
    return strategy


def test_the_progress_logger(shared: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = page(shared)
    start = text.index("from nvalchemi_lightning import TrainingStage\n\n\n# this is just")
    code = text[start : text.index("Outside hooks, the same state")]
    names: dict[str, Any] = {"logger": logging.getLogger("guide")}
    exec(code, names)
    with caplog.at_level(logging.INFO, "guide"):
        trained(names["ProgressLogger"]())
    assert [record.getMessage() for record in caplog.records] == ["epoch=0 batch=1 step=1", "epoch=0 batch=2 step=2"]


def test_the_summary_logger(shared: Path) -> None:
    text = page(shared)
    start = text.index("from nvalchemi_lightning import TrainingStage\n\nclass SummaryLogger")
    code = text[start : text.index("Per-batch validation callback")]

    class Tracker:
        def __init__(self) -> None:
            self.losses: list[float] = []

        def log(self, *, val_loss: float) -> None:
            self.losses.append(val_loss)

    strategy = TrainingStrategy(
        models=model(),
        optimizer_configs=OptimizerConfig(lr=1e-3),
        loss_fn=EnergyMSELoss(),
        validation_config=ValidationConfig(validation_data=loader(), every_n_steps=1),
        num_epochs=1,
    )
    tracker = Tracker()
    exec(code, {"strategy": strategy, "my_tracker": tracker})
    strategy.run(loader(), enable_progress_bar=False)
    assert len(tracker.losses) == 2
    assert tracker.losses[-1] == float(strategy.last_validation["total_loss"])


def test_a_hook_of_every_stage_of_the_page_exists(shared: Path) -> None:
    text = page(shared, "002_da30e79e57d18497.txt")
    assert all(f"`{stage.name}`\t{stage.value}\t" in text for stage in TrainingStage)


def test_the_checkpoint_hook_of_its_page(shared: Path) -> None:
    text = page(shared, "003_5b1ca9f6c8d1330a.txt")
    line = next(line for line in text.splitlines() if line.startswith(">>> hook = CheckpointHook("))
    names: dict[str, Any] = {"CheckpointHook": CheckpointHook}
    exec(line.removeprefix(">>> "), names)
    assert names["hook"].step_interval == 1000
