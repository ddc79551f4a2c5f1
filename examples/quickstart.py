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
EPOCHS = 60


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


def print_errors(name: str, predict: Callable[[Batch], dict[str, Tensor]], loader: DataLoader) -> None:
    """Print the mean absolute errors of a predictor."""
    energy, forces = EnergyMAE(), ForcesMAE()
    for batch in loader:
        output = predict(batch)
        energy.update(output["energy"], batch.energy, batch.num_nodes_per_graph)
        forces.update(output["forces"], batch.forces)
    print(f"{name:24}{1e3 * energy.compute():20.1f}{1e3 * forces.compute():18.1f}")


def main(folder: Path) -> None:
    """Run the quickstart; the Zarr stores go into ``folder``."""
    torch.manual_seed(0)
    frames = ase.io.read(MOLECULES, index=":")
    train, val, test = (
        dataset(folder / f"{split}.zarr", [atoms for atoms in frames if atoms.info["split"] == split])
        for split in ("train", "val", "test")
    )
    test_loader = DataLoader(test, batch_size=48)

    statistics = AtomicStatistics.fit(train, cutoff=CUTOFF)
    model = PaiNN.from_statistics(statistics, cutoff=CUTOFF, hidden=64)

    print(f"Mean absolute errors on {len(test)} frames of trajectories that are not in the training set:")
    print(f"{'':24}{'energy [meV/atom]':>20}{'forces [meV/A]':>18}")
    print_errors("atoms counted, no forces", trivial(statistics), test_loader)
    print_errors("PaiNN before training", model.eval(), test_loader)

    strategy = TrainingStrategy(
        models=model,
        optimizer_configs=OptimizerConfig(lr=2e-3),
        loss_fn=EnergyMSELoss(per_atom=True) + ForceMSELoss() * 10.0,
        validation_config=ValidationConfig(validation_data=DataLoader(val, batch_size=48), every_n_epochs=1),
        num_epochs=EPOCHS,
    )
    strategy.run(DataLoader(train, batch_size=8, shuffle=True))
    print_errors("PaiNN after training", model.eval(), test_loader)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(folder))
