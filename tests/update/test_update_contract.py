"""What holds for every hook: one table, and each row through the same tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from rank_rigs import run_two_ranks
from update_contract_rigs import TABLE, close, fields, from_spec, loader, make, numbers, recipe, result
from update_rigs import At, Stage, run

from nvalchemi_lightning import hooks
from nvalchemi_lightning.feeding import OneLoader
from nvalchemi_lightning.hooks import GradientAccumulationHook
from nvalchemi_lightning.module import AlchemiModule

SCRIPT = Path(__file__).with_name("update_contract_ranks.py")

every_hook = pytest.mark.parametrize("name", TABLE)


def test_the_table_has_every_hook_of_the_package() -> None:
    public = {name: getattr(hooks, name) for name in hooks.__all__}
    called = {name for name, each in public.items() if any("__call__" in vars(base) for base in each.__mro__)}
    assert set(TABLE) == called - {"Hook", "TrainingUpdateHook", "TrainingUpdateOrchestrator"}


@every_hook
def test_its_state_goes_round(name: str) -> None:
    """A hook without state has neither method."""
    hook, fresh = make(name), make(name)
    what = recipe(hook)
    run(what, loader(4))
    if not hasattr(hook, "state_dict"):
        assert not hasattr(hook, "load_state_dict")
        return
    state = hook.state_dict()
    recipe(fresh)
    fresh.load_state_dict(state)
    assert numbers(fresh.state_dict()) == numbers(state)


@every_hook
@pytest.mark.parametrize("batch_count", [2, 5])
@pytest.mark.parametrize("accumulates", [False, True], ids=["", "under accumulation"])
def test_a_run_goes_on_bitwise(name: str, accumulates: bool, batch_count: int, tmp_path: Path) -> None:
    """A checkpoint in the middle of an epoch, and of a window, loaded into a new strategy."""

    def save(ctx: Any) -> None:
        if ctx.batch_count == batch_count:
            ctx.workflow.save_checkpoint(tmp_path)

    straight, resumed = make(name), make(name)
    accumulates &= not isinstance(straight, GradientAccumulationHook)
    whole = run(recipe(straight, *windows(accumulates), At(Stage.AFTER_BATCH, save)), loader(4))
    again = recipe(resumed, *windows(accumulates))
    again.restore_checkpoint(tmp_path)
    assert again.counters.batch_count == batch_count
    run(again, loader(4))
    assert result(again, resumed) == result(whole, straight)


def windows(wanted: bool) -> list[GradientAccumulationHook]:
    return [GradientAccumulationHook(3)] if wanted else []


@every_hook
def test_windows_are_large_batches(name: str) -> None:
    """Two batches per step give what one batch of twice the size gives."""
    ours, theirs = make(name), make(name)
    accumulates = isinstance(ours, GradientAccumulationHook)
    by_parts = run(recipe(ours) if accumulates else recipe(GradientAccumulationHook(2), ours), loader(2))
    at_once = run(recipe() if accumulates else recipe(theirs), loader(4))
    assert by_parts.step_count == at_once.step_count > 0
    by_parts.counters.batch_count, by_parts.counters.epoch_step_count = at_once.counters.batch_count, 0
    assert close(result(by_parts, ours), result(at_once, theirs))


@every_hook
def test_the_doors_give_the_same_bits(name: str) -> None:
    """`run`, a Trainer of the user's own, a job file's spec of the hook, and `train_batch`."""
    by_run, by_trainer, by_spec, by_hand = make(name), make(name), from_spec(name), make(name)
    what = run(recipe(by_run), loader(4))
    module = AlchemiModule(**fields(by_trainer))
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = Trainer(strategy="nvalchemi", accelerator="cpu", logger=False, max_epochs=2, **quiet)
    trainer.fit(module, OneLoader(loader(4)))
    assert result(module.recipe, by_trainer) == result(what, by_run)
    assert trainer.global_step == what.step_count
    assert result(run(recipe(by_spec), loader(4)), by_spec) == result(what, by_run)
    alone = recipe(by_hand)
    for batch in [*loader(4), *loader(4)]:
        alone.train_batch(batch)
    alone.counters.epoch_count = what.epoch_count  # train_batch knows no epochs
    assert result(alone, by_hand) == result(what, by_run)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[float]]]:
    """Run the script once and return what rank 0 and rank 1 found."""
    folder = tmp_path_factory.mktemp("ranks")
    run_two_ranks(SCRIPT, folder)
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in (0, 1)]


@every_hook
def test_two_ranks_are_one_process(ranks: list[dict[str, list[float]]], name: str) -> None:
    hook = make(name)
    single = result(run(recipe(hook), loader(4)), hook)
    assert ranks[0][name] == ranks[1][name]
    assert close(ranks[0][name], single)
