"""The weights of a model as a file of their own."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from nvalchemi_lightning.checkpoint.contents import Contents, read_contents
from nvalchemi_lightning.errors import ConfigurationError, LabelNotFoundError, nearest

__all__ = ["export_weights"]


def export_weights(
    path: str | Path,
    target: str | Path,
    *,
    model: str | None = None,
    index: int = -1,
    averaged: bool = False,
    overwrite: bool = False,
) -> Path:
    """Write the weights of one model of a checkpoint to a file: its ``state_dict``, for ``load_state_dict``.

    Parameters
    ----------
    path : str or Path
        A folder of checkpoints, a name in it (``step_<K>``, ``epoch_<K>``, ``final``), or a file of Lightning's
        ModelCheckpoint.
    target : str or Path
        The file, which ``torch.load(target, weights_only=True)`` reads. It appears whole or not at all.
    model : str, optional
        Which model; needed only if there are several.
    index : int
        Which checkpoint of a folder; -1 is the newest complete one.
    averaged : bool
        Take the average of `EMAHook` instead of the weights that train.
    overwrite : bool
        Replace a file that exists.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    FileExistsError
        If the file exists already.
    FileNotFoundError
        If there is no such checkpoint, or no folder for the file.
    LabelNotFoundError
        If there is no such model, or it has no averaged weights.
    ConfigurationError
        If there are several models and none is named.
    StoreError
        If the checkpoint is damaged.

    Examples
    --------
    >>> export_weights("runs/example/checkpoints", "potential.pt", averaged=True)  # doctest: +SKIP
    """
    target = Path(target)
    if target.exists() and not overwrite:
        raise FileExistsError(f"{target} exists; give another name, or ask to overwrite it")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {target.parent} for {target.name}; make it first")
    found = read_contents(path, index)
    _save(_weights(found, _chosen(found, model), averaged), target)
    return target


def _chosen(found: Contents, model: str | None) -> str:
    names = sorted(found.models)
    if model is None and len(names) == 1:
        return names[0]
    if model is None:
        raise ConfigurationError(f"{found.path} has the models {names}; say which one")
    if model not in names:
        raise LabelNotFoundError(f"{found.path} has no model {model!r}; it has {names}{nearest(model, names)}")
    return model


def _weights(found: Contents, model: str, averaged: bool) -> dict[str, Tensor]:
    if not averaged:
        return found.models[model]
    if model not in found.averaged:
        raise LabelNotFoundError(
            f"{found.path} has no averaged weights of {model!r}, only those that train; averages come from "
            "EMAHook and are there after its first update"
        )
    return found.averaged[model]


def _save(weights: dict[str, Tensor], target: Path) -> None:
    staged = target.with_name(f".{target.name}.part")
    try:
        torch.save(weights, staged)
        staged.replace(target)
    finally:
        staged.unlink(missing_ok=True)
