"""The table of checks: a check joins by a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from nvalchemi_lightning.data.checkup import geometry, labels, placeholders
from nvalchemi_lightning.data.checkup.bonds import BondForces
from nvalchemi_lightning.data.checkup.duplicates import Duplicates
from nvalchemi_lightning.data.checkup.elements import IsolatedAtoms, RareElements, UnseenElements, one_atom_cell
from nvalchemi_lightning.data.checkup.energies import ConstantEnergies, EnergyOutliers, Undetermined
from nvalchemi_lightning.data.checkup.energy_levels import EnergyLevels
from nvalchemi_lightning.data.checkup.report import Severity
from nvalchemi_lightning.data.checkup.stress import StressConvention
from nvalchemi_lightning.data.checkup.watchers import Each, Look, Watcher
from nvalchemi_lightning.data.checkup.work import Work

__all__ = ["CHECKS", "Check"]


@dataclass(frozen=True)
class Check:
    """One row of the table.

    Attributes
    ----------
    name : str
        What reports call it.
    severity : {"error", "warning", "note"}
        How bad it is, unless a conclusion says otherwise.
    title : str
        What is wrong with the structures that it names.
    advice : str
        What to do.
    watcher : callable
        Makes the watcher, one for each set.
    needs : frozenset of str
        Labels that a structure must have in full to be looked at.
    across : bool
        Whether one watcher sees the structures of all sets.
    """

    name: str
    severity: Severity
    title: str
    advice: str
    watcher: Callable[[], Watcher]
    needs: frozenset[str] = frozenset()
    across: bool = False


def _each(judge: Look) -> Callable[[], Watcher]:
    return partial(Each, judge)


_ENERGY, _FORCES, _STRESS = frozenset({"energy"}), frozenset({"forces"}), frozenset({"stress"})

CHECKS = (
    Check(
        "no_labels",
        "error",
        "no labels",
        "There is nothing to train on. Say what the labels are called, such as --energy-key REF_energy.",
        partial(labels.Coverage, labels.Coverage.nothing),
    ),
    Check(
        "overflow",
        "error",
        "labels that float32 cannot hold",
        "Correct the unit, or drop the structures.",
        _each(labels.overflow),
    ),
    Check(
        "coincident_atoms",
        "error",
        "atoms at one place",
        "Drop the structures, or correct positions and cell.",
        _each(geometry.coincident_atoms),
    ),
    Check(
        "virial_mismatch",
        "error",
        "stress and virial that contradict each other",
        "Keep the one whose sign and unit you know.",
        _each(labels.virial_mismatch),
        needs=frozenset({"stress", "virial"}),
    ),
    Check(
        "force_convention",
        "error",
        "forces with another sign or unit",
        "Convert the forces to eV/A, with the sign of -dE/dr.",
        BondForces,
        needs=_FORCES,
    ),
    Check(
        "energy_differences",
        "error",
        "energies that forces and stress contradict",
        "Find out which of the labels has another unit, sign or level of theory, and convert it.",
        Work,
        needs=_ENERGY | _FORCES,
    ),
    Check(
        "stress_convention",
        "error",
        "stress with another sign or unit",
        "Convert the stress to eV/A^3, positive under tension: VASP's kbar by -1/1602.2.",
        StressConvention,
        needs=_STRESS,
    ),
    Check(
        "unseen_elements",
        "error",
        "elements that are not trained on",
        "Add structures with the element to the training data, or drop these.",
        UnseenElements,
        across=True,
    ),
    Check(
        "length_unit",
        "warning",
        "positions in another unit",
        "Convert positions and cell to A.",
        geometry.LengthUnit,
    ),
    Check(
        "energy_levels",
        "warning",
        "energies of different levels of theory",
        "Subtract energies of isolated atoms from each set, those of its own level of theory, or train on one level.",
        EnergyLevels,
        needs=_ENERGY,
        across=True,
    ),
    Check(
        "energy_outliers",
        "warning",
        "energies far from those of other structures",
        "Look whether the calculations converged; drop those that did not.",
        EnergyOutliers,
        needs=_ENERGY,
    ),
    Check(
        "duplicates",
        "warning",
        "the same structure again",
        "Keep each structure once, in one of the sets.",
        Duplicates,
        across=True,
    ),
    Check(
        "partly_nan",
        "warning",
        "labels of which a part is NaN",
        "Losses leave the NaN out. Drop the structures if the rest of the label is no good either.",
        _each(labels.partly_nan),
    ),
    Check(
        "close_atoms",
        "warning",
        "atoms closer than in matter",
        "Keep the structures only if collisions are what the model shall learn.",
        _each(geometry.close_atoms),
    ),
    Check(
        "tiny_cell",
        "warning",
        "cells with hardly any volume",
        "Look whether the cell is in A.",
        _each(geometry.tiny_cell),
    ),
    Check(
        "huge_forces",
        "warning",
        "forces above 50 eV/A",
        "Drop the structures, or train with a Huber loss and gradient clipping.",
        _each(labels.huge_forces),
        needs=_FORCES,
    ),
    Check(
        "net_force",
        "warning",
        "forces that do not sum to zero",
        "A model whose forces derive from an energy cannot learn this. Look for atoms that were fixed or left out.",
        _each(labels.net_force),
        needs=_FORCES,
    ),
    Check(
        "net_torque",
        "warning",
        "molecules with a net torque",
        "Look whether the forces belong to these positions: another frame, order of atoms or orientation.",
        _each(labels.net_torque),
        needs=_FORCES,
    ),
    Check(
        "asymmetric_stress",
        "warning",
        "stress that is not symmetric",
        "Look at the order of the components.",
        _each(labels.asymmetric_stress),
    ),
    Check(
        "stress_without_volume",
        "warning",
        "stress of structures that are not periodic in three directions",
        "Leave the stress out: without a volume there is none.",
        _each(labels.no_volume),
        needs=_STRESS,
    ),
    Check(
        "zero_forces",
        "warning",
        "forces that look like placeholders",
        "Leave the forces out if nobody computed them; zeros are learnt.",
        _each(placeholders.zero_forces),
        needs=_FORCES,
    ),
    Check(
        "zero_stress",
        "warning",
        "stress that looks like a placeholder",
        "Leave the stress out if nobody computed it; zeros are learnt.",
        _each(placeholders.zero_stress),
        needs=_STRESS,
    ),
    Check(
        "constant_energy",
        "warning",
        "energies that look like placeholders",
        "Leave the energies out if nobody computed them.",
        ConstantEnergies,
        needs=_ENERGY,
    ),
    Check(
        "isolated_atoms",
        "warning",
        "isolated atoms of one element with several energies",
        "Keep the one of the ground state if you use them as reference energies.",
        IsolatedAtoms,
        needs=_ENERGY,
    ),
    Check(
        "partial_labels",
        "note",
        "labels that only some structures have",
        "Losses and metrics leave out what is missing.",
        partial(labels.Coverage, labels.Coverage.gaps),
    ),
    Check(
        "rare_elements",
        "note",
        "elements of hardly any structure",
        "Expect nothing of the model for them.",
        RareElements,
    ),
    Check(
        "undetermined_references",
        "note",
        "energies per element that the compositions do not determine",
        "Give energies of isolated atoms as references if the model shall hold for other compositions.",
        Undetermined,
        needs=_ENERGY,
    ),
    Check(
        "one_atom_cells",
        "note",
        "crystals of one atom per cell",
        "They are trained on and are no reference energies of isolated atoms.",
        _each(one_atom_cell),
    ),
    Check(
        "fragments",
        "note",
        "structures in parts beyond each other's reach",
        "Models with a cutoff see no interaction between the parts.",
        _each(geometry.fragments),
    ),
    Check(
        "left_handed",
        "note",
        "left-handed cells",
        "They are read as they are; some programs swap their vectors.",
        _each(geometry.left_handed),
    ),
)
"""All checks of structures that can be read, those that may be errors first."""
