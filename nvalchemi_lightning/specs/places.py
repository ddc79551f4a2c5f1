"""Say in errors where in a file they arose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nvalchemi_lightning.errors import AlchemiError, ConfigurationError
from nvalchemi_lightning.specs.base import BaseSpec

__all__ = ["BUILD_ERRORS", "built", "located"]

BUILD_ERRORS = (
    TypeError,
    ValueError,
    RuntimeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    OSError,
    ImportError,
)
"""What a constructor that gets wrong arguments may raise."""


@contextmanager
def located(where: str, advice: str = "") -> Iterator[None]:
    """Say in errors of this package where they arose.

    Parameters
    ----------
    where : str
        The place, put before the message.
    advice : str
        What else would do, put after it.
    """
    try:
        yield
    except AlchemiError as error:
        raise type(error)(f"{where}: {error}{advice}") from error


def built(spec: BaseSpec, **overrides: Any) -> Any:
    """Build a spec that came from a file.

    Parameters
    ----------
    spec : BaseSpec
        The recipe.
    **overrides
        Keywords that replace the stored ones.

    Raises
    ------
    ConfigurationError
        If what it calls raises an error of its own.
    """
    try:
        return spec.build(**overrides)
    except AlchemiError:
        raise
    except BUILD_ERRORS as error:
        raise ConfigurationError(f"{spec.cls_path} cannot be built ({type(error).__name__}: {error})") from error
