"""Models, hooks and functions that specs may name, and strategies made of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nvalchemi_lightning.data import AtomicData, Batch
from nvalchemi_lightning.losses import EnergyMSELoss
from nvalchemi_lightning.optim import OptimizerConfig
from nvalchemi_lightning.specs.trust import _added, trust
from nvalchemi_lightning.stages import TrainingStage
from nvalchemi_lightning.strategy import TrainingStrategy


class Net(nn.Module):
    """A small network per atom in float64, summed over each structure."""

    def __init__(self, hidden: int = 4) -> None:
        super().__init__()
        self.hidden = hidden
        self.layers = nn.Sequential(nn.Linear(3, hidden), nn.SiLU(), nn.Linear(hidden, 1)).double()

    def forward(self, batch: Any) -> dict[str, Tensor]:
        per_atom = self.layers(batch.positions)
        return {"energy": per_atom.new_zeros(batch.num_graphs, 1).index_add(0, batch.batch_idx, per_atom)}


class Shifted(Net):
    """Adds a number that is kept where no checkpoint looks."""

    def __init__(self, hidden: int = 4) -> None:
        super().__init__(hidden)
        self.register_buffer("shift", torch.zeros(1, dtype=torch.float64), persistent=False)


class Renamed(Net):
    """Keeps its constructor argument under another name."""

    def __init__(self, width: int = 4) -> None:
        super().__init__(width)


class Fragile(Net):
    """Cannot be built a second time."""

    built = False

    def __init__(self, hidden: int = 4) -> None:
        if Fragile.built:
            raise OSError("the licence server is away")
        super().__init__(hidden)

    def checkpoint_spec(self) -> Any:
        from nvalchemi_lightning.specs import create_model_spec

        return create_model_spec(Fragile, hidden=self.hidden)


class Counting:
    """A hook of the script, without a recipe."""

    stage = TrainingStage.AFTER_BATCH
    frequency = 1

    def __init__(self, start: int = 0) -> None:
        self.seen = start

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        self.seen += 1

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


class Forgetful(Counting):
    """A hook with a recipe that keeps less than it says."""

    def to_spec(self) -> Any:
        from nvalchemi_lightning.specs import create_model_spec

        return create_model_spec(Forgetful)

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def training_fn(model: Any, batch: Any) -> dict[str, Tensor]:
    return {"predicted_energy": model(batch)["energy"]}


def named_fn(models: Any, batch: Any) -> dict[str, Tensor]:
    return training_fn(models["a"], batch)


def assembler(loss_fn: Any, predictions: Any, batch: Any, **options: Any) -> dict[str, Tensor]:
    return {"energy": batch.energy}


def batches(count: int = 3) -> list[Batch]:
    """Return batches of two structures of three atoms."""
    generator = torch.Generator().manual_seed(0)
    return [Batch.from_data_list([_structure(generator) for _ in range(2)]) for _ in range(count)]


def _structure(generator: torch.Generator) -> AtomicData:
    return AtomicData(
        positions=torch.randn(3, 3, generator=generator, dtype=torch.float64),
        atomic_numbers=torch.tensor([1, 6, 8]),
        energy=torch.randn(1, 1, generator=generator, dtype=torch.float64),
    )


def strategy(**fields: Any) -> TrainingStrategy:
    """Return a strategy for `Net`; fields replace the defaults."""
    defaults: dict[str, Any] = {
        "models": None,
        "optimizer_configs": OptimizerConfig(lr=0.01),
        "loss_fn": EnergyMSELoss(),
        "num_steps": 3,
        **fields,
    }
    if defaults["models"] is None:
        defaults["models"] = Net()
    return TrainingStrategy(**defaults)


def run(what: TrainingStrategy) -> TrainingStrategy:
    """Run without a progress bar and return the strategy."""
    what.run(batches(), enable_progress_bar=False)
    return what


def random_draws() -> tuple[float, float, float]:
    """Return what the global generators give next."""
    return random.random(), float(np.random.random()), float(torch.rand(()))


@contextmanager
def trusting_rigs() -> Iterator[None]:
    """Let specs name what stands here, within the block."""
    before = dict(_added)
    trust("specs_rigs")
    try:
        yield
    finally:
        _added.clear()
        _added.update(before)
