"""What a checkup found, as frozen data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

__all__ = ["SEVERITIES", "CheckReport", "CheckedSet", "Finding", "Place", "Severity"]

Severity: TypeAlias = Literal["error", "warning", "note"]

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""From the worst: training is not sensible; look at it before you train; good to know."""


@dataclass(frozen=True)
class Place:
    """A structure that a finding is about.

    Attributes
    ----------
    source : str
        File or store.
    frame : int
        Position in it, from 0; in a store the physical index.
    seen : str
        What was seen there.
    origin : str
        File and frame that a structure of a store came from, if the store knows.
    """

    source: str
    frame: int
    seen: str = ""
    origin: str = ""

    def __str__(self) -> str:
        """Show it the way errors do."""
        origin = f" ({self.origin})" if self.origin else ""
        return f"{self.source}: frame {self.frame}{origin}" + (f": {self.seen}" if self.seen else "")


@dataclass(frozen=True)
class Finding:
    """Something that a check found in a set, or between sets.

    Attributes
    ----------
    check : str
        Name of the check.
    severity : {"error", "warning", "note"}
        How bad it is.
    source : str
        The set, or the sets joined by a comma.
    message : str
        What was found, with the values seen.
    advice : str
        What to do.
    count : int
        Number of structures concerned; 0 for a finding about the set as a whole.
    places : tuple of Place
        The first of them.
    """

    check: str
    severity: Severity
    source: str
    message: str
    advice: str
    count: int = 0
    places: tuple[Place, ...] = ()


@dataclass(frozen=True)
class CheckedSet:
    """What was looked at.

    Attributes
    ----------
    source : str
        File, store or number of the argument.
    held_out : bool
        Whether it is not trained on.
    structures : int
        Structures that could be read.
    atoms : int
        Atoms of these.
    elements : tuple of str
        Symbols, in the order of the periodic table.
    labels : mapping of str to int
        Number of structures with each label.
    """

    source: str
    held_out: bool
    structures: int
    atoms: int
    elements: tuple[str, ...]
    labels: Mapping[str, int]


@dataclass(frozen=True)
class CheckReport:
    """All that a checkup found.

    Attributes
    ----------
    sets : tuple of CheckedSet
        What was looked at, in the order given.
    findings : tuple of Finding
        The worst first.
    """

    sets: tuple[CheckedSet, ...]
    findings: tuple[Finding, ...]

    def __iter__(self) -> Iterator[Finding]:
        """Iterate over the findings."""
        return iter(self.findings)

    def count(self, severity: Severity) -> int:
        """Return the number of findings of a severity."""
        return sum(finding.severity == severity for finding in self.findings)

    def is_sensible(self, *, strict: bool = False) -> bool:
        """Say whether nothing speaks against training: no errors; if ``strict``, no warnings either."""
        return not self.count("error") and not (strict and self.count("warning"))

    def as_dict(self) -> dict[str, Any]:
        """Return plain dictionaries and lists, for JSON."""
        return asdict(self)
