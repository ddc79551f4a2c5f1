"""What is in a checkpoint, as numbers and names that JSON can hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from nvalchemi_lightning.checkpoint.contents import Contents, read_contents
from nvalchemi_lightning.checkpoint.layout import as_object

__all__ = ["CheckpointReport", "ModelReport", "OptimizerReport", "inspect_checkpoint"]


@dataclass(frozen=True)
class ModelReport:
    """A model of a checkpoint.

    Attributes
    ----------
    tensors, numbers : int
        How many parameters and buffers, and how many numbers in them.
    trained : int or None
        How many of the numbers optimizers train; None if that is not known.
    dtypes : list of str
        Those of the tensors.
    weights : list of str
        ``"raw"``, and ``"averaged"`` if there are such too.
    spec : dict or None
        Its recipe, if it is there.
    """

    tensors: int
    numbers: int
    trained: int | None
    dtypes: list[str]
    weights: list[str]
    spec: dict[str, Any] | None


@dataclass(frozen=True)
class OptimizerReport:
    """An optimizer of a checkpoint.

    Attributes
    ----------
    optimizer : str or None
        The dotted path of its class, if it is there.
    groups : list of dict
        Per parameter group the number of ``parameters`` (tensors), ``lr`` and the other plain options.
    """

    optimizer: str | None
    groups: list[dict[str, Any]]


@dataclass(frozen=True)
class CheckpointReport:
    """A checkpoint.

    Attributes
    ----------
    path : str
        The folder or file.
    index : int or None
        Which checkpoint of a folder.
    written_by : str
        Product and version.
    counters : dict of str to int
        Executed steps and so on.
    models : dict of str to ModelReport
        By name.
    optimizers : dict of str to OptimizerReport
        By name.
    schedulers, hooks : dict
        Their states; tensors are replaced by text such as ``"float64 3x3"``.
    metrics : dict of str to float
        The validation of these weights; empty if there was none.
    provenance : dict
        When it was written, versions, commit, seeds and training data, as far as they were noted.
    """

    path: str
    index: int | None
    written_by: str
    counters: dict[str, Any]
    models: dict[str, ModelReport]
    optimizers: dict[str, OptimizerReport]
    schedulers: dict[str, Any]
    hooks: dict[str, Any]
    metrics: dict[str, float]
    provenance: dict[str, Any]


def inspect_checkpoint(path: str | Path, index: int = -1) -> CheckpointReport:
    """Describe a checkpoint; nothing that it names is built or imported.

    Parameters
    ----------
    path : str or Path
        A folder of checkpoints, a name in it (``step_<K>``, ``epoch_<K>``, ``final``), or a file of Lightning's
        ModelCheckpoint.
    index : int
        Which one of a folder; -1 is the newest complete one.

    Raises
    ------
    FileNotFoundError
        If there is no such file, folder or index.
    StoreError
        If it is damaged, or no file of `AlchemiModule`.
    """
    found = read_contents(path, index)
    return CheckpointReport(
        path=str(found.path),
        index=found.index,
        written_by=found.written_by,
        counters=found.counters,
        models={name: _model(found, name) for name in found.models},
        optimizers={name: _optimizer(found, name) for name in found.optimizers},
        schedulers={name: _plain(state) for name, state in found.schedulers.items()},
        hooks={name: _plain(state) for name, state in found.hooks.items()},
        metrics=found.metrics,
        provenance=found.provenance,
    )


def _model(found: Contents, name: str) -> ModelReport:
    state = {key: value for key, value in found.models[name].items() if isinstance(value, Tensor)}
    trained = {key for names in found.trained.values() for key in names}
    return ModelReport(
        tensors=len(state),
        numbers=sum(value.numel() for value in state.values()),
        trained=sum(state[key].numel() for key in state if f"{name}.{key}" in trained) if found.trained else None,
        dtypes=sorted({_dtype(value) for value in state.values()}),
        weights=["raw", "averaged"] if name in found.averaged else ["raw"],
        spec=found.specs.get(f"models/{name}"),
    )


def _optimizer(found: Contents, name: str) -> OptimizerReport:
    groups = as_object(found.optimizers[name]).get("param_groups", [])
    return OptimizerReport(
        optimizer=as_object(found.specs.get(f"optimizers/{name}")).get("cls_path"),
        groups=[{"parameters": len(group["params"]), **dict(_options(group))} for group in groups],
    )


def _options(group: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in group.items():
        if name != "params" and value is not None:
            yield name, _plain(value)


def _plain(value: Any) -> Any:
    """Return what JSON can hold of a state; tensors of one number become that number."""
    if isinstance(value, Tensor):
        return _plain(value.item()) if value.numel() == 1 and not value.is_complex() else _shape(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def _shape(tensor: Tensor) -> str:
    return f"{_dtype(tensor)} {'x'.join(map(str, tensor.shape))}"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
