"""Where a checkpoint comes from: software, commit, seeds and training data."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from nvalchemi_lightning.checkpoint.git import commit_of

__all__ = ["RunProvenance", "data_of"]

_PACKAGES = ("nvalchemi-lightning", "torch", "lightning", "numpy")


class RunProvenance:
    """What checkpoints say of the run that wrote them. What costs time is found out once per run."""

    def __init__(self) -> None:
        self._loader_seed: int | None = None
        self._data: list[dict[str, Any]] = []
        self._commit: str | None = None
        self._begun = False

    def begin_run(self, loader: Any) -> None:
        """Look at the training data and the working directory.

        Parameters
        ----------
        loader : iterable
            What batches come from, see `data_of`.
        """
        seed = getattr(loader, "seed", None)
        self._loader_seed = seed if isinstance(seed, int) else None
        self._data = data_of(loader)
        self._commit = commit_of(Path())
        self._begun = True

    def form(self) -> dict[str, Any]:
        """Return it as JSON data; what is not known is left out.

        Returns
        -------
        dict
            ``written`` (now, UTC, ISO 8601), ``versions``, ``commit`` (of the git repository around the working
            directory), ``seeds`` (``torch``: what the global generator was seeded with; ``loader``) and ``data``,
            see `data_of`; the last two describe the newest run.
        """
        if not self._begun:
            self._commit, self._begun = commit_of(Path()), True
        seeds = {"torch": torch.initial_seed(), "loader": self._loader_seed}
        known = {"commit": self._commit, "data": self._data}
        return {
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": dict(_versions()),
            "seeds": {name: seed for name, seed in seeds.items() if seed is not None},
            **{name: value for name, value in known.items() if value},
        }


@cache
def _versions() -> Mapping[str, str]:
    return {**{name: version(name) for name in _PACKAGES}, "python": platform.python_version()}


def data_of(loader: Any) -> list[dict[str, Any]]:
    """Return what is known of the data sets behind a loader.

    Parameters
    ----------
    loader : iterable
        Looked at if its ``dataset``, or each of the ``datasets`` in it, has a ``reader`` with ``name``,
        ``fingerprint()`` and a length, as those of stores and of structures in memory have.

    Returns
    -------
    list of dict
        Per data set ``source``, ``structures`` and ``fingerprint``; empty for data of another kind.
    """
    dataset = getattr(loader, "dataset", None)
    parts = getattr(dataset, "datasets", (dataset,))
    readers: list[Any] = [getattr(part, "reader", None) for part in parts]
    return [
        {"source": reader.name, "structures": len(reader), "fingerprint": reader.fingerprint()}
        for reader in readers
        if hasattr(reader, "fingerprint")
    ]
