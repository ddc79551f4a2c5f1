"""Hash a file while it is written, on a thread of its own."""

from __future__ import annotations

import hashlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import BinaryIO

__all__ = ["HashedFile"]

# What may wait to be hashed [bytes]; it is held in memory besides the state that is written.
_WAITING = 16 << 20


class HashedFile:
    """A file that is open for writing, with the SHA-256 of what was written.

    Parameters
    ----------
    file : binary file
        Where the bytes go.

    Attributes
    ----------
    failure : OSError or None
        What kept bytes from being written. A caller in between, such as ``torch.save``, may turn the error into
        another.

    Notes
    -----
    Hashing costs about as much as writing to memory does, and needs no lock of the interpreter.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.failure: OSError | None = None
        self._file = file
        self._hash = hashlib.sha256()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hash")
        self._queue: deque[tuple[Future[None], int]] = deque()
        self._waiting = 0

    def write(self, data: bytes | memoryview) -> int:
        """Write bytes, and hash them meanwhile."""
        data = bytes(data)  # what torch hands over is a view into memory that it uses again
        self._queue.append((self._thread.submit(self._hash.update, data), len(data)))
        self._waiting += len(data)
        while self._waiting > _WAITING:
            done, size = self._queue.popleft()
            done.result()
            self._waiting -= size
        try:
            return self._file.write(data)
        except OSError as error:
            self.failure = error
            raise

    def flush(self) -> None:
        """Hand what is buffered to the system."""
        self._file.flush()

    def hexdigest(self) -> str:
        """Return the SHA-256 of what was written; nothing can be written afterwards."""
        self._thread.shutdown()
        return self._hash.hexdigest()

    def __enter__(self) -> HashedFile:
        """Return the file."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)
