"""The versions of the files that only this package writes, and how older ones are read.

=============  ==============================================  =======
kind           file                                            version
=============  ==============================================  =======
``record``     ``lightning/checkpoints/<N>.json``              1
``resume``     ``lightning/checkpoints/<N>.pt``                1
``lightning``  the part of this package in a ``.ckpt`` file    1
=============  ==============================================  =======

A change that older code would misread raises the version of its kind, and a function in `_STEPS` says how a file of
the version before becomes one of the new version. Files of the layout that the reference has too are versioned by its
``schema_version``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nvalchemi_lightning.errors import ConfigurationError, StoreError

__all__ = ["upgraded", "versioned"]

VERSION = "schema_version"

_CURRENT = {"record": 1, "resume": 1, "lightning": 1}

# (kind, version) to what makes the next version of it.
_STEPS: dict[tuple[str, int], Callable[[dict[str, Any]], dict[str, Any]]] = {}


def versioned(kind: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is to be written: the content with the present version of its kind.

    Parameters
    ----------
    kind : {"record", "resume", "lightning"}
        What it is.
    content : mapping
        What it holds.
    """
    return {VERSION: _CURRENT[kind], **content}


def upgraded(kind: str, content: Mapping[str, Any], where: Path | str) -> dict[str, Any]:
    """Return what was read as the present version has it.

    Parameters
    ----------
    kind : {"record", "resume", "lightning"}
        What it is.
    content : mapping
        What was read.
    where : Path or str
        The file, for messages.

    Raises
    ------
    StoreError
        If it has no version.
    ConfigurationError
        If a newer version of this package wrote it.
    """
    version = content.get(VERSION)
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise StoreError(f"{where} is damaged: {VERSION} is {version!r}")
    if version > _CURRENT[kind]:
        raise ConfigurationError(
            f"{where} has schema version {version}, newer than supported ({_CURRENT[kind]}); update nvalchemi-lightning"
        )
    found = dict(content)
    for older in range(version, _CURRENT[kind]):
        found = {**_STEPS[kind, older](found), VERSION: older + 1}
    return found
