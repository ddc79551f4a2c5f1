"""Numbers that are the same for the same structure, however its atoms are ordered, shifted, rotated or repeated.

The numbers are sums over atoms of densities of neighbors, in the spirit of embedded-atom potentials: linear ones, their
square roots, and the norms of their dipoles and quadrupoles. The norms respond in first order where a symmetric
environment is distorted, to which every smooth function is blind. A number changes by about the displacement [A] when
an atom moves.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nvalchemi_lightning.data.checkup.subject import CUTOFF, Floats, Subject

__all__ = ["SIZE", "fingerprint", "polarity"]

SIZE = 12
"""Numbers in a fingerprint."""

_SPREAD = 0.6180339887498949
_TRIANGLE = np.triu_indices(3)
_TWICE = np.array([1.0, 2.0, 2.0, 1.0, 2.0, 1.0])


def fingerprint(subject: Subject) -> Floats:
    """Return the numbers that tell structures of one composition apart.

    Returns
    -------
    ndarray
        Shape (:data:`SIZE`,). Structures whose numbers agree are the same up to what lies beyond the cutoff. Mirror
        images agree.
    """
    weights = _weights(subject.numbers)
    density = _densities(subject)
    radial, dipole, quadrupole = density[:, :3], density[:, 3:6], density[:, 6:]
    trace = quadrupole[:, [0, 3, 5]].mean(1)
    quadrupole[:, [0, 3, 5]] -= trace[:, None]
    per_atom = np.column_stack(
        [
            radial,
            np.sqrt(1 + np.abs(radial)),
            np.sqrt((dipole * dipole).sum(1)),
            np.sqrt((quadrupole * quadrupole * _TWICE).sum(1)),
        ]
    )
    return np.concatenate([weights @ per_atom / np.sqrt(len(weights)), _extent(subject, weights)])


def polarity(subject: Subject) -> float:
    """Return the largest dipole of the density around an atom; where symmetry makes forces vanish, it vanishes too."""
    dipole = _densities(subject)[:, 3:6]
    return float(np.sqrt((dipole * dipole).sum(1)).max())


def _weights(numbers: NDArray[np.int64]) -> Floats:
    """Return a number between 0.5 and 1.5 for each atom that tells the elements apart."""
    weights: Floats = 0.5 + np.modf(numbers * _SPREAD)[0]
    return weights


def _densities(subject: Subject) -> Floats:
    """Return for every atom 3 radial, 3 dipole and 6 quadrupole sums over its neighbors, shape (V, 12)."""
    edges = subject.edges
    total = np.zeros((len(subject.numbers), 12))
    if not len(edges):
        return total
    length = edges.lengths[:, None]
    direction = edges.vectors / np.maximum(length, 1e-12)
    smooth = (0.5 + 0.5 * np.cos(np.pi / CUTOFF * length)) ** 2 * _weights(subject.numbers)[edges.target][:, None]
    terms = smooth * np.concatenate(
        [
            np.ones_like(length),
            np.exp(-length),
            np.cos(2 * length),
            direction,
            direction[:, _TRIANGLE[0]] * direction[:, _TRIANGLE[1]],
        ],
        axis=1,
    )
    first = np.flatnonzero(np.diff(edges.source, prepend=-1))
    total[edges.source[first]] = np.add.reduceat(terms, first)
    return total


def _extent(subject: Subject, weights: Floats) -> Floats:
    """Return the size of the repeated cell and the spread of the atoms in the directions that do not repeat."""
    periodic = subject.cell[np.array(subject.pbc)]
    count = len(periodic)
    if count == 3:
        return np.array([abs(np.linalg.det(periodic)) ** (1 / 3), 0.0, 0.0, 0.0])
    free = np.eye(3)
    size = 0.0
    if count:
        _, stretch, directions = np.linalg.svd(periodic)
        free = directions[count:]
        size = float(np.prod(stretch)) ** (1 / count)
    across = subject.positions @ free.T
    across -= weights @ across / weights.sum()
    spread = np.linalg.eigvalsh((across * weights[:, None]).T @ across / weights.sum())
    return np.array([size, *np.sqrt(np.abs(spread)), *np.zeros(count)])
