"""Runs that are stopped and go on: what differs between them, and everything that must come out the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader as TorchLoader

from nvalchemi_lightning.data import AtomicData, Batch, DataLoader, InMemoryDataset
from nvalchemi_lightning.hooks import EMAHook, GradientAccumulationHook, GradientClipHook, MixedPrecisionHook
from nvalchemi_lightning.losses import EnergyMSELoss, ForceMSELoss
from nvalchemi_lightning.optim import OptimizerConfig
from nvalchemi_lightning.stages import TrainingStage
from nvalchemi_lightning.strategy import TrainingStrategy
from nvalchemi_lightning.validation import ValidationConfig

PASSES, BATCHES = 3, 4
STEPS = PASSES * BATCHES


class Noisy(nn.Module):
    """A network that draws random numbers: dropout before the energy, forces by autograd."""

    requires_autograd = True

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.hidden = hidden
        self.layers = nn.Sequential(nn.Linear(3, hidden), nn.Tanh(), nn.Dropout(0.3), nn.Linear(hidden, 1))

    def forward(self, batch: Any) -> dict[str, Tensor]:
        positions = batch.positions.detach().requires_grad_(True)
        per_atom = self.layers(positions).squeeze(-1)
        energy = per_atom.new_zeros(batch.num_graphs).index_add(0, batch.batch_idx, per_atom)[:, None]
        forces = -torch.autograd.grad(energy.sum(), positions, create_graph=self.training)[0]
        return {"energy": energy, "forces": forces}


def structures(count: int = 2 * BATCHES, seed: int = 1) -> list[AtomicData]:
    """Return structures of 1, 2, 3, 1, ... atoms."""
    generator = torch.Generator().manual_seed(seed)
    return [
        AtomicData(
            positions=torch.randn(i % 3 + 1, 3, generator=generator),
            atomic_numbers=torch.ones(i % 3 + 1, dtype=torch.int32),
            energy=torch.randn(1, 1, generator=generator),
            forces=torch.randn(i % 3 + 1, 3, generator=generator),
        )
        for i in range(count)
    ]


def seeded() -> DataLoader:
    """Return our loader in random order."""
    return DataLoader(structures(), batch_size=2, shuffle=True, seed=3)


def foreign() -> TorchLoader[Any]:
    """Return torch's loader, which draws its order from the global generator."""
    return TorchLoader(structures(), batch_size=2, shuffle=True, collate_fn=Batch.from_data_list)


def shaken(data: AtomicData) -> AtomicData:
    """Move the atoms by random numbers of torch and NumPy."""
    noise = torch.randn_like(data.positions) + torch.from_numpy(np.random.normal(size=3)).float()
    data.positions = data.positions + 0.1 * noise
    return data


def augmented(workers: int = 0) -> DataLoader:
    """Return a loader whose structures differ from epoch to epoch."""
    data = InMemoryDataset(structures(), transforms=[shaken])
    return DataLoader(data, batch_size=2, shuffle=True, seed=3, num_workers=workers)


class Unsized:
    """A loader that does not know its length."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.loader, "set_epoch"):
            self.loader.set_epoch(epoch)


class Log:
    """A hook with state that notes the loss of every batch and draws random numbers when training begins."""

    frequency = 1
    stage = None

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.validations: list[tuple[int, float]] = []
        self.epochs: list[int] = []

    def _runs_on_stage(self, stage: TrainingStage) -> bool:
        return stage in (
            TrainingStage.BEFORE_TRAINING,
            TrainingStage.AFTER_BATCH,
            TrainingStage.AFTER_EPOCH,
            TrainingStage.AFTER_VALIDATION,
        )

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        if stage is TrainingStage.BEFORE_TRAINING:
            torch.rand(3)
            np.random.rand()
        elif stage is TrainingStage.AFTER_BATCH:
            self.losses.append(ctx.loss.item())
        elif stage is TrainingStage.AFTER_EPOCH:
            self.epochs.append(ctx.epoch)
        else:
            self.validations.append((ctx.step_count, ctx.validation["total_loss"].item()))

    def state_dict(self) -> dict[str, Any]:
        return {"losses": [*self.losses], "validations": [*self.validations], "epochs": [*self.epochs]}

    def load_state_dict(self, state: Any) -> None:
        self.losses, self.epochs = [*state["losses"]], [*state["epochs"]]
        self.validations = [tuple(row) for row in state["validations"]]


@dataclass(frozen=True)
class Scenario:
    """One kind of run."""

    loader: Callable[[], Any] = seeded
    hooks: Callable[[], list[Any]] = list
    config: Callable[[], Any] = lambda: adam()  # noqa: PLW0108  defined below
    validation: dict[str, Any] | None = None
    duration: dict[str, int] | None = None

    def strategy(self, seed: int, *more_hooks: Any) -> TrainingStrategy:
        """Return a fresh strategy, its weights by the seed."""
        return TrainingStrategy(**self.fields(seed, *more_hooks))

    def fields(self, seed: int, *more_hooks: Any) -> dict[str, Any]:
        """Return the fields of the recipe."""
        torch.manual_seed(seed)
        np.random.seed(seed)
        return {
            "models": Noisy(),
            "optimizer_configs": self.config(),
            "loss_fn": EnergyMSELoss() + ForceMSELoss(),
            "validation_config": self.validating(),
            "hooks": [Log(), *self.hooks(), *more_hooks],
            **(self.duration or {"num_epochs": PASSES}),
        }

    def validating(self) -> ValidationConfig | None:
        """Return the validation, whose loader draws from the global generator as torch's loaders do."""
        if self.validation is None:
            return None
        data = TorchLoader(structures(3, seed=8), batch_size=2, collate_fn=Batch.from_data_list)
        return ValidationConfig(validation_data=data, **self.validation)


