"""Groups, schedules and frozen parameters in real runs: resumed, frozen on the way, logged, driven by validation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from optim_rigs import At, Potential, batches, column, module, run, strategy, trainer, validation
from torch.optim.lr_scheduler import ReduceLROnPlateau

from nvalchemi_lightning.errors import ConfigurationError, DataError, LabelNotFoundError
from nvalchemi_lightning.feeding import OneLoader
from nvalchemi_lightning.hooks import TrainingUpdateHook
from nvalchemi_lightning.optim import OptimizerConfig, ParamGroup, WarmupCosine
from nvalchemi_lightning.specs import trust
from nvalchemi_lightning.stages import TrainingStage as Stage
from nvalchemi_lightning.strategy import TrainingStrategy
from nvalchemi_lightning.validation.evaluation import summary_keys

WARMUP: dict[str, Any] = {
    "scheduler_cls": WarmupCosine,
    "scheduler_kwargs": {"warmup_steps": 2, "total_steps": 8, "min_factor": 0.1},
}
GROUPS = (
    ParamGroup(pattern="*.embedding.*", name="embedding", lr=1e-3, weight_decay=0.0),
    ParamGroup(pattern="*.readout.*", name="readout", lr=5e-2),
)


@pytest.fixture(autouse=True)
def _trusted() -> None:
    trust("optim_rigs")


def layered(**fields: Any) -> OptimizerConfig:
    """Return three groups, weight decay without biases, and a schedule."""
    return OptimizerConfig(
        **{"lr": 1e-2, "weight_decay": 0.1, "param_groups": GROUPS, "no_decay": "bias_and_scale", **WARMUP, **fields}
    )


def weights(what: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in what.models["main"].state_dict().items()}


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def rates(what: Any) -> list[float]:
    return [group["lr"] for group in what.flat_optimizers()[0][0].param_groups]


# Resuming (B40) -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [1, 3, 4])
def test_b40_a_run_with_groups_and_frozen_parts_resumes_bit_for_bit(tmp_path: Path, stop: int) -> None:
    def frozen() -> Potential:
        model = Potential()
        model.hidden[0].requires_grad_(False)
        return model

    torch.manual_seed(0)
    straight = run(strategy(layered(), models=frozen()))
    torch.manual_seed(0)
    first = run(strategy(layered(), models=frozen(), num_steps=stop))
    first.save_checkpoint(tmp_path)
    again = TrainingStrategy.load_checkpoint(tmp_path, models=frozen(), num_steps=6)
    assert rates(again) == rates(first)
    run(again)
    assert same(weights(again), weights(straight))
    assert rates(again) == rates(straight)
    assert [group["name"] for group in again.flat_optimizers()[0][0].param_groups] == [
        "default",
        "default/no_decay",
        "embedding",
        "readout",
        "readout/no_decay",
    ]


def test_b40_groups_that_differ_from_the_checkpoint_are_named(tmp_path: Path) -> None:
    first = run(strategy(layered()))
    first.save_checkpoint(tmp_path)
    other = strategy(OptimizerConfig(lr=1e-2, **WARMUP))
    before = weights(other)
    message = (
        "main_optimizer groups parameters otherwise than the checkpoint: 'main.embedding.weight' is in the group "
        "'default', there in 'embedding', and 4 more like it. Use the param_groups and no_decay of the run"
    )
    with pytest.raises(ConfigurationError, match=message):
        other.restore_checkpoint(tmp_path)
    assert same(weights(other), before)
    renamed = layered(param_groups=(GROUPS[0], ParamGroup(pattern="*.readout.*", name="head", lr=5e-2)))
    with pytest.raises(ConfigurationError, match=r"'main\.readout\.weight' is in the group 'head', there in 'readout'"):
        strategy(renamed).restore_checkpoint(tmp_path)
    with pytest.raises(ConfigurationError, match="the same parameters in another order"):
        strategy(layered(param_groups=GROUPS[::-1])).restore_checkpoint(tmp_path)


def test_a_checkpoint_with_one_group_goes_on_in_groups_when_asked(tmp_path: Path) -> None:
    """What the reference wrote has one group; moments follow the names, not the numbers."""
    first = run(strategy(OptimizerConfig(lr=1e-2)))
    first.save_checkpoint(tmp_path)
    with pytest.raises(ConfigurationError, match="in the group 'default/no_decay', there in 'default', and 4"):
        strategy(layered()).restore_checkpoint(tmp_path)
    again = TrainingStrategy.load_checkpoint(tmp_path, optimizer_configs=layered(), num_steps=7)
    old, new = first.flat_optimizers()[0][0], again.flat_optimizers()[0][0]
    for name, parameter in again.models["main"].named_parameters():
        moments = old.state[first.models["main"].get_parameter(name)]
        assert all(torch.equal(value, new.state[parameter][key]) for key, value in moments.items())
    assert len(new.param_groups) == 5
    run(again)
    one = TrainingStrategy.load_checkpoint(tmp_path, optimizer_configs=OptimizerConfig(lr=1e-3))
    assert len(one.flat_optimizers()[0][0].param_groups) == 1


@pytest.mark.parametrize("new_configs", [False, True])
def test_b40_a_layer_more_is_named(tmp_path: Path, new_configs: bool) -> None:
    save = strategy(layered())
    run(save).save_checkpoint(tmp_path)
    frozen = Potential()
    frozen.hidden[1].requires_grad_(False)
    message = r"added: \[\], removed: \['main.hidden.1.weight', 'main.hidden.1.bias'\]"
    options = {"optimizer_configs": layered(lr=0.5)} if new_configs else {}
    with pytest.raises(ConfigurationError, match=message):
        TrainingStrategy.load_checkpoint(tmp_path, models=frozen, **options)


def test_b40_the_checkpoint_of_a_trainer_is_checked_too(tmp_path: Path) -> None:
    """Two groups of equal shapes, exchanged: moments would land on the wrong layer without a word."""

    def halves(first: str, second: str) -> OptimizerConfig:
        names = {first: "first", second: "second"}
        return OptimizerConfig(
            lr=1e-2,
            parameters="*",
            param_groups=[ParamGroup(pattern=f"*.{part}.*", name=name) for part, name in names.items()],
        )

    saved, path = trainer(max_epochs=1), tmp_path / "saved.ckpt"
    saved.fit(module(halves("hidden.0", "hidden.1")), OneLoader(batches()))
    saved.save_checkpoint(path)
    swapped = module(halves("hidden.1", "hidden.0"))
    with pytest.raises(ConfigurationError, match=r"optimizer 0 groups .* 'main\.hidden\.1\.weight' is in .* 'first'"):
        trainer(max_epochs=2).fit(swapped, OneLoader(batches()), ckpt_path=path)
    model = Potential()
    model.readout.requires_grad_(False)
    partly = module(halves("hidden.0", "hidden.1"), models=model)
    with pytest.raises(ConfigurationError, match=r"optimizer 0 does not train .*removed: \['main\.readout\.weight', "):
        trainer(max_epochs=2).fit(partly, OneLoader(batches()), ckpt_path=path)
    two = module(OptimizerConfig(), OptimizerConfig())
    with pytest.raises(ConfigurationError, match="the run has 2 optimizers, the checkpoint 1; use the optimizer_con"):
        trainer(max_epochs=2).fit(two, OneLoader(batches()), ckpt_path=path)
    straight = module(halves("hidden.0", "hidden.1"))
    trainer(max_epochs=2).fit(straight, OneLoader(batches()))
    resumed = module(halves("hidden.0", "hidden.1"))
    trainer(max_epochs=2).fit(resumed, OneLoader(batches()), ckpt_path=path)
    assert same(weights(resumed.recipe), weights(straight.recipe))


# Frozen parameters (B17) --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer_cls", [torch.optim.AdamW, torch.optim.SGD])
def test_b17_parameters_frozen_on_the_way_stay_from_then_on(optimizer_cls: type) -> None:
    """Neither decay nor momentum moves them, although the optimizer holds them."""
    options = {"momentum": 0.9} if optimizer_cls is torch.optim.SGD else {}
    seen: list[torch.Tensor] = []

    def freeze(ctx: Any) -> None:
        if ctx.step_count == 3:
            ctx.model.hidden[0].requires_grad_(False)
        seen.append(ctx.model.hidden[0].weight.detach().clone())

    config = OptimizerConfig(optimizer_cls=optimizer_cls, lr=0.1, weight_decay=0.1, optimizer_kwargs=options)
    what = strategy(config, hooks=[At(Stage.AFTER_BATCH, freeze)])
    moments = run(what).flat_optimizers()[0][0].state[what.models["main"].hidden[0].weight]
    assert moments
    assert not torch.equal(seen[0], seen[2])
    assert all(torch.equal(each, seen[2]) for each in seen[2:])


# Schedules in a run -------------------------------------------------------------------------------------------------


class Every(TrainingUpdateHook):
    """Step in every second batch."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, ctx: Any, stage: Stage, will_skip: bool) -> tuple[bool, Any]:
        self.seen += stage is Stage.DO_OPTIMIZER_STEP
        return stage is not Stage.DO_OPTIMIZER_STEP or self.seen % 2 == 0, ctx.loss


