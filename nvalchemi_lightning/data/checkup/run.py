"""Reading sets once, and showing each structure to every check."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from nvalchemi_lightning.data.checkup.origins import with_origins
from nvalchemi_lightning.data.checkup.reading import CheckSource, open_sets
from nvalchemi_lightning.data.checkup.report import SEVERITIES, CheckReport, Finding
from nvalchemi_lightning.data.checkup.subject import Subject
from nvalchemi_lightning.data.checkup.table import CHECKS, Check
from nvalchemi_lightning.data.checkup.watchers import Conclusion, Examples, Watcher
from nvalchemi_lightning.data.sources.dialect import Dialect
from nvalchemi_lightning.data.sources.stores import StoreSource

__all__ = ["check"]


def check(
    *sources: CheckSource,
    against: Sequence[CheckSource] = (),
    dialect: Dialect | None = None,
    on_structure: Callable[[], object] | None = None,
) -> CheckReport:
    """Look for what would spoil a training: in each set, and between sets.

    Parameters
    ----------
    *sources : str, PathLike, Source or iterable of AtomicData
        Sets to train on: files that ASE reads, stores, or structures.
    against : sequence of the same, optional
        Sets that are held out, for validation and tests.
    dialect : Dialect, optional
        What labels are called in files, and their units; default: ASE's names and units.
    on_structure : callable, optional
        Called after each structure, for a progress bar.

    Returns
    -------
    CheckReport
        The findings, the worst first. An error says that training would not be sensible.

    Raises
    ------
    ConfigurationError
        If there is no source, or one is given twice.
    FileNotFoundError
        If there is nothing at a path.
    DataError
        If the format of a file is not recognised.

    Notes
    -----
    Structures are read once, one at a time. About 200 bytes are kept of each, to compare it with others; for a
    moment at the end it is up to 500.
    """
    sets = open_sets(sources, against, dialect)
    everywhere = _Watch(row for row in CHECKS if row.across)
    found: list[Finding] = []
    for one in sets:
        own = _Watch(row for row in CHECKS if not row.across)
        for subject in one.subjects():
            own.see(subject)
            everywhere.see(subject)
            if on_structure is not None:
                on_structure()
        found += [*one.findings(), *own.findings(one.name)]
    found += everywhere.findings(", ".join(one.name for one in sets))
    stores = [one.name for one in sets if isinstance(one.source, StoreSource)]
    ranked = sorted(with_origins(found, stores), key=_rank)
    return CheckReport(tuple(one.summary() for one in sets), tuple(ranked))


def _rank(finding: Finding) -> int:
    return SEVERITIES.index(finding.severity)


class _Watch:
    """Watchers at work, and what they said of single structures."""

    def __init__(self, checks: Iterable[Check]) -> None:
        self._watchers: list[tuple[Check, Watcher]] = [(row, row.watcher()) for row in checks]
        self._seen: dict[str, Examples] = {}

    def see(self, subject: Subject) -> None:
        """Show a structure to every watcher that can judge it."""
        for row, watcher in self._watchers:
            if row.needs <= subject.known.keys():
                seen = watcher.look(subject)
                if seen is not None:
                    self._seen.setdefault(row.name, Examples()).add(subject.source, subject.number, seen)

    def findings(self, source: str) -> Iterator[Finding]:
        """Yield what the watchers found, in the order of the table."""
        for row, watcher in self._watchers:
            if row.name in self._seen:
                yield _finding(row, source, Conclusion(row.title, self._seen[row.name]))
            for conclusion in watcher.conclude():
                yield _finding(row, source, conclusion)


def _finding(row: Check, source: str, said: Conclusion) -> Finding:
    return Finding(
        row.name,
        said.severity or row.severity,
        said.source or source,
        said.message,
        row.advice,
        said.examples.count,
        tuple(said.examples.places),
    )
