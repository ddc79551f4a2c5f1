"""Read the ``.pt`` files of a checkpoint: tensors and plain data, never code, in the form that their place needs."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nvalchemi_lightning.checkpoint.layout import HOOKS, RESUME
from nvalchemi_lightning.checkpoint.migrations import upgraded
from nvalchemi_lightning.checkpoint.places import readable
from nvalchemi_lightning.errors import StoreError
from nvalchemi_lightning.resume import check_resume_states

__all__ = ["load_tensors", "read_states"]

_UNSAFE: type[Exception] = torch.serialization.pickle.UnpicklingError  # type: ignore[attr-defined]

# What torch.load raises on a file that is cut short, foreign, not safe to load, or made to confuse.
_LOAD_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, EOFError, ImportError, LookupError, MemoryError, OSError),
    *(RuntimeError, TypeError, ValueError, Warning, struct.error, _UNSAFE),
)


def read_states(root: Path, names: Iterable[str]) -> dict[str, Any]:
    """Return what the files hold, by component, such as ``"models/main"``.

    Parameters
    ----------
    root : Path
        The folder of checkpoints.
    names : iterable of str
        Files relative to it.

    Raises
    ------
    StoreError
        If one is missing, damaged, holds code, or not what its place needs; it names the path.
    """
    return {name.rpartition("/checkpoints/")[0]: _state(root, name) for name in names}


def _state(root: Path, name: str) -> Any:
    path = readable(root, name)
    state = load_tensors(path)
    component = name.rpartition("/checkpoints/")[0]
    if component == RESUME:
        ranks = upgraded("resume", state, path).get("ranks")
        check_resume_states(ranks, path)
        return ranks
    if component.startswith("optimizers/"):
        _require(_is_optimizer_state(state), path, "the state of an optimizer")
    else:
        _require(all(isinstance(key, str) for key in state), path, "a state with names")
    if component == HOOKS:
        _require(all(isinstance(each, dict) for each in state.values()), path, "a state per hook")
    return state


def load_tensors(path: Path) -> dict[Any, Any]:
    """Return the state that a file holds, on the CPU; nothing in it is executed.

    Raises
    ------
    FileNotFoundError
        If there is none.
    StoreError
        If it is damaged, or holds something else.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # what torch warns of here, no file of a checkpoint holds
            state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except _LOAD_ERRORS as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise StoreError(f"{path} is damaged or not safe to load: {reason}") from error
    _require(isinstance(state, dict), path, "a state", state)
    _require(not any(tensor.is_meta for tensor in _tensors(state)), path, "numbers in all its tensors")
    return dict(state)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple | set):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _is_optimizer_state(state: Mapping[Any, Any]) -> bool:
    moments, groups = state.get("state"), state.get("param_groups")
    return (
        isinstance(moments, dict)
        and all(isinstance(number, int) and isinstance(each, dict) for number, each in moments.items())
        and isinstance(groups, list)
        and all(isinstance(group, dict) and _are_numbers(group.get("params")) for group in groups)
    )


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(number, int) for number in value)


def _require(condition: bool, path: Path, wanted: str, found: Any = None) -> None:
    if not condition:
        held = "" if found is None else f" but a {type(found).__name__}"
        raise StoreError(f"{path} is damaged: it does not hold {wanted}{held}")
