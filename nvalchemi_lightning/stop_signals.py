"""Turning SIGINT and SIGTERM into a request to stop after the present batch."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["stopping_on_signals"]


@contextmanager
def stopping_on_signals(stop: Callable[[str], None]) -> Iterator[None]:
    """Call ``stop`` with the name of a signal at its first arrival, and let the second do what it always does.

    Parameters
    ----------
    stop : callable
        Takes the name, such as ``"SIGTERM"``.

    Notes
    -----
    Only the main thread of a process may handle signals; elsewhere nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {}

    def arrived(number: int, frame: Any) -> None:
        signal.signal(number, before[number])
        stop(signal.Signals(number).name)

    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, arrived)
    try:
        yield
    finally:
        for handled, handler in before.items():
            # Whoever took the signal in the meantime keeps it.
            if signal.getsignal(handled) is arrived:
                signal.signal(handled, handler)
