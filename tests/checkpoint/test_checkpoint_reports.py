"""What is in a checkpoint, its weights alone, and what differs between two."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_rigs import Counting, Net, adam, assert_same, batches, contents, named_strategy, run, strategy
from lightning.pytorch import Trainer

from nvalchemi_lightning.checkpoint import compare_runs, export_weights, inspect_checkpoint
from nvalchemi_lightning.checkpoint import exporting as module
from nvalchemi_lightning.feeding import OneLoader
from nvalchemi_lightning.hooks import EMAHook
from nvalchemi_lightning.module import AlchemiModule


def fitted(path: Path, **fields: Any) -> AlchemiModule:
    """Train with a Trainer and save its checkpoint."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(strategy="nvalchemi", accelerator="cpu", max_epochs=1, enable_checkpointing=False, **quiet)
    made = AlchemiModule(strategy(num_epochs=1, **fields))
    trainer.fit(made, OneLoader(batches()))
    trainer.save_checkpoint(path)
    return made


def averaging() -> list[Any]:
    return [Counting(), EMAHook(decay=0.5)]


@pytest.fixture
def trained(root: Path) -> Any:
    """Return a strategy after three steps, saved."""
    what = run(strategy(hooks=averaging()))
    what.save_checkpoint(root)
    return what


# What is in it ------------------------------------------------------------------------------------------------------


def test_a_folder_is_described(trained: Any, root: Path) -> None:
    found = inspect_checkpoint(root)
    assert (found.path, found.index, found.counters["step_count"]) == (str(root), 0, 3)
    model = found.models["main"]
    numbers = sum(parameter.numel() for parameter in trained.models["main"].parameters())
    assert (model.tensors, model.numbers, model.trained) == (4, numbers, numbers)
    assert (model.dtypes, model.weights) == (["float64"], ["raw", "averaged"])
    assert model.spec["cls_path"] == "checkpoint_rigs.Net"
    optimizer = found.optimizers["main_optimizer"]
    assert optimizer.optimizer == "torch.optim.adam.Adam"
    assert [(group["parameters"], group["lr"]) for group in optimizer.groups] == [(4, 0.005)]
    assert found.schedulers["main_scheduler"]["last_epoch"] == 3
    assert found.hooks["checkpoint_rigs.Counting:0"] == {"seen": 3, "tensor": 3}
    average = found.hooks["nvalchemi.training.hooks.ema.EMAHook:0"]["averaged_model_state"]
    assert average["module.layers.0.weight"] == "float64 4x3"
    assert "torch" in found.provenance["versions"]
    json.dumps(dataclasses.asdict(found), allow_nan=False)


def test_frozen_models_train_nothing(root: Path) -> None:
    named_strategy().save_checkpoint(root)
    found = inspect_checkpoint(root)
    assert found.models["teacher"].trained == 0
    assert found.models["student"].trained == found.models["student"].numbers
    assert [*found.optimizers] == ["student_optimizer_0", "student_optimizer_1"]


def test_odd_states_become_json(root: Path) -> None:
    class Odd(Counting):
        def state_dict(self) -> dict[str, Any]:
            return {"bound": float("inf"), "pair": (1, None), 3: torch.tensor(float("nan")), "z": torch.tensor([1j])}

    strategy(hooks=[Odd()]).save_checkpoint(root)
    (state,) = inspect_checkpoint(root).hooks.values()
    assert state == {"bound": "inf", "pair": [1, None], "3": "nan", "z": "complex64 1"}


def test_a_file_of_lightning_is_described(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    made = fitted(path, hooks=averaging())
    found = inspect_checkpoint(path)
    assert found.written_by.startswith("Lightning ")
    assert found.counters == dict(vars(made.recipe.counters))
    assert found.models["main"].weights == ["raw", "averaged"]
    assert found.models["main"].spec["cls_path"] == "checkpoint_rigs.Net"
    assert found.models["main"].trained == found.models["main"].numbers
    assert found.optimizers["optimizer_0"].groups[0]["lr"] == 0.0025
    assert found.schedulers["scheduler_0"]["last_epoch"] == 5
    assert found.hooks["checkpoint_rigs.Counting:0"]["seen"] == 5
    assert found.provenance["versions"]["torch"]


def test_a_foreign_file_of_lightning(tmp_path: Path) -> None:
    path = tmp_path / "b.ckpt"
    torch.save({"state_dict": {"layer.weight": torch.ones(1)}}, path)
    with pytest.raises(ValueError, match="is no checkpoint of an AlchemiModule"):
        inspect_checkpoint(path)
    path.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="damaged or not safe to load"):
        inspect_checkpoint(path)


