"""Components without a strategy, and loading whatever a folder holds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_rigs import Net, assert_same, contents, named_strategy, run, state_of, strategy
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from nvalchemi_lightning import CheckpointManifest, load_checkpoint, save_checkpoint
from nvalchemi_lightning.models import DemoModel, DemoModelWrapper
from nvalchemi_lightning.specs import create_model_spec
from nvalchemi_lightning.strategy import TrainingStrategy

LINEAR = create_model_spec(nn.Linear, in_features=3, out_features=2)
SGD = create_model_spec(torch.optim.SGD, lr=0.1, momentum=0.9)
DECAY = create_model_spec(ExponentialLR, gamma=0.9)


def trained(seed: int = 0) -> dict[str, Any]:
    """Return a model, its optimizer and schedule after two steps, with recipes."""
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = ExponentialLR(optimizer, gamma=0.9)
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
    return {
        "models": {"main": (model, LINEAR)},
        "optimizers": {"opt": (optimizer, SGD)},
        "schedulers": {"sched": (scheduler, DECAY)},
    }


def states(parts: Any) -> dict[str, Any]:
    return {
        kind: {name: dict(part.state_dict()) for name, (part, _) in parts[kind].items()}
        for kind in ("models", "optimizers", "schedulers")
    }


def test_what_is_saved_is_loaded(root: Path) -> None:
    one, two = trained(0), trained(1)
    assert save_checkpoint(root, **one) == 0
    assert save_checkpoint(root, **two) == 1
    again = load_checkpoint(root)
    assert isinstance(again, CheckpointManifest)
    assert again.checkpoint_index == 1
    assert_same(states(vars(again)), states(two))
    assert_same(states(vars(load_checkpoint(root, 0))), states(one))
    optimizer, scheduler = again.optimizers["opt"][0], again.schedulers["sched"][0]
    assert optimizer.param_groups[0]["params"] == list(again.models["main"][0].parameters())
    assert scheduler.optimizer is optimizer
    assert again.models["main"][1] == LINEAR
    assert again.associations["main"]["scheduler_optimizers"] == {"sched": "opt"}
    record = json.loads((root / "lightning/checkpoints/1.json").read_text())
    assert "torch" in record["provenance"]["versions"]


def test_components_of_the_reference(shared: Path) -> None:
    sample = shared / "samples/ckpt_components"
    found = load_checkpoint(sample)
    assert isinstance(found, CheckpointManifest)
    for kind, name in (("models", "main"), ("optimizers", "opt"), ("schedulers", "sched")):
        (part, _) = vars(found)[kind][name]
        saved = torch.load(sample / kind / name / "checkpoints/0.pt", weights_only=True)
        assert_same({key: part.state_dict()[key] for key in saved}, dict(saved))


def test_components_are_written_as_the_reference_writes_them(shared: Path, root: Path) -> None:
    sample = shared / "samples/ckpt_components"
    found = load_checkpoint(sample)
    save_checkpoint(root, models=found.models, optimizers=found.optimizers, schedulers=found.schedulers)
    assert json.loads((root / "manifest.json").read_text()) == json.loads((sample / "manifest.json").read_text())
    theirs, ours = (set(contents(folder)) for folder in (sample, root))
    assert ours - theirs == {"lightning/checkpoints/0.json"}
    assert theirs <= ours


def test_a_model_alone(root: Path) -> None:
    save_checkpoint(root, models=trained()["models"])
    again = load_checkpoint(root)
    assert (again.optimizers, again.schedulers) == ({}, {})
    assert load_checkpoint(root, map_location="meta").models["main"][0].weight.device.type == "meta"


def test_associations_may_be_given(root: Path) -> None:
    parts = trained()
    other = torch.optim.SGD([nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    associations = {"main": {"optimizers": ["opt"]}}
    save_checkpoint(root, models=parts["models"], optimizers={"opt": (other, SGD)}, associations=associations)
    assert load_checkpoint(root).associations == associations


def test_a_strategy(root: Path) -> None:
    one = run(strategy())
    assert save_checkpoint(root, one) == 0
    found = load_checkpoint(root)
    assert isinstance(found, dict)
    assert_same(state_of(found["strategy"]), state_of(one))
    assert type(found["strategy"]) is type(one)
    assert (found["checkpoint_index"], found["source"]["format"]) == (0, "native")
    live = strategy(seed=3)
    assert load_checkpoint(root, strategy=live)["strategy"] is live
    assert_same(state_of(live), state_of(one))
    model = Net()
    assert load_checkpoint(root, models=model)["strategy"].models["main"] is model


def test_a_strategy_of_the_reference(shared: Path) -> None:
    with pytest.warns(UserWarning, match="states of hooks that are not there"):
        found = load_checkpoint(shared / "samples/ckpt_demo_async", 1)
    assert isinstance(found, dict)
    assert isinstance(found["strategy"], TrainingStrategy)
    assert found["strategy"].step_count == 4


def test_some_models_of_a_strategy(root: Path) -> None:
    one = run(named_strategy())
    save_checkpoint(root, one)
    found = load_checkpoint(root, model_names=["student"])
    assert isinstance(found, CheckpointManifest)
    assert [*found.models] == ["student"]
    assert [*found.optimizers] == ["student_optimizer_0", "student_optimizer_1"]
    assert_same(dict(found.models["student"][0].state_dict()), dict(one.models["student"].state_dict()))
    with pytest.raises(KeyError, match=r"no model 'studnt'; it has \['student', 'teacher'\]; did you mean 'student'"):
        load_checkpoint(root, model_names=["studnt"])


def test_components_and_a_strategy_in_one_folder(root: Path) -> None:
    parts = {"main": (Net(), create_model_spec(Net, hidden=4))}
    save_checkpoint(root, models=parts)
    save_checkpoint(root, strategy())
    save_checkpoint(root, models=parts)
    kinds = [type(load_checkpoint(root, index)) for index in range(3)]
    assert kinds == [CheckpointManifest, dict, CheckpointManifest]


def test_another_recipe_under_the_same_name_is_refused(root: Path) -> None:
    parts = trained()
    save_checkpoint(root, **parts)
    before = contents(root)
    parts["optimizers"]["opt"] = (parts["optimizers"]["opt"][0], create_model_spec(torch.optim.SGD, lr=0.5))
    message = r"disagrees with the spec being saved. Differing fields: lr: 0.1 -> 0.5, momentum: 0.9 -> None"
    with pytest.raises(ValueError, match=message):
        save_checkpoint(root, **parts)
    assert contents(root) == before


def stray_optimizer() -> dict[str, Any]:
    return {**trained(), "optimizers": {"opt": (torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), SGD)}}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (dict, "needs a strategy, or models="),
        (lambda: {"models": {"main": nn.Linear(3, 2)}}, "models/main must be a pair of the object and its recipe"),
        (lambda: {"models": {"a/b": (nn.Linear(3, 2), LINEAR)}}, "'a/b' cannot be a folder name"),
        (lambda: {"models": {"..": (nn.Linear(3, 2), LINEAR)}}, r"'\.\.' cannot be a folder name"),
        (stray_optimizer, r"optimizers\['opt'\] holds no parameter of \['main'\]"),
        (lambda: {**trained(), "strategy": strategy()}, "so models, optimizers, schedulers would be ignored"),
    ],
)
def test_what_cannot_be_saved(root: Path, parts: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        save_checkpoint(root, **parts())
    assert not root.exists()


def test_arguments_that_contradict_each_other(root: Path) -> None:
    save_checkpoint(root, **trained())
    with pytest.raises(ValueError, match="without a strategy, so hooks would be ignored"):
        load_checkpoint(root, hooks=[])
    with pytest.raises(ValueError, match="into strategy=, so hooks, model_names would be ignored"):
        load_checkpoint(root, strategy=strategy(), hooks=[], model_names=["main"])
    with pytest.raises(ValueError, match="holds components only"):
        load_checkpoint(root, strategy=strategy())


def test_a_state_that_does_not_fit_its_recipe(root: Path) -> None:
    save_checkpoint(root, models={"main": (nn.Linear(4, 2), LINEAR)})
    with pytest.raises(ValueError, match="the state of models/main does not fit its recipe"):
        load_checkpoint(root)


def test_nothing_but_models_optimizers_and_schedules_is_built(shared: Path, root: Path) -> None:
    shutil.copytree(shared / "samples/ckpt_components", root)
    spec = root / "schedulers/sched/spec.json"
    spec.write_text(json.dumps({"cls_path": "torch.nn.modules.linear.Linear", "in_features": 1, "out_features": 1}))
    with pytest.raises(ValueError, match="Linear"):
        load_checkpoint(root)
    spec.write_text(json.dumps({"cls_path": "os.mkdir", "path": str(root / "made")}))
    with pytest.raises(ValueError, match="os"):
        load_checkpoint(root)
    assert not (root / "made").exists()


def test_weights_keep_their_dtype(root: Path) -> None:
    model = DemoModelWrapper(DemoModel(hidden_dim=2)).double()
    spec = create_model_spec(DemoModelWrapper, model=create_model_spec(DemoModel, hidden_dim=2))
    save_checkpoint(root, models={"main": (model, spec)})
    assert_same(dict(load_checkpoint(root).models["main"][0].state_dict()), dict(model.state_dict()))
