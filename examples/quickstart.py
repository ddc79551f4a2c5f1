"""Train PaiNN on molecules labelled with energies and forces, and print how good it becomes.

The steps are those of any training: labelled structures, a Zarr store, loaders, a model, a recipe, a run.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import ase.io
import numpy as np
import torch
from ase import Atoms

from nvalchemi_lightning import EnergyMSELoss, ForceMSELoss, OptimizerConfig, TrainingStrategy, ValidationConfig
from nvalchemi_lightning.data import AtomicData, AtomicDataZarrReader, AtomicDataZarrWriter, DataLoader, Dataset
from nvalchemi_lightning.models import PaiNN

MOLECULES = Path(__file__).parent / "data" / "molecules.extxyz.gz"
EPOCHS = 60
BATCH_SIZE = 16
CUTOFF = 5.0  # [A]


def store(path: Path, frames: list[Atoms]) -> Dataset:
    """Write labelled frames to a Zarr store and open it as a dataset."""
    AtomicDataZarrWriter(path).write([AtomicData.from_atoms(atoms) for atoms in frames])
    return Dataset(AtomicDataZarrReader(path))


def errors(model: PaiNN, loader: DataLoader) -> tuple[float, float]:
    """Return the mean absolute errors of energy [meV/atom] and forces [meV/A]."""
    energy, forces = [], []
    for batch in loader:
        output = model(batch)
        energy.append((output["energy"] - batch.energy).detach().flatten() / batch.num_nodes_per_graph)
        forces.append((output["forces"] - batch.forces).detach().flatten())
    return 1e3 * torch.cat(energy).abs().mean().item(), 1e3 * torch.cat(forces).abs().mean().item()


def trivial_errors(train: list[Atoms], test: list[Atoms]) -> tuple[float, float]:
    """Return the same errors of the best predictor that only counts atoms: one energy per element, no forces."""
    elements = sorted({number for atoms in train for number in atoms.numbers})

    def counts(frames: list[Atoms]) -> np.ndarray:
        return np.array([[np.sum(atoms.numbers == number) for number in elements] for atoms in frames])

    def energies(frames: list[Atoms]) -> np.ndarray:
        return np.array([atoms.get_potential_energy() for atoms in frames])

    per_element = np.linalg.lstsq(counts(train), energies(train), rcond=None)[0]
    energy = (counts(test) @ per_element - energies(test)) / counts(test).sum(axis=1)
    forces = np.concatenate([atoms.get_forces() for atoms in test])
    return 1e3 * np.abs(energy).mean(), 1e3 * np.abs(forces).mean()


def main(folder: Path) -> None:
    """Run the quickstart; the Zarr stores go into ``folder``."""
    torch.manual_seed(0)
    frames = ase.io.read(MOLECULES, index=":")
    split = {name: [atoms for atoms in frames if atoms.info["split"] == name] for name in ("train", "val", "test")}
    data = {name: store(folder / f"{name}.zarr", atoms) for name, atoms in split.items()}
    train, val, test = (
        DataLoader(data[name], batch_size=BATCH_SIZE, shuffle=name == "train") for name in ("train", "val", "test")
    )

    model = PaiNN.from_statistics(train, cutoff=CUTOFF)
    before = errors(model, test)
    strategy = TrainingStrategy(
        models=model,
        optimizer_configs=OptimizerConfig(lr=2e-3),
        loss_fn=EnergyMSELoss(per_atom=True) + ForceMSELoss() * 10.0,
        validation_config=ValidationConfig(validation_data=val, every_n_epochs=5),
        num_epochs=EPOCHS,
    )
    strategy.run(train)

    print(f"\nErrors on {len(split['test'])} frames of trajectories that training never saw (mean absolute):")
    print(f"{'':24}{'energy [meV/atom]':>20}{'forces [meV/A]':>18}")
    rows = {"composition, no forces": trivial_errors(split["train"], split["test"]), "PaiNN, untrained": before}
    rows["PaiNN, trained"] = errors(model, test)
    for name, (energy, force) in rows.items():
        print(f"{name:24}{energy:20.1f}{force:18.1f}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(folder))
