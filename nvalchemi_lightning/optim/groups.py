"""Parameters in groups by name, each with its own learning rate and weight decay."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from pydantic import ConfigDict, Field
from torch import Tensor
from torch.optim import Optimizer

from nvalchemi_lightning.errors import ConfigurationError, UnknownNameError
from nvalchemi_lightning.strict_model import StrictModel

__all__ = ["DEFAULT_GROUP", "ParamGroup", "grouped", "matching", "require_options", "require_own_rates"]

DEFAULT_GROUP = "default"
"""The name of the group of all parameters that no pattern matches."""


class ParamGroup(StrictModel):
    """The parameters that a pattern matches, with their own learning rate and weight decay.

    Parameters
    ----------
    pattern : str
        A case-sensitive glob over names ``"<model key>.<parameter>"``, such as ``"*.embedding.*"``; one bare model
        has the key ``"main"``. ``*`` matches dots too.
    name : str, optional
        How logs and messages call the group; default the pattern.
    lr, weight_decay : float, optional
        Finite and >= 0; default those of the optimizer.

    Raises
    ------
    pydantic.ValidationError
        A `ValueError` that names the field and the value.

    Examples
    --------
    >>> slow = ParamGroup(pattern="main.embedding.*", name="embedding", lr=1e-4, weight_decay=0.0)
    >>> config = OptimizerConfig(lr=1e-3, param_groups=[slow])
    """

    model_config = ConfigDict(frozen=True)

    pattern: str = Field(min_length=1)
    name: str | None = Field(default=None, min_length=1)
    lr: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    weight_decay: float | None = Field(default=None, ge=0, allow_inf_nan=False)

    @property
    def label(self) -> str:
        """The name, or the pattern where there is none."""
        return self.name or self.pattern

    @property
    def options(self) -> dict[str, float]:
        """What the group sets for itself, as keywords of the optimizer."""
        given = {"lr": self.lr, "weight_decay": self.weight_decay}
        return {name: value for name, value in given.items() if value is not None}


def matching(pattern: str, names: Collection[str], where: str) -> list[str]:
    """Return the names that a glob matches.

    Parameters
    ----------
    pattern : str
        Case-sensitive; ``*`` matches dots too.
    names : collection of str
        The names that exist.
    where : str
        How the message names the pattern, such as ``"param_groups[0]"``.

    Raises
    ------
    UnknownNameError
        If it matches none; gives the nearest ones.
    """
    found = [name for name in names if fnmatchcase(name, pattern)]
    if not found:
        near = get_close_matches(pattern.replace("*", ""), names, n=3, cutoff=0.0)
        raise UnknownNameError(
            f"{where}: the pattern {pattern!r} matches no parameter; names are '<model key>.<parameter name>', "
            f"the nearest ones {', '.join(map(repr, near))}"
        )
    return found


def grouped(
    named: Mapping[str, Tensor], groups: Sequence[ParamGroup], *, trained: Collection[str], spare: bool
) -> list[dict[str, Any]]:
    """Return parameter groups as torch's optimizers take them.

    Parameters
    ----------
    named : mapping of str to Tensor
        Every parameter of the model by qualified name; patterns may match frozen ones too.
    groups : sequence of ParamGroup
        The first whose pattern matches takes a parameter; the rest is the default group.
    trained : collection of str
        The names that enter a group.
    spare : bool
        Whether parameters of fewer than two dimensions (biases, scales) get a group of their own without weight
        decay, called ``"<group>/no_decay"``.

    Returns
    -------
    list of dict
        The default group, then ``groups`` in their order; groups without a trained parameter are left out.

    Raises
    ------
    UnknownNameError
        If a pattern matches no parameter.
    ConfigurationError
        If earlier patterns take all that a pattern matches.
    """
    owner = _owners(named, groups)
    found = []
    for index, group in enumerate((None, *groups), start=-1):
        members = [named[name] for name in named if name in trained and owner.get(name, -1) == index]
        label, options = (group.label, group.options) if group is not None else (DEFAULT_GROUP, {})
        decayed = [parameter for parameter in members if not (spare and _is_vector(parameter))]
        spared = [parameter for parameter in members if spare and _is_vector(parameter)]
        found.append({"params": decayed, "name": label, **options})
        found.append({"params": spared, "name": f"{label}/no_decay", **options, "weight_decay": 0.0})
    return [group for group in found if group["params"]]


def _is_vector(parameter: Tensor) -> bool:
    return parameter.ndim < 2


def _owners(names: Collection[str], groups: Sequence[ParamGroup]) -> dict[str, int]:
    """Return the index of the group of every name that a pattern matches."""
    owner: dict[str, int] = {}
    for index, group in enumerate(groups):
        matched = matching(group.pattern, names, f"param_groups[{index}]")
        new = [name for name in matched if name not in owner]
        if not new:
            first = groups[owner[matched[0]]].pattern
            raise ConfigurationError(
                f"param_groups[{index}]: earlier patterns take all {len(matched)} parameters that {group.pattern!r} "
                f"matches, such as {matched[0]!r} by {first!r}; the first match wins, so put the narrower pattern first"
            )
        owner.update(dict.fromkeys(new, index))
    return owner


def require_options(optimizer: Optimizer, groups: Iterable[Mapping[str, Any]]) -> None:
    """Refuse an option of a group that the optimizer would not look at.

    Raises
    ------
    ConfigurationError
        Naming group and option.
    """
    for group in groups:
        foreign = [name for name in group if name not in ("params", "name", *optimizer.defaults)]
        if foreign:
            raise ConfigurationError(
                f"{type(optimizer).__name__} has no {foreign[0]}, which the group {group['name']!r} sets; "
                "leave it out or choose another optimizer"
            )


def require_own_rates(before: Sequence[Any], optimizer: Optimizer, scheduler: type) -> None:
    """Refuse a schedule that gives all groups one learning rate when theirs differed.

    Parameters
    ----------
    before : sequence of float
        The learning rates of the groups before the schedule was built.
    optimizer : Optimizer
        The optimizer afterwards.
    scheduler : type
        The class of the schedule.

    Raises
    ------
    ConfigurationError
        If the learning rates of the groups are lost.
    """
    after = {float(group["lr"]) for group in optimizer.param_groups}
    if len({float(rate) for rate in before}) > 1 and len(after) == 1 and after != {0.0}:
        names = [group.get("name", str(i)) for i, group in enumerate(optimizer.param_groups)]
        raise ConfigurationError(
            f"{scheduler.__name__} sets one learning rate for all groups, so those of param_groups are lost; give its "
            f"keywords (such as max_lr) as lists with a value for each of {names}, or use a schedule by factors"
        )
