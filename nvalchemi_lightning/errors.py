"""The one exception tree.

::

    AlchemiError
    ├── ConfigurationError (ValueError)      a recipe, option or combination that cannot work
    │   └── UnknownNameError                 a misspelt key, field, stage or element; names the nearest valid one
    ├── ConfigurationTypeError (TypeError)   an argument of the wrong kind
    ├── DataError (ValueError)               structures, labels or batches that are not what they must be
    │   ├── LabelNotFoundError (KeyError)    a label that was asked for is absent; lists what there is
    │   └── StoreError                       a Zarr store that is damaged, foreign or inconsistent
    ├── MissingTargetError (AttributeError)  the batch lacks a target that a loss needs
    ├── MissingPredictionError (KeyError)    the model's output lacks what a loss needs
    ├── SecondOwnerError (RuntimeError)      something other than the owner touched gradients or weights
    ├── StoreWriteError (OSError)            the file system refused a write; says in which state the store is
    ├── TrainingStateError (RuntimeError)    a call at a moment when it has no meaning
    └── UntrustedPathError (ValueError)      a spec names something outside the trust list

Every class also derives from the built-in that callers of the reference catch.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = [
    "AlchemiError",
    "ConfigurationError",
    "ConfigurationTypeError",
    "DataError",
    "LabelNotFoundError",
    "MissingPredictionError",
    "MissingTargetError",
    "SecondOwnerError",
    "StoreError",
    "StoreWriteError",
    "TrainingStateError",
    "UnknownNameError",
    "UntrustedPathError",
    "nearest",
]


class AlchemiError(Exception):
    """Base of every error that this package raises on purpose."""

    def __str__(self) -> str:
        """Return the message itself; ``KeyError`` would show it quoted."""
        return " ".join(str(argument) for argument in self.args)


class ConfigurationError(AlchemiError, ValueError):
    """A recipe, an option or a combination of options that cannot work."""


class UnknownNameError(ConfigurationError):
    """A name that does not exist; the message gives the nearest one that does."""


class ConfigurationTypeError(AlchemiError, TypeError):
    """An argument of the wrong kind."""


class DataError(AlchemiError, ValueError):
    """Structures, labels or batches that are not what they must be."""


class LabelNotFoundError(DataError, KeyError):
    """A label that was asked for is absent; the message lists what there is."""


class StoreError(DataError):
    """A Zarr store that is damaged, foreign or inconsistent."""


class MissingTargetError(AlchemiError, AttributeError):
    """A batch without a target that a loss needs."""


class MissingPredictionError(AlchemiError, KeyError):
    """A prediction mapping without an entry that a loss needs."""


class SecondOwnerError(AlchemiError, RuntimeError):
    """Something other than the owner touched gradients or weights."""


class StoreWriteError(AlchemiError, OSError):
    """The file system refused a write to a store: no space, no right, no device."""


class TrainingStateError(AlchemiError, RuntimeError):
    """A call at a moment when it has no meaning."""


class UntrustedPathError(AlchemiError, ValueError):
    """A spec that names something outside the trust list."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return a hint such as ``"; did you mean 'forces'?"``, or ``""`` when nothing is close.

    Parameters
    ----------
    name : str
        The name that was given.
    valid : iterable of str
        The names that exist.
    """
    names = sorted(valid)
    match = [other for other in names if name and other.startswith(name)] or get_close_matches(name, names, n=1)
    return f"; did you mean {match[0]!r}?" if match else ""
