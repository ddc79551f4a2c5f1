"""What an unfinished conversion has done, so that it can go on where it stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from nvalchemi_lightning.data.conversion.provenance import OmittedFrame
from nvalchemi_lightning.errors import ConfigurationError
from nvalchemi_lightning.strict_model import StrictModel

__all__ = ["Fingerprint", "Record"]

_FILE = "record.json"


class Fingerprint(StrictModel):
    """By what a source is recognised: its path, and for a file its size and when it was last changed."""

    name: str
    size: int | None
    changed_ns: int | None

    @classmethod
    def of(cls, path: str) -> Fingerprint:
        """Return the fingerprint of what is at a path."""
        state = Path(path).stat()
        if Path(path).is_dir():
            return cls(name=path, size=None, changed_ns=(Path(path) / "zarr.json").stat().st_mtime_ns)
        return cls(name=path, size=state.st_size, changed_ns=state.st_mtime_ns)


class Record(StrictModel):
    """How far a conversion has come.

    Attributes
    ----------
    options : dict
        What decides on the result beside the sources.
    sources : list of Fingerprint
        What is converted.
    source, frame : int
        Where to go on: number of the source, and of the frame in it.
    structures : int
        Structures that have been written.
    omitted : list of OmittedFrame
        Frames that were left out.
    findings : list of dict
        What the frames of finished sources had, for each dialect.
    current : dict or None
        What the frames of the source at which it is had so far.
    labelled : dict of str to int
        Label to the number of structures that have it.
    parts : list of str
        Names of the parts that files speak of, by number.
    publishing : dict of str to str
        Name of a part to the place that its finished store goes to; the name is empty where there are no parts.
    stores : dict of str to int
        Path of each store to the number of structures for it; empty before all are finished.
    appended_to : tuple of int or None
        How many structures and sources the target had before, where its structures are appended to it.
    """

    options: dict[str, Any]
    sources: list[Fingerprint]
    source: int = 0
    frame: int = 0
    structures: int = 0
    omitted: list[OmittedFrame] = Field(default_factory=list)
    findings: list[dict[str, Any]] = Field(default_factory=list)
    current: dict[str, Any] | None = None
    labelled: dict[str, int] = Field(default_factory=dict)
    parts: list[str] = Field(default_factory=list)
    publishing: dict[str, str] = Field(default_factory=dict)
    stores: dict[str, int] = Field(default_factory=dict)
    appended_to: tuple[int, int] | None = None

    @staticmethod
    def lies_in(folder: Path) -> bool:
        """Say whether a folder holds a record."""
        return (folder / _FILE).exists()

    def save(self, folder: Path) -> None:
        """Write it; there is the old or the new one at any moment."""
        new = folder / f"{_FILE}.new"
        new.write_text(self.model_dump_json(), encoding="utf-8")
        new.replace(folder / _FILE)

    def resumed(self, folder: Path) -> Record:
        """Return the record of an unfinished conversion that is the same as this one.

        Raises
        ------
        ConfigurationError
            If it was started with other options, its sources have changed since, or it cannot be read.
        """
        found = _load(folder)
        for name, value in self.options.items():
            before = found.options.get(name)
            if before != value:
                raise ConfigurationError(_refusal(f"it was started with {name}={before!r}, not {value!r}"))
        names = [source.name for source in found.sources]
        if names != [source.name for source in self.sources]:
            raise ConfigurationError(_refusal(f"it was started with the sources {', '.join(names)}"))
        for before, now in zip(found.sources, self.sources, strict=True):
            if before != now:
                raise ConfigurationError(_refusal(f"{now.name} has changed since"))
        return found


def _load(folder: Path) -> Record:
    try:
        return Record.model_validate_json((folder / _FILE).read_text(encoding="utf-8"))
    except (OSError, ValidationError) as error:
        raise ConfigurationError(_refusal(f"{folder / _FILE} cannot be read")) from error


def _refusal(why: str) -> str:
    return f"the unfinished conversion cannot go on: {why}; start anew, without resume"
