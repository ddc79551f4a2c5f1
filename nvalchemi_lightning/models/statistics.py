"""Numbers of a data set that a model starts from: energies per element and the size of the forces."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, ConfigDict, PlainSerializer, ValidationError

from nvalchemi_lightning.data.elements import SYMBOLS
from nvalchemi_lightning.data.inspection.compositions import TABLE
from nvalchemi_lightning.data.inspection.size_range import SizeRange
from nvalchemi_lightning.errors import DataError
from nvalchemi_lightning.models.statistics_remarks import remarks
from nvalchemi_lightning.models.statistics_store import keep, kept
from nvalchemi_lightning.models.statistics_sums import StatisticsSums, blocks_of, rms
from nvalchemi_lightning.strict_model import StrictModel

if TYPE_CHECKING:
    from nvalchemi_lightning.data.store.layout import ZarrStoreLike

__all__ = ["AtomicStatistics", "ElementStatistics"]

Number: TypeAlias = Annotated[
    float,
    BeforeValidator(lambda value: math.nan if value is None else value),
    PlainSerializer(lambda value: None if math.isnan(value) else value, return_type=float | None, when_used="json"),
]
"""A number that JSON holds as null where it is NaN."""


class ElementStatistics(StrictModel):
    """What belongs to one element.

    Attributes
    ----------
    number : int
        Atomic number.
    atoms : int
        Atoms of the element.
    labelled_atoms : int
        Those of them in structures with an energy.
    reference_energy : float
        Energy of an atom [eV].
    force_scale : float
        Root mean square of the force components on its atoms [eV/A]; NaN without forces.
    """

    model_config = ConfigDict(frozen=True)

    number: int
    atoms: int
    labelled_atoms: int
    reference_energy: float
    force_scale: Number

    @property
    def symbol(self) -> str:
        """Symbol of the element."""
        return SYMBOLS[self.number]


class AtomicStatistics(StrictModel):
    """What a model needs to know about a data set before training.

    Attributes
    ----------
    num_structures, num_atoms : int
        How many there are.
    sizes : SizeRange
        Atoms of the smallest, the middle and the largest structure.
    num_energies, num_forces, num_stresses : int
        Structures with the label, or a part of it; a stress only counts where some direction is periodic.
    per_element : tuple of ElementStatistics
        Elements by ascending atomic number.
    references : {"fitted", "given"}
        Where the reference energies come from.
    rank : int
        Number of independent compositions among the structures with an energy. Below the number of elements the
        fitted reference energies are not unique, and the smallest ones are taken: they describe these compositions,
        and say nothing about others.
    isolated_atoms : tuple of int
        Elements with a structure of a single atom that has an energy and no neighbors.
    energy_scale : float
        What the reference energies leave unexplained, as the standard deviation per atom [eV] if atoms contribute
        independently; NaN without energies.
    energy_residual : float
        The same as root mean square over structures of energy per atom [eV].
    energy_resolution : float
        Largest distance of an energy from the next number of its dtype [eV].
    force_scale : float
        Root mean square of the force components [eV/A]; NaN without forces.
    stress_scale : float
        Root mean square of the stress components [eV/A^3]; NaN without stress.
    cutoff : float or None
        Distance within which neighbors are counted [A].
    neighbors_per_atom : float
        Mean number of neighbors; NaN without a cutoff.
    """

    model_config = ConfigDict(frozen=True)

    num_structures: int
    num_atoms: int
    sizes: SizeRange
    num_energies: int
    num_forces: int
    num_stresses: int
    per_element: tuple[ElementStatistics, ...]
    references: Literal["fitted", "given"]
    rank: int
    isolated_atoms: tuple[int, ...]
    energy_scale: Number
    energy_residual: Number
    energy_resolution: Number
    force_scale: Number
    stress_scale: Number
    cutoff: float | None
    neighbors_per_atom: Number

    @property
    def elements(self) -> tuple[int, ...]:
        """Atomic numbers that occur, ascending."""
        return tuple(element.number for element in self.per_element)

    @property
    def reference_energies(self) -> tuple[float, ...]:
        """Energy of an atom of each element [eV]."""
        return tuple(element.reference_energy for element in self.per_element)

    @property
    def is_degenerate(self) -> bool:
        """Whether the compositions do not determine the reference energies."""
        return self.rank < len(self.per_element)

    @property
    def remarks(self) -> list[str]:
        """What one should know before one trusts the numbers: a sentence each; empty if there is nothing."""
        return remarks(self)

    @classmethod
    def fit(
        cls,
        structures: Iterable[Any] | str | os.PathLike[str],
        *,
        cutoff: float | None = None,
        reference_energies: Mapping[int, float] | None = None,
    ) -> AtomicStatistics:
        """Compute the statistics in one pass.

        Parameters
        ----------
        structures : iterable of AtomicData or Batch, str or PathLike
            The training data: structures, a loader, or a Zarr store or file. Labels that are absent or NaN are passed
            over.
        cutoff : float, optional
            Distance within which neighbors are counted [A]; not counted by default.
        reference_energies : mapping of int to float, optional
            Energy of an atom by atomic number [eV]. By default they are fitted to the energies by least squares, in
            float64.

        Raises
        ------
        FileNotFoundError
            If there is nothing at the path.
        DataError
            If there is no structure, a label is infinite, or ``reference_energies`` lacks an element.

        Notes
        -----
        The memory does not grow with the number of structures, and the result does not depend on how they are cut
        into batches, but for roundings of float64.
        """
        sums = StatisticsSums(cutoff)
        for data in blocks_of(structures):
            sums.add(data)
        if not sums.sizes:
            raise DataError("there are no structures to compute statistics from")
        fitted = sums.total.solve()
        energies = fitted.values if reference_energies is None else _given(reference_energies, sums.atoms)
        return cls(
            num_structures=sums.sizes.total(),
            num_atoms=int(sums.atoms.sum()),
            sizes=SizeRange.of(sums.sizes),
            num_energies=sums.labelled["energy"],
            num_forces=sums.labelled["forces"],
            num_stresses=sums.labelled["stress"],
            per_element=_per_element(sums, energies),
            references="fitted" if reference_energies is None else "given",
            rank=fitted.rank,
            isolated_atoms=tuple(sorted(sums.isolated)),
            energy_scale=rms(sums.total.residual(energies) ** 2, int(sums.labelled_atoms.sum())),
            energy_residual=rms(sums.per_atom.residual(energies) ** 2, sums.per_atom.rows),
            energy_resolution=sums.resolution,
            force_scale=sums.forces.root(),
            stress_scale=sums.stress.root(),
            cutoff=cutoff,
            neighbors_per_atom=math.nan if cutoff is None else sums.edges / int(sums.atoms.sum()),
        )

    def save(self, store: ZarrStoreLike) -> None:
        """Keep the statistics in the store that they are of, in an attribute that other readers ignore.

        Parameters
        ----------
        store : str, PathLike, zarr Store, StorePath or dict
            The store.

        Raises
        ------
        FileNotFoundError
            If there is no store.
        DataError
            If it has another number of structures.
        """
        keep(store, self.model_dump(mode="json"))

    @classmethod
    def load(cls, place: ZarrStoreLike) -> AtomicStatistics:
        """Return the statistics that are kept in a store, or in a file that ``data stats --json`` wrote.

        Parameters
        ----------
        place : str, PathLike, zarr Store, StorePath or dict
            The store or file.

        Raises
        ------
        FileNotFoundError
            If there is nothing at the path.
        DataError
            If it holds no statistics, or the store changed after they were computed.
        """
        found = kept(place)
        try:
            return cls.model_validate_json(json.dumps(found))
        except (ValidationError, DataError) as error:
            raise DataError(f"{place} holds damaged statistics, or those of another version; compute again") from error


def _per_element(sums: StatisticsSums, energies: NDArray[np.float64]) -> tuple[ElementStatistics, ...]:
    force_scales = sums.forces.roots()
    return tuple(
        ElementStatistics(
            number=number,
            atoms=int(sums.atoms[number]),
            labelled_atoms=int(sums.labelled_atoms[number]),
            reference_energy=float(energies[number]),
            force_scale=force_scales[number],
        )
        for number in np.flatnonzero(sums.atoms).tolist()
    )


def _given(energies: Mapping[int, float], atoms: NDArray[np.int64]) -> NDArray[np.float64]:
    elements = np.flatnonzero(atoms).tolist()
    missing = [element for element in elements if element not in energies]
    if missing:
        raise DataError(f"reference_energies lacks the atomic numbers {missing}; it has {sorted(energies)}")
    values = np.zeros(TABLE)
    values[elements] = [energies[element] for element in elements]
    return values
