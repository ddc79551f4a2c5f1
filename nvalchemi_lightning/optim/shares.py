"""Divide the parameters of one model among several optimizers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from nvalchemi_lightning.errors import ConfigurationError
from nvalchemi_lightning.optim.groups import matching

if TYPE_CHECKING:
    from nvalchemi_lightning.optim.config import OptimizerConfig

__all__ = ["shared_out"]

Parameter = TypeVar("Parameter")


def shared_out(
    parameters: Mapping[str, Parameter], configs: Sequence[OptimizerConfig], trained: Collection[str], key: str
) -> list[dict[str, Parameter]]:
    """Return the parameters of each config, in order.

    Parameters
    ----------
    parameters : mapping of str to Parameter
        Every parameter of the model by qualified name.
    configs : sequence of OptimizerConfig
        Each takes what its globs match among what is left; one without globs takes the rest. If none has globs,
        each gets everything.
    trained : collection of str
        The names that train.
    key : str
        The model, for messages.

    Raises
    ------
    UnknownNameError
        If a pattern matches no parameter.
    ConfigurationError
        If a config is left without a parameter that trains, or such a parameter without a config.
    """
    if all(config.parameters is None for config in configs):
        return [dict(parameters) for _ in configs]
    rest, shares = dict(parameters), []
    for index, config in enumerate(configs):
        where = f"optimizer_configs[{key!r}][{index}]"
        chosen = _chosen(config.parameters, parameters, where)
        share = {name: parameter for name, parameter in rest.items() if name in chosen}
        if not any(name in trained for name in share):
            raise ConfigurationError(
                f"{where} has no parameter to train: what its globs match is frozen or belongs to an earlier config; "
                "put the narrower globs first, or leave the config out"
            )
        shares.append(share)
        rest = {name: parameter for name, parameter in rest.items() if name not in share}
    left = [name for name in rest if name in trained]
    if left:
        raise ConfigurationError(
            f"optimizer_configs[{key!r}]: {len(left)} parameters that train belong to no optimizer, such as "
            f"{left[0]!r}; add a config without globs at the end, or freeze them"
        )
    return shares


def _chosen(patterns: Sequence[str] | None, names: Collection[str], where: str) -> Collection[str]:
    if patterns is None:
        return names
    return {name for pattern in patterns for name in matching(pattern, names, f"{where}.parameters")}
