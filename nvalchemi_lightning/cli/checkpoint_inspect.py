"""``nvalchemi-lightning checkpoint inspect``: what is in a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nvalchemi_lightning.cli.output import show_json, show_line, show_table

if TYPE_CHECKING:
    from nvalchemi_lightning.checkpoint.inspection import CheckpointReport, ModelReport, OptimizerReport

__all__ = ["inspect"]


def inspect(
    path: Annotated[Path, typer.Argument(help="A folder of checkpoints, step_K, epoch_K or final in it, or a .ckpt.")],
    index: Annotated[int, typer.Option("--index", min=-1, help="Which checkpoint; -1 is the newest.")] = -1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with recipes and all states.")] = False,
) -> None:
    """Show what is in a checkpoint. Nothing that it names is built or imported."""
    from nvalchemi_lightning.checkpoint.inspection import inspect_checkpoint

    found = inspect_checkpoint(path, index)
    if as_json:
        show_json(dataclasses.asdict(found))
        return
    show_line(f"{found.path}{'' if found.index is None else f', checkpoint {found.index}'}")
    show_line(f"written by {found.written_by}")
    _show_numbers("", found.counters)
    show_line()
    _show_components(found)
    _show_numbers("validation", found.metrics)
    _show_provenance(found.provenance)


def _show_components(found: CheckpointReport) -> None:
    columns = ["model", "numbers", "trained", "tensors", "type", "weights", "made by"]
    show_table(columns, [_model(name, one) for name, one in found.models.items()])
    if found.optimizers:
        show_line()
        rows = [row for name, one in found.optimizers.items() for row in _groups(name, one)]
        show_table(["optimizer", "class", "group", "lr", "weight decay", "tensors"], rows)
    if found.schedulers:
        show_line()
        rows = [[name, state.get("last_epoch"), _text(state.get("_last_lr"))] for name, state in _objects(found)]
        show_table(["schedule", "steps", "lr"], rows)
    if found.hooks:
        show_line()
        show_table(["hook", "state"], [(name, _scalars(state)) for name, state in found.hooks.items()])


def _model(name: str, one: ModelReport) -> list[object]:
    kinds = ", ".join(one.dtypes)
    return [name, one.numbers, one.trained, one.tensors, kinds, ", ".join(one.weights), _path(one.spec)]


def _path(spec: Mapping[str, Any] | None) -> str | None:
    return None if spec is None else str(spec.get("cls_path"))


def _groups(name: str, one: OptimizerReport) -> Iterator[list[object]]:
    for number, group in enumerate(one.groups):
        label, options = group.get("name", number), [group.get(option) for option in ("lr", "weight_decay")]
        yield [name, one.optimizer, label, *options, group["parameters"]]


def _objects(found: CheckpointReport) -> list[tuple[str, dict[str, Any]]]:
    return [(name, state if isinstance(state, dict) else {}) for name, state in found.schedulers.items()]


def _scalars(state: Any) -> str:
    """Return the plain values of a state, which are few; tensors and nested ones are in the JSON."""
    entries = state.items() if isinstance(state, dict) else ()
    return ", ".join(f"{key} {_text(value)}" for key, value in entries if not isinstance(value, dict | list))


def _show_numbers(title: str, numbers: Mapping[str, Any]) -> None:
    if numbers:
        text = ", ".join(f"{name} {_text(value)}" for name, value in numbers.items())
        show_line(f"\n{title}: {text}" if title else text)


def _show_provenance(provenance: Mapping[str, Any]) -> None:
    if provenance:
        show_line()
    for name, value in provenance.items():
        if isinstance(value, list):
            for part in value:
                show_line(f"{name}: {_text(part)}")
        else:
            show_line(f"{name}: {_text(value)}")


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)
