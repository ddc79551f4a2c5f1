"""Models, batches and hooks small enough to follow by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from nvalchemi_lightning.data import AtomicData, Batch
from nvalchemi_lightning.losses import ComposedLossFunction, EnergyMAELoss, EnergyMSELoss, ForceMSELoss
from nvalchemi_lightning.optim import OptimizerConfig
from nvalchemi_lightning.stages import REPLACEMENT_STAGES, TrainingStage
from nvalchemi_lightning.strategy import TrainingStrategy
from nvalchemi_lightning.validation import ValidationConfig

Row = tuple[str, int, int, int, int]

OBSERVED = tuple(stage for stage in TrainingStage if stage not in REPLACEMENT_STAGES)
"""The stages that any number of hooks may observe."""

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "accelerator": "cpu",
}
"""Options of a Trainer that writes and prints nothing."""


class Harm(nn.Module):
    """Independent harmonic wells, E = 0.5 w sum r^2, with forces by autograd; labels are made with w = 2."""

    requires_autograd = True

    def __init__(self, w: float = 1.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w, dtype=torch.float64))

    def forward(self, batch: Any) -> dict[str, Tensor]:
        positions = batch.positions.detach().requires_grad_(True)
        energy = per_graph(0.5 * self.w * positions.square().sum(-1), batch)
        forces = -torch.autograd.grad(energy.sum(), positions, create_graph=self.training)[0]
        return {"energy": energy, "forces": forces}


class Noisy(nn.Module):
    """A model that draws random numbers: dropout in front of a linear energy, forces by autograd."""

    requires_autograd = True

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1)).double()

    def forward(self, batch: Any) -> dict[str, Tensor]:
        positions = batch.positions.detach().requires_grad_(True)
        energy = per_graph(self.features(positions).squeeze(-1), batch)
        forces = -torch.autograd.grad(energy.sum(), positions, create_graph=self.training)[0]
        return {"energy": energy, "forces": forces}


class ConstGrad(nn.Module):
    """The energy of every structure is w; with `constant_loss` and SGD(lr=1), w is minus the number of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, batch: Any) -> dict[str, Tensor]:
        return {"energy": self.w.expand(batch.num_graphs, 1)}


def per_graph(per_atom: Tensor, batch: Any) -> Tensor:
    """Return the sum of a per-atom energy over each structure, shape (B, 1)."""
    return per_atom.new_zeros(batch.num_graphs).index_add(0, batch.batch_idx, per_atom)[:, None]


def structure(atoms: int, generator: torch.Generator, *, energy: float | None = None) -> AtomicData:
    """Return one structure with the labels of `Harm` at w = 2, or with a given energy."""
    positions = torch.randn(atoms, 3, generator=generator, dtype=torch.float64)
    label = positions.square().sum() if energy is None else torch.tensor(energy, dtype=torch.float64)
    return AtomicData(
        positions=positions,
        atomic_numbers=torch.ones(atoms, dtype=torch.int32),
        energy=label.reshape(1, 1),
        forces=-2.0 * positions,
    )


def structures(count: int, *, seed: int = 0, energies: Sequence[float] | None = None) -> list[AtomicData]:
    """Return structures of 1, 2, 3, 1, ... atoms."""
    generator = torch.Generator().manual_seed(seed)
    return [structure(i % 3 + 1, generator, energy=None if energies is None else energies[i]) for i in range(count)]


def batches(*sizes: int, seed: int = 0, energies: Sequence[float] | None = None) -> list[Batch]:
    """Return batches of so many structures each."""
    data = structures(sum(sizes), seed=seed, energies=energies)
    return [Batch.from_data_list(cut) for cut in cuts(data, sizes)]


def cuts(data: Sequence[Any], sizes: Iterable[int]) -> Iterator[Sequence[Any]]:
    """Yield consecutive pieces of a sequence."""
    start = 0
    for size in sizes:
        yield data[start : start + size]
        start += size


