"""Checks of labels by themselves: presence, NaN, range, placeholders, symmetry, sums that must vanish."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np

from nvalchemi_lightning.data.checkup.subject import LABELS, Subject
from nvalchemi_lightning.data.checkup.watchers import Conclusion, Examples
from nvalchemi_lightning.data.elements import SYMBOLS

__all__ = [
    "Coverage",
    "asymmetric_stress",
    "huge_forces",
    "net_force",
    "net_torque",
    "no_volume",
    "overflow",
    "partly_nan",
    "virial_mismatch",
]

_MAX_FORCE = 50.0
_MAX_RELATIVE_SUM = 0.02
_MAX_SUM = 0.01
_MAX_ASYMMETRY = 0.01
_FLOAT32_MAX = float(np.finfo(np.float32).max)


class Coverage:
    """Counts the labels."""

    def __init__(self, conclude: Callable[[Coverage], Iterable[Conclusion]]) -> None:
        self.structures = 0
        self.labelled: Counter[str] = Counter()
        self.lacking = {label: Examples() for label in LABELS}
        self._conclude = conclude

    def look(self, subject: Subject) -> None:
        """Count."""
        self.structures += 1
        for label in LABELS:
            if subject.has(label):
                self.labelled[label] += 1
            else:
                self.lacking[label].add(subject.source, subject.number)

    def conclude(self) -> Iterable[Conclusion]:
        """Conclude from the counts."""
        return self._conclude(self)

    def nothing(self) -> Iterable[Conclusion]:
        """Say so where no structure has a label."""
        if not self.labelled:
            yield Conclusion(f"none of the {self.structures} structures has one of {', '.join(LABELS)}")

    def gaps(self) -> Iterable[Conclusion]:
        """Name labels that only some structures have."""
        for label, count in self.labelled.items():
            if count < self.structures:
                message = f"{count} of {self.structures} structures have {label}"
                yield Conclusion(message, self.lacking[label])


def partly_nan(subject: Subject) -> str | None:
    """Find labels of which a part is NaN."""
    seen = []
    for label in LABELS:
        value = getattr(subject.data, label)
        if value is not None and bool((bad := value.isnan()).any()) and not bool(bad.all()):
            seen.append(f"{int(bad.sum())} of the {value.numel()} numbers of {label}")
    return f"NaN in {' and '.join(seen)}" if seen else None


def overflow(subject: Subject) -> str | None:
    """Find labels that float32 cannot hold."""
    for label in LABELS:
        value = getattr(subject.data, label)
        if value is not None and (largest := float(value.double().abs().nan_to_num().max())) > _FLOAT32_MAX:
            return f"{label} reaches {largest:.3g}, infinite in float32"
    return None


def huge_forces(subject: Subject) -> str | None:
    """Find forces that training would follow alone."""
    sizes = np.linalg.norm(subject.known["forces"], axis=1)
    atom = int(sizes.argmax())
    if sizes[atom] < _MAX_FORCE:
        return None
    return f"{sizes[atom]:.4g} eV/A on {SYMBOLS[subject.numbers[atom]]} {atom}"


def net_force(subject: Subject) -> str | None:
    """Find forces that do not sum to zero, as they do without an external field."""
    forces = subject.known["forces"]
    total, size = float(np.linalg.norm(forces.sum(0))), float(np.linalg.norm(forces))
    if total <= max(_MAX_SUM, _MAX_RELATIVE_SUM * size):
        return None
    return f"the forces sum to {total:.3g} eV/A; their root mean square is {size / np.sqrt(len(forces)):.3g} eV/A"


def net_torque(subject: Subject) -> str | None:
    """Find molecules on which the forces exert a torque."""
    if any(subject.pbc):
        return None
    forces = subject.known["forces"]
    arms = subject.positions - subject.positions.mean(0)
    torque = float(np.linalg.norm(np.cross(arms, forces).sum(0)))
    scale = float(np.linalg.norm(arms) * np.linalg.norm(forces))
    # A net force is a finding of its own, and its torque depends on the origin.
    if torque <= max(_MAX_SUM, _MAX_RELATIVE_SUM * scale) or net_force(subject):
        return None
    return f"torque {torque:.3g} eV, {torque / scale:.0%} of what forces of that size could exert"


def asymmetric_stress(subject: Subject) -> str | None:
    """Find stress and virial tensors that are not symmetric."""
    for name in subject.known.keys() & {"stress", "virial"}:
        tensor = subject.known[name]
        difference = float(np.abs(tensor - tensor.T).max())
        if difference > _MAX_ASYMMETRY * np.abs(tensor).max():
            return f"transposed entries of {name} differ by {difference:.3g}"
    return None


def no_volume(subject: Subject) -> str | None:
    """Find stresses of structures that have no volume."""
    if all(subject.pbc):
        return None
    largest = float(np.abs(subject.known["stress"]).max())
    return f"stress up to {largest:.3g} eV/A^3, but pbc is {list(subject.pbc)}"


def virial_mismatch(subject: Subject) -> str | None:
    """Find stress and virial that contradict each other."""
    if subject.volume is None:
        return None
    virial, from_stress = subject.known["virial"], -subject.volume * subject.known["stress"]
    difference = float(np.abs(virial - from_stress).max())
    if difference <= 0.02 * max(np.abs(virial).max(), np.abs(from_stress).max()) + 1e-3:
        return None
    return f"virial and -volume * stress differ by up to {difference:.3g} eV"
