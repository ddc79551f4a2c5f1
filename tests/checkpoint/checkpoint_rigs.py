"""Models, hooks and data small enough to save in milliseconds."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nvalchemi_lightning.checkpoint import load
from nvalchemi_lightning.checkpoint.lock import LOCK
from nvalchemi_lightning.data import AtomicData, Batch
from nvalchemi_lightning.losses import EnergyMSELoss
from nvalchemi_lightning.optim import OptimizerConfig
from nvalchemi_lightning.stages import TrainingStage
from nvalchemi_lightning.strategy import TrainingStrategy


class Net(nn.Module):
    """A small network per atom in float64, summed over each structure."""

    def __init__(self, hidden: int = 4) -> None:
        super().__init__()
        self.hidden = hidden
        self.layers = nn.Sequential(nn.Linear(3, hidden), nn.SiLU(), nn.Linear(hidden, 1)).double()

    def forward(self, batch: Any) -> dict[str, Tensor]:
        return {"energy": per_graph(self.layers(batch.positions), batch)}


class Strategy(TrainingStrategy):
    """A strategy of the user's own."""


class Counting:
    """A hook with state: how many batches it has seen, and a tensor of as many."""

    stage = TrainingStage.AFTER_BATCH
    frequency = 1

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        self.seen += 1

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "tensor": torch.tensor([self.seen])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class At:
    """A hook that calls a function at one stage."""

    frequency = 1

    def __init__(self, stage: TrainingStage, function: Callable[[Any], None]) -> None:
        self.stage = stage
        self.function = function

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        self.function(ctx)


def named_training_fn(models: dict[str, nn.Module], batch: Any) -> dict[str, Tensor]:
    """Train the student on the labels; the teacher only looks on."""
    with torch.no_grad():
        models["teacher"](batch)
    return {"predicted_energy": models["student"](batch)["energy"]}


def per_graph(per_atom: Tensor, batch: Any) -> Tensor:
    """Return sums over structures, shape (B, 1)."""
    return per_atom.new_zeros(batch.num_graphs, 1).index_add(0, batch.batch_idx, per_atom)


def batches(count: int = 5, *, seed: int = 0) -> list[Batch]:
    """Return batches of two structures of three atoms."""
    generator = torch.Generator().manual_seed(seed)
    return [Batch.from_data_list([structure(generator) for _ in range(2)]) for _ in range(count)]


def structure(generator: torch.Generator) -> AtomicData:
    """Return one structure with an energy."""
    return AtomicData(
        positions=torch.randn(3, 3, generator=generator, dtype=torch.float64),
        atomic_numbers=torch.tensor([1, 6, 8]),
        energy=torch.randn(1, 1, generator=generator, dtype=torch.float64),
    )


def adam(lr: float = 0.01, **options: Any) -> OptimizerConfig:
    """Return Adam with a schedule, whose states make a forgotten step visible."""
    defaults = {"scheduler_cls": torch.optim.lr_scheduler.StepLR, "scheduler_kwargs": {"step_size": 2, "gamma": 0.5}}
    return OptimizerConfig(optimizer_cls=torch.optim.Adam, lr=lr, **{**defaults, **options})


def strategy(seed: int = 0, cls: type[TrainingStrategy] = Strategy, **fields: Any) -> TrainingStrategy:
    """Return a strategy for `Net`; fields replace the defaults."""
    torch.manual_seed(seed)
    defaults: dict[str, Any] = {"optimizer_configs": adam(), "loss_fn": EnergyMSELoss()}
    if not {"num_epochs", "num_steps"} & set(fields):
        defaults["num_steps"] = 3
    if "models" not in fields:
        defaults["models"] = Net()
    return cls(**{**defaults, **fields})


def named_strategy(**fields: Any) -> TrainingStrategy:
    """Return a strategy for a student and a frozen teacher; the student has two optimizers."""
    defaults: dict[str, Any] = {
        "models": {"student": Net(3), "teacher": Net(2)},
        "optimizer_configs": {"student": [adam(), OptimizerConfig(lr=1e-3)]},
        "training_fn": named_training_fn,
    }
    return strategy(**{**defaults, **fields})


def run(what: TrainingStrategy, loader: Any = None, **options: Any) -> TrainingStrategy:
    """Run without a progress bar and return the strategy."""
    what.run(batches() if loader is None else loader, enable_progress_bar=False, **options)
    return what


def rebuilt(root: Path, *arguments: Any, **options: Any) -> Any:
    """Load a checkpoint as a `Strategy`."""
    return load(Strategy, root, *arguments, **options)


def state_of(what: TrainingStrategy) -> dict[str, Any]:
    """Return copies of everything that a checkpoint must bring back exactly."""
    state: dict[str, Any] = {"counters": dict(vars(what.counters))}
    for name, model in what.models.items():
        state[name] = {key: value.clone() for key, value in model.state_dict().items()}
    for name, pairs in what.optimizers().items():
        for i, (optimizer, scheduler) in enumerate(pairs):
            held = [p for group in optimizer.param_groups for p in group["params"]]
            state[f"{name}{i}"] = {
                "lr": [group["lr"] for group in optimizer.param_groups],
                "moments": [{k: torch.as_tensor(v).clone() for k, v in optimizer.state[p].items()} for p in held],
                "schedule": None if scheduler is None else scheduler.state_dict(),
            }
    return state


def assert_same(one: Any, other: Any, where: str = "state") -> None:
    """Compare nested states bit by bit."""
    assert type(one) is type(other), where
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype, where
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key, value in one.items():
            assert_same(value, other[key], f"{where}[{key!r}]")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for i, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_same(left, right, f"{where}[{i}]")
    else:
        assert one == other, where


def contents(root: Path) -> dict[str, bytes]:
    """Return every file of a folder but the lock of its writers."""
    files = [path for path in sorted(root.rglob("*")) if path.is_file() and path.name != LOCK]
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


FILE_OPERATIONS = ("replace", "fsync", "unlink", "mkdir", "rmdir")
"""What of `os` a save goes through besides the writing of bytes."""


@contextmanager
def counted_operations(patch: pytest.MonkeyPatch, act: Callable[..., None]) -> Iterator[None]:
    """Call ``act(n, name)`` before the n-th file operation."""
    done = 0

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any, **options: Any) -> Any:
            nonlocal done
            act(done, name)
            done += 1
            return original(*arguments, **options)

        return operation

    with patch.context() as patched:
        for name in FILE_OPERATIONS:
            patched.setattr(os, name, counted(name, getattr(os, name)))
        yield


def disk_full(after: int) -> Callable[..., None]:
    """Return an action that fails where bytes should reach the disk, from the given file operation on."""

    def act(operation: int, name: str) -> None:
        if operation >= after and name == "fsync":
            raise OSError(errno.ENOSPC, "No space left on device")

    return act


@contextmanager
def restore_warnings() -> Iterator[None]:
    """Let a load tell that it fell back."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is not complete")
        yield
