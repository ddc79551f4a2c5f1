"""The hook and the transform give batches their edges."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from nvalchemi_lightning.data import AtomicData, Batch, InMemoryDataset
from nvalchemi_lightning.data.feeding.edge_transform import NeighborListTransform
from nvalchemi_lightning.errors import ConfigurationError
from nvalchemi_lightning.hooks import Hook
from nvalchemi_lightning.hooks.neighbor_list import NeighborListHook
from nvalchemi_lightning.models.base import NeighborConfig
from nvalchemi_lightning.neighbors import neighbor_list
from nvalchemi_lightning.specs import create_model_spec, create_model_spec_from_json
from nvalchemi_lightning.stages import TrainingStage

STAGE = TrainingStage.BEFORE_FORWARD


def chain(*lengths: float) -> AtomicData:
    heights = torch.tensor([0.0, *lengths]).cumsum(0)
    positions = torch.stack([torch.zeros_like(heights), torch.zeros_like(heights), heights], 1)
    return AtomicData(positions=positions, atomic_numbers=torch.ones(len(heights), dtype=torch.int64))


def batch() -> Batch:
    return Batch.from_data_list([chain(1.0, 2.0), chain(1.5)])


def run(hook: NeighborListHook, data: Any) -> torch.Tensor:
    hook(SimpleNamespace(batch=data), STAGE)
    edges: torch.Tensor = data.neighbor_list
    return edges


def test_writes_edges_in_place() -> None:
    data = batch()
    assert run(NeighborListHook(cutoff=1.2), data).tolist() == [[0, 1], [1, 0]]
    assert data.neighbor_list_shifts.tolist() == [[0, 0, 0], [0, 0, 0]]
    assert data.num_edges == 2


def test_b24_no_edges() -> None:
    data = Batch.from_data_list([chain(), chain(50.0)])
    assert run(NeighborListHook(cutoff=5.0), data).shape == (0, 2)
    assert data.neighbor_list_shifts.shape == (0, 3)


def test_is_a_hook_of_the_forward_stage() -> None:
    hook = NeighborListHook(cutoff=5.0)
    assert isinstance(hook, Hook)
    assert (hook.frequency, hook.stage) == (1, STAGE)


def change_cutoff(data: Batch) -> NeighborListHook:
    return NeighborListHook(cutoff=1.1)


def move_atoms(data: Batch) -> NeighborListHook:
    data.positions[1] += 100.0
    return NeighborListHook(cutoff=1.6)


def replace_positions(data: Batch) -> NeighborListHook:
    data.positions = data.positions * 1.2
    return NeighborListHook(cutoff=1.6)


def replace_edges(data: Batch) -> NeighborListHook:
    data.neighbor_list = torch.zeros(0, 2, dtype=torch.int64)
    return NeighborListHook(cutoff=1.6)


@pytest.mark.parametrize("change", [change_cutoff, move_atoms, replace_positions, replace_edges])
def test_a_batch_that_comes_again_gets_the_list_it_needs_now(change: Any) -> None:
    data = batch()
    first = run(NeighborListHook(cutoff=1.6), data)
    hook = change(data)
    again = run(hook, data)
    assert again is not first
    assert torch.equal(again, neighbor_list(data, hook.cutoff)[0])


def test_replaces_edges_whose_cutoff_nothing_tells() -> None:
    stored = Batch.from_data_list([NeighborListTransform(1.2)(chain(1.0, 2.0))])
    assert len(run(NeighborListHook(cutoff=4.0), stored)) == 6


def test_works_on_tensors_of_inference_mode() -> None:
    with torch.inference_mode():
        data = batch()
        hook = NeighborListHook(cutoff=1.6)
        assert torch.equal(run(hook, data), neighbor_list(data, 1.6)[0])


@pytest.mark.parametrize(
    ("arguments", "cutoff"),
    [
        ({"config": NeighborConfig(cutoff=4.0)}, 4.0),
        ({"config": {"cutoff": 4.0, "format": "coo"}}, 4.0),
        ({"config": NeighborConfig(cutoff=4.0, skin=0.5), "skin": 0.25}, 4.75),
        ({"cutoff": 6.0, "format": "coo"}, 6.0),
    ],
)
def test_both_spellings_and_their_specs(arguments: dict[str, Any], cutoff: float) -> None:
    assert NeighborListHook(**arguments).cutoff == cutoff
    spec = create_model_spec(NeighborListHook, **arguments)
    assert create_model_spec_from_json(spec.model_dump()).build().cutoff == cutoff


@pytest.mark.parametrize("arguments", [{}, {"config": NeighborConfig(cutoff=1.0), "cutoff": 1.0}])
def test_needs_one_cutoff(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"needs either config or cutoff=\.\.\., not both and not neither"):
        NeighborListHook(**arguments)


@pytest.mark.parametrize("extra", [{"format": "matrix"}, {"half_list": True}])
def test_only_full_pair_lists(extra: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="writes full lists in the format 'coo', got format="):
        NeighborListHook(NeighborConfig(cutoff=1.0, **extra))


@pytest.mark.parametrize("values", [{"cutoff": 0.0}, {"cutoff": float("inf")}, {"cutoff": 1.0, "cutof": 2.0}])
def test_config_is_checked(values: dict[str, float]) -> None:
    with pytest.raises((ValidationError, ConfigurationError), match="cutoff"):
        NeighborListHook(values)


@pytest.mark.parametrize("make", [lambda: chain(1.0, 2.0), batch])
def test_transform_leaves_its_input_alone(make: Any) -> None:
    data = make()
    changed = NeighborListTransform(1.6)(data)
    assert "neighbor_list" not in data
    assert type(changed) is type(data)
    assert changed.positions is data.positions
    assert torch.equal(changed.neighbor_list, neighbor_list(data, 1.6)[0])
    assert changed.neighbor_list_shifts.shape == (changed.num_edges, 3)


def test_edges_of_data_in_memory_reach_batches() -> None:
    structures = [chain(1.0, 2.0), chain(1.5), chain()]
    once = InMemoryDataset(NeighborListTransform(1.6)(Batch.from_data_list(structures)))
    each = InMemoryDataset(structures, transforms=[NeighborListTransform(1.6)])
    for order in ([0, 1, 2], [2, 1], [2]):
        expected = neighbor_list(Batch.from_data_list([structures[index] for index in order]), 1.6)[0]
        for dataset in (once, each):
            assert torch.equal(dataset.__getitems__(order).neighbor_list, expected)


def test_transform_checks_its_cutoff() -> None:
    with pytest.raises(ConfigurationError, match="cutoff must be a positive number"):
        NeighborListTransform(-1.0)


@pytest.mark.parametrize("name", ["doc_neighborlist_hook", "neighborlist_hook_config"])
def test_hooks_of_sample_job_specs_build(shared: Path, name: str) -> None:
    job = json.loads((shared / "samples" / "cli" / f"{name}.json").read_text())
    (form,) = [hook["spec"] for hook in job["source"]["hooks"] if "NeighborListHook" in hook["spec"]["cls_path"]]
    hook = create_model_spec_from_json(form).build()
    assert isinstance(hook, NeighborListHook)
    assert hook.cutoff == 6.0
