"""How good PaiNN becomes on ethanol: 900 structures, 40 epochs, one thread, float32, at most five minutes."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import ase.io
import torch
from measure import arguments, save

from nvalchemi_lightning import OptimizerConfig, TrainingStage, TrainingStrategy, ValidationConfig
from nvalchemi_lightning.data import AtomicData, Batch, DataLoader
from nvalchemi_lightning.losses import EnergyMAELoss, ForceL2NormLoss
from nvalchemi_lightning.models import AtomicStatistics, PaiNN
from nvalchemi_lightning.neighbors import neighbor_list

CUTOFF = 5.0  # [A]
EPOCHS = 40
BATCH_SIZE = 5
LEARNING_RATE = 3e-3
REPORTED = (1, 3, 10, 20, 40)

# A MACE of 62 thousand parameters, trained by its own program on the same data and thread for 40 epochs:
# validation force MAE by epoch and test errors [meV/A, meV/atom], CPU time [s].
MACE_VALIDATION = {1: 205.0, 3: 96.0, 10: 53.0, 20: 41.0}
MACE_TEST = {"forces": "35.1 to 36.1", "energy": "1.4 to 1.5", "seconds": "264"}


class ValidationErrors:
    """Notes the force error of every validation pass [meV/A]."""

    stage = TrainingStage.AFTER_VALIDATION
    frequency = 1

    def __init__(self) -> None:
        self.by_epoch: dict[int, float] = {}

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        """Note the error under the number of completed epochs."""
        self.by_epoch.setdefault(ctx.epoch, 1e3 * ctx.validation["metrics"]["forces_mae"])


def shared_folder() -> Path:
    """Return the folder of shared data sets."""
    return Path(os.environ.get("NVALCHEMI_SHARED", Path(__file__).resolve().parents[2] / "shared"))


def structures(name: str) -> list[AtomicData]:
    """Read a part of the data set; neighbors are searched once."""
    found = []
    for atoms in ase.io.read(shared_folder() / "data" / f"ethanol_{name}.extxyz.gz", ":"):
        data = AtomicData.from_atoms(atoms)
        data.neighbor_list, data.neighbor_list_shifts = neighbor_list(data, CUTOFF)
        found.append(data)
    return found


def batches(data: list[AtomicData]) -> list[Batch]:
    """Return batches for evaluation."""
    return list(DataLoader(data, batch_size=100))


def train(data: list[AtomicData], validation: list[Batch], epochs: int) -> tuple[PaiNN, dict[int, float]]:
    """Train a model; return it and its validation errors by epoch."""
    torch.manual_seed(0)
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    model = PaiNN.from_statistics(AtomicStatistics.fit(data, cutoff=CUTOFF), hidden=46, cutoff=CUTOFF)
    errors = ValidationErrors()
    strategy = TrainingStrategy(
        models=model,
        optimizer_configs=OptimizerConfig(
            optimizer_cls=torch.optim.Adam,
            lr=LEARNING_RATE,
            scheduler_cls=torch.optim.lr_scheduler.OneCycleLR,
            scheduler_kwargs={"max_lr": LEARNING_RATE, "total_steps": epochs * len(loader), "pct_start": 0.1},
        ),
        loss_fn=EnergyMAELoss() + ForceL2NormLoss(),
        validation_config=ValidationConfig(validation_data=validation, every_n_epochs=1),
        num_epochs=epochs,
        hooks=[errors],
    )
    strategy.run(loader, enable_progress_bar=sys.stderr.isatty())
    return model, errors.by_epoch


def test_errors(model: PaiNN, data: list[Batch]) -> dict[str, float]:
    """Return the mean absolute errors of energy [meV/atom] and forces [meV/A]."""
    strategy = TrainingStrategy(
        models=model,
        loss_fn=ForceL2NormLoss(),
        validation_config=ValidationConfig(validation_data=data),
        num_epochs=1,
    )
    metrics = strategy.validate()["metrics"]
    return {name: 1e3 * metrics[f"{name}_mae"] for name in ("energy", "forces")}


def main() -> None:
    """Train, and print the errors beside those of MACE."""
    options = arguments(__doc__, epochs=EPOCHS)
    if not shared_folder().is_dir():
        print("learning: skipped, the shared data sets are absent (set NVALCHEMI_SHARED to their folder)")
        return
    data = {name: structures(name) for name in ("train", "val", "test")}
    start = time.process_time()
    model, validation = train(data["train"], batches(data["val"]), options.epochs)
    seconds = time.process_time() - start
    test = test_errors(model, batches(data["test"]))
    print(f"{'':32}{'PaiNN':>10}{'MACE':>16}")
    print(f"{'parameters':32}{sum(p.numel() for p in model.parameters()):10}{62000:16}")
    for epoch in REPORTED:
        if epoch in validation:
            row = f"validation forces, epoch {epoch:<3}"
            print(f"{row + ' [meV/A]':32}{validation[epoch]:10.1f}{MACE_VALIDATION.get(epoch, '')!s:>16}")
    print(f"{'test forces [meV/A]':32}{test['forces']:10.1f}{MACE_TEST['forces']:>16}")
    print(f"{'test energy [meV/atom]':32}{test['energy']:10.2f}{MACE_TEST['energy']:>16}")
    print(f"{'CPU time of training [s]':32}{seconds:10.0f}{MACE_TEST['seconds']:>16}")
    if options.save:
        save("learning", {"validation_forces": validation, "test": test, "cpu_seconds": round(seconds)})


if __name__ == "__main__":
    main()