class Unsized:
    """A re-iterable loader that does not know its length."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


def sgd(lr: float = 0.01, **options: Any) -> OptimizerConfig:
    """Return plain gradient descent."""
    return OptimizerConfig(optimizer_cls=torch.optim.SGD, lr=lr, **options)


def adam(lr: float = 0.01, **options: Any) -> OptimizerConfig:
    """Return Adam, whose state makes a forgotten step visible."""
    return OptimizerConfig(optimizer_cls=torch.optim.Adam, lr=lr, **options)


def force_loss() -> ComposedLossFunction:
    """Return energy and forces, 1 : 10."""
    return EnergyMSELoss() + ForceMSELoss() * 10.0


def constant_loss() -> EnergyMAELoss:
    """Return the loss of `ConstGrad`: labels lie far below, so the gradient of w is 1."""
    return EnergyMAELoss(per_atom=False)


def strategy(**fields: Any) -> TrainingStrategy:
    """Return a strategy for `Harm`; fields replace the defaults."""
    defaults: dict[str, Any] = {"models": Harm(), "optimizer_configs": sgd(), "loss_fn": force_loss()}
    if not {"num_epochs", "num_steps"} & set(fields):
        defaults["num_epochs"] = 1
    return TrainingStrategy(**{**defaults, **fields})


def run(what: TrainingStrategy, loader: Any, **options: Any) -> TrainingStrategy:
    """Run without a progress bar and return the strategy."""
    what.run(loader, enable_progress_bar=False, **options)
    return what


def w_of(recipe: Any, key: str = "main") -> float:
    """Return the one weight of a model of a recipe."""
    value: float = recipe.models[key].w.item()
    return value


def trainer(**options: Any) -> Trainer:
    """Return a quiet Trainer with the owner on one device."""
    return Trainer(**{**QUIET, "strategy": "nvalchemi", "max_epochs": 1, **options})


def config(*sizes: int, **fields: Any) -> ValidationConfig:
    """Return a configuration whose data are batches of so many structures."""
    return ValidationConfig(**{"validation_data": batches(*sizes or (2, 3), seed=9), **fields})


class At:
    """A hook that calls a function at one stage."""

    def __init__(self, stage: TrainingStage | None, function: Callable[[Any], Any], frequency: Any = 1) -> None:
        self.stage = stage
        self.frequency = frequency
        self._function = function

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        self._function(ctx)


class BoomError(Exception):
    """Raised by the hooks of this file."""


class Scoped(At):
    """A hook with a context; it notes what happens to it in a shared log."""

    def __init__(
        self, name: str, log: list[str], *, fail_in: str = "", stage: TrainingStage = TrainingStage.AFTER_BATCH
    ) -> None:
        super().__init__(stage, lambda ctx: log.append(f"call {name}"))
        self.name = name
        self.log = log
        self.fail_in = fail_in

    def __enter__(self) -> Scoped:
        self._act("enter")
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        self._act("exit" if kind is None else f"exit[{kind.__name__}]")
        return True

    def _act(self, what: str) -> None:
        self.log.append(f"{what} {self.name}")
        if self.fail_in and what.startswith(self.fail_in):
            raise BoomError(f"{what} {self.name}")


class Closable(At):
    """A hook that can only be closed."""

    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__(TrainingStage.AFTER_BATCH, lambda ctx: None)
        self.name = name
        self.log = log

    def close(self) -> None:
        self.log.append(f"close {self.name}")


def raising(stage: TrainingStage, error: BaseException | type[BaseException] = BoomError) -> At:
    def fail(ctx: Any) -> None:
        if not ctx.validating:
            raise error

    return At(stage, fail)


class Recorder:
    """A hook at every stage that may be observed; it notes the stage and the counters."""

    stage = None
    frequency = 1

    def __init__(self, stages: Iterable[TrainingStage] = OBSERVED) -> None:
        self.stages = tuple(stages)
        self.rows: list[Row] = []

    def _runs_on_stage(self, stage: TrainingStage) -> bool:
        return stage in self.stages

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        name = f"[{stage.name}]" if ctx.validating else stage.name
        self.rows.append((name, ctx.step_count, ctx.batch_count, ctx.epoch, ctx.epoch_step_count))

    @property
    def names(self) -> list[str]:
        """The stages alone."""
        return [row[0] for row in self.rows]


def golden(text: str) -> list[Row]:
    """Read a literal list: ``step batch epoch epoch_step: STAGE STAGE ...`` in every line."""
    rows: list[Row] = []
    for line in text.strip().splitlines():
        counters, _, stages = line.partition(":")
        step, batch, epoch, epoch_step = (int(number) for number in counters.split())
        rows += [(stage, step, batch, epoch, epoch_step) for stage in stages.split()]
    return rows


def assert_usable(what: Any) -> None:
    """The guards are gone and hooks are left: anybody may use the optimizers, and a gradient may accumulate."""
    assert not what.scope.active
    for model in what.models.values():
        for parameter in model.parameters():
            parameter.requires_grad_(True)
            parameter.sum().backward()
            parameter.grad = None
    if what._optimizers is not None:
        for optimizer in what.flat_optimizers()[0]:
            optimizer.step()


class StopAfter(Callback):
    """A native callback that asks the Trainer to stop after so many batches."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx + 1 == self.batches:
            trainer.should_stop = True


def two_models() -> tuple[dict[str, nn.Module], Callable[[Any, Any], Any]]:
    """A student that trains with a frozen part, and a teacher without an optimizer."""
    student = nn.Sequential(Harm(), nn.BatchNorm1d(1).double())
    student[1].eval()
    student[1].bias.requires_grad_(False)
    teacher = Harm(2.0)

    def forward(models: Any, batch: Any) -> dict[str, torch.Tensor]:
        assert models["student"].training
        assert not models["student"][1].training
        assert not models["teacher"].training
        assert not models["teacher"].w.requires_grad
        output = models["student"][0](batch)
        energy = output["energy"] + models["student"][1](output["energy"]) * 0
        return {"predicted_energy": energy, "predicted_forces": output["forces"]}

    return {"student": student, "teacher": teacher}, forward
