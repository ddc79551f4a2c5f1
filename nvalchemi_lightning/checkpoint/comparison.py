"""What differs between two runs, by their checkpoints or recipes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nvalchemi_lightning.checkpoint.contents import read_contents
from nvalchemi_lightning.checkpoint.layout import read_json
from nvalchemi_lightning.checkpoint.reference_names import in_reference_names
from nvalchemi_lightning.errors import ConfigurationError
from nvalchemi_lightning.specs import without_timestamps

__all__ = ["ComparedModel", "Comparison", "Difference", "compare_runs"]

WEIGHTS = "weights"


@dataclass(frozen=True)
class Difference:
    """A value that is not the same in both.

    Attributes
    ----------
    section : str
        ``"recipe"``, ``"provenance"``, ``"counters"`` or ``"metrics"``.
    name : str
        A dotted path, such as ``"optimizer_configs.main[0].optimizer_kwargs.lr"``.
    a, b : Any
        The values; None where there is none.
    """

    section: str
    name: str
    a: Any
    b: Any


@dataclass(frozen=True)
class ComparedModel:
    """The weights of a model.

    Attributes
    ----------
    equal : bool
        Whether every tensor is the same in both, dtype and shape included; NaN equals NaN.
    max_difference : float
        The largest absolute difference between numbers of tensors of the same shape; infinite if one of two is NaN.
    tensor : str or None
        Where that is.
    mismatches : list of str
        Tensors that only one has, or whose shapes or dtypes differ.
    """

    equal: bool
    max_difference: float
    tensor: str | None
    mismatches: list[str]


@dataclass(frozen=True)
class Comparison:
    """What differs between two runs.

    Attributes
    ----------
    differences : list of Difference
        Values that differ.
    models : dict of str to ComparedModel
        Weights by model; averaged ones under ``"<model> (averaged)"``.
    not_compared : list of str
        Sections that only one of the two has: a recipe has no weights, a file of Lightning no validation.
    """

    differences: list[Difference]
    models: dict[str, ComparedModel]
    not_compared: list[str]

    @property
    def equal(self) -> bool:
        """Whether everything that both have is the same."""
        return not self.differences and all(model.equal for model in self.models.values())


def compare_runs(a: str | Path, b: str | Path, *, index_a: int = -1, index_b: int = -1) -> Comparison:
    """Compare recipe, provenance, counters, validation and weights of two runs.

    Parameters
    ----------
    a, b : str or Path
        A folder of checkpoints, a name in it (``step_<K>``, ``epoch_<K>``, ``final``), a file of Lightning's
        ModelCheckpoint, or a JSON file of a recipe.
    index_a, index_b : int
        Which checkpoint of a folder; -1 is the newest complete one.

    Returns
    -------
    Comparison
        Moments of optimizers and states of hooks are not compared, nor is the time of writing.

    Raises
    ------
    FileNotFoundError
        If there is no such file, folder or index.
    StoreError
        If one is damaged.
    """
    one, two = _side(Path(a), index_a), _side(Path(b), index_b)
    both = [name for name in one if name in two]
    values = [name for name in both if name != WEIGHTS]
    names = dict.fromkeys([*one[WEIGHTS], *two[WEIGHTS]]) if WEIGHTS in both else ()
    return Comparison(
        differences=[each for name in values for each in _differing(name, one[name], two[name])],
        models={name: _compared(one[WEIGHTS].get(name, {}), two[WEIGHTS].get(name, {})) for name in names},
        not_compared=[
            *(f"{name}: only {a} has it" for name in one if name not in two),
            *(f"{name}: only {b} has it" for name in two if name not in one),
        ],
    )


def _side(path: Path, index: int) -> dict[str, dict[str, Any]]:
    """Return the sections that a run has."""
    if path.suffix == ".json":
        recipe = read_json(path)
        if not isinstance(recipe, dict):
            raise ConfigurationError(f"{path} is no recipe: it holds no JSON object")
        return {"recipe": _flat_recipe(recipe)}
    found = read_contents(path, index)
    sections = {
        "recipe": _flat_recipe(found.recipe or {}),
        "provenance": {name: value for name, value in _flat(found.provenance) if name not in ("", "written")},
        "counters": found.counters,
        "metrics": found.metrics,
        WEIGHTS: {**found.models, **{f"{name} (averaged)": state for name, state in found.averaged.items()}},
    }
    return {name: section for name, section in sections.items() if section}


def _flat_recipe(recipe: Mapping[str, Any]) -> dict[str, Any]:
    form = without_timestamps(in_reference_names({key: recipe[key] for key in recipe if key != "runtime_state"}))
    return {name: value for name, value in _flat(form) if name}


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value that holds no others, with its dotted path."""
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _flat(item, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list) and value:
        for i, item in enumerate(value):
            yield from _flat(item, f"{path}[{i}]")
    else:
        yield path, value


def _differing(section: str, one: Mapping[str, Any], two: Mapping[str, Any]) -> Iterator[Difference]:
    for name in {**one, **two}:
        if one.get(name) != two.get(name):
            yield Difference(section, name, one.get(name), two.get(name))


def _compared(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> ComparedModel:
    mismatches, largest, where = [], 0.0, None
    for name in {**one, **two}:
        mismatch = _mismatch(one.get(name), two.get(name))
        if mismatch is not None:
            mismatches.append(f"{name}: {mismatch}")
        difference = _largest_difference(one.get(name), two.get(name))
        if difference > largest:
            largest, where = difference, name
    return ComparedModel(not mismatches and where is None, largest, where, mismatches)


def _mismatch(one: Tensor | None, two: Tensor | None) -> str | None:
    if one is None or two is None:
        return f"only in {'b' if one is None else 'a'}"
    forms = [f"{str(each.dtype).removeprefix('torch.')} {list(each.shape)}" for each in (one, two)]
    return None if forms[0] == forms[1] else " / ".join(forms)


def _largest_difference(one: Tensor | None, two: Tensor | None) -> float:
    if one is None or two is None or one.shape != two.shape or not one.numel():
        return 0.0
    wide = torch.complex128 if one.is_complex() or two.is_complex() else torch.float64
    left, right = one.to(wide), two.to(wide)
    same = (left == right) | (left.isnan() & right.isnan())
    difference = (left - right).abs().masked_fill(same, 0.0)  # equal infinities differ by NaN
    return float(difference.nan_to_num(nan=torch.inf, posinf=torch.inf).max())
