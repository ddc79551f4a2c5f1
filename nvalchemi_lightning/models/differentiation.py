"""Derivatives of the energy inside a model, whatever the surroundings record."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["energy_and_gradient", "forces_on_atoms", "leaving_inference", "savable", "stress_of_edges"]


def energy_and_gradient(
    energy_of: Callable[[Tensor], Tensor], point: Tensor, *, training: bool
) -> tuple[Tensor, Tensor]:
    """Evaluate energies and differentiate their sum, also under ``torch.no_grad()`` and ``torch.inference_mode()``.

    Parameters
    ----------
    energy_of : callable
        Computes energies [eV] from ``point``.
    point : Tensor
        Where to evaluate, in Angstrom, such as positions (V, 3). It is left as it is.
    training : bool
        Whether the derivative is to be differentiated again.

    Returns
    -------
    energy : Tensor
        What ``energy_of`` returned.
    gradient : Tensor
        Derivative of the sum of the energies, of the shape of ``point``.

    Notes
    -----
    Under ``no_grad`` both are detached. Else, in training, both carry their graph; otherwise the gradient is detached,
    and so is the energy unless ``point`` requires gradients, so that no graph outlives the call.
    """
    recording = torch.is_grad_enabled()
    keeps_graph = recording and (training or point.requires_grad)
    with torch.inference_mode(False), torch.enable_grad():
        at = savable(point)
        at = at if at.requires_grad else at.detach().requires_grad_()
        energy = energy_of(at)
        (gradient,) = torch.autograd.grad(
            energy.sum(),
            at,
            retain_graph=keeps_graph,
            create_graph=recording and training,
            materialize_grads=True,
        )
    return (energy if keeps_graph else energy.detach()), gradient


@contextmanager
def leaving_inference() -> Iterator[None]:
    """Leave ``torch.inference_mode()`` inside the block; whether operations are recorded stays as it is."""
    recording = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(recording):
        yield


def savable(tensor: Tensor) -> Tensor:
    """Return a tensor that autograd may save; to be called outside of inference mode, whose tensors are copied."""
    return tensor.clone() if tensor.is_inference() else tensor


def forces_on_atoms(gradient: Tensor, source: Tensor, target: Tensor, num_atoms: int) -> Tensor:
    """Return the forces that follow from the derivative with respect to the edge vectors.

    Parameters
    ----------
    gradient : Tensor
        Derivative of the energy with respect to the vectors from source to target, shape (E, 3) [eV/A].
    source, target : Tensor
        Atoms that each edge joins, int64, shape (E,).
    num_atoms : int
        Number of atoms V.

    Returns
    -------
    Tensor
        Forces, shape (V, 3) [eV/A]; exactly zero for atoms without edges.
    """
    forces = gradient.new_zeros(num_atoms, 3).index_add(0, source, gradient)
    return forces.index_add(0, target, gradient, alpha=-1)


def stress_of_edges(gradient: Tensor, vectors: Tensor, structure: Tensor, cell: Tensor, pbc: Tensor) -> Tensor:
    """Return the stress that follows from the derivative with respect to the edge vectors.

    Parameters
    ----------
    gradient : Tensor
        Derivative of the energy with respect to the edge vectors, shape (E, 3) [eV/A].
    vectors : Tensor
        The edge vectors, shape (E, 3) [A].
    structure : Tensor
        Structure of each edge, int64, shape (E,).
    cell : Tensor
        Lattice vectors as rows, shape (B, 3, 3) [A].
    pbc : Tensor
        Periodicity, bool, shape (B, 3).

    Returns
    -------
    Tensor
        ``dE/dstrain / volume``, symmetric and positive under tension, shape (B, 3, 3) [eV/A^3]. Zero for structures
        that are not periodic at all, or whose cell has no volume: their stress is not defined.

    Notes
    -----
    A symmetric strain e moves positions and cell by ``x (1 + e)``, so every edge vector r becomes ``r (1 + e)`` and
    the derivative is the symmetric part of the sum of ``r (x) dE/dr``.
    """
    outer = (vectors.unsqueeze(2) * gradient.unsqueeze(1)).flatten(1)
    summed = outer.new_zeros(cell.shape[0], 9).index_add(0, structure, outer).view(-1, 3, 3)
    volume: Tensor = torch.linalg.det(cell).abs()
    # Rounding leaves a flat cell a little volume.
    defined = pbc.any(1) & (volume > 1e-6 * cell.norm(dim=2).prod(1))
    stress = 0.5 * (summed + summed.mT) / volume.where(defined, 1.0).view(-1, 1, 1)
    return stress.where(defined.view(-1, 1, 1), 0.0)
