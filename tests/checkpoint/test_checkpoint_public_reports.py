"""What users of other tools reported about checkpoints and resuming, and what must happen here instead."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_rigs import At, Net, assert_same, batches, rebuilt, run, strategy
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.strategies import DDPStrategy
from torch import distributed, nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from nvalchemi_lightning.checkpoint import export_weights
from nvalchemi_lightning.checkpoint.states import model_state
from nvalchemi_lightning.data import AtomicData, DataLoader
from nvalchemi_lightning.errors import ConfigurationError
from nvalchemi_lightning.hooks import CheckpointHook, EMAHook
from nvalchemi_lightning.module import AlchemiModule
from nvalchemi_lightning.optim import OptimizerConfig
from nvalchemi_lightning.stages import TrainingStage
from nvalchemi_lightning.validation import ValidationConfig

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
    "strategy": "nvalchemi",
    "max_epochs": -1,
}


class KilledError(Exception):
    """Ends a run from outside."""


# Where a run goes on ------------------------------------------------------------------------------------------------


def numbered(count: int) -> DataLoader:
    """Return batches of two structures in random order; their energies are their ids."""
    generator = torch.Generator().manual_seed(4)
    data = [
        AtomicData(
            positions=torch.randn(3, 3, generator=generator, dtype=torch.float64),
            atomic_numbers=torch.tensor([1, 6, 8]),
            energy=torch.full((1, 1), float(i), dtype=torch.float64),
        )
        for i in range(2 * count)
    ]
    return DataLoader(data, batch_size=2, shuffle=True, seed=3)


def noting_ids(into: list[tuple[int, ...]]) -> At:
    """Return a hook that notes which structures every batch holds."""
    return At(TrainingStage.BEFORE_BATCH, lambda ctx: into.append(tuple(int(e) for e in ctx.batch.energy)))


def killing(at_batch: int) -> At:
    """Return a hook that ends the run when so many batches are done."""

    def kill(ctx: Any) -> None:
        if ctx.batch_count == at_batch:
            raise KilledError

    return At(TrainingStage.BEFORE_BATCH, kill)


def test_a_resume_within_an_epoch_reads_what_is_left_of_it(root: Path) -> None:
    """B07: the position in the data is restored with the counters, so that no batch is read twice or left out."""
    whole: list[Any] = []
    run(strategy(num_epochs=3, hooks=[noting_ids(whole)]), numbered(10))
    seen: list[Any] = []
    saver = CheckpointHook(root, step_interval=14)
    killed = strategy(num_epochs=3, hooks=[killing(14), noting_ids(seen), saver])
    with pytest.raises(KilledError):
        run(killed, numbered(10))
    loaded = rebuilt(root, hooks=[noting_ids(seen)])
    assert (loaded.step_count, loaded.epoch_count, loaded.epoch_step_count) == (14, 1, 4)
    assert seen == whole[:14]
    run(loaded, numbered(10))
    assert seen == whole
    epochs = [sorted(i for batch in seen[k : k + 10] for i in batch) for k in (0, 10, 20)]
    assert epochs == [[*range(20)]] * 3
    assert whole[:10] != whole[10:20]
    assert (loaded.step_count, loaded.batch_count) == (30, 30)
    assert (loaded.epoch_count, loaded.epoch_step_count) == (3, 0)


@pytest.mark.parametrize("interval", [{"epoch_interval": 1}, {"step_interval": 4}], ids=str)
def test_a_resume_between_epochs_begins_the_next_one(interval: dict[str, int], root: Path) -> None:
    """B37: a finished epoch is not trained again, also where the checkpoint precedes the bookkeeping of its end."""
    whole: list[Any] = []
    run(strategy(num_epochs=3, hooks=[noting_ids(whole)]), numbered(4))
    saver = CheckpointHook(root, **interval)
    with pytest.raises(KilledError):
        run(strategy(num_epochs=3, hooks=[saver, killing(4)]), numbered(4))
    seen: list[Any] = []
    begun: list[int] = []
    epochs = At(TrainingStage.BEFORE_EPOCH, lambda ctx: begun.append(ctx.epoch))
    resumed = run(rebuilt(root, hooks=[noting_ids(seen), epochs]), numbered(4))
    assert len(seen) == 8
    assert seen == whole[4:]
    assert begun == [1, 2]
    assert (resumed.step_count, resumed.epoch_count) == (12, 3)


# Names without wrappers ---------------------------------------------------------------------------------------------


@pytest.fixture
def one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let DDP run in this process alone."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    store = f"file://{tmp_path / 'store'}"
    distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


KINDS = ["plain", "ddp", "compiled", "ddp, compiled", "averaged", "averaged, ddp, compiled", "averaged, parts compiled"]


def kind_of_run(kind: str, seed: int, num_steps: int, *hooks: Any) -> tuple[AlchemiModule, Trainer]:
    """Return a module whose model may be compiled, and a Trainer that may wrap it."""
    torch.manual_seed(seed)
    model: Any = Net()
    if "parts compiled" in kind:
        model.layers[0] = torch.compile(model.layers[0], backend="eager")
    elif "compiled" in kind:
        model = torch.compile(model, backend="eager")
    averages = [EMAHook(decay=0.5)] if "averaged" in kind else []
    module = AlchemiModule(strategy(models=model, num_steps=num_steps, hooks=[*averages, *hooks]))
    return module, Trainer(**{**QUIET, "strategy": "nvalchemi_ddp" if "ddp" in kind else "nvalchemi", "devices": 1})


def weights_of(module: AlchemiModule) -> dict[str, Any]:
    return model_state(module.recipe.models["main"])


def averages_in(root: Path) -> dict[str, Any]:
    """Return the averaged weights of a checkpoint, empty where it has none."""
    path = root / "hooks/checkpoints/0.pt"
    states = torch.load(path, weights_only=True).values() if path.is_file() else ()
    return next((state["averaged_model_state"] for state in states if "averaged_model_state" in state), {})


@pytest.fixture
def saved_by_all(tmp_path: Path, one_rank: None) -> dict[str, Any]:
    """Return the weights after three steps, which every kind of run saved, and after four."""
    for kind in KINDS:
        module, trainer = kind_of_run(kind, 0, 3, CheckpointHook(tmp_path / kind, step_interval=3))
        trainer.fit(module, numbered(5))
        assert isinstance(trainer.strategy, DDPStrategy) is ("ddp" in kind)
        trainer.save_checkpoint(tmp_path / f"{kind}.ckpt")
    module, trainer = kind_of_run("plain", 0, 4)
    trainer.fit(module, numbered(5))
    return weights_of(module)


def test_names_in_files_are_those_of_the_bare_model(saved_by_all: Any, tmp_path: Path) -> None:
    """B29: neither ``module.`` nor ``_orig_mod.`` gets into a file of ours or of Lightning."""
    names = {*Net().state_dict()}
    for kind in KINDS:
        assert {*torch.load(tmp_path / kind / "models/main/checkpoints/0.pt", weights_only=True)} == names
        associations = json.loads((tmp_path / kind / "manifest.json").read_text())["associations"]
        assert associations == json.loads((tmp_path / "plain/manifest.json").read_text())["associations"]
        state = torch.load(tmp_path / f"{kind}.ckpt", weights_only=True)["state_dict"]
        assert {*state} - {"_extra_state"} == {f"models.main.{name}" for name in names}, kind
        averages = averages_in(tmp_path / kind)
        assert {*averages} == ({"n_averaged", *(f"module.{name}" for name in names)} if "averaged" in kind else set())
        target = export_weights(tmp_path / f"{kind}.ckpt", tmp_path / f"{kind}.pt")
        Net().load_state_dict(torch.load(target, weights_only=True))


@pytest.mark.filterwarnings("ignore:the checkpoint has states of hooks that are not there")
@pytest.mark.filterwarnings("ignore:the checkpoint has no state of the hook")
def test_every_kind_of_run_loads_what_every_other_saved(saved_by_all: Any, tmp_path: Path) -> None:
    """B29: and each goes on as the one that saved would have."""
    for saver, loader in product(KINDS, KINDS):
        module, trainer = kind_of_run(loader, 1, 4)
        module.recipe.restore_checkpoint(tmp_path / saver)
        trainer.fit(module, numbered(5))
        native, trainer = kind_of_run(loader, 2, 4)
        trainer.fit(native, numbered(5), ckpt_path=tmp_path / f"{saver}.ckpt")
        for found in (module, native):
            assert found.recipe.step_count == 4
            for name, value in weights_of(found).items():
                assert torch.allclose(value, saved_by_all[name], rtol=0, atol=1e-12), f"{saver} in {loader}"


# Hooks that change the model ----------------------------------------------------------------------------------------


class AddedHead:
    """A hook of a fine-tuning run: it appends a layer to the model when it is registered."""

    frequency = 1
    stage = TrainingStage.AFTER_TRAINING

    def on_register(self, workflow: Any) -> None:
        workflow.models["main"].layers.append(nn.Linear(1, 1).double())

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        return


def test_a_layer_that_a_hook_adds_gets_its_weights_back(root: Path) -> None:
    """B54: weights and moments are loaded after the hooks have changed the model."""
    what = run(strategy(hooks=[AddedHead()]))
    with torch.no_grad():
        what.models["main"].layers[3].weight.fill_(7.0)
        what.models["main"].layers[3].bias.fill_(8.0)
    what.save_checkpoint(root)
    loaded = rebuilt(root, hooks=[AddedHead()])
    head = loaded.models["main"].layers[3]
    assert (head.weight.item(), head.bias.item()) == (7.0, 8.0)
    assert {parameter.device for parameter in head.parameters()} == {loaded.devices[0]}
    (optimizer,), _ = loaded.flat_optimizers()
    (saved,), _ = what.flat_optimizers()
    for live, old in zip(head.parameters(), what.models["main"].layers[3].parameters(), strict=True):
        assert optimizer.state[live]["exp_avg"].item() == saved.state[old]["exp_avg"].item() != 0.0
    what.num_steps = loaded.num_steps = 5
    assert_same(*(dict(run(each).models["main"].state_dict()) for each in (what, loaded)))


def test_a_layer_without_the_hook_that_adds_it_is_refused(root: Path) -> None:
    """B54: the message names what the model lacks."""
    run(strategy(hooks=[AddedHead()])).save_checkpoint(root)
    keys = r"has \['layers.3.bias', 'layers.3.weight'\] in addition"
    with pytest.raises(ConfigurationError, match=rf"models\['main'\] does not fit: .* {keys}; .*hooks that change it"):
        rebuilt(root)


# Rates, schedules and stoppers --------------------------------------------------------------------------------------


def falling(step_size: int, lr: float = 1.0) -> OptimizerConfig:
    kwargs = {"step_size": step_size, "gamma": 0.1}
    return OptimizerConfig(optimizer_cls=Adam, lr=lr, scheduler_cls=StepLR, scheduler_kwargs=kwargs)


def noting_rates(into: list[float]) -> At:
    """Return a hook that notes the learning rate of every batch."""
    return At(TrainingStage.BEFORE_BATCH, lambda ctx: into.append(ctx.optimizers[0].param_groups[0]["lr"]))


def test_restarts_leave_the_learning_rate_alone(root: Path) -> None:
    """B79: nothing is multiplied when a run starts, however often it does."""
    what = run(strategy(num_steps=3, optimizer_configs=falling(2, 1e-2)))
    rates: list[float] = []
    for _ in range(3):
        what.save_checkpoint(root)
        what = run(rebuilt(root, hooks=[noting_rates(rates)]))
        (group,) = what.flat_optimizers()[0][0].param_groups
        assert (group["lr"], group["initial_lr"]) == (pytest.approx(1e-3), 1e-2)
    assert rates == []
    what.num_steps = 4
    run(what)
    assert rates == [pytest.approx(1e-3)]
    (group,) = what.flat_optimizers()[0][0].param_groups
    assert (group["lr"], group["initial_lr"]) == (pytest.approx(1e-4), 1e-2)


def test_restarts_of_lightning_leave_the_learning_rate_alone(tmp_path: Path) -> None:
    """B79: the same with ``ckpt_path``."""
    path, fields = tmp_path / "a.ckpt", {"optimizer_configs": falling(2, 1e-2)}
    options: dict[str, Any] = {}
    for _ in range(4):
        module, trainer = AlchemiModule(strategy(num_steps=3, **fields)), Trainer(**QUIET)
        trainer.fit(module, numbered(5), **options)
        (group,) = module.recipe.flat_optimizers()[0][0].param_groups
        assert (group["lr"], group["initial_lr"]) == (pytest.approx(1e-3), 1e-2)
        trainer.save_checkpoint(path)
        options = {"ckpt_path": path}
    rates: list[float] = []
    trainer = Trainer(**QUIET)
    trainer.fit(AlchemiModule(strategy(num_steps=4, hooks=[noting_rates(rates)], **fields)), numbered(5), **options)
    assert rates == [pytest.approx(1e-3)]


def validating(**cadence: int) -> ValidationConfig:
    return ValidationConfig(validation_data=batches(1, seed=8), **cadence)


def ordered(saver: CheckpointHook, others: list[Any], *, saver_first: bool) -> list[Any]:
    return [saver, *others] if saver_first else [*others, saver]


@pytest.mark.parametrize("saver_first", [True, False])
def test_a_checkpoint_of_an_epoch_has_the_schedule_after_it(saver_first: bool, root: Path) -> None:
    """B114: wherever the hook stands, the checkpoint has what the schedule made of the epoch."""
    whole: list[float] = []
    hooks = ordered(CheckpointHook(root, epoch_interval=1), [noting_rates(whole)], saver_first=saver_first)
    run(strategy(num_epochs=2, optimizer_configs=falling(4), hooks=hooks), batches(4))
    assert whole == pytest.approx([1.0] * 4 + [0.1] * 4)
    rates: list[float] = []
    loaded = rebuilt(root, 0, hooks=[noting_rates(rates)])
    (optimizer,), (schedule,) = loaded.flat_optimizers()
    assert schedule.last_epoch == 4
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    run(loaded, batches(4))
    assert rates == pytest.approx([0.1] * 4)


@pytest.mark.parametrize("saver_first", [True, False])
def test_a_checkpoint_of_an_epoch_has_what_validation_changed(saver_first: bool, root: Path) -> None:
    """B114: schedules and stoppers that listen to the validation of the epoch have heard it."""
    kwargs = {"patience": 0, "factor": 0.1, "threshold": 1e9, "threshold_mode": "abs"}
    config = OptimizerConfig(optimizer_cls=SGD, lr=1e-3, scheduler_cls=ReduceLROnPlateau, scheduler_kwargs=kwargs)
    fields: dict[str, Any] = {"optimizer_configs": config, "validation_config": validating(every_n_epochs=1)}
    stopper = EarlyStopping("validation/total_loss", patience=9, min_delta=1e9)
    hooks = ordered(CheckpointHook(root, epoch_interval=1), [stopper], saver_first=saver_first)
    run(strategy(num_epochs=3, hooks=hooks, **fields), batches(4))
    for index, (heard, rate, waited) in enumerate([(1, 1e-3, 0), (2, 1e-4, 1), (3, 1e-5, 2)]):
        again = EarlyStopping("validation/total_loss", patience=9, min_delta=1e9)
        loaded = rebuilt(root, index, hooks=[again], validation_config=fields["validation_config"])
        (optimizer,), (schedule,) = loaded.flat_optimizers()
        assert (schedule.last_epoch, again.wait_count) == (heard, waited)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)


def patient() -> tuple[EarlyStopping, dict[str, Any]]:
    """Return a stopper, and the fields of a strategy whose validation never improves."""
    stopper = EarlyStopping("validation/total_loss", patience=3)
    config = OptimizerConfig(optimizer_cls=SGD, lr=0.0)
    return stopper, {"optimizer_configs": config, "validation_config": validating(every_n_steps=1), "num_steps": 20}


def test_early_stopping_goes_on_waiting(root: Path) -> None:
    """B124: after two of three bad validations, one more stops the resumed run."""
    stopper, fields = patient()
    run(strategy(hooks=[stopper, CheckpointHook(root, step_interval=1)], **fields))
    assert stopper.stopped_epoch is not None
    again, _ = patient()
    loaded = rebuilt(root, 2, hooks=[again], validation_config=fields["validation_config"])
    assert (loaded.step_count, again.wait_count) == (3, 2)
    run(loaded)
    assert (loaded.step_count, again.wait_count) == (4, 3)
    assert again.best_score == stopper.best_score


def test_early_stopping_goes_on_waiting_from_a_file_of_lightning(tmp_path: Path) -> None:
    """B124: the same with the stopper given to the Trainer, and ``ckpt_path``."""
    path = tmp_path / "a.ckpt"
    stopper, fields = patient()
    trainer = Trainer(callbacks=[stopper], **QUIET)
    trainer.fit(AlchemiModule(strategy(**{**fields, "num_steps": 3})), numbered(5))
    assert stopper.wait_count == 2
    trainer.save_checkpoint(path)
    again, fields = patient()
    module = AlchemiModule(strategy(**fields))
    Trainer(callbacks=[again], **QUIET).fit(module, numbered(5), ckpt_path=path)
    assert (module.recipe.step_count, again.wait_count) == (4, 3)
