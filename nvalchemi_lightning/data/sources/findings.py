"""What the frames of a source had: what was asked for in vain, what looks like a label, what was left behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np

from nvalchemi_lightning.data.atomic_data import AtomicData
from nvalchemi_lightning.data.sources.dialect import Dialect
from nvalchemi_lightning.data.sources.raw_structure import RawStructure
from nvalchemi_lightning.errors import ConfigurationError, LabelNotFoundError, nearest

__all__ = ["Findings"]

_PLAIN = Dialect()

_STEMS = {"energy": ("energ",), "forces": ("forc", "grad"), "stress": ("stress", "virial")}
"""Label to what names of it usually contain."""

_NO_LABELS = ("weight", "std", "sigma", "var", "error", "kinetic")
"""What names contain that are about a label but are not one."""


class Findings:
    """What the frames of a source had.

    Attributes
    ----------
    frames : int
        Structures that were looked at.
    seen : Counter of str
        Label to the number of structures that have its key, with a value or NaN.
    lookalikes : dict of str to set of str
        Label to names in structures that lacked it and that look like it; empty once the label has been seen.
    names : set of str
        Every name that a structure had.
    numbers : set of str
        Names of numbers per structure that are not labels.
    """

    def __init__(self) -> None:
        self.frames = 0
        self.seen: Counter[str] = Counter()
        self.lookalikes: dict[str, set[str]] = {label: set() for label in _STEMS}
        self.names: set[str] = set()
        self.numbers: set[str] = set()

    def note(self, raw: RawStructure, present: Iterable[str]) -> None:
        """Add what one structure of a file has; ``present`` are the labels whose keys are there."""
        self.frames += 1
        for label in present:
            self.seen[label] += 1
        for place in raw.places:
            self.names.update(place)
        for label, names in self.lookalikes.items():
            if not self._has(label):
                names.update(_lookalikes(label, raw))

    def note_fields(self, data: AtomicData) -> None:
        """Add what one structure of a store has."""
        self.frames += 1
        self.names.update(data.field_levels)
        for label in _PLAIN.keys:
            self.seen[label] += label in data

    def _has(self, label: str) -> bool:
        return bool(self.seen[label] or (label == "stress" and self.seen["virial"]))

    def check_labels(self, dialect: Dialect, name: str) -> None:
        """Refuse a source that has no energy, forces or stress under the key but something that looks like it.

        Raises
        ------
        LabelNotFoundError
            If it has.
        """
        for label, names in self.lookalikes.items():
            key = dialect.keys[label]
            if names and key is not None and not self._has(label):
                raise LabelNotFoundError(
                    f"{name} has no {label} under the key {key!r}, but {', '.join(sorted(names))} may be it; say "
                    f"{label}_key={min(names)!r} (--{label}-key {min(names)}), or {label}_key=None (none) to go without"
                )

    def check_options(self, dialect: Dialect, name: str) -> None:
        """Refuse a dialect that speaks of what no structure has.

        Raises
        ------
        LabelNotFoundError
            If a key of its own is nowhere.
        ConfigurationError
            If a unit, sign or order is given for a label that is nowhere.
        """
        for number in dialect.keep:
            self.check_key(number, "number to keep", name)
        for label, key in dialect.keys.items():
            if key is None or self.seen[label]:
                continue
            if key != _PLAIN.keys[label]:
                self.check_key(key, label, name)
            self._check_unused(dialect.given(label), label, name)
        if not self._has("stress") and dialect.stress_order != _PLAIN.stress_order:
            self._check_unused(["stress_order"], "stress or virial", name)

    def check_key(self, key: str, label: str, name: str) -> None:
        """Refuse a key that no structure has.

        Raises
        ------
        LabelNotFoundError
            If it is not among the names.
        """
        if key not in self.names:
            known = ", ".join(sorted(self.names)) or "nothing"
            raise LabelNotFoundError(
                f"no structure of {name} has the {label} {key!r}{nearest(key, self.names)} (there are: {known})"
            )

    def _check_unused(self, options: Iterable[str], label: str, name: str) -> None:
        for option in options:
            raise ConfigurationError(f"{option} is given, but no structure of {name} has a label {label}; leave it out")

    def merge(self, other: Findings) -> None:
        """Add what another source had, or what other frames of this one had."""
        self.frames += other.frames
        self.seen += other.seen
        self.names |= other.names
        self.numbers |= other.numbers
        for label, names in self.lookalikes.items():
            names.update(other.lookalikes[label])

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        lookalikes = {label: sorted(names) for label, names in self.lookalikes.items()}
        sets = {"lookalikes": lookalikes, "names": sorted(self.names), "numbers": sorted(self.numbers)}
        return {"frames": self.frames, "seen": dict(self.seen), **sets}

    @classmethod
    def from_json(cls, noted: dict[str, Any]) -> Findings:
        """Return what :meth:`to_json` was made from."""
        found = cls()
        found.frames = noted["frames"]
        found.seen.update(noted["seen"])
        found.names.update(noted["names"])
        found.numbers.update(noted["numbers"])
        for label, names in found.lookalikes.items():
            names.update(noted["lookalikes"][label])
        return found


def _lookalikes(label: str, raw: RawStructure) -> set[str]:
    """Return the names whose spelling and shape are those of a label."""
    sizes = {"energy": (1,), "forces": (3 * len(raw.numbers),), "stress": (6, 9)}[label]
    return {
        name
        for place in raw.places
        for name, value in place.items()
        if _sounds_like(label, name) and _size(value) in sizes
    }


@lru_cache(maxsize=1024)
def _sounds_like(label: str, name: str) -> bool:
    folded = name.casefold()
    return any(stem in folded for stem in _STEMS[label]) and not any(part in folded for part in _NO_LABELS)


def _size(value: Any) -> int:
    """Return how many numbers a value holds, 0 if it is something else."""
    if isinstance(value, bool) or not isinstance(value, int | float | list | np.ndarray | np.number):
        return 0
    array = np.asarray(value)
    return array.size if array.dtype.kind in "iuf" else 0
