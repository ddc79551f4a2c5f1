"""Entering and leaving the hooks of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Any

__all__ = ["HookLifecycle", "each_hook"]


def each_hook(hooks: Iterable[Any]) -> Iterator[Any]:
    """Yield every hook, in the place of an orchestrator the hooks that it composes.

    Parameters
    ----------
    hooks : iterable
        Hooks in registration order.
    """
    for hook in hooks:
        if hasattr(hook, "iter_hooks"):
            yield from hook.iter_hooks()
        else:
            yield hook


class HookLifecycle:
    """A re-entrant context around a run: every hook is entered once and left once, whatever happens.

    Hooks are entered in registration order and left in reverse. A failure on the way in leaves the hooks that
    were entered; a failure on the way out does not keep the others from being left; an exception of the run is
    never suppressed by a hook.

    Parameters
    ----------
    hooks : iterable
        Hooks in registration order, walked through whenever the context is opened.
    """

    def __init__(self, hooks: Iterable[Any]) -> None:
        self._hooks = hooks
        self._stack: ExitStack | None = None
        self._depth = 0

    @property
    def active(self) -> bool:
        """Whether the context is open."""
        return self._stack is not None

    def __enter__(self) -> HookLifecycle:
        if self._stack is None:
            with ExitStack() as stack:
                for hook in each_hook(self._hooks):
                    _enter(stack, hook)
                self._stack = stack.pop_all()
        self._depth += 1
        return self

    def add(self, hook: Any) -> None:
        """Enter a hook that was registered while the context is open."""
        if self._stack is None:
            return
        with ExitStack() as stack:
            for each in each_hook([hook]):
                _enter(stack, each)
            self._stack.push(stack.pop_all())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth = max(self._depth - 1, 0)
        if self._depth == 0:
            self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """Leave every hook now, however deep the nesting; closing twice is harmless."""
        stack, self._stack, self._depth = self._stack, None, 0
        if stack is not None:
            stack.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)


def _enter(stack: ExitStack, hook: Any) -> None:
    if hasattr(hook, "__enter__"):
        hook.__enter__()
    if hasattr(hook, "__exit__"):
        stack.push(_unsuppressed(hook))
    elif hasattr(hook, "close"):
        stack.callback(hook.close)


def _unsuppressed(hook: Any) -> Any:
    def leave(kind: Any, error: Any, trace: Any) -> None:
        hook.__exit__(kind, error, trace)

    return leave
