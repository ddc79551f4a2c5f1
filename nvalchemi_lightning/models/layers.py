"""The parts of PaiNN. Vectors are stored component by component, shape (3 V, F): such rows add up fastest."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["Edges", "ElementMessage", "Message", "RadialBasis", "Update"]

_SMALLEST_NORM = 1e-4
"""Added under square roots of norms, so that zero vectors have derivatives of every order."""


@dataclass(frozen=True)
class Edges:
    """Where messages go and what modulates them.

    Attributes
    ----------
    source, target : Tensor
        Receiving and sending atom of each edge, int64, shape (E,).
    vector_source, vector_target : Tensor
        Their rows among vectors of shape (3 V, F), int64, shape (3 E,).
    directions : Tensor
        Unit vectors from source to target, shape (3, E, 1).
    basis : Tensor
        Radial functions, shape (E, R + 1).
    """

    source: Tensor
    target: Tensor
    vector_source: Tensor
    vector_target: Tensor
    directions: Tensor
    basis: Tensor

    @classmethod
    def of(cls, source: Tensor, target: Tensor, vectors: Tensor, num_atoms: int, radial: RadialBasis) -> Edges:
        """Prepare edges whose vectors have shape (E, 3) [A]."""
        # Two atoms at one place would have no derivative.
        lengths = torch.sqrt(vectors.square().sum(1, keepdim=True) + 1e-12)
        rows = num_atoms * torch.arange(3, device=source.device).unsqueeze(1)
        return cls(
            source=source,
            target=target,
            vector_source=(source + rows).flatten(),
            vector_target=(target + rows).flatten(),
            directions=(vectors / lengths).t().contiguous().unsqueeze(2),
            basis=radial(lengths),
        )


class RadialBasis(nn.Module):
    """Spherical Bessel functions and a constant, all of which vanish smoothly at the cutoff.

    Parameters
    ----------
    num_radial : int
        Number of Bessel functions R.
    cutoff : float
        Where they vanish [A].

    References
    ----------
    Gasteiger, Gross, Guennemann, Directional message passing for molecular graphs (2020), equations 7 and 8.
    """

    def __init__(self, num_radial: int, cutoff: float) -> None:
        super().__init__()
        self.num_radial = num_radial
        self.cutoff = cutoff

    def forward(self, lengths: Tensor) -> Tensor:
        """Return the functions at lengths of shape (E, 1) [A], shape (E, R + 1)."""
        scaled = lengths / self.cutoff
        orders = torch.arange(1, self.num_radial + 1, dtype=lengths.dtype, device=lengths.device)
        bessel = torch.sin(math.pi * orders * scaled) * (math.sqrt(2 / self.cutoff) / lengths)
        # The lowest polynomial that is 1 at zero and has two vanishing derivatives there up to order 5 and at 1 up to 2.
        envelope = 1 - scaled**6 * (28 - scaled * (48 - 21 * scaled))
        envelope = envelope.where(scaled < 1, 0.0)
        return torch.cat([bessel, torch.ones_like(lengths)], dim=1) * envelope


def _perceptron(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.SiLU(), nn.Linear(hidden, outputs))


def _added(values: Tensor, rows: Tensor, increments: Tensor) -> Tensor:
    # Under autocast the increments may be of lower precision than what they are added to.
    return values.index_add(0, rows, increments.to(values.dtype))


class ElementMessage(nn.Module):
    """The first message, which depends on the elements and the geometry alone.

    Parameters
    ----------
    num_elements, hidden, num_radial : int
        Sizes.
    """

    def __init__(self, num_elements: int, hidden: int, num_radial: int) -> None:
        super().__init__()
        self.features = nn.Embedding(num_elements, 2 * hidden)
        self.filters = nn.Linear(num_radial + 1, 2 * hidden, bias=False)

    def forward(self, species: Tensor, scalars: Tensor, edges: Edges) -> tuple[Tensor, Tensor]:
        """Return scalars (V, F) with the messages added, and the first vectors (3 V, F)."""
        hidden = scalars.shape[1]
        sent = self.features(species).index_select(0, edges.target) * self.filters(edges.basis)
        to_scalars, along = sent.split(hidden, dim=1)
        to_vectors = (edges.directions * along).view(-1, hidden)
        vectors = scalars.new_zeros(3 * scalars.shape[0], hidden)
        return _added(scalars, edges.source, to_scalars), _added(vectors, edges.vector_source, to_vectors)


class Message(nn.Module):
    """What neighbors tell: scalars, vectors along the edge, and their own vectors.

    Parameters
    ----------
    hidden, num_radial : int
        Sizes.

    References
    ----------
    Schuett, Unke, Gastegger, Equivariant message passing (2021), equations 7 and 8.
    """

    def __init__(self, hidden: int, num_radial: int) -> None:
        super().__init__()
        self.features = _perceptron(hidden, hidden, 3 * hidden)
        self.filters = nn.Linear(num_radial + 1, 3 * hidden, bias=False)

    def forward(self, scalars: Tensor, vectors: Tensor, edges: Edges) -> tuple[Tensor, Tensor]:
        """Return scalars (V, F) and vectors (3 V, F) with the messages added."""
        hidden = scalars.shape[1]
        features, gates = self.features(scalars).split([2 * hidden, hidden], dim=1)
        filters, vector_filters = self.filters(edges.basis).split([2 * hidden, hidden], dim=1)
        to_scalars, along = (features.index_select(0, edges.target) * filters).split(hidden, dim=1)
        gated = (vectors.view(3, -1, hidden) * gates).view(-1, hidden).index_select(0, edges.vector_target)
        to_vectors = gated.view(3, -1, hidden) * vector_filters + edges.directions * along
        return (
            _added(scalars, edges.source, to_scalars),
            _added(vectors, edges.vector_source, to_vectors.view(-1, hidden)),
        )


class Update(nn.Module):
    """How an atom combines its scalars and vectors.

    Parameters
    ----------
    hidden : int
        Size.
    last : bool
        Whether the vectors are not needed any more.

    References
    ----------
    Schuett, Unke, Gastegger, Equivariant message passing (2021), equations 9 and 10.
    """

    def __init__(self, hidden: int, last: bool) -> None:
        super().__init__()
        self.last = last
        self.mix = nn.Linear(hidden, 2 * hidden, bias=False)
        self.gates = _perceptron(2 * hidden, hidden, (2 if last else 3) * hidden)

    def forward(self, scalars: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Return scalars (V, F) and vectors (3 V, F) after the update."""
        hidden = scalars.shape[1]
        mixed = self.mix(vectors).to(vectors.dtype).view(3, -1, 2, hidden)
        # One product gives the scalar products of both mixtures and the squared norms of the second.
        product, square = (mixed * mixed[:, :, 1:]).sum(0).unbind(1)
        norm = torch.sqrt(square + _SMALLEST_NORM)
        parts = self.gates(torch.cat([scalars, norm], dim=1)).split(hidden, dim=1)
        scalars = scalars + parts[0] + parts[1] * product
        if not self.last:
            vectors = vectors + (mixed[:, :, 0] * parts[2]).view(-1, hidden)
        return scalars, vectors
