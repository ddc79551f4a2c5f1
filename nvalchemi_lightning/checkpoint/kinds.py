"""Whether what was read is of the kind that the live object holds in its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from nvalchemi_lightning.errors import StoreError

__all__ = ["require_no_methods", "require_same_kind"]


def require_same_kind(live: Any, saved: Any, where: str) -> None:
    """Refuse a value that the live object could not work with, such as text for a learning rate.

    Parameters
    ----------
    live, saved : Any
        Two nested states; None on either side fits everything, and so does a key that only one of them has.
    where : str
        How the message names the value.

    Raises
    ------
    StoreError
        Naming the place.
    """
    if live is None or saved is None:
        return
    if isinstance(live, Mapping) and isinstance(saved, Mapping):
        for key in live.keys() & saved.keys():
            require_same_kind(live[key], saved[key], f"{where}[{key!r}]")
    elif isinstance(live, list | tuple) and isinstance(saved, list | tuple):
        for i, (one, other) in enumerate(zip(live, saved, strict=False)):
            require_same_kind(one, other, f"{where}[{i}]")
    elif not (_is_number(live) and _is_number(saved)) and not isinstance(saved, type(live)):
        raise StoreError(f"{where} is {saved!r:.80}; it must be like {live!r:.80}")


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)


def require_no_methods(live: object, saved: Mapping[str, Any], where: str) -> None:
    """Refuse a state whose names are methods of the object, which takes all of it as attributes.

    Parameters
    ----------
    live : object
        Such as a learning rate schedule.
    saved : mapping of str to Any
        The state.
    where : str
        How the message names it.

    Raises
    ------
    StoreError
        Naming the key.
    """
    taken = [name for name in saved if name == "optimizer" or _is_method(getattr(type(live), name, None))]
    if taken:
        raise StoreError(f"{where} is damaged: it would replace {taken[0]!r} of {type(live).__name__}")


def _is_method(value: Any) -> bool:
    return callable(value) or isinstance(value, property)
