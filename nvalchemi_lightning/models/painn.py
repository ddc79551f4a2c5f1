"""PaiNN, the potential that comes with the package."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from nvalchemi_lightning.errors import ConfigurationError, DataError
from nvalchemi_lightning.models.base import BaseModelMixin, ModelConfig, NeighborConfig
from nvalchemi_lightning.models.differentiation import (
    energy_and_gradient,
    forces_on_atoms,
    leaving_inference,
    stress_of_edges,
)
from nvalchemi_lightning.models.graph import AtomGraph
from nvalchemi_lightning.models.layers import Edges, ElementMessage, Message, RadialBasis, Readout, Update
from nvalchemi_lightning.models.statistics import AtomicStatistics
from nvalchemi_lightning.neighbors import check_cutoff

if TYPE_CHECKING:
    from nvalchemi_lightning.data.store.layout import ZarrStoreLike

__all__ = ["PaiNN"]

_LARGEST = 118
_DOUBLE = ("energy_scale", "element_energies")


class PaiNN(nn.Module, BaseModelMixin):
    """An equivariant message passing potential for molecules and crystals.

    The energy of a structure is ``scale * sum_i e_i + sum_i E0[Z_i]``: a learned part of each atom, which depends on
    its surroundings, and a fixed part that depends on its element alone. Forces and stress are its derivatives.

    Parameters
    ----------
    hidden : int, default 64
        Features per atom F.
    num_layers : int, default 3
        Rounds of messages.
    num_radial : int, default 8
        Radial functions.
    cutoff : float, default 5.0
        Largest distance of neighbors [A].
    elements : sequence of int, optional
        Atomic numbers that the model knows; all by default.
    reference_energies : sequence of float, optional
        Energy E0 of an atom of each of ``elements`` [eV]; zero by default.
    scale : float, default 1.0
        Size of the learned energies [eV]; best the root mean square of the forces [eV/A].
    neighbors_per_atom : float, default 10.0
        Typical number of neighbors, by which sums over them are normalized.
    active_outputs : sequence of str, default ("energy", "forces")
        What a call computes: any of ``energy`` (B, 1) [eV], ``forces`` (V, 3) [eV/A], ``stress`` (B, 3, 3) [eV/A^3].

    Raises
    ------
    ConfigurationError
        If a size is not positive, an element is no element or named twice, or the reference energies do not match
        the elements.
    UnknownNameError
        If there is no such output.

    Notes
    -----
    A batch without ``neighbor_list`` gets its neighbors searched inside the call. Edges beyond the cutoff have no
    effect; edges that are missing are missed silently, so a list must reach the cutoff. The batch is never changed.

    ``scale`` and the reference energies are kept in float64, whatever dtype the model is cast to, and added up in
    float64. Where the batch brings energies in float64, the total stays float64, so that a loss sees differences that
    float32 cannot hold; otherwise it is rounded to the dtype of the positions: near -1e5 eV, float32 resolves 0.008 eV.

    Stress is zero for structures without periodicity or whose cell has no volume, where it is not defined.

    In training mode forces and stress can be differentiated. Otherwise all outputs are detached, unless the positions
    require gradients. Both work under ``torch.no_grad()`` and ``torch.inference_mode()``.

    References
    ----------
    K. T. Schuett, O. T. Unke, M. Gastegger, Equivariant message passing for the prediction of tensorial properties and
    molecular spectra, ICML 2021, arXiv:2102.03150.

    Examples
    --------
    >>> statistics = AtomicStatistics.fit(structures, cutoff=5.0)
    >>> model = PaiNN.from_statistics(statistics, hidden=64)
    """

    energy_scale: Tensor
    element_energies: Tensor
    species_of: Tensor

    def __init__(
        self,
        hidden: int = 64,
        num_layers: int = 3,
        num_radial: int = 8,
        cutoff: float = 5.0,
        elements: Sequence[int] | None = None,
        reference_energies: Sequence[float] | None = None,
        scale: float = 1.0,
        neighbors_per_atom: float = 10.0,
        active_outputs: Sequence[str] = ("energy", "forces"),
    ) -> None:
        super().__init__()
        _check_sizes(hidden=hidden, num_layers=num_layers, num_radial=num_radial, neighbors_per_atom=neighbors_per_atom)
        check_cutoff(cutoff)
        known = _checked_elements(elements, reference_energies)
        self.hidden = hidden
        self.num_layers = num_layers
        self.num_radial = num_radial
        self.cutoff = cutoff
        self.elements = None if elements is None else known
        self.reference_energies = None if reference_energies is None else tuple(map(float, reference_energies))
        self.scale = scale
        self.neighbors_per_atom = neighbors_per_atom
        self.model_config = ModelConfig(
            outputs=frozenset({"energy", "forces", "stress"}),
            autograd_outputs=frozenset({"forces", "stress"}),
            optional_inputs=frozenset({"cell", "pbc", "neighbor_list_shifts"}),
            supports_pbc=True,
            neighbor_config=NeighborConfig(cutoff=cutoff),
        )
        self.set_config("active_outputs", set(active_outputs))
        self.register_buffer("energy_scale", torch.tensor(scale, dtype=torch.float64))
        energies = [0.0] * len(known) if reference_energies is None else list(reference_energies)
        self.register_buffer("element_energies", torch.tensor(energies, dtype=torch.float64))
        species_of = torch.full((_LARGEST + 2,), -1)
        species_of[list(known)] = torch.arange(len(known))
        self.register_buffer("species_of", species_of, persistent=False)
        self._elements_seen = False
        self._build(len(known))

    def _build(self, num_elements: int) -> None:
        hidden, num_radial = self.hidden, self.num_radial
        self.embedding = nn.Embedding(num_elements, hidden)
        # Sums over n independent messages have the size of one message after division by the root of n.
        self.radial = RadialBasis(num_radial, self.cutoff, amplitude=self.neighbors_per_atom**-0.5)
        self.first_message = ElementMessage(num_elements, hidden, num_radial)
        self.messages = nn.ModuleList(Message(hidden, num_radial) for _ in range(self.num_layers - 1))
        self.updates = nn.ModuleList(
            Update(hidden, last=layer == self.num_layers - 1) for layer in range(self.num_layers)
        )
        self.readout = Readout(hidden)

    @classmethod
    def from_statistics(cls, statistics: AtomicStatistics | ZarrStoreLike, **options: Any) -> Self:
        """Make a model whose elements, reference energies, scales and cutoff are those of a data set.

        Parameters
        ----------
        statistics : AtomicStatistics or store
            Of the training data; or the store or file from which :meth:`AtomicStatistics.load` reads them.
        **options : Any
            Other arguments of the constructor; they take precedence.

        Raises
        ------
        ConfigurationError
            If neighbors were counted within another distance than ``cutoff``.
        DataError
            If there are no statistics in the store, or it changed after they were computed.
        """
        if not isinstance(statistics, AtomicStatistics):
            statistics = AtomicStatistics.load(statistics)
        scales = (statistics.force_scale, statistics.energy_scale)
        found = {
            "elements": statistics.elements,
            "reference_energies": statistics.reference_energies,
            # A NaN compares as False, so absent labels are passed over.
            "scale": next((scale for scale in scales if scale > 0), 1.0),
        }
        if statistics.cutoff is not None:
            found["cutoff"] = statistics.cutoff
        if statistics.neighbors_per_atom > 0 and "neighbors_per_atom" not in options:
            _check_same_cutoff(statistics.cutoff, options.get("cutoff", statistics.cutoff))
            found["neighbors_per_atom"] = statistics.neighbors_per_atom
        return cls(**{**found, **options})

    @property
    def active_outputs(self) -> tuple[str, ...]:
        """What a call computes; change it with ``set_config("active_outputs", ...)``."""
        return tuple(sorted(self.model_config.active_outputs))

    def forward(self, data: Any) -> dict[str, Tensor | None]:
        """Return the active outputs by name.

        Parameters
        ----------
        data : Batch or AtomicData
            The structures.

        Raises
        ------
        DataError
            If the dtype of the positions is not that of the model, or an element is not among ``elements``. On a GPU
            only the first call looks at the elements, since looking costs a synchronization; later, the energy of a
            structure with an unknown element is NaN.
        """
        self._check_dtype(data.positions)
        with leaving_inference():
            graph = AtomGraph.of(data, self.cutoff)
            species = self._species(graph)

        def energy_of(vectors: Tensor) -> Tensor:
            energies = graph.sum_over_structures(self._atom_energies(species.clamp(min=0), graph, vectors))
            return energies * self.energy_scale

        if not self.requires_autograd:
            total = self._total(energy_of(graph.vectors), species, graph)
            return self.adapt_output({"energy": total.to(_total_dtype(data))})
        energy, gradient = energy_and_gradient(energy_of, graph.vectors, training=self.training)
        outputs = {"energy": self._total(energy, species, graph).to(_total_dtype(data))}
        if "forces" in self.model_config.active_outputs:
            outputs["forces"] = forces_on_atoms(gradient, graph.source, graph.target, len(graph.numbers))
        if "stress" in self.model_config.active_outputs:
            outputs["stress"] = _stress(gradient, graph)
        return self.adapt_output(outputs)

    def _atom_energies(self, species: Tensor, graph: AtomGraph, vectors: Tensor) -> Tensor:
        edges = Edges.of(graph.source, graph.target, vectors, len(species), self.radial)
        scalars, features = self.first_message(species, self.embedding(species), edges)
        scalars, features = self.updates[0](scalars, features)
        for message, update in zip(self.messages, self.updates[1:], strict=True):
            scalars, features = update(*message(scalars, features, edges))
        energies: Tensor = self.readout(scalars)
        return energies.to(vectors.dtype)

    def _total(self, energy: Tensor, species: Tensor, graph: AtomGraph) -> Tensor:
        """Return the energies with those of the elements, float64, shape (B, 1)."""
        references = self.element_energies[species].masked_fill(species < 0, math.nan)
        return energy.double() + graph.sum_over_structures(references.unsqueeze(1))

    def _species(self, graph: AtomGraph) -> Tensor:
        """Return the place of each atom's element among the known ones, -1 for unknown ones."""
        species = self.species_of[graph.numbers.clamp(0, _LARGEST + 1)]
        if self._elements_seen and species.is_cuda:
            return species
        self._elements_seen = True
        if species.numel() and int(species.min()) < 0:
            atom = int(torch.nonzero(species < 0)[0])
            raise DataError(
                f"atomic number {int(graph.numbers[atom])} of atom {atom} in structure {int(graph.structure[atom])} of "
                f"the batch is not among the elements of this model: {self.elements or 'all up to 118'}"
            )
        return species

    def _check_dtype(self, positions: Tensor) -> None:
        own = self.embedding.weight.dtype
        if positions.dtype != own:
            raise DataError(
                f"positions are {positions.dtype} but the model is {own}; use model.to({positions.dtype}) or "
                f"batch.to(dtype={own})"
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or cast the model, but keep totals in float64."""
        exact = {name: getattr(self, name) for name in _DOUBLE}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, value in exact.items():
            changed = getattr(self, name)
            if changed.dtype != torch.float64:
                setattr(self, name, value.to(changed.device))
        return self


def _total_dtype(data: Any) -> torch.dtype:
    """Return the wider of the dtypes of the positions and of the energies that the batch brings."""
    energy, positions = getattr(data, "energy", None), data.positions
    return positions.dtype if energy is None else torch.promote_types(energy.dtype, positions.dtype)


def _stress(gradient: Tensor, graph: AtomGraph) -> Tensor:
    if graph.cell is None or graph.pbc is None:
        return gradient.new_zeros(graph.num_structures, 3, 3)
    structure = graph.structure.index_select(0, graph.source)
    return stress_of_edges(gradient, graph.vectors, structure, graph.cell, graph.pbc)


def _check_same_cutoff(counted: float | None, cutoff: float | None) -> None:
    if counted != cutoff:
        raise ConfigurationError(
            f"the statistics count neighbors within {counted} A, but the cutoff of the model is {cutoff} A; compute "
            "them with that cutoff, or give neighbors_per_atom"
        )


def _check_sizes(**sizes: float) -> None:
    for name, size in sizes.items():
        if not size > 0:
            raise ConfigurationError(f"{name} must be positive, got {size!r}")


def _checked_elements(elements: Sequence[int] | None, energies: Sequence[float] | None) -> tuple[int, ...]:
    if elements is not None and any(isinstance(element, str) for element in elements):
        raise ConfigurationError(f"elements must be atomic numbers such as (1, 6, 8), got {tuple(elements)}")
    known = tuple(range(1, _LARGEST + 1)) if elements is None else tuple(map(int, elements))
    wrong = [element for element in known if not 1 <= element <= _LARGEST]
    if wrong or not known or len(set(known)) < len(known):
        raise ConfigurationError(f"elements must be distinct atomic numbers from 1 to {_LARGEST}, got {known}")
    if energies is not None and (elements is None or len(energies) != len(known)):
        raise ConfigurationError(
            f"reference_energies has {len(energies)} numbers; give one for each of elements, which is {elements}"
        )
    return known