def test_nothing_is_imported(shared: Path, root: Path) -> None:
    shutil.copytree(shared / "samples/ckpt_demo_async", root)
    for name in ("models/main/spec.json", "strategy/checkpoints/2.json"):
        text = (root / name).read_text()
        (root / name).write_text(text.replace("nvalchemi.models.demo", "antigravity").replace("torch.optim", "this"))
    found = inspect_checkpoint(root)
    assert found.models["main"].spec["cls_path"].startswith("antigravity.")
    assert found.models["main"].weights == ["raw", "averaged"]
    assert not {"antigravity", "this"} & set(sys.modules)


# Weights alone ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("averaged", [False, True])
def test_weights_of_a_folder(trained: Any, root: Path, tmp_path: Path, averaged: bool) -> None:
    target = export_weights(root, tmp_path / "potential.pt", averaged=averaged)
    ema = next(hook for part in trained.hooks for hook in getattr(part, "hooks", ()) if isinstance(hook, EMAHook))
    expected = ema.get_averaged_model() if averaged else trained.models["main"]
    again = Net()
    again.load_state_dict(torch.load(target, weights_only=True))
    assert_same(dict(again.state_dict()), dict(expected.state_dict()))
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["potential.pt"]


@pytest.mark.parametrize("averaged", [False, True])
def test_weights_of_a_file_of_lightning(tmp_path: Path, averaged: bool) -> None:
    made = fitted(tmp_path / "a.ckpt", hooks=[average := EMAHook(decay=0.5)])
    export_weights(tmp_path / "a.ckpt", tmp_path / "potential.pt", averaged=averaged)
    expected = average.get_averaged_model() if averaged else made.models["main"]
    found = torch.load(tmp_path / "potential.pt", weights_only=True)
    assert_same(found, dict(expected.state_dict()))


def test_averages_of_the_reference(shared: Path, tmp_path: Path) -> None:
    sample = shared / "samples/ckpt_demo_async"
    export_weights(sample / "step_4", tmp_path / "a.pt", averaged=True)
    (state,) = torch.load(sample / "hooks/checkpoints/1.pt", weights_only=True).values()
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    assert_same({f"module.{name}": value for name, value in found.items()}, without_count(state))


def without_count(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state["averaged_model_state"].items() if name != "n_averaged"}


def test_which_model(root: Path, tmp_path: Path) -> None:
    named_strategy().save_checkpoint(root)
    with pytest.raises(ValueError, match=r"has the models \['student', 'teacher'\]; say which one"):
        export_weights(root, tmp_path / "a.pt")
    with pytest.raises(KeyError, match=r"no model 'teach'; it has \['student', 'teacher'\]; did you mean 'teacher'"):
        export_weights(root, tmp_path / "a.pt", model="teach")
    export_weights(root, tmp_path / "a.pt", model="teacher")
    assert torch.load(tmp_path / "a.pt", weights_only=True)["layers.0.weight"].shape == (2, 3)


def test_no_average_is_no_average(root: Path, tmp_path: Path) -> None:
    strategy(hooks=averaging()).save_checkpoint(root)
    with pytest.raises(KeyError, match="no averaged weights of 'main'"):
        export_weights(root, tmp_path / "a.pt", averaged=True)
    assert not (tmp_path / "a.pt").exists()


def test_files_are_not_overwritten_unasked(trained: Any, root: Path, tmp_path: Path) -> None:
    target = tmp_path / "a.pt"
    target.write_text("mine")
    with pytest.raises(FileExistsError, match="exists; give another name"):
        export_weights(root, target)
    assert target.read_text() == "mine"
    export_weights(root, target, overwrite=True)
    assert "layers.0.weight" in torch.load(target, weights_only=True)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        export_weights(root, tmp_path / "absent/a.pt")


def test_a_failed_export_leaves_what_was_there(trained: Any, root: Path, tmp_path: Path, monkeypatch: Any) -> None:
    def full(weights: Any, path: Path) -> None:
        path.write_text("half")
        raise OSError("No space left on device")

    monkeypatch.setattr(module.torch, "save", full)
    target = tmp_path / "a.pt"
    target.write_text("mine")
    with pytest.raises(OSError, match="No space"):
        export_weights(root, target, overwrite=True)
    assert contents(tmp_path)["a.pt"] == b"mine"
    assert not [*tmp_path.glob("*.part"), *tmp_path.glob(".*.part")]


# Two runs -----------------------------------------------------------------------------------------------------------


def saved(folder: Path, **fields: Any) -> Path:
    run(strategy(**fields)).save_checkpoint(folder)
    return folder


