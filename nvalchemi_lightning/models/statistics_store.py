"""Keeping statistics in the store that they are of, and finding them again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvalchemi_lightning.errors import DataError

if TYPE_CHECKING:
    from nvalchemi_lightning.data.store.layout import ZarrStoreLike

__all__ = ["keep", "kept"]

NOTE = "nvalchemi_lightning_statistics"
"""Attribute of a store that holds its statistics."""


def keep(store: ZarrStoreLike, statistics: dict[str, Any]) -> None:
    """Write statistics to a store; see :meth:`AtomicStatistics.save`."""
    from nvalchemi_lightning.data.store.notes import write_note
    from nvalchemi_lightning.data.store.reader import AtomicDataZarrReader

    reader, count = AtomicDataZarrReader(store), statistics["num_structures"]
    if len(reader) != count:
        raise DataError(
            f"the statistics are of {count} structures but {reader.name} has {len(reader)}; keep them in the store "
            "that they were computed from"
        )
    write_note(store, NOTE, statistics)


def kept(place: ZarrStoreLike) -> dict[str, Any]:
    """Return what a store or file holds; see :meth:`AtomicStatistics.load`."""
    from nvalchemi_lightning.data.store.notes import read_note

    if isinstance(place, (str, os.PathLike)) and Path(place).is_file():
        return _in_file(Path(place))
    found = read_note(place, NOTE)
    if found is None:
        raise DataError(f"{place} holds no statistics; compute them with: nvalchemi-lightning data stats {place}")
    return found


def _in_file(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not the JSON that nvalchemi-lightning data stats --json prints") from error
    if not isinstance(found, dict) or not isinstance(found.get("statistics"), dict):
        raise DataError(f"{path} has no entry 'statistics'; nvalchemi-lightning data stats --json prints one")
    statistics: dict[str, Any] = found["statistics"]
    return statistics
