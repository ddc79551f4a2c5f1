"""A model that costs next to nothing, its data, and the plain training loops over both."""

from __future__ import annotations

import torch
from measure import ClockedBatches
from torch import Tensor, nn

from nvalchemi_lightning.data import AtomicData, Batch
from nvalchemi_lightning.losses import EnergyMSELoss, as_composed_loss, compute_supervised_loss
from nvalchemi_lightning.training_fn import default_training_fn

__all__ = ["LEARNING_RATE", "EnergyModel", "Supervised", "as_tensors", "make_batches", "plain_objects", "plain_tensors"]

LEARNING_RATE = 1e-3


class AtomNetwork(nn.Module):
    """Energies as sums of what a small network says about each atom's position; 41 parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, 1))

    def energies(self, positions: Tensor, batch_idx: Tensor, num_graphs: int) -> Tensor:
        """Return the energy of each graph, shape (B, 1) [eV]."""
        per_atom = self.layers(positions)
        return per_atom.new_zeros(num_graphs, 1).index_add(0, batch_idx, per_atom)


class EnergyModel(AtomNetwork):
    """The network as a model that reads a batch."""

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return ``{"energy": ...}``."""
        return {"energy": self.energies(batch.positions, batch.batch_idx, batch.num_graphs)}


class Supervised:
    """Model, loss and optimizer that the rungs share, fresh for every run."""

    def __init__(self) -> None:
        self.model = EnergyModel()
        self.loss_fn = as_composed_loss(EnergyMSELoss())
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=LEARNING_RATE)

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of a batch."""
        predictions = default_training_fn(self.model, batch)
        output = compute_supervised_loss(self.loss_fn, predictions, batch, step=0, epoch=0)
        return output["total_loss"]


def make_batches(count: int = 8) -> list[Batch]:
    """Return batches of four molecules of nine atoms with random energies."""
    generator = torch.Generator().manual_seed(1)

    def molecule() -> AtomicData:
        return AtomicData(
            positions=torch.randn(9, 3, generator=generator),
            atomic_numbers=torch.ones(9, dtype=torch.int64),
            energy=torch.randn(1, 1, generator=generator),
        )

    return [Batch.from_data_list([molecule() for _ in range(4)]) for _ in range(count)]


def as_tensors(batch: Batch) -> tuple[Tensor, Tensor, int, Tensor]:
    """Return what a loop without objects needs of a batch."""
    return batch.positions, batch.batch_idx, batch.num_graphs, batch.energy


def plain_tensors(loader: ClockedBatches) -> nn.Module:
    """Train on tensors that are taken out of the batch beforehand."""
    model = AtomNetwork()
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    for positions, batch_idx, num_graphs, energy in loader:
        loss = (model.energies(positions, batch_idx, num_graphs) - energy).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def plain_objects(loader: ClockedBatches) -> nn.Module:
    """Train on batches with the package's loss; the batch is copied to the device as Lightning would do."""
    task = Supervised()
    for source in loader:
        batch = source.to("cpu")
        loss = task.loss(batch)
        task.optimizer.zero_grad()
        loss.backward()
        task.optimizer.step()
    return task.model
