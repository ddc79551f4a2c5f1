"""One writer at a time in a folder of checkpoints."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["LOCK", "sole_writer"]

LOCK = ".lock"

# A file system that cannot lock, as some of clusters; such a folder is written as if it had one writer.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def sole_writer(root: Path) -> Iterator[bool]:
    """Wait until nobody else writes to a folder, and keep others waiting meanwhile.

    Parameters
    ----------
    root : Path
        The folder of checkpoints; made if absent.

    Yields
    ------
    bool
        Whether the folder is locked; False where the system has no locks.

    Notes
    -----
    The lock belongs to the open file: it is gone when the process is, however that ended.
    """
    if not root.exists():
        root.mkdir(parents=True, exist_ok=True)
    handle = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
    locked = _lock(handle)
    try:
        yield locked
    finally:
        if locked:  # said explicitly, because a process that was forked meanwhile has the file open too
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _lock(handle: int) -> bool:
    if fcntl is None:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        raise
    return True
