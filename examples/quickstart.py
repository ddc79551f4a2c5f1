"""Train PaiNN on molecules labelled with energies and forces, and print how good it becomes.

The steps are those of any training: labelled structures, a Zarr store, loaders, a model, a recipe, a run.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import ase.io
import torch
from ase import Atoms
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR

from nvalchemi_lightning import EnergyMSELoss, ForceMSELoss, OptimizerConfig, TrainingStrategy, ValidationConfig
from nvalchemi_lightning.data import (
    AtomicData,
    AtomicDataZarrReader,
    AtomicDataZarrWriter,
    Batch,
    DataLoader,
    InMemoryDataset,
    NeighborListTransform,
)
from nvalchemi_lightning.metrics import EnergyMAE, ForcesMAE
from nvalchemi_lightning.models import AtomicStatistics, PaiNN

MOLECULES = Path(__file__).parent / "data" / "molecules.extxyz.gz"
CUTOFF = 5.0  # [A]
EPOCHS = 40


def dataset(path: Path, frames: list[Atoms]) -> InMemoryDataset:
    """Write labelled frames and their neighbor lists to a Zarr store, and read it into memory."""
    with_edges = NeighborListTransform(CUTOFF)
    AtomicDataZarrWriter(path).write(with_edges(AtomicData.from_atoms(atoms)) for atoms in frames)
    return InMemoryDataset(reader=AtomicDataZarrReader(path))


def trivial(statistics: AtomicStatistics) -> Callable[[Batch], dict[str, Tensor]]:
    """Return the predictor that only counts atoms: the best energy per element, and no forces."""
    energies = torch.zeros(119, dtype=torch.float64)
    energies[list(statistics.elements)] = torch.tensor(statistics.reference_energies, dtype=torch.float64)

    def predict(batch: Batch) -> dict[str, Tensor]:
        total = torch.zeros(batch.num_graphs, dtype=torch.float64)
        total.index_add_(0, batch.batch_idx, energies[batch.atomic_numbers])
        return {"energy": total.unsqueeze(1), "forces": torch.zeros_like(batch.forces)}

    return predict


def errors(predict: Callable[[Batch], dict[str, Tensor]], loader: DataLoader) -> tuple[float, float]:
    """Return the mean absolute errors of energy [meV/atom] and forces [meV/A]."""
    energy, forces = EnergyMAE(), ForcesMAE()
    for batch in loader:
        output = predict(batch)
        energy.update(output["energy"], batch.energy, batch.num_nodes_per_graph)
        forces.update(output["forces"], batch.forces)
    return 1e3 * energy.compute().item(), 1e3 * forces.compute().item()


def main(folder: Path) -> None:
    """Run the quickstart; the Zarr stores go into ``folder``."""
    torch.manual_seed(0)
    frames = ase.io.read(MOLECULES, index=":")
    train, val, test = (
        dataset(folder / f"{split}.zarr", [atoms for atoms in frames if atoms.info["split"] == split])
        for split in ("train", "val", "test")
    )
    train_loader = DataLoader(train, batch_size=8, shuffle=True)
    val_loader, test_loader = DataLoader(val, batch_size=48), DataLoader(test, batch_size=48)

    statistics = AtomicStatistics.fit(train, cutoff=CUTOFF)
    model = PaiNN.from_statistics(statistics, cutoff=CUTOFF)
    table = {
        "atoms counted, no forces": errors(trivial(statistics), test_loader),
        "PaiNN before training": errors(model.eval(), test_loader),
    }
    strategy = TrainingStrategy(
        models=model,
        optimizer_configs=OptimizerConfig(
            lr=3e-3, scheduler_cls=CosineAnnealingLR, scheduler_kwargs={"T_max": EPOCHS * len(train_loader)}
        ),
        loss_fn=EnergyMSELoss(per_atom=True) + ForceMSELoss() * 10.0,
        validation_config=ValidationConfig(validation_data=val_loader, every_n_epochs=1),
        num_epochs=EPOCHS,
    )
    strategy.run(train_loader)
    table["PaiNN after training"] = errors(model.eval(), test_loader)

    print(f"\nMean absolute errors on {len(test)} frames of trajectories that training never saw:")
    print(f"{'':24}{'energy [meV/atom]':>20}{'forces [meV/A]':>18}")
    for name, (energy, forces) in table.items():
        print(f"{name:24}{energy:20.1f}{forces:18.1f}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(folder))
