"""A model that costs next to nothing, its data, and the loop that trains it without any object."""

from __future__ import annotations

import torch
from loops import LEARNING_RATE, Task
from measure import ClockedBatches
from torch import Tensor, nn

from nvalchemi_lightning.data import AtomicData, Batch
from nvalchemi_lightning.losses import EnergyMSELoss

__all__ = ["TINY", "as_tensors", "make_batches", "plain_tensors"]


class AtomNetwork(nn.Module):
    """Energies as sums of what a small network says about each atom's position; 41 parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, 1))

    def energies(self, positions: Tensor, batch_idx: Tensor, num_graphs: int) -> Tensor:
        """Return the energy of each graph, shape (B, 1) [eV]."""
        per_atom: Tensor = self.layers(positions)
        return per_atom.new_zeros(num_graphs, 1).index_add(0, batch_idx, per_atom)


class EnergyModel(AtomNetwork):
    """The network as a model that reads a batch."""

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return ``{"energy": ...}``."""
        return {"energy": self.energies(batch.positions, batch.batch_idx, batch.num_graphs)}


TINY = Task(EnergyModel, EnergyMSELoss)
"""Train the tiny model on energies."""


def make_batches(count: int = 8) -> list[Batch]:
    """Return batches of four molecules of nine atoms with random energies and forces."""
    generator = torch.Generator().manual_seed(1)

    def molecule() -> AtomicData:
        return AtomicData(
            positions=torch.randn(9, 3, generator=generator),
            atomic_numbers=torch.ones(9, dtype=torch.int64),
            energy=torch.randn(1, 1, generator=generator),
            forces=torch.randn(9, 3, generator=generator),
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
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model
