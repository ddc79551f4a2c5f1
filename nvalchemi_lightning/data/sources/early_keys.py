"""Finding out whether keys exist before the structures are read, where a file can tell quickly."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from nvalchemi_lightning.data.sources.dialect import Dialect
from nvalchemi_lightning.data.sources.findings import Findings
from nvalchemi_lightning.data.sources.source import Source
from nvalchemi_lightning.errors import DataError

__all__ = ["check_early"]

_PLAIN = Dialect()


def check_early(sources: Sequence[Source]) -> None:
    """Refuse sources without a key that was asked for, or with labels under other names.

    Only the first frame is read, and the comment lines of extended XYZ files until every key has been seen; what this
    cannot tell is found out after reading.

    Raises
    ------
    LabelNotFoundError
        If a key is in no frame, or there is no label but something that looks like one.
    """
    first = {id(source): _first(source) for source in sources}
    for source in sources:
        _check_lookalikes(source, first[id(source)])
    for dialect in {source.dialect.model_dump_json(): source.dialect for source in sources}.values():
        group = [source for source in sources if source.dialect == dialect]
        found = Findings()
        for source in group:
            found.merge(first[id(source)])
        _check_keys(group, dialect, found)


def _first(source: Source) -> Findings:
    """Return what the first frame has; nothing if it cannot be read, which is reported later."""
    try:
        for frame in source.frames():
            frame.read()
            break
    except DataError:
        return Findings()
    return source.findings


def _check_lookalikes(source: Source, found: Findings) -> None:
    for label, names in found.lookalikes.items():
        key = source.dialect.keys[label]
        if names and key is not None and not _mentioned([source], {key}):
            found.check_labels(source.dialect, source.name)


def _check_keys(group: Sequence[Source], dialect: Dialect, found: Findings) -> None:
    own = {key: label for label, key in dialect.keys.items() if key is not None and key != _PLAIN.keys[label]}
    own |= dict.fromkeys(dialect.keep, "number to keep")
    wanted = own.keys() - found.names
    mentioned = _mentioned(group, wanted)
    for key in sorted(wanted - mentioned):
        found.check_key(key, own[key], ", ".join(source.name for source in group))


def _mentioned(sources: Iterable[Source], keys: set[str]) -> set[str]:
    """Return the keys that some frame mentions; all of them where that cannot be told quickly."""
    missing = set(keys)
    for source in sources:
        comments = source.comments()
        if comments is None:
            return set(keys)
        for comment in comments:
            missing -= {key for key in missing if re.search(rf"(?:^|[\s:]){re.escape(key)}(?:[=:\s]|$)", comment)}
            if not missing:
                break
    return set(keys) - missing
