"""What a checkpoint says of where it comes from."""

from __future__ import annotations

import json
import platform
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_rigs import batches, run, strategy, structure
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader as TorchLoader

from nvalchemi_lightning.checkpoint import provenance as module
from nvalchemi_lightning.checkpoint.provenance import data_of
from nvalchemi_lightning.data import (
    AtomicData,
    AtomicDataZarrReader,
    AtomicDataZarrWriter,
    Batch,
    DataLoader,
    Dataset,
    InMemoryDataset,
    MultiDataset,
)
from nvalchemi_lightning.hooks import CheckpointHook
from nvalchemi_lightning.module import AlchemiModule


def structures(count: int = 6, seed: int = 0) -> list[AtomicData]:
    generator = torch.Generator().manual_seed(seed)
    return [structure(generator) for _ in range(count)]


def recorded(root: Path, index: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / f"lightning/checkpoints/{index}.json").read_text())["provenance"]
    return found


def test_a_run_leaves_its_provenance(root: Path) -> None:
    what = strategy(seed=5, hooks=[CheckpointHook(root, step_interval=1)])
    run(what, DataLoader(structures(), batch_size=2, shuffle=True, seed=8))
    found = recorded(root)
    assert found["versions"]["python"] == platform.python_version()
    assert {name: version(name) for name in ("nvalchemi-lightning", "torch", "lightning", "numpy")}.items() <= found[
        "versions"
    ].items()
    assert found["seeds"] == {"torch": 5, "loader": 8}
    (data,) = found["data"]
    assert (data["source"], data["structures"]) == ("the structures in memory", 6)
    written = datetime.fromisoformat(found["written"])
    assert written.tzinfo == UTC
    assert abs(datetime.now(UTC) - written) < timedelta(minutes=10)


def test_lightnings_checkpoints_have_it_too(tmp_path: Path) -> None:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(strategy="nvalchemi", accelerator="cpu", max_epochs=1, enable_checkpointing=False, **quiet)
    trainer.fit(AlchemiModule(strategy(num_epochs=1)), DataLoader(structures(), batch_size=2, seed=4))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    found = torch.load(tmp_path / "a.ckpt", weights_only=True)["nvalchemi_lightning"]["provenance"]
    assert found["seeds"]["loader"] == 4
    assert found["data"][0]["structures"] == 6


def test_the_commit_is_that_of_the_working_directory(root: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    what = strategy()
    what.save_checkpoint(root)
    assert "commit" not in recorded(root)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/HEAD").write_text("d" * 40)
    run(what)
    what.save_checkpoint(root)
    assert recorded(root, 1)["commit"] == "d" * 40


def test_data_is_looked_at_once_per_run(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    monkeypatch.setattr(module, "data_of", lambda loader: looked.append(loader) or [])
    what = strategy(hooks=[CheckpointHook(root, step_interval=1)])
    run(what)
    assert len(looked) == 1
    assert "data" not in recorded(root, 2)


def test_stores_are_known_by_what_is_in_them(tmp_path: Path) -> None:
    path = tmp_path / "train.zarr"
    AtomicDataZarrWriter(path).write(structures())
    loader = DataLoader(Dataset(AtomicDataZarrReader(path)), batch_size=2)
    (one,) = data_of(loader)
    assert (one["source"], one["structures"]) == (str(path), 6)
    assert data_of(DataLoader(Dataset(AtomicDataZarrReader(path)), batch_size=3)) == [one]
    AtomicDataZarrWriter(path).delete([2])
    (two,) = data_of(DataLoader(Dataset(AtomicDataZarrReader(path)), batch_size=2))
    assert two["structures"] == 5
    assert two["fingerprint"] != one["fingerprint"]


def changed(name: str) -> list[AtomicData]:
    few = structures()
    setattr(few[3], name, getattr(few[3], name) + 1)
    return few


def test_structures_in_memory_are_known_by_atoms_and_energies() -> None:
    (one,) = data_of(DataLoader(structures(), batch_size=2))
    assert data_of(DataLoader(structures(), batch_size=3)) == [one]
    for other in (structures(seed=1), structures()[::-1], structures(5), changed("energy"), changed("atomic_numbers")):
        (two,) = data_of(DataLoader(other, batch_size=2))
        assert two["fingerprint"] != one["fingerprint"]


def test_structures_without_energies() -> None:
    few = [AtomicData(positions=torch.zeros(2, 3), atomic_numbers=torch.tensor([1, 8]))]
    assert data_of(DataLoader(few, batch_size=1))[0]["structures"] == 1


def test_each_of_several_data_sets() -> None:
    both = MultiDataset(InMemoryDataset(structures(2)), InMemoryDataset(structures(3)))
    assert [part["structures"] for part in data_of(DataLoader(both, batch_size=1))] == [2, 3]


@pytest.mark.parametrize(
    "loader", [batches(), TorchLoader(structures(), batch_size=2, collate_fn=Batch.from_data_list), iter(())]
)
def test_unknown_data_is_left_out(loader: Any) -> None:
    assert data_of(loader) == []
