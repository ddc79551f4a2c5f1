"""A small potential with energy, forces and stress, structures with and without labels, and windows of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from update_rigs import At, Stage, run, sgd

from nvalchemi_lightning.data import AtomicData, Batch
from nvalchemi_lightning.losses import ComposedLossFunction, EnergyMSELoss, ForceMSELoss, StressMSELoss
from nvalchemi_lightning.strategy import TrainingStrategy


class Potential(nn.Module):
    """Energies by a network per atom, forces by autograd, stress from the pair of position and force."""

    requires_autograd = True

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double()

    def forward(self, batch: Any) -> dict[str, Tensor]:
        positions = batch.positions.detach().requires_grad_(True)
        energy = _summed(self.layers(positions).sum(-1, keepdim=True), batch)
        forces = -torch.autograd.grad(energy.sum(), positions, create_graph=self.training)[0]
        stress = _summed((positions[:, :, None] * forces[:, None, :]).flatten(1), batch).view(-1, 3, 3)
        return {"energy": energy, "forces": forces, "stress": stress}


def _summed(per_atom: Tensor, batch: Any) -> Tensor:
    return per_atom.new_zeros(batch.num_graphs, per_atom.shape[1]).index_add(0, batch.batch_idx, per_atom)


def labelled(count: int, *, missing: Iterable[tuple[int, str]] = (), seed: int = 0) -> list[AtomicData]:
    """Return structures of 1, 2, 3, 4, 1, ... atoms; ``missing`` lists pairs of structure and absent label."""
    generator = torch.Generator().manual_seed(seed)
    absent = set(missing)
    return [_labelled(i % 4 + 1, generator, {name for j, name in absent if j == i}) for i in range(count)]


def _labelled(atoms: int, generator: torch.Generator, absent: set[str]) -> AtomicData:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    labels = {"energy": random(1, 1), "forces": random(atoms, 3), "stress": random(1, 3, 3)}
    kept = {name: value for name, value in labels.items() if name not in absent}
    return AtomicData(positions=random(atoms, 3), atomic_numbers=torch.ones(atoms, dtype=torch.int32), **kept)


def cut(data: Sequence[AtomicData], sizes: Iterable[int]) -> list[Batch]:
    """Return batches of consecutive structures."""

    def pieces() -> Iterator[Batch]:
        start = 0
        for size in sizes:
            # Every batch has every label, NaN where a structure has none.
            yield Batch.from_data_list(list(data))[list(range(start, start + size))]
            start += size

    return list(pieces())


def three_terms() -> ComposedLossFunction:
    """Return energies, forces and stresses, each by its default mean."""
    return EnergyMSELoss() + ForceMSELoss() * 10.0 + StressMSELoss() * 3.0


def gradients(loader: Any, *hooks: Any, **fields: Any) -> list[list[Tensor]]:
    """Return the gradients of all parameters before every step of one pass."""
    seen: list[list[Tensor]] = []

    def note(ctx: Any) -> None:
        if ctx.window is None or ctx.window.last:
            seen.append([parameter.grad.clone() for parameter in ctx.model.parameters()])

    hooks = (*hooks, At(Stage.BEFORE_OPTIMIZER_STEP, note))
    defaults: dict[str, Any] = {"models": Potential(), "optimizer_configs": sgd(0.0), "loss_fn": three_terms()}
    if not {"num_epochs", "num_steps"} & set(fields):
        defaults["num_epochs"] = 1
    run(TrainingStrategy(**{**defaults, **fields}, hooks=list(hooks)), loader)
    return seen


def same(ours: list[list[Tensor]], theirs: list[list[Tensor]], atol: float = 1e-12) -> bool:
    """Return whether two lists of gradients agree."""
    assert len(ours) == len(theirs)
    return all(
        torch.allclose(one, other, rtol=0, atol=atol)
        for mine, yours in zip(ours, theirs, strict=True)
        for one, other in zip(mine, yours, strict=True)
    )