def test_the_same_run_twice(tmp_path: Path) -> None:
    found = compare_runs(saved(tmp_path / "a", hooks=averaging()), saved(tmp_path / "b", hooks=averaging()))
    assert found.equal
    assert (found.differences, found.not_compared) == ([], [])
    assert {name: model.equal for name, model in found.models.items()} == {"main": True, "main (averaged)": True}


def test_another_rate_and_seed(tmp_path: Path) -> None:
    a = saved(tmp_path / "a")
    b = saved(tmp_path / "b", seed=1, optimizer_configs=adam(0.02))
    found = compare_runs(a, b)
    assert [(one.section, one.name, one.a, one.b) for one in found.differences] == [
        ("recipe", "optimizer_configs.main[0].optimizer_kwargs.lr", 0.01, 0.02),
        ("provenance", "seeds.torch", 0, 1),
    ]
    assert not found.equal
    weights = [torch.load(folder / "models/main/checkpoints/0.pt", weights_only=True) for folder in (a, b)]
    largest = {name: (weights[0][name] - weights[1][name]).abs().max().item() for name in weights[0]}
    model = found.models["main"]
    assert (model.max_difference, model.tensor) == (max(largest.values()), max(largest, key=largest.__getitem__))


def test_two_moments_of_a_run(root: Path) -> None:
    what = strategy()
    what.save_checkpoint(root)
    run(what).save_checkpoint(root)
    by_name = compare_runs(root / "step_0", root / "final")
    assert by_name == compare_runs(root, root, index_a=0, index_b=1)
    assert ("counters", "step_count", 0, 3) in [dataclasses.astuple(one) for one in by_name.differences]


def test_recipes_and_runs(tmp_path: Path) -> None:
    what = strategy()
    (tmp_path / "a.json").write_text(json.dumps(what.to_spec_dict()))
    root = saved(tmp_path / "root")
    (different,) = compare_runs(tmp_path / "a.json", root).differences
    assert (different.name, different.a) == ("strategy_cls", None)
    found = compare_runs(root / "strategy.json", root)
    assert found.equal
    assert found.not_compared == [f"{name}: only {root} has it" for name in ("provenance", "counters", "weights")]
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(ValueError, match="is no recipe"):
        compare_runs(tmp_path / "a.json", root)


def test_a_folder_and_a_file_of_lightning(tmp_path: Path) -> None:
    fitted(tmp_path / "a.ckpt")
    found = compare_runs(tmp_path / "a.ckpt", saved(tmp_path / "root", num_epochs=1))
    assert (found.equal, found.differences, found.not_compared) == (True, [], [])


def test_a_file_whose_recipe_was_left_out(tmp_path: Path) -> None:
    added = {"recipe": {"omitted": "the model stores no arguments"}}
    torch.save({"state_dict": {"models.main.x": torch.ones(1)}, "nvalchemi_lightning": added}, tmp_path / "a.ckpt")
    root = saved(tmp_path / "root")
    found = compare_runs(tmp_path / "a.ckpt", root)
    assert f"recipe: only {root} has it" in found.not_compared


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("one", "two", "equal", "largest"),
    [
        ([1.0, NAN, INF], [1.0, NAN, INF], True, 0.0),
        ([1.0, NAN], [1.0, 2.0], False, INF),
        ([INF], [-INF], False, INF),
        ([1.0, 2.0], [1.5, 2.25], False, 0.5),
        ([], [], True, 0.0),
    ],
)
def test_differences_of_numbers(
    tmp_path: Path, one: list[float], two: list[float], equal: bool, largest: float
) -> None:
    for name, values in (("a", one), ("b", two)):
        torch.save({"state_dict": {"models.main.x": torch.tensor(values)}}, tmp_path / f"{name}.ckpt")
    model = compare_runs(tmp_path / "a.ckpt", tmp_path / "b.ckpt").models["main"]
    assert (model.equal, model.max_difference) == (equal, largest)


def test_differences_of_shapes(tmp_path: Path) -> None:
    a = {"models.main.x": torch.ones(2), "models.main.y": torch.ones(2), "models.main.only": torch.ones(1)}
    b = {"models.main.x": torch.ones(3), "models.main.y": torch.ones(2).double(), "models.other.z": torch.tensor([1j])}
    torch.save({"state_dict": a}, tmp_path / "a.ckpt")
    torch.save({"state_dict": b}, tmp_path / "b.ckpt")
    found = compare_runs(tmp_path / "a.ckpt", tmp_path / "b.ckpt")
    assert not found.equal
    assert found.models["main"].mismatches == [
        "x: float32 [2] / float32 [3]",
        "y: float32 [2] / float64 [2]",
        "only: only in a",
    ]
    assert found.models["other"].mismatches == ["z: only in b"]
    assert found.models["main"].max_difference == 0.0
