"""Reading sets for a checkup: what cannot be read is a finding, and the rest goes on."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias

from nvalchemi_lightning.data.atomic_data import AtomicData
from nvalchemi_lightning.data.checkup.report import CheckedSet, Finding
from nvalchemi_lightning.data.checkup.subject import LABELS, Subject
from nvalchemi_lightning.data.checkup.watchers import Examples
from nvalchemi_lightning.data.elements import SYMBOLS
from nvalchemi_lightning.data.sources.dialect import Dialect
from nvalchemi_lightning.data.sources.opening import open_source
from nvalchemi_lightning.data.sources.source import Frame, Source
from nvalchemi_lightning.errors import ConfigurationError, DataError

__all__ = ["CheckSource", "Reading", "open_sets"]

CheckSource: TypeAlias = "str | os.PathLike[str] | Source | Iterable[AtomicData]"


def open_sets(sources: Sequence[CheckSource], against: Sequence[CheckSource], dialect: Dialect | None) -> list[Reading]:
    """Open sets to train on and held-out ones without reading structures.

    Raises
    ------
    ConfigurationError
        If there is none to train on, or one is given twice.
    FileNotFoundError
        If there is nothing at a path.
    DataError
        If the format of a file is not recognised.
    """
    if not sources:
        raise ConfigurationError("there is nothing to check; give at least one file, store or list of structures")
    opened = [
        _open(source, place, dialect, held_out=place > len(sources))
        for place, source in enumerate([*sources, *against], 1)
    ]
    twice = [name for name, count in Counter(one.name for one in opened).items() if count > 1]
    if twice:
        raise ConfigurationError(f"{twice[0]} is given twice; give each set once")
    return opened


def _open(source: CheckSource, place: int, dialect: Dialect | None, *, held_out: bool) -> Reading:
    if isinstance(source, (str, os.PathLike)):
        # A store has no dialect; its names and units are fixed.
        source = open_source(source, None if Path(source).is_dir() else dialect)
    return Reading(source, source.name if isinstance(source, Source) else f"argument {place}", held_out)


@dataclass
class Reading:
    """One set while it is read.

    Attributes
    ----------
    source : Source or iterable of AtomicData
        Where the structures come from.
    name : str
        What messages call it.
    held_out : bool
        Whether it is not trained on.
    """

    source: Source | Iterable[AtomicData]
    name: str
    held_out: bool
    _structures: int = 0
    _atoms: int = 0
    _elements: set[int] = field(default_factory=set)
    _labels: Counter[str] = field(default_factory=Counter)
    _refused: Examples = field(default_factory=Examples)

    def subjects(self) -> Iterator[Subject]:
        """Yield the structures that can be read; count them, and note the others."""
        frames, number = self._frames(), -1
        while True:
            number += 1
            try:
                frame = next(frames, None)
                if frame is None:
                    return
                number = frame.number
                subject = Subject(frame.read(), self.name, number, self.held_out)
                # Refuses atoms that are absurdly far apart.
                _ = subject.edges
            except DataError as error:
                self._refused.add(self.name, number, str(error).removeprefix(f"{self.name}: frame {number}: "))
            else:
                self._count(subject)
                yield subject

    def _frames(self) -> Iterator[Frame]:
        if isinstance(self.source, Source):
            return self.source.frames()
        return (Frame(number, partial(_given, data)) for number, data in enumerate(self.source))

    def _count(self, subject: Subject) -> None:
        self._structures += 1
        self._atoms += len(subject.numbers)
        self._elements.update(element for element, _ in subject.composition)
        self._labels.update(label for label in LABELS if subject.has(label))

    def summary(self) -> CheckedSet:
        """Return what was read."""
        elements = tuple(SYMBOLS[element] for element in sorted(self._elements))
        labels = {label: self._labels[label] for label in LABELS if self._labels[label]}
        return CheckedSet(self.name, self.held_out, self._structures, self._atoms, elements, labels)

    def findings(self) -> Iterator[Finding]:
        """Yield what was noted while reading."""
        if self._refused.count:
            yield Finding(
                "unreadable",
                "error",
                self.name,
                "structures that cannot be read",
                "Correct or drop them; data convert --on-error skip leaves them out.",
                self._refused.count,
                tuple(self._refused.places),
            )
        if not self._structures:
            advice = "Give a file or store with at least one structure."
            yield Finding("no_structures", "error", self.name, "there is no structure to look at", advice)
        if isinstance(self.source, Source):
            yield from self._unread_labels(self.source)

    def _unread_labels(self, source: Source) -> Iterator[Finding]:
        try:
            source.findings.check_labels(source.dialect, self.name)
        except DataError as error:
            advice = "Name the key of the label, or leave the label out on purpose."
            yield Finding("unread_labels", "error", self.name, str(error), advice)


def _given(data: AtomicData) -> AtomicData:
    return data
