"""What a Trainer of one's own may ask, what travels with the weights, and what hooks defer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from core_rigs import At, Harm, batches, force_loss, run, sgd, strategy, trainer, w_of

from nvalchemi_lightning.errors import ConfigurationError
from nvalchemi_lightning.feeding import OneLoader
from nvalchemi_lightning.module import AlchemiModule
from nvalchemi_lightning.stages import TrainingStage
from nvalchemi_lightning.validation import ValidationConfig

Stage = TrainingStage


def fitted(train: Any = None, **options: Any) -> tuple[AlchemiModule, Any]:
    """Fit two batches with validation and return module and Trainer."""
    module = AlchemiModule(models=Harm(), optimizer_configs=sgd(), loss_fn=force_loss())
    t = trainer(**{"max_epochs": 2, **options})
    t.fit(module, OneLoader(batches(2, 3)) if train is None else train, OneLoader(batches(2)))
    return module, t


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"fast_dev_run": True}, 1),
        ({"overfit_batches": 1}, 2),
        ({"min_epochs": 2}, 4),
        ({"detect_anomaly": True}, 4),
        ({"deterministic": True}, 4),
        ({"max_epochs": None, "max_steps": 3}, 3),
        ({"max_epochs": 0}, 0),
        ({"max_steps": 0}, 0),
    ],
    ids=str,
)
def test_options_that_change_no_number(options: dict[str, Any], steps: int) -> None:
    module, t = fitted(**options)
    assert (module.recipe.step_count, t.global_step) == (steps, steps)
    loader = batches(2, 3)[:1] if "overfit_batches" in options else batches(2, 3)
    expected = w_of(run(strategy(num_steps=steps), loader)) if steps else 1.0
    assert w_of(module.recipe) == expected


def test_reloading_the_loader_every_epoch_works_or_is_named() -> None:
    try:
        module, _ = fitted(reload_dataloaders_every_n_epochs=1)
    except ConfigurationError as error:
        assert "reload_dataloaders_every_n_epochs" in str(error)  # noqa: PT017
    else:
        assert (module.recipe.step_count, module.recipe.epoch_count) == (4, 2)


def test_a_barebones_trainer() -> None:
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"))
    module, _ = fitted(barebones=True, num_sanity_val_steps=None, **off)
    assert module.recipe.step_count == 4


def test_a_fit_without_a_loader_says_so() -> None:
    module = AlchemiModule(models=Harm(), optimizer_configs=sgd(), loss_fn=force_loss())
    with pytest.raises(
        ConfigurationError, match=r"there is no training data; write trainer.fit\(module, train_dataloa"
    ):
        trainer().fit(module)


def test_counters_travel_with_the_weights() -> None:
    module, _ = fitted()
    fresh = AlchemiModule(models=Harm(), optimizer_configs=sgd(), loss_fn=force_loss())
    fresh.load_state_dict(module.state_dict())
    assert fresh.recipe.counters == module.recipe.counters
    assert fresh.recipe.step_count == 4
    assert w_of(fresh.recipe) == w_of(module.recipe)


def test_a_module_that_moves_batches_in_its_own_way_is_asked() -> None:
    moved: list[int] = []

    class Own(AlchemiModule):
        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            moved.append(batch.num_graphs)
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

    module = Own(models=Harm(), optimizer_configs=sgd(), loss_fn=force_loss())
    trainer().fit(module, OneLoader(batches(2, 3)), OneLoader(batches(4)))
    assert moved == [2, 3, 4]


def test_what_the_environment_says_about_ranks_changes_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A left-over WORLD_SIZE does not inflate the steps of all ranks."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    what = run(strategy(), batches(1, 1))
    what.train_batch(batches(1)[0])
    assert (what.step_count, what.global_step_count) == (3, 3)


def test_deferred_actions_run_at_the_end_of_their_point() -> None:
    """After the validation that is due there and the schedulers that listen to it."""
    log: list[str] = []

    def defer(name: str) -> Any:
        return lambda ctx: ctx.workflow.defer(lambda: log.append(f"{name} {ctx.workflow.step_count}"))

    plateau = sgd(1e-3, scheduler_cls=torch.optim.lr_scheduler.ReduceLROnPlateau, scheduler_kwargs={"patience": 0})
    hooks = [
        At(Stage.AFTER_BATCH, defer("batch")),
        At(Stage.AFTER_EPOCH, defer("epoch")),
        At(Stage.AFTER_VALIDATION, lambda ctx: log.append(f"validation {ctx.step_count}")),
    ]
    config = ValidationConfig(validation_data=batches(2), every_n_steps=2)
    what = strategy(num_steps=3, hooks=hooks, optimizer_configs=plateau, validation_config=config)
    scheduler = what.flat_optimizers()[1][0]
    what.register_hook(
        At(Stage.AFTER_BATCH, lambda ctx: ctx.workflow.defer(lambda: log.append(f"plateau {scheduler.last_epoch}")))
    )
    run(what, batches(1, 1, 1))
    assert log == [
        *("batch 1", "plateau 0"),
        *("validation 2", "batch 2", "plateau 1"),
        *("batch 3", "plateau 1"),
        *("epoch 3", "validation 3"),
    ]


def test_deferred_actions_of_a_failed_run_are_forgotten() -> None:
    log: list[int] = []

    def defer_and_fail(ctx: Any) -> None:
        if ctx.step_count == 0:
            ctx.workflow.defer(lambda: log.append(ctx.step_count))
            raise ZeroDivisionError

    failing = At(Stage.AFTER_LOSS, defer_and_fail)
    what = strategy(hooks=[failing])
    with pytest.raises(ZeroDivisionError):
        run(what, batches(1))
    failing._function = lambda ctx: None
    run(what, batches(1))
    assert log == []


def test_train_batch_runs_deferred_actions() -> None:
    log: list[int] = []
    what = strategy(hooks=[At(Stage.AFTER_LOSS, lambda ctx: ctx.workflow.defer(lambda: log.append(what.step_count)))])
    what.train_batch(batches(1)[0])
    assert log == [1]
