"""What a run needs besides weights, optimizers, hooks and counters to go on as if it had never stopped."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed

from nvalchemi_lightning.errors import StoreError
from nvalchemi_lightning.hooks.lifecycle import each_hook
from nvalchemi_lightning.random_states import capture_random_states, check_random_states, restore_random_states

__all__ = ["ResumePoint", "check_resume_states", "gather_from_ranks", "keeping_random_states"]


class ResumePoint:
    """Random states, what is due at the present point of the loop, and what hooks hold on this rank alone.

    Parameters
    ----------
    hooks : iterable, optional
        The hooks of the run; those with ``rank_state_dict`` and ``load_rank_state_dict`` are asked.

    Attributes
    ----------
    validated_at : int or None
        The step count at which the newest validation took place.
    validation_due : bool
        Whether a validation is due that has not taken place yet.
    """

    def __init__(self, hooks: Iterable[Any] = ()) -> None:
        self._hooks = hooks
        self.validated_at: int | None = None
        self.validation_due = False
        self._pass_began: Mapping[str, Any] | None = None
        self._loaded: Mapping[int, Mapping[str, Any]] = {}

    def begin_run(self) -> None:
        """Forget what an earlier run has validated."""
        self.validated_at, self.validation_due = None, False

    def state(self) -> dict[str, Any]:
        """Return the state of this process, copied."""
        return {
            "random": capture_random_states(),
            "pass_began": self._pass_began,
            "validated_at": self.validated_at,
            "validation_due": self.validation_due,
            "hooks": {key: hook.rank_state_dict() for key, hook in self._holders().items()},
        }

    def _holders(self) -> dict[str, Any]:
        """Return the hooks that hold something on every rank, keyed by their place."""
        holders = (hook for hook in each_hook(self._hooks) if hasattr(hook, "rank_state_dict"))
        return {f"{place}:{type(hook).__name__}": hook for place, hook in enumerate(holders)}

    def load(self, ranks: Mapping[int, Mapping[str, Any]]) -> None:
        """Take over what `gather_from_ranks` collected; it counts from the beginning of the next run.

        Parameters
        ----------
        ranks : mapping of int to mapping
            Rank to its `state`; empty where a checkpoint has none.
        """
        self._loaded = ranks

    def take_over(self, rank: int, world_size: int) -> bool:
        """Put this process where the loaded state says, once.

        Parameters
        ----------
        rank, world_size : int
            This process, and how many there are.

        Returns
        -------
        bool
            Whether there was a state to take over.
        """
        ranks, self._loaded = self._loaded, {}
        if not ranks:
            return False
        if len(ranks) != world_size:
            warnings.warn(
                f"the checkpoint has the random states of {len(ranks)} rank(s), this run has {world_size}; it goes on, "
                f"but not bit for bit. Use {len(ranks)} rank(s) if that matters, and save with CheckpointHook or "
                "ModelCheckpoint, which ask every rank for its state",
                stacklevel=2,
            )
        own = ranks.get(rank)
        if own is None:
            return False
        self._pass_began = own.get("pass_began")
        self.validated_at, self.validation_due = own["validated_at"], own["validation_due"]
        holders = self._holders()
        for key in own["hooks"].keys() & holders.keys():
            holders[key].load_rank_state_dict(own["hooks"][key])
        restore_random_states(own["random"])
        return True

    @contextmanager
    def beginning_a_pass(self, skipped: int) -> Iterator[None]:
        """Let a loader that draws its order from the global generators draw the same one when a pass is continued.

        Parameters
        ----------
        skipped : int
            How many batches of the pass are behind.
        """
        if not skipped:
            self._pass_began = capture_random_states()
        if not skipped or self._pass_began is None:
            yield
            return
        with keeping_random_states():
            restore_random_states(self._pass_began)
            yield


@contextmanager
def keeping_random_states() -> Iterator[None]:
    """Restore the global generators after the block."""
    states = capture_random_states()
    try:
        yield
    finally:
        restore_random_states(states)


def gather_from_ranks(state: Any) -> dict[int, Any]:
    """Return the values of all ranks; every rank must call it.

    Parameters
    ----------
    state : Any
        That of this process.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return {0: state}
    states: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(states, state)
    return dict(enumerate(states))


def check_resume_states(ranks: Any, where: object) -> None:
    """Refuse what `gather_from_ranks` cannot have collected from `ResumePoint.state`.

    Parameters
    ----------
    ranks : Any
        What was read from a file.
    where : object
        The file, for the message.

    Raises
    ------
    StoreError
        Naming the file and the entry.
    """
    if not isinstance(ranks, Mapping) or not all(type(rank) is int and rank >= 0 for rank in ranks):
        raise StoreError(f"{where} is damaged: it does not hold a state per rank but {ranks!r:.80}")
    for rank, state in ranks.items():
        if not isinstance(state, Mapping):
            raise StoreError(f"{where} is damaged: the state of rank {rank} is {state!r:.80}")
        step, due = state.get("validated_at"), state.get("validation_due")
        if not (step is None or (type(step) is int and step >= 0)) or type(due) is not bool:
            raise StoreError(f"{where} is damaged: validated_at is {step!r}, validation_due {due!r} (rank {rank})")
        hooks = state.get("hooks")
        if not isinstance(hooks, Mapping) or not all(isinstance(held, Mapping) for held in hooks.values()):
            raise StoreError(f"{where} is damaged: the states of hooks of rank {rank} are {hooks!r:.80}")
        check_random_states(state.get("random"), where)
        if state.get("pass_began") is not None:
            check_random_states(state["pass_began"], where)
