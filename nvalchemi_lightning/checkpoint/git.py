"""The commit of a working directory, read from the files of git: no process is started.

Their layout is that of gitrepository-layout(5).
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["commit_of"]

_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_DEPTH = 5  # of symbolic references, as in git


def commit_of(folder: Path) -> str | None:
    """Return the commit that is checked out around a folder.

    Parameters
    ----------
    folder : Path
        A folder of the working directory.

    Returns
    -------
    str or None
        Its hash; None where there is no repository, no commit yet, or git's files cannot be read.
    """
    try:
        repository = _repository(folder.resolve())
        return None if repository is None else _resolved(repository, "HEAD", _DEPTH)
    except OSError:
        return None


def _repository(folder: Path) -> Path | None:
    """Return the folder in which ``HEAD`` is."""
    for place in (folder, *folder.parents):
        found = place / ".git"
        if found.is_dir():
            return found
        if found.is_file():  # a linked working tree, or a submodule
            return place / _text(found).removeprefix("gitdir:").strip()
    return None


def _resolved(repository: Path, name: str, depth: int) -> str | None:
    shared = _shared(repository)
    found = next((_text(place / name) for place in (repository, shared) if (place / name).is_file()), None)
    if found is None:
        return _packed(shared / "packed-refs", name)
    if found.startswith("ref:") and depth:
        return _resolved(repository, found.removeprefix("ref:").strip(), depth - 1)
    return found if _COMMIT.fullmatch(found) else None


def _shared(repository: Path) -> Path:
    """Return where a linked working tree has its branches."""
    pointer = repository / "commondir"
    return repository / _text(pointer) if pointer.is_file() else repository


def _packed(path: Path, name: str) -> str | None:
    lines = _text(path).splitlines() if path.is_file() else []
    entries = (line.split(" ") for line in lines if _COMMIT.match(line))
    return next((commit for commit, *rest in entries if rest == [name]), None)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace").strip()
