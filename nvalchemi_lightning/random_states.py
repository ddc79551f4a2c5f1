"""The states of the global random number generators, as data that safe loading accepts."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nvalchemi_lightning.errors import StoreError

__all__ = ["capture_random_states", "check_random_states", "restore_random_states"]

_NUMPY_WORDS = 624
_CUDA_BYTES = 16


def capture_random_states() -> dict[str, Any]:
    """Return the states of ``random``, NumPy, torch and, if it was used, the current CUDA device.

    Returns
    -------
    dict
        Tensors and numbers under ``python``, ``numpy``, ``torch`` and ``cuda``; 10 kB.
    """
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
        "numpy": {
            "words": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Put the generators into the states that `capture_random_states` returned.

    Parameters
    ----------
    states : mapping
        That of a CUDA device is put into the current one, if there is one.
    """
    random.setstate(_python_state(states))
    np.random.set_state(_numpy_state(states))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def check_random_states(states: Any, where: object) -> None:
    """Refuse what `capture_random_states` cannot have returned, and would leave the generators broken.

    Parameters
    ----------
    states : Any
        What was read from a file.
    where : object
        The file, for the message.

    Raises
    ------
    StoreError
        Naming the file and the generator. No generator has changed.
    """
    if not isinstance(states, Mapping):
        raise StoreError(f"{where} is damaged: it holds no random states but {states!r:.80}")
    for name, fits in (("python", _python_fits), ("numpy", _numpy_fits), ("torch", _torch_fits), ("cuda", _cuda_fits)):
        try:
            good = fits(states)
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            good = False
        if not good:
            raise StoreError(f"{where} is damaged: the random state of {name} is none")


def _python_state(states: Mapping[str, Any]) -> tuple[Any, ...]:
    python = states["python"]
    return python["version"], tuple(python["words"].tolist()), python["gauss"]


def _numpy_state(states: Mapping[str, Any]) -> tuple[Any, ...]:
    numpy = states["numpy"]
    words = numpy["words"].numpy().astype(np.uint32)
    return "MT19937", words, numpy["position"], numpy["has_gauss"], numpy["cached"]


def _python_fits(states: Mapping[str, Any]) -> bool:
    gauss = states["python"]["gauss"]
    random.Random().setstate(_python_state(states))  # noqa: S311  (it is thrown away)
    return gauss is None or isinstance(gauss, float)


def _numpy_fits(states: Mapping[str, Any]) -> bool:
    _, words, position, has_gauss, cached = _numpy_state(states)
    np.random.RandomState().set_state(_numpy_state(states))
    # NumPy takes any position, and reads beyond its words then.
    inside = type(position) is int and 0 <= position <= _NUMPY_WORDS and words.shape == (_NUMPY_WORDS,)
    return inside and has_gauss in (0, 1) and isinstance(cached, float)


def _torch_fits(states: Mapping[str, Any]) -> bool:
    torch.Generator().set_state(states["torch"])
    return True


def _cuda_fits(states: Mapping[str, Any]) -> bool:
    state = states.get("cuda")
    return state is None or (isinstance(state, Tensor) and state.dtype == torch.uint8 and state.shape == (_CUDA_BYTES,))
