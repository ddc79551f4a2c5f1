"""How a check is written: a watcher that looks at one structure after the other, and concludes at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from nvalchemi_lightning.data.checkup.report import Place, Severity
from nvalchemi_lightning.data.checkup.subject import Subject

__all__ = ["Conclusion", "Each", "Examples", "Look", "Watcher"]

_SHOWN = 8

Look: TypeAlias = Callable[[Subject], "str | None"]
"""Says what is wrong with a structure, or None."""


@dataclass
class Examples:
    """The first structures of many, and how many there are."""

    count: int = 0
    places: list[Place] = field(default_factory=list)

    def add(self, source: str, number: int, seen: str = "") -> None:
        """Count one more."""
        self.count += 1
        if len(self.places) < _SHOWN:
            self.places.append(Place(source, number, seen))


@dataclass(frozen=True)
class Conclusion:
    """What a watcher says of all structures that it saw.

    Attributes
    ----------
    message : str
        What was found, with the values seen.
    examples : Examples
        The structures concerned, if it is about single ones.
    severity : {"error", "warning", "note"}, optional
        Where it differs from that of the check.
    source : str, optional
        The sets concerned, where a watcher sees several.
    """

    message: str
    examples: Examples = field(default_factory=Examples)
    severity: Severity | None = None
    source: str | None = None


class Watcher(Protocol):
    """Sees every structure of a set once; what it keeps of each must be small."""

    def look(self, subject: Subject) -> str | None:
        """Look at a structure; say what is wrong with this one by itself, or None."""

    def conclude(self) -> Iterable[Conclusion]:
        """Say what the whole tells."""


@dataclass(frozen=True)
class Each:
    """A watcher that judges every structure by itself."""

    judge: Look

    def look(self, subject: Subject) -> str | None:
        """Judge it."""
        return self.judge(subject)

    def conclude(self) -> Iterable[Conclusion]:
        """Have nothing to add."""
        return ()
