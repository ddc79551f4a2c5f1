"""Models, batches and update hooks small enough to follow by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from nvalchemi_lightning.data import AtomicData, Batch
from nvalchemi_lightning.hooks import TrainingUpdateHook
from nvalchemi_lightning.losses import EnergyMAELoss, EnergyMSELoss
from nvalchemi_lightning.optim import OptimizerConfig
from nvalchemi_lightning.stages import TrainingStage
from nvalchemi_lightning.strategy import TrainingStrategy

Stage = TrainingStage

UPDATE_STAGES = (Stage.BEFORE_BATCH, Stage.DO_BACKWARD, Stage.DO_OPTIMIZER_STEP, Stage.AFTER_OPTIMIZER_STEP)


class ConstGrad(nn.Module):
    """The energy of every structure is w; with `constant_loss` and SGD(lr=1), w is minus the number of steps."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros((), dtype=dtype))

    def forward(self, batch: Any) -> dict[str, Tensor]:
        return {"energy": self.w.expand(batch.num_graphs, 1)}


class Net(nn.Module):
    """A small network per atom with a buffer that follows the data, summed over each structure."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, 1)).to(dtype)
        self.register_buffer("mean", torch.zeros(3, dtype=dtype))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([0.0, float("inf")]))

    def forward(self, batch: Any) -> dict[str, Tensor]:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(batch.positions.mean(0), 0.5)  # type: ignore[operator]
                self.calls += 1
        atoms = self.layers(batch.positions).squeeze(-1)
        return {"energy": atoms.new_zeros(batch.num_graphs).index_add(0, batch.batch_idx, atoms)[:, None]}


class Potential(nn.Module):
    """Energies and forces by autograd; structures that hold helium come out as NaN."""

    requires_autograd = True

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh())

    def forward(self, batch: Any) -> dict[str, Tensor]:
        positions = batch.positions.detach().requires_grad_(True)
        atoms = self.layers(positions).sum(-1) * torch.where(batch.atomic_numbers == 2, float("nan"), 1.0)
        energy = atoms.new_zeros(batch.num_graphs).index_add(0, batch.batch_idx, atoms)[:, None]
        forces = -torch.autograd.grad(energy.sum(), positions, create_graph=self.training)[0]
        return {"energy": energy, "forces": forces}


def batches(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.float64, energy: float | None = None) -> list[Batch]:
    """Return batches of so many structures of 1, 2, 3, 1, ... atoms; the label is the sum of squared positions."""
    generator = torch.Generator().manual_seed(seed)
    made = [[_structure(i % 3 + 1, generator, dtype, energy) for i in range(size)] for size in sizes]
    return [Batch.from_data_list(structures) for structures in made]


def _structure(atoms: int, generator: torch.Generator, dtype: torch.dtype, energy: float | None) -> AtomicData:
    positions = torch.randn(atoms, 3, generator=generator, dtype=dtype)
    label = positions.square().sum() if energy is None else torch.tensor(energy, dtype=dtype)
    numbers = torch.ones(atoms, dtype=torch.int32)
    return AtomicData(positions=positions, atomic_numbers=numbers, energy=label.reshape(1, 1), forces=-2 * positions)


def constant(count: int, dtype: torch.dtype = torch.float64) -> list[Batch]:
    """Return batches for `ConstGrad`: labels lie far below, so the gradient of w is 1."""
    return batches(*[1] * count, energy=-1000.0, dtype=dtype)


def sgd(lr: float = 1.0, **options: Any) -> OptimizerConfig:
    """Return plain gradient descent."""
    return OptimizerConfig(optimizer_cls=torch.optim.SGD, lr=lr, **options)


def adam(lr: float = 0.01, **options: Any) -> OptimizerConfig:
    """Return Adam, whose state makes a forgotten step visible."""
    return OptimizerConfig(optimizer_cls=torch.optim.Adam, lr=lr, **options)


def strategy(*hooks: Any, **fields: Any) -> TrainingStrategy:
    """Return a strategy for `ConstGrad`; fields replace the defaults."""
    defaults: dict[str, Any] = {
        "models": ConstGrad(),
        "optimizer_configs": sgd(),
        "loss_fn": EnergyMAELoss(per_atom=False),
        "hooks": list(hooks),
    }
    if not {"num_epochs", "num_steps"} & set(fields):
        defaults["num_epochs"] = 1
    return TrainingStrategy(**{**defaults, **fields})


def network(*hooks: Any, **fields: Any) -> TrainingStrategy:
    """Return a strategy for `Net` in float32 with Adam."""
    torch.manual_seed(0)
    defaults: dict[str, Any] = {"models": Net(), "optimizer_configs": adam(), "loss_fn": EnergyMSELoss(per_atom=False)}
    return strategy(*hooks, **{**defaults, **fields})


def run(what: TrainingStrategy, loader: Iterable[Any], **options: Any) -> TrainingStrategy:
    """Run without a progress bar and return the strategy."""
    what.run(loader, enable_progress_bar=False, **options)
    return what


def w_of(what: Any) -> float:
    """Return the one weight of the main model."""
    value: float = what.models["main"].w.item()
    return value


class At:
    """A hook that calls a function at one stage."""

    frequency = 1

    def __init__(self, stage: TrainingStage, function: Callable[[Any], Any]) -> None:
        self.stage = stage
        self._function = function

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        self._function(ctx)


class Noting(TrainingUpdateHook):
    """An update hook that notes in a shared log how it is called, and answers as told."""

    def __init__(self, name: str = "a", log: list[Any] | None = None, priority: int = 50, **answers: Any) -> None:
        self.name = name
        self.log: list[Any] = [] if log is None else log
        self.priority = priority  # type: ignore[misc]
        self.answers = answers

    def __call__(self, ctx: Any, stage: TrainingStage, will_skip: bool) -> tuple[bool, Tensor | None]:
        self.log.append((self.name, stage.name, will_skip))
        answer = self.answers.get(stage.name, True)
        return answer if isinstance(answer, tuple) else (answer, ctx.loss)

    def notes(self, *stages: TrainingStage) -> list[tuple[str, bool]]:
        """Return stage and ``will_skip`` of the calls of this hook."""
        wanted = {stage.name for stage in stages or UPDATE_STAGES}
        calls = [entry for entry in self.log if len(entry) == 3]
        return [(stage, skip) for name, stage, skip in calls if name == self.name and stage in wanted]


class Accumulate(TrainingUpdateHook):
    """Accumulation over windows of k batches, as a user would write it."""

    priority = 10

    def __init__(self, k: int) -> None:
        self.k, self.n = k, 0

    def __call__(self, ctx: Any, stage: TrainingStage, will_skip: bool) -> tuple[bool, Tensor | None]:
        if stage is Stage.BEFORE_BATCH:
            return self.n % self.k == 0, ctx.loss
        if stage is Stage.DO_BACKWARD:
            return True, ctx.loss / self.k
        if stage is Stage.DO_OPTIMIZER_STEP:
            self.n += 1
            return self.n % self.k == 0, ctx.loss
        return True, ctx.loss
