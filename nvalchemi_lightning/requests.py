"""What hooks ask of the run that is under way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

__all__ = ["RunRequests"]


@dataclass
class RunRequests:
    """Requests of hooks to the run.

    Attributes
    ----------
    stop_reason : str or None
        Why the run shall end after the present batch, None if it shall go on.
    deferred : list of callable
        What to do at the end of the present point of the loop.
    scalars : dict of str to Tensor or float
        What to log at the next cadence.
    votes : Tensor or None
        How many ranks asked to stop, as of the newest batch; None on one rank.
    """

    stop_reason: str | None = None
    deferred: list[Callable[[], None]] = field(default_factory=list)
    scalars: dict[str, Tensor | float] = field(default_factory=dict)

    votes: Tensor | None = None
    _agreed: bool | None = None

    def count_votes(self, votes: Tensor) -> None:
        """Take how many ranks asked to stop; the number is fetched from the device when it is asked for, once."""
        self.votes, self._agreed = votes, None

    def must_stop(self) -> bool:
        """Return whether the run ends here; with several ranks, whether they all know that one asked for it."""
        if self.votes is None:
            return self.stop_reason is not None
        if self._agreed is None:
            self._agreed = bool(self.votes > 0)
        return self._agreed

    def forget(self) -> None:
        """Forget what an earlier run left behind."""
        self.stop_reason, self.deferred, self.scalars = None, [], {}
        self.votes = self._agreed = None

    def run_deferred(self) -> None:
        """Do what was deferred, each once."""
        actions, self.deferred = self.deferred, []
        for action in actions:
            action()

    def take_scalars(self) -> dict[str, Tensor | float]:
        """Return what was logged since the last call, and forget it."""
        scalars, self.scalars = self.scalars, {}
        return scalars
