"""What a checkpoint costs: the pause of training, writing, reading, and the memory of a save in the background."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import arguments, save
from torch import Tensor, nn

from nvalchemi_lightning import OptimizerConfig, TrainingStrategy
from nvalchemi_lightning.checkpoint.buffers import HostBuffers
from nvalchemi_lightning.checkpoint.reading import read
from nvalchemi_lightning.checkpoint.snapshot import Description, take_snapshot
from nvalchemi_lightning.checkpoint.writing import write
from nvalchemi_lightning.losses import EnergyMSELoss

WEIGHTS = 5_000_000  # with the two moments of Adam 57 MiB


class Plain(nn.Module):
    """Twenty tensors, and nothing to compute with them."""

    def __init__(self, size: int = WEIGHTS, parts: int = 20) -> None:
        super().__init__()
        self.size, self.parts = size, parts
        self.weights = nn.ParameterList(torch.randn(size // parts) for _ in range(parts))

    def forward(self, batch: Any) -> dict[str, Tensor]:
        """Return energies that depend on every tensor."""
        return {"energy": sum(weight[:1] for weight in self.weights).expand(batch.num_graphs, 1)}


def trained() -> TrainingStrategy:
    """Return a strategy whose optimizer has moments."""
    config = OptimizerConfig(optimizer_cls=torch.optim.Adam, lr=1e-3)
    strategy = TrainingStrategy(models=Plain(), optimizer_configs=config, loss_fn=EnergyMSELoss(), num_steps=1)
    for pairs in strategy.optimizers().values():
        for optimizer, _ in pairs:
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
    return strategy


def milliseconds(action: Callable[[], Any], rounds: int) -> float:
    """Return the lower quartile of the wall-clock time of an action [ms]."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        action()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.quantiles(times, n=4)[0]


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of a nested state."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


def written_by_torch(states: Any, path: Path) -> None:
    """Write with ``torch.save``, and wait for the disk."""
    with path.open("wb") as file:
        torch.save(states, file)
        file.flush()
        os.fsync(file.fileno())


def peak_megabytes() -> float:
    """Return the highest resident memory since it was reset [MB]."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1e3


def extra_memory(strategy: TrainingStrategy, folder: Path) -> float:
    """Return what snapshot and write need together, in sizes of the state."""
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_megabytes()
    buffers = HostBuffers()
    for _ in range(3):
        write(folder, take_snapshot(strategy, None, buffers))
    size = sum(tensor.nbytes for tensor in tensors_in(take_snapshot(strategy, None, buffers).states)) / 1e6
    return (peak_megabytes() - before) / size


def measured(rounds: int, folder: Path) -> dict[str, dict[str, float]]:
    """Return times [ms] and their ratios to what cannot be avoided."""
    strategy = trained()
    memory = extra_memory(strategy, folder / "memory")
    buffers = HostBuffers()
    description = Description()
    states = take_snapshot(strategy, None, buffers, description).states
    sources, targets = ([tensor.clone() for tensor in tensors_in(states)] for _ in range(2))
    whole, file = write(folder / "ours", take_snapshot(strategy)), folder / "torch.pt"
    snapshot = take_snapshot(strategy)
    rows = {
        "pause of an asynchronous save": (
            milliseconds(lambda: take_snapshot(strategy, None, buffers, description), rounds),
            milliseconds(lambda: [a.copy_(b) for a, b in zip(targets, sources, strict=True)], rounds),
            1.1,
        ),
        "writing": (
            milliseconds(lambda: write(folder / "ours", snapshot, whole), rounds),
            milliseconds(lambda: written_by_torch(states, file), rounds),
            1.5,
        ),
        "reading": (
            milliseconds(lambda: read(folder / "ours"), rounds),
            milliseconds(lambda: torch.load(file, weights_only=True), rounds),
            1.5,
        ),
    }
    found = {
        name: {"ms": round(ours, 2), "least_ms": round(least, 2), "ratio": round(ours / least, 2), "target": target}
        for name, (ours, least, target) in rows.items()
    }
    return {**found, "memory in states": {"ratio": round(memory, 2), "target": 1.3}}


def main() -> int:
    """Measure, and print what is met and what is missed."""
    options = arguments(__doc__, rounds=20)
    with tempfile.TemporaryDirectory() as folder:
        result = measured(options.rounds, Path(folder))
    for name, row in result.items():
        verdict = "ok" if row["ratio"] <= row["target"] else "missed"
        times = f"{row['ms']:8.1f} ms, least {row['least_ms']:6.1f} ms" if "ms" in row else ""
        print(f"{name:30} {row['ratio']:5.2f} times (target {row['target']:.1f}, {verdict}) {times}")
    if options.save:
        save("checkpoints", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
