"""The states of the global random number generators, as data that safe loading accepts."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["capture_random_states", "restore_random_states"]


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
    python, numpy = states["python"], states["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    words = numpy["words"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", words, numpy["position"], numpy["has_gauss"], numpy["cached"]))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
