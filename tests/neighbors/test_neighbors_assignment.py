"""Edges on batches of nvalchemi-toolkit, told from stand-ins; tests/interop has the real ones."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from nvalchemi_lightning.data import AtomicData, Batch, NeighborListTransform
from nvalchemi_lightning.data.edge_assignment import assign_edges
from nvalchemi_lightning.data.edge_cutoff import reach_of
from nvalchemi_lightning.hooks import NeighborListHook


class TheirBatch:
    """Takes edges as a level only, as a batch of nvalchemi-toolkit does where it has none."""

    def __init__(self, batch: Batch) -> None:
        self.batch_idx, self.num_graphs, self.device = batch.batch_idx, batch.num_graphs, batch.device
        self.levels: dict[str, Any] = {}

    def set_level(self, name: str, storage: Any) -> None:
        self.levels[name] = storage


def test_a_batch_with_levels_gets_edges_and_their_number_in_every_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("nvalchemi.data.level_storage")
    module.SegmentedLevelStorage = SimpleNamespace  # type: ignore[attr-defined]
    for name in ("nvalchemi", "nvalchemi.data"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    structures = [
        AtomicData(positions=torch.eye(3)[:count] * 2.0, atomic_numbers=torch.ones(count, dtype=torch.int64))
        for count in (2, 1, 3)
    ]
    ours = NeighborListTransform(5.0)(Batch.from_data_list(structures))
    theirs = TheirBatch(ours)
    assign_edges(theirs, ours.neighbor_list, ours.neighbor_list_shifts, 5.0)
    level = theirs.levels["edges"]
    assert level.segment_lengths.tolist() == ours.num_edges_per_graph.tolist() == [2, 0, 6]
    assert torch.equal(level.data["neighbor_list"], ours.neighbor_list)
    assert torch.equal(level.data["neighbor_list_shifts"], ours.neighbor_list_shifts)
    assert reach_of(theirs) == 5.0


def test_a_config_of_another_class_is_read_by_its_attributes() -> None:
    assert NeighborListHook(SimpleNamespace(cutoff=4.0, format="coo", half_list=False, skin=0.5)).cutoff == 4.5
