"""Checks of elements, and of atoms by themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from nvalchemi_lightning.data.checkup.subject import Subject
from nvalchemi_lightning.data.checkup.watchers import Conclusion, Examples
from nvalchemi_lightning.data.elements import SYMBOLS

__all__ = ["IsolatedAtoms", "RareElements", "UnseenElements", "one_atom_cell"]

_RARE = 3
_RARE_PART = 8
_SAME_ENERGY = 1e-3


class RareElements:
    """Counts the structures of each element."""

    def __init__(self) -> None:
        self._structures = 0
        self._examples: dict[int, Examples] = {}

    def look(self, subject: Subject) -> None:
        """Count."""
        self._structures += 1
        for element, _ in subject.composition:
            self._examples.setdefault(element, Examples()).add(subject.source, subject.number)

    def conclude(self) -> Iterable[Conclusion]:
        """Name elements of hardly any structure."""
        for element, examples in sorted(self._examples.items()):
            if examples.count < _RARE and examples.count * _RARE_PART <= self._structures:
                message = f"{SYMBOLS[element]} occurs in {examples.count} of {self._structures} structures"
                yield Conclusion(message, examples)


class UnseenElements:
    """Finds elements of held-out sets that no set to train on has."""

    def __init__(self) -> None:
        self._trained: Counter[int] = Counter()
        self._held_out: dict[str, dict[int, Examples]] = {}

    def look(self, subject: Subject) -> None:
        """Note the elements."""
        for element, _ in subject.composition:
            if subject.held_out:
                own = self._held_out.setdefault(subject.source, {})
                own.setdefault(element, Examples()).add(subject.source, subject.number)
            else:
                self._trained[element] += 1

    def conclude(self) -> Iterable[Conclusion]:
        """Name them, set by set."""
        known = ", ".join(SYMBOLS[element] for element in sorted(self._trained))
        for source, elements in self._held_out.items():
            for element, examples in sorted(elements.items()):
                if element not in self._trained:
                    yield Conclusion(f"{SYMBOLS[element]} is not among {known}", examples, source=source)


class IsolatedAtoms:
    """Compares the energies of isolated atoms."""

    def __init__(self) -> None:
        self._first: dict[int, float] = {}
        self._other: dict[int, Examples] = {}

    def look(self, subject: Subject) -> None:
        """Keep the first energy of an element, and count those that differ."""
        if not subject.is_isolated_atom:
            return
        element, energy = int(subject.numbers[0]), float(subject.known["energy"])
        if abs(self._first.setdefault(element, energy) - energy) > _SAME_ENERGY:
            examples = self._other.setdefault(element, Examples())
            examples.add(subject.source, subject.number, f"{energy:.6g} eV")

    def conclude(self) -> Iterable[Conclusion]:
        """Name elements with several energies."""
        for element, examples in sorted(self._other.items()):
            symbol, energy = SYMBOLS[element], self._first[element]
            yield Conclusion(f"the first isolated {symbol} atom has {energy:.6g} eV, others differ", examples)


def one_atom_cell(subject: Subject) -> str | None:
    """Find periodic cells of one atom, which are crystals and no isolated atoms."""
    if len(subject.numbers) != 1 or subject.is_isolated_atom:
        return None
    return f"{SYMBOLS[subject.numbers[0]]} with {len(subject.edges)} images of itself nearby"
