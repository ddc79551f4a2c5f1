"""Checks for structures that occur twice: within a set, and in sets that should be apart.

What is kept of each structure is :data:`BYTES` bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nvalchemi_lightning.data.checkup.fingerprint import SIZE, fingerprint
from nvalchemi_lightning.data.checkup.report import Severity
from nvalchemi_lightning.data.checkup.subject import Floats, Subject
from nvalchemi_lightning.data.checkup.watchers import Conclusion, Examples

__all__ = ["BYTES", "Duplicates"]

BYTES = 8 * (SIZE + 4)
"""Memory per structure: fingerprint, energy per atom, composition, set and number."""

_SAME = 2e-4
"""Largest difference of any number of two fingerprints of one structure; about 2e-4 A, above float32 rounding."""

_NEAR = 0.01
"""The same for structures that are no independent test of each other; a femtosecond of molecular dynamics."""

_SAME_ENERGY = 1e-3
"""Largest difference per atom [eV] of labels that count as equal; usual forces change them by that within the
tolerance of the fingerprint."""

_MAX_QUERIES = 2000
_MANY_NEAR = 0.01


class Pair(NamedTuple):
    """Positions of two structures in the arrays, the earlier first."""

    first: int
    second: int


@dataclass
class Duplicates:
    """Keeps fingerprints, and finds the pairs at the end."""

    _sources: list[str] = field(default_factory=list)
    _held_out: list[bool] = field(default_factory=list)
    _prints: array[float] = field(default_factory=lambda: array("d"))
    _energies: array[float] = field(default_factory=lambda: array("d"))
    _compositions: array[int] = field(default_factory=lambda: array("q"))
    _sets: array[int] = field(default_factory=lambda: array("q"))
    _numbers: array[int] = field(default_factory=lambda: array("q"))

    def look(self, subject: Subject) -> None:
        """Keep what tells the structure from others; isolated atoms belong in every set."""
        if subject.is_isolated_atom:
            return
        if not self._sources or self._sources[-1] != subject.source:
            self._sources.append(subject.source)
            self._held_out.append(subject.held_out)
        energy = float(subject.known.get("energy", np.array(np.nan))) / len(subject.numbers)
        self._prints.extend(fingerprint(subject))
        self._energies.append(energy)
        self._compositions.append(_key(subject))
        self._sets.append(len(self._sources) - 1)
        self._numbers.append(subject.number)

    def conclude(self) -> Iterable[Conclusion]:
        """Find the pairs, and say which sets they are in and whether their energies agree."""
        kept = _Kept(
            np.frombuffer(self._prints, np.float64).reshape(-1, SIZE),
            np.frombuffer(self._compositions, np.int64),
            np.frombuffer(self._sets, np.int64),
        )
        energies = np.frombuffer(self._energies, np.float64)
        contradictions: dict[tuple[int, int], Examples] = {}
        repeats: dict[tuple[int, int], Examples] = {}
        for first, second in kept.same():
            one, two = sorted((first, second))
            differs = abs(energies[one] - energies[two]) > _SAME_ENERGY
            elsewhere = "" if kept.sets[one] == kept.sets[two] else f"{self._sources[kept.sets[one]]}: "
            seen = f"as {elsewhere}frame {self._numbers[one]}"
            if differs:
                seen += f", but its energy differs by {abs(energies[one] - energies[two]):.3g} eV per atom"
            place = int(kept.sets[one]), int(kept.sets[two])
            examples = (contradictions if differs else repeats).setdefault(place, Examples())
            examples.add(self._sources[kept.sets[two]], self._numbers[two], seen)
        yield from self._conclusions("the same geometry with another energy", contradictions, "warning")
        yield from self._conclusions("the same structure again", repeats, "note")
        yield from self._correlated(kept, set(repeats) | set(contradictions))

    def _conclusions(
        self, what: str, found: dict[tuple[int, int], Examples], severity: Severity
    ) -> Iterator[Conclusion]:
        for (one, two), examples in sorted(found.items()):
            source = self._sources[one] if one == two else f"{self._sources[one]}, {self._sources[two]}"
            leak = self._held_out[one] != self._held_out[two]
            message = what + (", in training and held-out data" if leak else "")
            yield Conclusion(message, examples, "warning" if leak else severity, source)

    def _correlated(self, kept: _Kept, leaks: set[tuple[int, int]]) -> Iterator[Conclusion]:
        held_out = np.array(self._held_out, bool)[kept.sets] if self._held_out else np.empty(0, bool)
        for number, source in enumerate(self._sources):
            if not self._held_out[number]:
                continue
            asked = np.flatnonzero(kept.sets == number)
            asked = asked[:: -(-len(asked) // _MAX_QUERIES)]
            near = int(kept.near(asked, np.flatnonzero(~held_out)))
            if near > _MANY_NEAR * len(asked) and not any(number in pair for pair in leaks):
                yield Conclusion(
                    f"{near} of {len(asked)} structures looked at are within about {_NEAR:g} A of one that is trained "
                    "on; errors on this set will be too good",
                    severity="note",
                    source=source,
                )


@dataclass(frozen=True)
class _Kept:
    """Fingerprints, compositions and sets of all structures."""

    prints: Floats
    compositions: NDArray[np.int64]
    sets: NDArray[np.int64]

    def same(self) -> Iterator[Pair]:
        """Yield the pairs whose fingerprints agree, each structure once as the second."""
        order = np.lexsort((self.prints[:, 0], self.compositions))
        prints, compositions = self.prints[order], self.compositions[order]
        unpaired = np.ones(len(order), bool)
        for step in range(1, len(order)):
            close = prints[step:, 0] - prints[:-step, 0] < _SAME
            places = np.flatnonzero(close & unpaired[step:] & (compositions[step:] == compositions[:-step]))
            if not len(places):
                return
            agree = (np.abs(prints[places + step] - prints[places]) < _SAME).all(1)
            for place in places[agree].tolist():
                unpaired[place + step] = False
                yield Pair(int(order[place]), int(order[place + step]))

    def near(self, asked: NDArray[np.int64], among: NDArray[np.int64]) -> int:
        """Count the structures asked for that have a near one among others."""
        order = among[np.lexsort((self.prints[among, 0], self.compositions[among]))]
        compositions, prints = self.compositions[order], self.prints[order]
        count = 0
        for one in asked.tolist():
            start, end = np.searchsorted(compositions, self.compositions[one] + np.array([0, 1]))
            low, high = start + np.searchsorted(prints[start:end, 0], self.prints[one, 0] + np.array([-_NEAR, _NEAR]))
            count += bool((np.abs(prints[low:high] - self.prints[one]) < _NEAR).all(1).any())
        return count


def _key(subject: Subject) -> int:
    """Return a number that composition and periodicity have in common with hardly any other."""
    text = repr((subject.composition, sum(subject.pbc))).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big", signed=True) >> 1