def test_b45_a_schedule_counts_executed_steps() -> None:
    """B45: eight batches, four of them with a step: the rates are those of steps 0 to 3."""
    what = strategy(OptimizerConfig(lr=1.0, **WARMUP), num_steps=4, hooks=[Every()])
    seen: list[float] = []
    what.register_hook(
        At(Stage.BEFORE_OPTIMIZER_STEP, lambda ctx: seen.append(ctx.optimizers[0].param_groups[0]["lr"]))
    )
    run(what)
    assert (what.batch_count, what.step_count) == (8, 4)
    schedule = what.flat_optimizers()[1][0]
    assert seen == [schedule.factor(step) for step in range(4) for _ in range(2)]
    assert schedule.last_epoch == 4


def plateau(**fields: Any) -> OptimizerConfig:
    return OptimizerConfig(
        lr=1e-2,
        scheduler_cls=ReduceLROnPlateau,
        **{"scheduler_kwargs": {"patience": 0, "factor": 0.5, "threshold": 0.0}, **fields},
    )


@pytest.mark.parametrize(("cadence", "passes"), [({"every_n_steps": 3}, 3), ({"every_n_epochs": 1}, 2), ({}, 1)])
def test_b51_a_plateau_schedule_steps_at_either_cadence(cadence: dict[str, int], passes: int) -> None:
    """Eight steps in epochs of four: at 3, 6 and the end, or after both epochs, or at the end alone."""
    what = run(strategy(plateau(), num_steps=8, validation_config=validation(**cadence)))
    assert what.flat_optimizers()[1][0].last_epoch == passes


