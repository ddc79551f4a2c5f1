"""`AlchemiModule.load_from_checkpoint`: the recipe travels in Lightning's checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from specs_rigs import Net, batches, strategy, training_fn, trusting_rigs

from nvalchemi_lightning.errors import ConfigurationError, ConfigurationTypeError, StoreError, UntrustedPathError
from nvalchemi_lightning.feeding import OneLoader
from nvalchemi_lightning.hooks import EMAHook
from nvalchemi_lightning.hooks.lifecycle import each_hook
from nvalchemi_lightning.losses import EnergyMSELoss
from nvalchemi_lightning.module import AlchemiModule
from nvalchemi_lightning.optim import OptimizerConfig
from nvalchemi_lightning.recipe import TrainingRecipe
from nvalchemi_lightning.specs.trust import _added
from nvalchemi_lightning.strategy import TrainingStrategy


@pytest.fixture(autouse=True)
def _trusted() -> Iterator[None]:
    with trusting_rigs():
        yield


def trainer(steps: int = 2) -> Trainer:
    return Trainer(
        strategy="nvalchemi",
        accelerator="cpu",
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def saved(path: Path, module: AlchemiModule, *, weights_only: bool = False) -> Path:
    training = trainer()
    training.fit(module, OneLoader(batches()))
    training.save_checkpoint(path, weights_only=weights_only)
    return path


def module(**fields: Any) -> AlchemiModule:
    given = {"models": Net(), "loss_fn": EnergyMSELoss(), "optimizer_configs": OptimizerConfig(lr=0.01), **fields}
    return AlchemiModule(**given)


def assert_same_weights(one: AlchemiModule, other: AlchemiModule) -> None:
    pairs = zip(one.recipe.models.values(), other.recipe.models.values(), strict=True)
    for left, right in pairs:
        assert left.state_dict().keys() == right.state_dict().keys()
        assert all(torch.equal(value, right.state_dict()[name]) for name, value in left.state_dict().items())


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_module_comes_back_with_weights_and_counters(tmp_path: Path, weights_only: bool) -> None:
    trained = module()
    path = saved(tmp_path / "a.ckpt", trained, weights_only=weights_only)
    again = AlchemiModule.load_from_checkpoint(path)
    assert type(again.recipe) is TrainingRecipe
    assert_same_weights(again, trained)
    assert again.recipe.step_count == 2
    assert again.recipe.optimizer_configs["main"][0].lr == 0.01


def test_the_recipe_of_a_strategy_comes_back_as_one(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.ckpt", AlchemiModule(strategy(num_steps=7)))
    again = AlchemiModule.load_from_checkpoint(path, num_steps=9)
    assert type(again.recipe) is TrainingStrategy
    assert again.recipe.num_steps == 9


def test_training_goes_on_from_a_module_that_came_back(tmp_path: Path) -> None:
    """The same numbers as the run that was not interrupted."""
    torch.manual_seed(0)
    plain = module()
    twin = copy.deepcopy(plain.recipe.models["main"])
    trainer(4).fit(plain, OneLoader(batches()))
    path = saved(tmp_path / "a.ckpt", module(models=twin))
    again = AlchemiModule.load_from_checkpoint(path)
    trainer(4).fit(again, OneLoader(batches()), ckpt_path=path)
    assert again.recipe.step_count == 4
    assert_same_weights(again, plain)


def test_hooks_come_back_with_their_state_when_they_are_asked_for(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.ckpt", module(hooks=[EMAHook()]))
    again = AlchemiModule.load_from_checkpoint(path, hooks="saved")
    assert [hook.num_updates for hook in each_hook(again.recipe.hooks)] == [2]
    with pytest.warns(UserWarning, match="states of hooks that are not there"):
        assert AlchemiModule.load_from_checkpoint(path).recipe.hooks == []


def test_live_models_get_the_weights(tmp_path: Path) -> None:
    trained = module()
    path = saved(tmp_path / "a.ckpt", trained)
    own = Net()
    again = AlchemiModule.load_from_checkpoint(path, map_location="cpu", models=own)
    assert again.recipe.models["main"] is own
    assert_same_weights(again, trained)


def test_the_dtype_of_the_weights_survives(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.ckpt", module())
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["state_dict"]["models.main.layers.0.bias"] = torch.zeros(4, dtype=torch.float32)
    torch.save(checkpoint, path)
    again = AlchemiModule.load_from_checkpoint(path)
    assert again.recipe.models["main"].layers[0].bias.dtype is torch.float32


def test_a_recipe_that_cannot_be_stored_does_not_keep_the_run_from_saving(tmp_path: Path) -> None:
    class Local(TrainingRecipe):
        pass

    recipe = Local(models=Net(), loss_fn=EnergyMSELoss(), optimizer_configs=OptimizerConfig(lr=0.01))
    path = saved(tmp_path / "a.ckpt", AlchemiModule(recipe))
    with pytest.raises(ConfigurationError, match=r"holds no recipe: .*Local.*pass ckpt_path='.*a\.ckpt' to fit"):
        AlchemiModule.load_from_checkpoint(path)


def test_a_function_that_cannot_be_imported_is_passed_again(tmp_path: Path) -> None:
    path = saved(
        tmp_path / "a.ckpt", module(training_fn=lambda model, batch: {"predicted_energy": model(batch)["energy"]})
    )
    with pytest.raises(ConfigurationError, match="pass training_fn= again"):
        AlchemiModule.load_from_checkpoint(path)
    assert AlchemiModule.load_from_checkpoint(path, training_fn=training_fn).recipe.training_fn is training_fn


def test_the_trust_list_holds(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.ckpt", module())
    _added.clear()
    with pytest.raises(UntrustedPathError, match=r"model_specs\['main'\]: 'specs_rigs\.Net' lies outside"):
        AlchemiModule.load_from_checkpoint(path)


def test_files_that_are_none_of_ours_say_so(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    with pytest.raises(FileNotFoundError):
        AlchemiModule.load_from_checkpoint(path)
    torch.save({"state_dict": {}}, path)
    with pytest.raises(ConfigurationError, match="holds no recipe: an AlchemiModule of this version did not write it"):
        AlchemiModule.load_from_checkpoint(path)
    path.write_bytes(b"no checkpoint")
    with pytest.raises(StoreError, match=r"a\.ckpt is damaged or not safe to load"):
        AlchemiModule.load_from_checkpoint(path)


def test_an_unknown_argument_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.ckpt", module())
    with pytest.raises(ConfigurationTypeError, match=r"runtime overrides \['strict'\]"):
        AlchemiModule.load_from_checkpoint(path, strict=True)
