"""A tiny model for examples of the training loop. It knows no neighbors and is no potential."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nvalchemi_lightning.errors import DataError
from nvalchemi_lightning.models.base import BaseModelMixin, ModelConfig
from nvalchemi_lightning.models.differentiation import energy_and_gradient, leaving_inference, savable
from nvalchemi_lightning.models.graph import structure_of_atoms

__all__ = ["DemoModel", "DemoModelWrapper"]


class DemoModel(nn.Module):
    """One number per atom from its element and its position.

    Parameters
    ----------
    num_atom_types : int, default 100
        Rows of the table of elements; atomic numbers are below it.
    hidden_dim : int, default 64
        Width.

    Notes
    -----
    The names and shapes of its weights are those of the model of the same name in nvalchemi-toolkit. Its energy
    changes when a structure is moved or turned.
    """

    def __init__(self, num_atom_types: int = 100, hidden_dim: int = 64) -> None:
        super().__init__()
        self.num_atom_types = num_atom_types
        self.hidden_dim = hidden_dim
        self.embedding = nn.Embedding(num_atom_types, hidden_dim, padding_idx=0, max_norm=1)
        self.coord_embedding = nn.Sequential(nn.Linear(3, hidden_dim, bias=False), nn.LayerNorm(hidden_dim), nn.SiLU())
        self.joint_mlp = nn.Sequential(
            nn.Linear(2 * hidden_dim, hidden_dim),
            nn.LayerNorm(hidden_dim),
            nn.SiLU(),
            nn.Linear(hidden_dim, hidden_dim),
        )
        self.projection = nn.Linear(hidden_dim, 1)

    def forward(self, atomic_numbers: Tensor, positions: Tensor) -> Tensor:
        """Return one energy per atom, shape (V,) [eV], for positions of shape (V, 3) [A].

        Raises
        ------
        DataError
            If there is an element that the table does not hold (checked on the CPU, where looking costs nothing).
        """
        if not atomic_numbers.is_cuda and atomic_numbers.numel() and int(atomic_numbers.max()) >= self.num_atom_types:
            raise DataError(
                f"atomic number {int(atomic_numbers.max())} needs DemoModel(num_atom_types=...) above it, "
                f"but it is {self.num_atom_types}"
            )
        element = self.embedding(atomic_numbers.long())
        place = self.coord_embedding(positions)
        hidden = self.joint_mlp(torch.cat([element, place], dim=-1)) + element + place
        energies: Tensor = self.projection(hidden).squeeze(-1)
        return energies


class DemoModelWrapper(nn.Module, BaseModelMixin):
    """Energies and forces of a :class:`DemoModel`.

    Parameters
    ----------
    model : DemoModel
        The model.
    """

    def __init__(self, model: DemoModel) -> None:
        super().__init__()
        self.model = model
        self.model_config = ModelConfig(outputs=frozenset({"energy", "forces"}), autograd_outputs=frozenset({"forces"}))

    def forward(self, data: Any) -> dict[str, Tensor | None]:
        """Return the active outputs for a batch, which is not changed; see :class:`BaseModelMixin`."""
        with leaving_inference():
            numbers, structure = savable(data.atomic_numbers), structure_of_atoms(data)

        def energy_of(positions: Tensor) -> Tensor:
            energies: Tensor = self.model(numbers, positions)
            return energies.new_zeros(data.num_graphs).index_add(0, structure, energies)

        if not self.requires_autograd:
            return self.adapt_output({"energy": energy_of(data.positions)})
        energy, gradient = energy_and_gradient(energy_of, data.positions, training=self.training)
        return self.adapt_output({"energy": energy, "forces": -gradient})