@pytest.mark.parametrize("cadence", [{"every_n_steps": 1}, {"every_n_epochs": 1}])
def test_b112_a_plateau_schedule_resumes_exactly(tmp_path: Path, cadence: dict[str, int]) -> None:
    """Its count of bad validations is part of what is restored; the metric never improves."""

    def worse(summary: Mapping[str, Any]) -> float:
        return 1.0

    config = plateau(scheduler_kwargs={"patience": 1, "factor": 0.5})
    options: dict[str, Any] = {"validation_config": validation(**cadence)}
    straight = run(strategy(config, num_steps=12, **options))
    run(strategy(config, num_steps=4, **options)).save_checkpoint(tmp_path)
    again = run(TrainingStrategy.load_checkpoint(tmp_path, num_steps=12, **options))
    ours, theirs = (what.flat_optimizers()[1][0].state_dict() for what in (again, straight))
    assert ours == theirs
    assert rates(again) == rates(straight)
    assert same(weights(again), weights(straight))


@pytest.mark.parametrize("adapter", ["energy_mae", "EnergyMSELoss", "total_loss"])
def test_b51_a_plateau_schedule_watches_any_number_of_the_summary(adapter: str) -> None:
    what = run(strategy(plateau(scheduler_metric_adapter=adapter), num_steps=1, validation_config=validation()))
    summary: Any = what.last_validation
    numbers = {**summary, **summary["metrics"], **summary["per_component_unweighted"]}
    assert what.flat_optimizers()[1][0].best == pytest.approx(float(numbers[adapter]))


DOORS: dict[str, Any] = {
    "run": lambda config, hooks: run(strategy(config, hooks=hooks, validation_config=validation())),
    "fit": lambda config, hooks: trainer(max_epochs=1).fit(
        module(config, hooks=hooks), OneLoader(batches()), OneLoader(batches())
    ),
}


@pytest.mark.parametrize("door", DOORS)
def test_b51_a_metric_that_no_summary_has_is_refused_before_training(door: str) -> None:
    config = plateau(scheduler_metric_adapter="energy_mea")
    message = r"'energy_mea' not found in validation summary; did you mean 'energy_mae'\?; available keys: \['EnergyMSE"
    seen: list[int] = []
    hooks = [At(Stage.BEFORE_TRAINING, lambda ctx: seen.append(1))]
    with pytest.raises(LabelNotFoundError, match=message):
        DOORS[door](config, hooks)
    assert not seen


def test_b51_a_metric_without_labels_is_named_at_the_first_validation() -> None:
    config = plateau(scheduler_metric_adapter="forces_mae")
    with pytest.raises(LabelNotFoundError, match=r"'forces_mae' not found .*available keys: \['EnergyMSELoss', "):
        run(strategy(config, num_steps=1, validation_config=validation()))


def test_a_hook_may_add_the_metric_that_a_schedule_watches() -> None:
    def add(ctx: Any) -> None:
        ctx.validation["mine"] = 3.0

    config = plateau(scheduler_metric_adapter="mine")
    what = strategy(config, num_steps=1, validation_config=validation(), hooks=[At(Stage.AFTER_VALIDATION, add)])
    assert run(what).flat_optimizers()[1][0].best == 3.0


