"""Constructor keywords that do not exist, answered with the nearest one that does."""

from __future__ import annotations

import inspect
from typing import Any

from nvalchemi_lightning.errors import UnknownNameError, nearest

__all__ = ["refuse_unknown_keywords"]


def refuse_unknown_keywords(cls: type, given: dict[str, Any]) -> None:
    """Refuse keywords that the constructor of a class does not take.

    Parameters
    ----------
    cls : type
        The class; one whose constructor takes any keyword is left alone.
    given : dict
        The keywords.

    Raises
    ------
    UnknownNameError
        For the first unknown one; names the nearest.
    """
    known = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        return
    for name in given:
        if name not in known:
            raise UnknownNameError(f"{cls.__name__} has no option {name!r}{nearest(name, known)}")
