"""A small potential with parameters to group, and runs of it."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from nvalchemi_lightning.data import AtomicData, Batch
from nvalchemi_lightning.losses import EnergyMSELoss
from nvalchemi_lightning.module import AlchemiModule
from nvalchemi_lightning.stages import TrainingStage
from nvalchemi_lightning.strategy import TrainingStrategy
from nvalchemi_lightning.validation import ValidationConfig

QUIET: dict[str, Any] = {
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
    "log_every_n_steps": 1,
}


class Potential(nn.Module):
    """An embedding, two equal layers and a readout, float64; energies by structure."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = layers
        self.embedding = nn.Embedding(9, 3, dtype=torch.float64)
        self.hidden = nn.ModuleList(nn.Linear(3, 3, dtype=torch.float64) for _ in range(layers))
        self.readout = nn.Linear(3, 1, dtype=torch.float64)

    def forward(self, batch: Any) -> dict[str, Tensor]:
        features = self.embedding(batch.atomic_numbers.long()) + batch.positions
        for layer in self.hidden:
            features = torch.tanh(layer(features))
        atoms = self.readout(features)
        return {"energy": atoms.new_zeros(batch.num_graphs, 1).index_add(0, batch.batch_idx, atoms)}


class At:
    """A hook that calls a function at one stage."""

    frequency = 1

    def __init__(self, stage: TrainingStage, function: Callable[[Any], None]) -> None:
        self.stage = stage
        self.function = function

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        self.function(ctx)


def batches(count: int = 4) -> list[Batch]:
    """Return batches of two structures of three atoms."""
    generator = torch.Generator().manual_seed(0)
    return [Batch.from_data_list([structure(generator) for _ in range(2)]) for _ in range(count)]


def structure(generator: torch.Generator) -> AtomicData:
    """Return one structure with an energy."""
    return AtomicData(
        positions=torch.randn(3, 3, generator=generator, dtype=torch.float64),
        atomic_numbers=torch.tensor([1, 6, 8]),
        energy=torch.randn(1, 1, generator=generator, dtype=torch.float64),
    )


def strategy(*configs: Any, cls: type[TrainingStrategy] = TrainingStrategy, **fields: Any) -> TrainingStrategy:
    """Return a strategy for `Potential`; fields replace the defaults."""
    return cls(**recipe(*configs, **{"num_steps": 6, **fields}))


def module(*configs: Any, **fields: Any) -> AlchemiModule:
    """Return a module for `Potential`; fields replace the defaults."""
    return AlchemiModule(**recipe(*configs, **fields))


def recipe(*configs: Any, **fields: Any) -> dict[str, Any]:
    """Return the fields of a recipe."""
    torch.manual_seed(0)
    models = fields.pop("models", None) or Potential()
    return {"models": models, "optimizer_configs": list(configs), "loss_fn": EnergyMSELoss(), **fields}


def run(what: TrainingStrategy, **options: Any) -> TrainingStrategy:
    """Run without a progress bar and return the strategy."""
    what.run(batches(), enable_progress_bar=False, **options)
    return what


def trainer(**options: Any) -> Trainer:
    """Return a quiet Trainer with the owner on one device."""
    return Trainer(**{**QUIET, "strategy": "nvalchemi", "logger": False, **options})


def validation(**cadence: Any) -> ValidationConfig:
    """Return a validation on two batches."""
    return ValidationConfig(validation_data=batches(2), **cadence)


def column(folder: Path, name: str) -> list[tuple[int, float]]:
    """Return step and value of every row of a CSV log that has one."""
    (table,) = folder.rglob("metrics.csv")
    with table.open() as lines:
        return [(int(row["step"]), float(row[name])) for row in csv.DictReader(lines) if row.get(name)]