def adam(**options: Any) -> OptimizerConfig:
    """Return Adam with a schedule by steps."""
    schedule = {"scheduler_cls": torch.optim.lr_scheduler.StepLR, "scheduler_kwargs": {"step_size": 5, "gamma": 0.5}}
    return OptimizerConfig(optimizer_cls=torch.optim.Adam, lr=0.02, **{**schedule, **options})


def plateau() -> OptimizerConfig:
    """Return Adam with a schedule that listens to validation and acts at once."""
    kwargs = {"patience": 0, "factor": 0.7, "threshold": 0.5}
    return adam(scheduler_cls=ReduceLROnPlateau, scheduler_kwargs=kwargs)


def outcome(recipe: Any) -> dict[str, Any]:
    """Return everything that must come out the same."""
    found: dict[str, Any] = {"counters": dict(vars(recipe.counters))}
    for name, model in recipe.models.items():
        found[name] = {key: value.clone() for key, value in model.state_dict().items()}
    for pairs in recipe.optimizers().values():
        for i, (optimizer, scheduler) in enumerate(pairs):
            found[f"optimizer {i}"] = optimizer.state_dict()
            found[f"scheduler {i}"] = None if scheduler is None else scheduler.state_dict()
    for hook in recipe.hooks:
        for each in getattr(hook, "hooks", [hook]):
            if hasattr(each, "state_dict") and not hasattr(each, "state_key"):
                found[type(each).__name__] = each.state_dict()
    return found


def same(one: Any, two: Any) -> bool:
    """Return whether two nested values are equal bit for bit."""
    if isinstance(one, Tensor):
        return torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(same(a, b) for a, b in zip(one, two, strict=True))
    return bool(one == two)


def differing(one: dict[str, Any], two: dict[str, Any]) -> list[str]:
    """Return the names of what differs."""
    return [name for name in one.keys() | two.keys() if not same(one.get(name), two.get(name))]


SCENARIOS = {
    "plain": Scenario(),
    "order from the global generator": Scenario(loader=foreign),
    "random transforms": Scenario(loader=augmented),
    "random transforms in a worker": Scenario(loader=lambda: augmented(1)),
    "unknown length": Scenario(loader=lambda: Unsized(seeded()), duration={"num_steps": STEPS - 1}),
    "unknown length and order": Scenario(loader=lambda: Unsized(foreign()), duration={"num_steps": STEPS - 1}),
    "ends within an epoch": Scenario(duration={"num_steps": STEPS - 1}),
    "update hooks": Scenario(hooks=lambda: [EMAHook(decay=0.9), GradientClipHook(max_norm=0.5)]),
    "bf16": Scenario(hooks=lambda: [MixedPrecisionHook(precision="bf16")]),
    "fp16": Scenario(hooks=lambda: [MixedPrecisionHook(precision="fp16")]),
    "accumulation": Scenario(hooks=lambda: [GradientAccumulationHook(3), EMAHook(decay=0.9)]),
    "two optimizers": Scenario(config=lambda: [adam(), OptimizerConfig(lr=1e-3)]),
    "plateau by epochs": Scenario(config=plateau, validation={"every_n_epochs": 1}),
    "plateau by steps": Scenario(config=plateau, validation={"every_n_steps": 3}),
    "plateau at every step": Scenario(config=plateau, validation={"every_n_steps": 1}),
    "plateau by epochs, foreign": Scenario(loader=foreign, config=plateau, validation={"every_n_epochs": 1}),
}