def test_a_metric_of_nan_is_no_plateau() -> None:
    def nothing(summary: Mapping[str, Any]) -> float:
        return float("nan")

    config = plateau(scheduler_metric_adapter=nothing)
    what = strategy(config, num_steps=1, validation_config=validation())
    with pytest.raises(DataError, match="is NaN, which no schedule can compare: no validation structure has such"):
        run(what)


def test_every_number_of_a_summary_is_known_beforehand() -> None:
    what = run(strategy(OptimizerConfig(), num_steps=1, validation_config=validation()))
    summary: Any = what.last_validation
    numbers = {key for key, value in summary.items() if isinstance(value, int | float | torch.Tensor)}
    reported = {*numbers, *summary["metrics"], *summary["per_component_unweighted"]} - {"distributed_reduced"}
    assert reported <= summary_keys(what.loss_fn)


# LearningRateMonitor ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interval", [None, "step"])
@pytest.mark.parametrize("door", ["run", "fit"])
def test_b58_the_monitor_sees_every_optimizer_and_group_at_executed_steps(
    tmp_path: Path, door: str, interval: Any
) -> None:
    """Every second batch is vetoed; value and step agree with what the strategy logs itself."""
    monitor, logger = LearningRateMonitor(interval), CSVLogger(tmp_path)
    configs = (layered(), OptimizerConfig(optimizer_cls=torch.optim.SGD, lr=1e-4))
    if door == "run":
        what = strategy(*configs, num_steps=4, hooks=[Every(), monitor])
        run(what, logger=logger, log_every_n_steps=1)
    else:
        built = module(*configs, hooks=[Every()])
        trainer(max_steps=4, logger=logger, callbacks=[monitor]).fit(built, OneLoader(batches()))
        what = built.recipe
    schedule = what.flat_optimizers()[1][0]
    for name, base in (("default", 1e-2), ("embedding", 1e-3), ("readout/no_decay", 5e-2)):
        logged = column(tmp_path, f"lr-AdamW/{name}")
        assert logged == [(step, base * schedule.factor(step)) for step in range(4) for _ in range(2)]
    assert {rate for _, rate in column(tmp_path, "lr-SGD")} == {1e-4}
    own = dict(column(tmp_path, "optimizer/0/group_0/lr"))
    monitored = dict(column(tmp_path, "lr-AdamW/default"))
    assert all(own[step] == monitored[step] for step in range(1, 4))


def test_the_monitor_goes_on_counting_in_a_resumed_run(tmp_path: Path) -> None:
    config = OptimizerConfig(lr=1.0, **WARMUP)
    run(strategy(config, num_steps=3)).save_checkpoint(tmp_path / "saved")
    again = TrainingStrategy.load_checkpoint(tmp_path / "saved", num_steps=6, hooks=[LearningRateMonitor("step")])
    run(again, logger=CSVLogger(tmp_path), log_every_n_steps=1)
    schedule = again.flat_optimizers()[1][0]
    assert column(tmp_path, "lr-AdamW") == [(step, schedule.factor(step)) for step in (3, 4, 5)]


class SaveAtThree(Callback):
    """Save in the middle of an epoch, as `ModelCheckpoint` does."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(self.path)


def test_the_monitor_goes_on_counting_in_a_resumed_fit(tmp_path: Path) -> None:
    config = OptimizerConfig(lr=1.0, **WARMUP)
    trainer(max_steps=4, callbacks=[SaveAtThree(tmp_path / "saved.ckpt")]).fit(module(config), OneLoader(batches()))
    resumed = module(config)
    monitored = trainer(max_steps=6, logger=CSVLogger(tmp_path), callbacks=[LearningRateMonitor("step")])
    monitored.fit(resumed, OneLoader(batches()), ckpt_path=tmp_path / "saved.ckpt")
    schedule = resumed.recipe.flat_optimizers()[1][0]
    assert column(tmp_path, "lr-AdamW") == [(step, schedule.factor(step)) for step in (3, 4, 5)]


def test_a_pattern_without_a_parameter_is_refused_before_training() -> None:
    seen: list[int] = []
    what = strategy(
        layered(param_groups=[ParamGroup(pattern="*.readuot.*")]),
        hooks=[At(Stage.BEFORE_TRAINING, lambda ctx: seen.append(1))],
    )
    with pytest.raises(ConfigurationError, match=r"'\*\.readuot\.\*' matches no parameter; .*'main\.readout\."):
        run(what)
    assert not seen
