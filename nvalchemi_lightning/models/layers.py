"""The parts of PaiNN.

Vector features are stored component by component, all x before all y before all z, shape (3 V, F): sums and products
over components then run over long contiguous rows, which matters since a training step differentiates them twice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["Edges", "ElementMessage", "Filters", "Message", "RadialBasis", "Readout", "Update"]

_BOND = 2.0
"""A typical distance [A]; edges measured in it are of order one."""

_TINY = 1e-6
"""Added under square roots, so that zero vectors and atoms at one place have derivatives of every order."""


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
        Vectors from source to target by component, shape (3, E, 1), of order one. Filters see the length anyway, so
        these need not be unit vectors.
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
        lengths = torch.sqrt(vectors.square().sum(1, keepdim=True) + _TINY**2)
        rows = num_atoms * torch.arange(3, device=source.device).unsqueeze(1)
        return cls(
            source=source,
            target=target,
            vector_source=(source + rows).flatten(),
            vector_target=(target + rows).flatten(),
            directions=(vectors / _BOND).t().contiguous().unsqueeze(2),
            basis=radial(lengths),
        )


class RadialBasis(nn.Module):
    """Spherical Bessel functions of order zero and a constant, all of which vanish smoothly at the cutoff.

    Parameters
    ----------
    num_radial : int
        Number of Bessel functions R.
    cutoff : float
        Where they vanish [A].
    amplitude : float
        Factor of all of them.

    References
    ----------
    Gasteiger, Gross, Guennemann, Directional message passing for molecular graphs (2020), equations 7 and 8.
    """

    def __init__(self, num_radial: int, cutoff: float, amplitude: float) -> None:
        super().__init__()
        self.num_radial = num_radial
        self.cutoff = cutoff
        self.amplitude = amplitude

    def forward(self, lengths: Tensor) -> Tensor:
        """Return the functions at lengths of shape (E, 1) [A], shape (E, R + 1)."""
        scaled = (lengths / self.cutoff).clamp(max=1)
        # One near zero up to the fifth derivative, zero at the cutoff up to the second.
        envelope = self.amplitude * (1 - scaled**6 * (28 - scaled * (48 - 21 * scaled)))
        waves = math.pi * torch.arange(1, self.num_radial + 1, dtype=lengths.dtype, device=lengths.device)
        bessel = torch.sin(waves * scaled) * (envelope / lengths)
        return torch.cat([bessel, envelope], dim=1)


def _linear(inputs: int, outputs: int, *, bias: bool = True, gain: float = 1.0) -> nn.Linear:
    """Return a linear map that keeps features and their gradients at their size when training starts."""
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.xavier_uniform_(layer.weight, gain)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


class Filters(nn.Module):
    """Modulation of messages by the length of their edge: learned combinations of radial functions.

    Parameters
    ----------
    num_radial : int
        Number of Bessel functions R.
    outputs : int
        Number of combinations.

    Notes
    -----
    The weight lies the other way around than in ``nn.Linear``: with so few rows, that makes its derivatives several
    times faster on CPUs.
    """

    def __init__(self, num_radial: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_radial + 1, outputs))
        bound = math.sqrt(3 / (num_radial + 1))
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, basis: Tensor) -> Tensor:
        """Return the filters for radial functions of shape (E, R + 1)."""
        return basis @ self.weight


class Readout(nn.Sequential):
    """The learned energy of each atom, shape (V, 1), from its scalars.

    Parameters
    ----------
    hidden : int
        Size.

    Notes
    -----
    It starts small, near the reference energies: the first steps would go into unlearning a constant otherwise. It
    ends without a constant, which forces alone could not train.
    """

    def __init__(self, hidden: int) -> None:
        inner = max(1, hidden // 2)
        super().__init__(_linear(hidden, inner), nn.SiLU(), _linear(inner, 1, bias=False, gain=0.1))


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
        self.filters = Filters(num_radial, 2 * hidden)

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

    Notes
    -----
    The paper has a perceptron where this has a linear map of the sender's scalars. The update before it ends in a
    perceptron already; a second one costs time and learns nothing more on molecules.

    References
    ----------
    Schuett, Unke, Gastegger, Equivariant message passing (2021), equations 7 and 8.
    """

    def __init__(self, hidden: int, num_radial: int) -> None:
        super().__init__()
        self.features = _linear(hidden, 3 * hidden)
        self.filters = Filters(num_radial, 3 * hidden)

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
        self.mix = _linear(hidden, 2 * hidden, bias=False)
        outputs = (2 if last else 3) * hidden
        self.gates = nn.Sequential(_linear(2 * hidden, hidden), nn.SiLU(), _linear(hidden, outputs))

    def forward(self, scalars: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Return scalars (V, F) and vectors (3 V, F) after the update."""
        hidden = scalars.shape[1]
        mixed = self.mix(vectors).to(vectors.dtype).view(3, -1, 2, hidden)
        # One product gives the scalar products of both mixtures and the squared norms of the second.
        product, square = (mixed * mixed[:, :, 1:]).sum(0).unbind(1)
        norm = torch.sqrt(square + _TINY)
        parts = self.gates(torch.cat([scalars, norm], dim=1)).split(hidden, dim=1)
        scalars = scalars + parts[0] + parts[1] * product
        if not self.last:
            vectors = vectors + (mixed[:, :, 0] * parts[2]).view(-1, hidden)
        return scalars, vectors
