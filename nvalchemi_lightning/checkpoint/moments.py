"""Whether the moments of a saved optimizer land on the parameters that they belong to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from nvalchemi_lightning.errors import ConfigurationError
from nvalchemi_lightning.optim.groups import DEFAULT_GROUP

__all__ = ["following_names", "require_same_groups", "require_same_optimizers", "require_same_parameters"]

Groups = Sequence[Mapping[str, Any]]


def require_same_parameters(optimizer: str, live: Sequence[str], saved: Sequence[str]) -> None:
    """Refuse an optimizer that trains other parameters than the saved one.

    Parameters
    ----------
    optimizer : str
        Its name, for the message.
    live, saved : sequence of str
        The qualified names of its parameters, in its order.

    Raises
    ------
    ConfigurationError
        Listing what was added and removed.
    """
    added, removed = [n for n in live if n not in saved], [n for n in saved if n not in live]
    if added or removed:
        raise ConfigurationError(
            f"{optimizer} does not train the parameters of the checkpoint (added: {added}, removed: {removed}); its "
            "moments would land on the wrong ones. Freeze and define parameters as in the run that was saved"
        )


def require_same_groups(
    optimizer: str, live: Sequence[str], live_groups: Groups, saved: Sequence[str] | None, saved_groups: Groups
) -> None:
    """Refuse an optimizer that arranges the saved parameters differently.

    Parameters
    ----------
    optimizer : str
        Its name, for the message.
    live, saved : sequence of str
        The names of its parameters, in its order; ``saved`` may be unknown.
    live_groups, saved_groups : sequence of mapping
        The groups of `torch.optim.Optimizer.state_dict`.

    Raises
    ------
    ConfigurationError
        If a parameter is in another group, or the order differs.
    """
    sizes, saved_sizes = ([len(group["params"]) for group in groups] for groups in (live_groups, saved_groups))
    if saved is None:
        if sizes != saved_sizes:
            raise ConfigurationError(
                f"{optimizer} has parameter groups of {sizes} parameters, in the checkpoint {saved_sizes}; "
                "freeze and group parameters as in the run that was saved"
            )
        return
    labels, saved_labels = _labels(live, live_groups), _labels(saved, saved_groups)
    moved = [name for name in live if labels[name] != saved_labels[name]]
    if moved:
        first = moved[0]
        more = f", and {len(moved) - 1} more like it" if len(moved) > 1 else ""
        raise ConfigurationError(
            f"{optimizer} groups parameters otherwise than the checkpoint: {first!r} is in the group "
            f"{labels[first]!r}, there in {saved_labels[first]!r}{more}. Use the param_groups and no_decay of the run "
            "that was saved, or load_checkpoint(..., optimizer_configs=...): moments then follow the names"
        )
    if list(live) != list(saved):
        raise ConfigurationError(
            f"{optimizer} does not train the parameters of the checkpoint (the same parameters in another order); its "
            "moments would land on the wrong ones. Define parameters and groups in the order of the run that was saved"
        )


def require_same_optimizers(
    live: Sequence[Optimizer], states: Sequence[Mapping[str, Any]], names: Sequence[tuple[list[str], list[str]]]
) -> None:
    """Refuse saved optimizers whose moments would land on other parameters than they belong to.

    Parameters
    ----------
    live : sequence of Optimizer
        The optimizers of the run.
    states : sequence of mapping
        The saved states, in the same order.
    names : sequence of (list of str, list of str)
        The names of the live and of the saved parameters of each.

    Raises
    ------
    ConfigurationError
        If their number, parameters or groups differ.
    """
    if len(live) != len(states):
        raise ConfigurationError(
            f"the run has {len(live)} optimizers, the checkpoint {len(states)}; use the optimizer_configs of the run "
            "that was saved"
        )
    for index, (optimizer, state, (own, saved)) in enumerate(zip(live, states, names, strict=True)):
        require_same_parameters(f"optimizer {index}", own, saved)
        require_same_groups(f"optimizer {index}", own, optimizer.param_groups, saved, state["param_groups"])


def following_names(
    moments: Mapping[int, Any], groups: Groups, saved: Sequence[str], live: Sequence[str]
) -> dict[int, Any]:
    """Return saved moments under the numbers that the parameters of these names have in the live optimizer.

    Parameters
    ----------
    moments : mapping of int to dict
        The ``state`` of a saved optimizer.
    groups : sequence of mapping
        Its groups.
    saved, live : sequence of str
        Names of its parameters and of those of the live optimizer, each in their order.
    """
    numbers = [number for group in groups for number in group["params"]]
    by_name = {name: moments[number] for name, number in zip(saved, numbers, strict=True) if number in moments}
    return {number: by_name[name] for number, name in enumerate(live) if name in by_name}


def _labels(names: Sequence[str], groups: Groups) -> dict[str, str]:
    """Return the group of every parameter; one without a name is the default group or goes by its number."""
    unnamed = DEFAULT_GROUP if len(groups) == 1 else "group {}"
    labels = [group.get("name", unnamed.format(i)) for i, group in enumerate(groups) for _ in group["params"]]
    return dict(zip(names, labels, strict=True))
