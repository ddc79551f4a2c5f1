"""``nvalchemi-lightning checkpoint`` and ``compare``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_rigs import run_here, run_process
from torch import Tensor, nn

from nvalchemi_lightning.data import AtomicData, DataLoader
from nvalchemi_lightning.hooks import CheckpointHook, EMAHook
from nvalchemi_lightning.losses import EnergyMSELoss
from nvalchemi_lightning.optim import OptimizerConfig
from nvalchemi_lightning.strategy import TrainingStrategy
from nvalchemi_lightning.validation import ValidationConfig


class Scale(nn.Module):
    """The smallest model."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, batch: Any) -> dict[str, Tensor]:
        return {"energy": self.scale * batch.num_nodes_per_graph[:, None]}


def loader() -> DataLoader:
    atoms = [AtomicData(positions=torch.zeros(n, 3), atomic_numbers=torch.ones(n).int()) for n in (1, 2, 3)]
    for one in atoms:
        one.energy = torch.zeros(1, 1)
    return DataLoader(atoms, batch_size=1)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a folder of three checkpoints, one per epoch."""
    folder = tmp_path / "run"
    torch.manual_seed(0)
    TrainingStrategy(
        models=Scale(),
        optimizer_configs=OptimizerConfig(lr=0.01),
        loss_fn=EnergyMSELoss(),
        validation_config=ValidationConfig(validation_data=loader(), every_n_epochs=1),
        hooks=[EMAHook(decay=0.5), CheckpointHook(folder, epoch_interval=1)],
        num_epochs=3,
    ).run(loader(), enable_progress_bar=False)
    return folder


def test_ls(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "models/main/checkpoints/1.pt").unlink()
    outcome = run_here(capsys, "checkpoint", "ls", root)
    assert (outcome.code, outcome.err) == (0, "")
    head, *rows = (line.split() for line in outcome.out.splitlines())
    assert head == ["index", "step", "epoch", "total_loss", "weights", "size", "written", "by", "state"]
    assert [row[:3] for row in rows] == [["0", "3", "1"], ["1", "6", "2"], ["2", "9", "3"]]
    assert ["best" in row for row in rows] == [False, False, True]
    assert rows[0][-1] == "complete"
    assert " ".join(rows[1]).endswith("models/main/checkpoints/1.pt is missing")


def test_ls_in_json(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run_here(capsys, "checkpoint", "ls", root, "--metric", "energy_mae", "--json")
    found = json.loads(outcome.out)
    assert [one["best"] for one in found] == [False, False, True]
    assert found[0]["metrics"]["energy_mae"] > found[2]["metrics"]["energy_mae"]
    outcome = run_here(capsys, "checkpoint", "ls", root, "--metric", "energy_maee")
    assert outcome.code == 2
    assert "has recorded 'energy_maee'; recorded are EnergyMSELoss, energy_mae" in outcome.err
    assert "did you mean 'energy_mae'?" in outcome.err


def test_verify(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run_here(capsys, "checkpoint", "verify", root)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.endswith(" files of 3 checkpoints: 0 damaged\n")
    name = "optimizers/main_optimizer/checkpoints/1.pt"
    (root / name).write_bytes(b"nonsense")
    outcome = run_here(capsys, "checkpoint", "verify", root)
    assert outcome.code == 1
    assert outcome.out.splitlines()[0] == f"{name} is damaged: its SHA-256 is not the recorded one"
    assert run_here(capsys, "checkpoint", "verify", root, "--index", 2).code == 0
    found = json.loads(run_here(capsys, "checkpoint", "verify", root, "--index", 1, "--json").out)
    assert [one["file"] for one in found if one["problem"]] == [name]


def test_inspect(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run_here(capsys, "checkpoint", "inspect", root / "epoch_2")
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert lines[0] == f"{root}, checkpoint 1"
    assert lines[2].startswith("step_count 6, ")
    assert "main         1        1        1  float32  raw, averaged  test_cli_checkpoint.Scale" in lines
    assert any(line.startswith("main_optimizer  torch.optim.adamw.AdamW") for line in lines)
    assert any("EMAHook:0" in line and "num_updates 6" in line for line in lines)
    assert any(line.startswith("data: source the structures in memory, structures 3, fingerprint ") for line in lines)
    found = json.loads(run_here(capsys, "checkpoint", "inspect", root, "--index", 0, "--json").out)
    assert found["counters"]["step_count"] == 3


def test_export(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "a.pt"
    outcome = run_here(capsys, "checkpoint", "export", root, target, "--averaged", "--model", "main")
    assert outcome.code == 0
    assert outcome.out == f"{target}: averaged weights\n"
    averaged = torch.load(target, weights_only=True)["scale"]
    assert run_here(capsys, "checkpoint", "export", root, target).code == 2
    assert run_here(capsys, "checkpoint", "export", root, target, "--overwrite", "--index", 2).code == 0
    assert averaged > torch.load(target, weights_only=True)["scale"]


def test_prune(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run_here(capsys, "checkpoint", "prune", root, "--keep-last", 1, "--dry-run")
    assert (outcome.code, outcome.out) == (0, "would remove: 0, 1\nwould keep: 2\n")
    outcome = run_here(capsys, "checkpoint", "prune", root, "--keep-last", 2, "--keep-best", "total_loss")
    assert outcome.out == "removed: 0\nkept: 1, 2\n"
    assert run_here(capsys, "checkpoint", "prune", root, "--keep-last", 5).out == "removed: none\nkept: 1, 2\n"
    outcome = run_here(capsys, "checkpoint", "prune", root)
    assert (outcome.code, "say which checkpoints stay" in outcome.err) == (2, True)


def test_compare(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run_here(capsys, "compare", root, root)
    assert (outcome.code, outcome.out.splitlines()[-1]) == (0, "equal")
    outcome = run_here(capsys, "compare", root / "epoch_1", root / "epoch_2")
    assert outcome.code == 1
    assert "counters  step_count         3" in outcome.out
    assert any(line.startswith("weights of main: differ by up to ") for line in outcome.out.splitlines())
    outcome = run_here(capsys, "compare", root, root, "--index-a", 0, "--json")
    assert outcome.code == 1
    assert json.loads(outcome.out)["equal"] is False
    outcome = run_here(capsys, "compare", root, root / "strategy.json")
    assert outcome.code == 0
    assert f"not compared: weights: only {root} has it" in outcome.out


def test_compare_of_other_shapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, count, value in (("a", 7, float("inf")), ("b", 0, 0.0)):
        state = {f"models.main.x{i}": torch.ones(1) for i in range(count)}
        torch.save({"state_dict": {**state, "models.main.y": torch.tensor([value])}}, tmp_path / f"{name}.ckpt")
    outcome = run_here(capsys, "compare", tmp_path / "a.ckpt", tmp_path / "b.ckpt")
    assert outcome.out.splitlines()[-2] == (
        "weights of main: differ by up to inf (y); x0: only in a; x1: only in a; x2: only in a; x3: only in a; "
        "x4: only in a; and 2 more"
    )
    found = json.loads(run_here(capsys, "compare", tmp_path / "a.ckpt", tmp_path / "b.ckpt", "--json").out)
    assert found["models"]["main"]["max_difference"] == "inf"


@pytest.mark.parametrize("words", [["ls"], ["verify"], ["inspect"], ["prune", "--keep-last", "1"], ["export", "x.pt"]])
def test_nothing_there_is_wrong_input(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command, *rest = words
    outcome = run_here(capsys, "checkpoint", command, tmp_path / "absent", *rest)
    assert outcome.code == 2
    assert "absent" in outcome.err


def test_folders_of_the_reference(shared: Path) -> None:
    outcome = run_process("checkpoint", "ls", shared / "samples/ckpt_demo_async")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.count("nvalchemi-toolkit  complete") == 3


def test_what_the_reference_left_out_is_not_shown(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run_here(capsys, "checkpoint", "inspect", shared / "samples/ckpt_components")
    assert outcome.code == 0
    assert outcome.out.splitlines()[1:] == [
        "written by nvalchemi-toolkit",
        "",
        "model  numbers  trained  tensors  type     weights  made by",
        "main        10                 2  float32  raw      torch.nn.modules.linear.Linear",
        "",
        "optimizer  class                group    lr  weight decay  tensors",
        "opt        torch.optim.sgd.SGD      0  0.09             0        2",
        "",
        "schedule  steps  lr",
        "sched         1  0.09",
    ]


def test_a_file_of_weights_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"state_dict": {"models.main.x": torch.ones(3)}}, tmp_path / "a.ckpt")
    outcome = run_here(capsys, "checkpoint", "inspect", tmp_path / "a.ckpt")
    assert outcome.out.splitlines()[-1].split() == ["main", "3", "1", "float32", "raw"]
    assert run_here(capsys, "checkpoint", "verify", tmp_path / "a.ckpt").out == "1 file: 0 damaged\n"
