"""The same numbers, bit for bit, through every way of running a recipe; nothing is written and nothing printed."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from core_rigs import (
    At,
    Harm,
    Noisy,
    Recorder,
    adam,
    batches,
    force_loss,
    run,
    sgd,
    strategy,
    structures,
    trainer,
    w_of,
)
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from nvalchemi_lightning.data import Batch, DataLoader
from nvalchemi_lightning.errors import ConfigurationError, TrainingStateError
from nvalchemi_lightning.feeding import OneLoader
from nvalchemi_lightning.module import AlchemiModule
from nvalchemi_lightning.stages import TrainingStage
from nvalchemi_lightning.strategy import TrainingStrategy
from nvalchemi_lightning.validation import ValidationConfig

Stage = TrainingStage


def loader() -> DataLoader:
    """Return seven numbered structures in shuffled batches of 3, 3 and 1."""
    data = structures(7)
    batch = Batch.from_data_list(data)
    batch.add_key("number", [torch.tensor([[i]]) for i in range(7)], level="system")
    return DataLoader(batch, batch_size=3, shuffle=True, seed=11)


def noisy(seed: int) -> Noisy:
    torch.manual_seed(seed)
    return Noisy()


def scheduled() -> dict[str, Any]:
    decay = {"scheduler_cls": torch.optim.lr_scheduler.ExponentialLR, "scheduler_kwargs": {"gamma": 0.9}}
    return {"optimizer_configs": adam(**decay), "loss_fn": force_loss()}


class Ids:
    """A hook that notes which structures a batch holds."""

    stage = Stage.BEFORE_BATCH
    frequency = 1

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        self.seen.append(ctx.batch.number.flatten().tolist())


Outcome = tuple[list[Tensor], list[list[int]]]


def outcome(model: torch.nn.Module, ids: Ids) -> Outcome:
    return [parameter.detach().clone() for parameter in model.parameters()], ids.seen


def by_run(seed: int) -> Outcome:
    model, ids = noisy(seed), Ids()
    run(strategy(models=model, num_epochs=3, hooks=[ids], **scheduled()), loader())
    return outcome(model, ids)


def by_run_in_two_parts(seed: int) -> Outcome:
    model, ids = noisy(seed), Ids()
    what = strategy(models=model, num_steps=4, hooks=[ids], **scheduled())
    data = loader()
    run(what, data)
    what.num_steps = 9
    run(what, data)
    return outcome(model, ids)


def by_run_with_new_loaders(seed: int) -> Outcome:
    model, ids = noisy(seed), Ids()
    what = strategy(models=model, num_steps=4, hooks=[ids], **scheduled())
    run(what, loader())
    what.num_steps = 9
    run(what, loader())
    return outcome(model, ids)


def by_trainer(seed: int) -> Outcome:
    model, ids = noisy(seed), Ids()
    trainer(max_epochs=3).fit(AlchemiModule(models=model, hooks=[ids], **scheduled()), loader())
    return outcome(model, ids)


def by_trainer_with_a_strategy(seed: int) -> Outcome:
    model, ids = noisy(seed), Ids()
    what = strategy(models=model, num_epochs=3, hooks=[ids], **scheduled())
    trainer(max_epochs=-1).fit(AlchemiModule(what), loader())
    assert (what.step_count, what.epoch_count) == (9, 3)
    return outcome(model, ids)


def by_train_batch(seed: int) -> Outcome:
    model, ids = noisy(seed), Ids()
    what = strategy(models=model, num_epochs=3, hooks=[ids], **scheduled())
    data = loader()
    with what:
        for epoch in range(3):
            data.set_epoch(epoch)
            for batch in data:
                what.train_batch(batch)
    return outcome(model, ids)


def by_validating_run(seed: int) -> Outcome:
    """Validation draws no random number and leaves no trace in the training."""
    model, ids = noisy(seed), Ids()
    config = ValidationConfig(validation_data=batches(2, 3), every_n_steps=2)
    run(strategy(models=model, num_epochs=3, hooks=[ids], validation_config=config, **scheduled()), loader())
    return outcome(model, ids)


DOORS = (
    by_run_in_two_parts,
    by_run_with_new_loaders,
    by_trainer,
    by_trainer_with_a_strategy,
    by_train_batch,
    by_validating_run,
)


def by_hand(seed: int) -> Outcome:
    """The loop in plain torch."""
    model, ids = noisy(seed), Ids()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    data = loader()
    for epoch in range(3):
        data.set_epoch(epoch)
        for batch in data:
            ids.seen.append(batch.number.flatten().tolist())
            optimizer.zero_grad()
            output = model(batch)
            energy = (output["energy"] - batch.energy).square().mean()
            atoms = batch.num_nodes_per_graph.double()
            per_atom = (output["forces"] - batch.forces).square().sum(-1) / 3
            forces = torch.zeros(batch.num_graphs, dtype=torch.float64).index_add(0, batch.batch_idx, per_atom) / atoms
            (energy / 11 + forces.mean() * 10 / 11).backward()
            optimizer.step()
            scheduler.step()
    return outcome(model, ids)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_every_door_gives_the_same_bits(door: Any, seed: int) -> None:
    """B115: also in two runs of one strategy, which are one run of both lengths."""
    weights, ids = by_run(seed)
    others, other_ids = door(seed)
    assert other_ids == ids
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(weights, others, strict=True))


def test_the_numbers_are_those_of_a_loop_by_hand() -> None:
    weights, ids = by_run(1)
    expected, expected_ids = by_hand(1)
    assert ids == expected_ids
    for mine, theirs in zip(weights, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_the_rig_can_tell_seeds_and_epochs_apart() -> None:
    """Otherwise equal bits would prove nothing."""
    (first, *_), ids = by_run(1)
    (second, *_), _ = by_run(2)
    assert not torch.equal(first, second)
    epochs = [ids[:3], ids[3:6], ids[6:]]
    assert all(sorted(chain(*epoch)) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_train_batch_and_run_count_on_each_other() -> None:
    """A batch outside a loader does not make the next run skip a batch of its loader, and the optimizer goes on."""
    ids = Ids()
    what = strategy(num_steps=4, hooks=[ids], optimizer_configs=adam())
    data = loader()
    what.train_batch(next(iter(data)))
    optimizer = what.flat_optimizers()[0][0]
    run(what, data)
    assert what.flat_optimizers()[0][0] is optimizer
    assert (what.step_count, what.batch_count, what.epoch_count, what.epoch_step_count) == (4, 4, 1, 0)
    assert sorted(chain(*ids.seen[1:])) == list(range(7))


def test_a_strategy_in_two_trainers_continues() -> None:
    what = strategy(num_epochs=2)
    for epoch in (1, 2):
        t = trainer(max_epochs=1)
        t.fit(AlchemiModule(what), OneLoader(batches(2, 3)))
        assert what.epoch_count >= epoch
    assert what.step_count == 4


@pytest.mark.parametrize("options", [{}, {"num_epochs": 3}])
def test_the_shorter_of_both_limits_ends_a_run(options: dict[str, Any]) -> None:
    module = AlchemiModule(models=Harm(), optimizer_configs=sgd(), loss_fn=force_loss(), **options)
    trainer(max_epochs=2).fit(module, OneLoader(batches(2, 3)))
    assert (module.recipe.step_count, module.recipe.epoch_count) == (4, 2)


def test_the_recipes_own_limit_may_come_first() -> None:
    module = AlchemiModule(models=Harm(), optimizer_configs=sgd(), loss_fn=force_loss(), num_steps=3)
    t = trainer(max_epochs=20)
    t.fit(module, OneLoader(batches(2, 3)))
    assert (module.recipe.step_count, t.global_step) == (3, 3)


def test_a_share_of_the_batches_makes_shorter_epochs() -> None:
    what = run(strategy(num_epochs=2), batches(1, 1, 1, 1), limit_train_batches=2)
    assert (what.step_count, what.epoch_count) == (4, 2)
    what = run(strategy(num_epochs=2), batches(1, 1, 1, 1), limit_train_batches=0.75)
    assert (what.step_count, what.epoch_count) == (6, 2)


def test_a_module_takes_a_recipe_or_its_fields() -> None:
    message = "takes either a recipe or its fields"
    with pytest.raises(ConfigurationError, match=message):
        AlchemiModule()
    with pytest.raises(ConfigurationError, match=message):
        AlchemiModule(strategy(), models=Harm())


def test_a_module_without_an_optimizer_cannot_be_fitted() -> None:
    module = AlchemiModule(models=Harm(), loss_fn=force_loss())
    with pytest.raises(ConfigurationError, match="nothing would be trained: optimizer_configs is empty"):
        trainer().fit(module, OneLoader(batches(1)))
    what = TrainingStrategy(models=Harm(), loss_fn=force_loss(), num_steps=1)
    with pytest.raises(ConfigurationError, match="nothing would be trained"):
        run(what, batches(1))
    with pytest.raises(ConfigurationError, match="nothing would be trained"):
        what.train_batch(batches(1)[0])


def test_validation_data_is_given_once() -> None:
    config = ValidationConfig(validation_data=batches(1))
    module = AlchemiModule(models=Harm(), optimizer_configs=sgd(), loss_fn=force_loss(), validation_config=config)
    with pytest.raises(ConfigurationError, match=r"validation data was given twice.*give it once"):
        trainer().fit(module, OneLoader(batches(1)), OneLoader(batches(1)))


def test_the_trainer_lists_one_callback_per_observed_stage() -> None:
    stages = (Stage.AFTER_LOSS, Stage.AFTER_BATCH, Stage.AFTER_EPOCH)
    hooks = [At(stage, lambda ctx: None) for stage in stages for _ in range(2)]
    module = AlchemiModule(models=Harm(), optimizer_configs=sgd(), loss_fn=force_loss(), hooks=hooks)
    t = trainer()
    t.fit(module, OneLoader(batches(1)))
    named = {callback.stage: callback for callback in t.callbacks if hasattr(callback, "stage")}
    assert {type(callback).__name__ for callback in named.values()} >= {
        "AfterLossCallback",
        "AfterBatchCallback",
        "AfterEpochCallback",
    }
    assert named[Stage.AFTER_EPOCH].hooks == tuple(hooks[4:])
    assert len({callback.state_key for callback in t.callbacks}) == len(t.callbacks)
    assert type(t.callbacks[0]).__name__ == "RunDriver"


def test_a_second_fit_attaches_nothing_twice() -> None:
    seen: list[int] = []
    hooks = [At(Stage.AFTER_BATCH, lambda ctx: seen.append(ctx.step_count))]
    module = AlchemiModule(models=Harm(), optimizer_configs=sgd(), loss_fn=force_loss(), hooks=hooks)
    t = trainer(max_epochs=1)
    t.fit(module, OneLoader(batches(1)))
    count = len(t.callbacks)
    t.fit_loop.max_epochs = 2
    t.fit(module, OneLoader(batches(1)))
    assert seen == [1, 2]
    assert len(t.callbacks) == count


def test_the_weights_of_a_module_are_named_by_model() -> None:
    state = AlchemiModule(
        models={"a": Harm(), "b": Harm()}, loss_fn=force_loss(), training_fn=lambda m, b: {}
    ).state_dict()
    assert [name for name in state if not name.startswith("_")] == ["models.a.w", "models.b.w"]


def test_a_run_moves_models_back_to_their_device() -> None:
    what = run(strategy(), batches(1))
    assert all(parameter.device == what.devices[0] for parameter in what.models["main"].parameters())


def test_a_hook_sees_copies_of_batches() -> None:
    """What a hook does to a batch stays out of the stored data."""

    def shift(ctx: Any) -> None:
        ctx.batch.positions = ctx.batch.positions + 1.0

    data = batches(2)
    kept = data[0].positions.clone()
    run(strategy(hooks=[At(Stage.BEFORE_FORWARD, shift)], num_steps=2), data)
    what = strategy(hooks=[At(Stage.BEFORE_FORWARD, shift)])
    what.train_batch(data[0])
    assert torch.equal(data[0].positions, kept)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda what: pickle.loads(pickle.dumps(what))], ids=["copy", "pickle"]
)
def test_a_copy_goes_on_by_itself(copied: Any) -> None:
    """Counters, weights and optimizer state belong to the copy; both end like a run without a copy."""
    loader = batches(1, 2, 3)
    what = run(strategy(num_steps=2, optimizer_configs=adam()), loader)
    other = copied(what)
    for each in (other, what):
        each.num_steps = 6
        assert each.step_count == 2
        run(each, loader)
    expected = run(strategy(num_steps=6, optimizer_configs=adam()), loader)
    assert w_of(what) == w_of(other) == w_of(expected)
    assert what.models["main"] is not other.models["main"]


def test_a_copy_asks_its_own_hooks_what_they_hold() -> None:
    class Holder(Recorder):
        held = "original"

        def rank_state_dict(self) -> dict[str, str]:
            return {"held": self.held}

        def load_rank_state_dict(self, state: dict[str, str]) -> None:
            self.held = state["held"]

    what = strategy(hooks=[Holder([Stage.AFTER_BATCH])])
    assert what.resume.state()["hooks"] == {"0:Holder": {"held": "original"}}
    other = copy.deepcopy(what)
    other.hooks[0].held = "copy"
    assert other.resume.state()["hooks"] == {"0:Holder": {"held": "copy"}}


def test_nothing_holds_on_to_a_strategy() -> None:
    what = run(strategy(), batches(1))
    model = weakref.ref(what.models["main"])
    del what
    gc.collect()
    assert model() is None


# What a run leaves behind


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def test_a_run_writes_and_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = ValidationConfig(validation_data=batches(2), every_n_steps=1)
    what = run(strategy(num_epochs=2, validation_config=config), batches(2, 3))
    what.validate()
    what.train_batch(batches(1)[0])
    assert files(tmp_path) == []
    assert capfd.readouterr() == ("", "")


def test_the_bar_is_all_that_a_run_prints(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    strategy(num_epochs=2).run(batches(2, 3))
    printed = capfd.readouterr()
    assert files(tmp_path) == []
    lines = [line for stream in printed for chunk in stream.splitlines() for line in chunk.split("\r") if line.strip()]
    assert lines
    assert all("2/2" in line or "1/2" in line or "0/2" in line or "Training:" in line for line in lines)
    assert any("loss=" in line for line in lines)


def test_options_reach_the_trainer(tmp_path: Path) -> None:
    run(strategy(), batches(1), logger=CSVLogger(tmp_path, name="mine"))
    assert (tmp_path / "mine" / "version_0" / "metrics.csv").is_file()


def test_a_misspelt_trainer_option_is_refused() -> None:
    with pytest.raises((TypeError, ValueError), match="enable_progres_bar"):
        strategy().run(batches(1), enable_progres_bar=False)


def test_the_global_generators_are_left_to_the_models() -> None:
    """A run without a random model draws no random number."""
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    config = ValidationConfig(validation_data=batches(2), every_n_steps=1)
    run(strategy(validation_config=config), loader())
    assert torch.equal(torch.rand(3), expected)


def test_validate_needs_a_configuration() -> None:
    with pytest.raises(TrainingStateError, match=r"validate\(\) requires a validation_config; set strategy.validation"):
        strategy().validate()


@pytest.mark.parametrize("call", ["run", "train_batch"])
def test_training_inside_a_run_is_refused(call: str) -> None:
    """The message is about that, not about what breaks first."""
    argument = {"run": batches(1), "train_batch": batches(1)[0]}[call]
    what = strategy(hooks=[At(Stage.AFTER_BATCH, lambda ctx: getattr(ctx.workflow, call)(argument))])
    with pytest.raises(TrainingStateError, match=rf"{call}\(\)"):
        run(what, batches(2, 3))
    assert w_of(what) != 1.0
