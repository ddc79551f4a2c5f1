"""Whether the files of a folder of checkpoints lie in that folder.

A folder may come from a stranger. A link in it could lead a read to a device that never ends, and a write, or a
removal, to files that are none of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from nvalchemi_lightning.errors import StoreError

__all__ = ["readable", "require_no_links"]


def readable(root: Path, name: str) -> Path:
    """Return the path of a file that is to be read.

    Parameters
    ----------
    root : Path
        The folder of checkpoints; it may be reached through links itself.
    name : str
        The file, relative to ``root``.

    Raises
    ------
    StoreError
        If it is missing, is no regular file, or links lead it out of the folder.
    """
    path = root / name
    if not path.resolve().is_relative_to(root.resolve()):
        raise StoreError(
            f"{path} is a link to {path.resolve()}, outside of the folder; copy the folder with its files "
            "(cp -rL) if you know where they come from"
        )
    if not path.is_file():
        raise StoreError(f"{path} is missing" if not path.exists() else f"{path} is damaged: it is no regular file")
    return path


def require_no_links(root: Path, names: Iterable[str]) -> None:
    """Refuse to write to, or remove from, folders that are links.

    Parameters
    ----------
    root : Path
        The folder of checkpoints; it may be a link itself.
    names : iterable of str
        Files relative to ``root``. One that is a link is replaced or removed itself, not what it leads to.

    Raises
    ------
    StoreError
        Naming the link.
    """
    folders = {parent for name in names for parent in Path(name).parents if parent != Path()}
    for folder in sorted(folders):
        if (root / folder).is_symlink():
            raise StoreError(
                f"{root / folder} is a link; a folder of checkpoints holds its own files. Replace the link by a "
                "folder, or save to another one"
            )
