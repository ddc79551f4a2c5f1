"""Recipes and pickles of strangers: nothing in them runs."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_rigs import Counting, Strategy, rebuilt
from hostile_rigs import RECORD, STATES, STRATEGY, edited

from nvalchemi_lightning.checkpoint.reading import _read_object
from nvalchemi_lightning.errors import (
    AlchemiError,
    ConfigurationError,
    StoreError,
    UntrustedPathError,
)
from nvalchemi_lightning.specs import create_model_spec_from_json, resolve
from nvalchemi_lightning.strategy_spec import strategy_from_checkpoint_dict


def optimizer_config(recipe: dict[str, Any]) -> dict[str, Any]:
    return recipe["optimizer_configs"]["main"][0]


PLACES: dict[str, Callable[[dict[str, Any], Any], Any]] = {
    "model": lambda recipe, evil: recipe["model_specs"].update(main=evil),
    "argument of the model": lambda recipe, evil: recipe["model_specs"]["main"].update(hidden=evil),
    "in a list of the model": lambda recipe, evil: recipe["model_specs"].update(
        main={"cls_path": "torch.nn.modules.container.ModuleList", "modules": [evil]}
    ),
    "deep in the model": lambda recipe, evil: recipe["model_specs"].update(
        main={"cls_path": "torch.nn.Linear", "in_features": {"a": [{"b": evil}]}, "out_features": 1}
    ),
    "optimizer config": lambda recipe, evil: recipe["optimizer_configs"].update(main=[evil]),
    "optimizer keyword": lambda recipe, evil: optimizer_config(recipe)["optimizer_kwargs"].update(lr=evil),
    "schedule keyword": lambda recipe, evil: optimizer_config(recipe)["scheduler_kwargs"].update(gamma=evil),
    "metric adapter": lambda recipe, evil: optimizer_config(recipe).update(scheduler_metric_adapter=evil),
    "loss": lambda recipe, evil: recipe.update(loss_fn_spec=evil),
    "term of the loss": lambda recipe, evil: recipe["loss_fn_spec"].update(components=[evil]),
    "weight of the loss": lambda recipe, evil: recipe["loss_fn_spec"].update(weights=[evil]),
}

EVIL: dict[str, Callable[[Path], Any]] = {
    "os.system": lambda canary: {"cls_path": "os.system", "command": f"touch {canary}"},
    "subprocess": lambda canary: {"cls_path": "subprocess.getoutput", "cmd": f"touch {canary}"},
    "eval": lambda canary: {"cls_path": "builtins.eval", "source": f"open({str(canary)!r}, 'w')"},
    "pathlib": lambda canary: {"cls_path": "pathlib.Path.touch", "self": str(canary)},
}


@pytest.fixture
def recipe(saved: Path) -> Any:
    """Return what a checkpoint says of its strategy."""
    return json.loads((saved / STRATEGY).read_text())


def is_refused(recipe: dict[str, Any], canary: Path) -> BaseException:
    with pytest.raises(AlchemiError) as caught:
        strategy_from_checkpoint_dict(Strategy, recipe)
    assert not canary.exists()
    return caught.value


@pytest.mark.parametrize("evil", EVIL)
@pytest.mark.parametrize("place", PLACES)
def test_a_call_in_any_place_of_a_recipe_is_refused(recipe: Any, canary: Path, place: str, evil: str) -> None:
    PLACES[place](recipe, EVIL[evil](canary))
    is_refused(recipe, canary)


@pytest.mark.parametrize("place", ["model", "argument of the model", "loss"])
def test_a_call_in_a_file_is_refused(folder: Path, canary: Path, place: str) -> None:
    edited(folder, STRATEGY, lambda recipe: PLACES[place](recipe, EVIL["os.system"](canary)) or recipe)
    with pytest.raises(UntrustedPathError, match=r"'os\.system' lies outside the trusted packages"):
        rebuilt(folder)
    assert not canary.exists()


@pytest.mark.parametrize("field", ["training_fn", "strategy_cls", "optimizer_cls", "scheduler_cls"])
@pytest.mark.parametrize(
    "path",
    [
        *(
            "os.system",
            "subprocess.Popen",
            "builtins.eval",
            "pickle.loads",
            "importlib.import_module",
            "runpy.run_path",
        ),
        *("torch.load", "torch.hub.load", "torch.jit.load", "torch.utils.cpp_extension.load", "torch.compile"),
        *("torch.optim.lr_scheduler.os.system", "torch.optim.optimizer.torch.load", "torch.nn.Module.__reduce__"),
        *("torch.nn.modules.module.torch.hub.load", "torch.optim.adam.Optimizer.__init__.__globals__"),
        "nvalchemi_lightning.specs.trust.importlib.import_module",
        "nvalchemi_lightning.checkpoint.files.shutil.rmtree",
        *("\u043es.system", "torch.\u043eptim.Adam", "torch\uff0enn.Linear", "os.\u017fystem"),
        *("torch.optim..Adam", ".os.system", "os/system", "torch.optim.Adam()", "__main__.x", "os"),
        *("../../x", "", "x" * 100_000, "a." * 5_000 + "b"),
    ],
    ids=lambda path: path[:60].replace("/", "-"),
)
def test_a_path_in_any_place_of_a_recipe_is_refused(recipe: Any, canary: Path, field: str, path: str) -> None:
    (optimizer_config(recipe) if field in optimizer_config(recipe) else recipe)[field] = path
    assert isinstance(is_refused(recipe, canary), ConfigurationError | UntrustedPathError)


@pytest.mark.parametrize(
    "path",
    [
        "nvalchemi_lightning.specs.trust._locate",
        "nvalchemi_lightning.checkpoint.files._move",
        "torch.nn.modules.module._global_forward_hooks",
        "torch.optim.Adam._init_group",
    ],
)
def test_private_parts_are_not_for_files(path: str) -> None:
    with pytest.raises(UntrustedPathError, match=r"a private part of .*; name something public"):
        resolve(path)


def test_a_trusted_function_of_the_wrong_kind_is_not_called(recipe: Any) -> None:
    """Neither can a file extend the trust list: what it names must give a model."""
    evil = {"cls_path": "nvalchemi_lightning.specs.trust.trust", "packages": ["os"]}
    with pytest.raises(UntrustedPathError, match="is a function, and unless you call"):
        strategy_from_checkpoint_dict(Strategy, {**recipe, "model_specs": {"main": evil}})


@pytest.mark.parametrize("tag", ["__type__", "__callable__", "__enum__", "__value__"])
def test_tagged_values_lead_nowhere_either(recipe: Any, canary: Path, tag: str) -> None:
    evil = {tag: "os.system", "type": "os.system", "value": f"touch {canary}"}
    PLACES["argument of the model"](recipe, evil)
    is_refused(recipe, canary)


@pytest.mark.parametrize(
    "text",
    [
        *('{"a":' * 100_000 + "1" + "}" * 100_000, "[" * 60 + "]" * 60, '{"a": ' + "1" * 10_000 + "}"),
        *('{"a": 1, "a": 2}', "", "\0", '"text"', "NaN", "[1", "\u00ff{}"),
    ],
    ids=["100000 levels", "60 levels", "10000 digits", "twice", "empty", "zero", "text", "nan", "cut", "mark"],
)
def test_text_that_is_no_object_is_named(tmp_path: Path, text: str) -> None:
    for name in ("manifest.json", RECORD, "strategy.json"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        with pytest.raises(StoreError, match=rf"{name} is damaged: ."):
            _read_object(tmp_path, name)


def test_a_key_that_is_there_twice_is_named(folder: Path) -> None:
    (folder / STRATEGY).write_text('{"training_fn": "a", "training_fn": "b"}')
    with pytest.raises(StoreError, match=r"the key 'training_fn' is there twice; restore it or load another"):
        rebuilt(folder)


def test_nesting_has_a_bound(folder: Path) -> None:
    (folder / STRATEGY).write_text("[" * 60 + "]" * 60)
    with pytest.raises(StoreError, match="it is nested more than 50 levels deep"):
        rebuilt(folder)


def test_a_spec_that_is_nested_too_deeply_says_so() -> None:
    form: dict[str, Any] = {"cls_path": "torch.nn.Flatten"}
    for _ in range(900):
        form = {"cls_path": "torch.nn.modules.container.ModuleList", "modules": [form]}
    with pytest.raises(ConfigurationError, match="a spec is nested too deeply to be read"):
        create_model_spec_from_json(form)


class Bomb:
    """Touches a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.canary}",)


@pytest.mark.parametrize("form", ["torch", "old torch", "pickle"])
@pytest.mark.parametrize("component", STATES)
def test_code_in_tensor_files_does_not_run(folder: Path, canary: Path, component: str, form: str) -> None:
    path = folder / f"{component}/checkpoints/0.pt"
    bomb = {"layers.0.weight": Bomb(canary)}
    if form == "pickle":
        path.write_bytes(pickle.dumps(bomb))
    else:
        torch.save(bomb, path, _use_new_zipfile_serialization=form == "torch")
    with pytest.raises(StoreError, match=rf"{component}/checkpoints/0.pt is damaged or not safe to load"):
        rebuilt(folder, hooks=[Counting()])
    assert not canary.exists()
    pickle.loads(pickle.dumps(Bomb(canary)))
    assert canary.exists(), "the bomb is a real one"
