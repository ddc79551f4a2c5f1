"""Which checkpoints stay when new ones come."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoint_rigs import batches, contents, rebuilt, run, strategy
from pydantic import ValidationError

from nvalchemi_lightning.checkpoint import save
from nvalchemi_lightning.checkpoint.layout import indices, record_file
from nvalchemi_lightning.checkpoint.pruning import best_index, prune, prune_checkpoints, retain
from nvalchemi_lightning.checkpoint.reading import recorded_metrics
from nvalchemi_lightning.checkpoint.snapshot import take_snapshot
from nvalchemi_lightning.checkpoint.writing import write
from nvalchemi_lightning.errors import ConfigurationError
from nvalchemi_lightning.hooks import CheckpointHook
from nvalchemi_lightning.validation import ValidationConfig

LOSSES = (5.0, 1.0, 3.0, 1.0, 4.0)


def validating(**cadence: Any) -> ValidationConfig:
    return ValidationConfig(validation_data=batches(1, seed=7), **(cadence or {"every_n_steps": 1}))


class Scripted(CheckpointHook):
    """Write down the losses of a script instead of those of the validation."""

    def _write(self, folder: Path, snapshot: Any) -> None:
        snapshot.metrics["total_loss"] = LOSSES[snapshot.strategy["runtime_state"]["step_count"] - 1]
        super()._write(folder, snapshot)


@pytest.mark.parametrize("async_save", [True, False])
@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"keep_last": 2}, [3, 4]),
        ({"keep_last": 9}, [0, 1, 2, 3, 4]),
        # of two equal ones the newer
        ({"keep_best": "total_loss"}, [3, 4]),
        ({"keep_best": "total_loss", "keep_last": 1}, [3, 4]),
        ({"keep_best": "total_loss", "keep_last": 3}, [2, 3, 4]),
    ],
)
def test_what_stays(root: Path, options: dict[str, Any], kept: list[int], async_save: bool) -> None:
    hook = Scripted(root, step_interval=1, async_save=async_save, **options)
    run(strategy(num_steps=5, validation_config=validating(), hooks=[hook]))
    assert indices(root) == kept
    assert [rebuilt(root, index).step_count for index in kept] == [index + 1 for index in kept]
    leftover = {name for name in contents(root) for gone in {0, 1, 2, 3, 4} - {*kept} if name.endswith(f"/{gone}.pt")}
    assert not leftover


def with_losses(root: Path, losses: list[float]) -> None:
    """Save a checkpoint per loss and keep the best and the newest."""
    for loss in losses:
        snapshot = take_snapshot(strategy())
        write(root, replace(snapshot, metrics={"total_loss": loss} if math.isfinite(loss) else {}))
        retain(root, 1, "total_loss")


def test_b71_a_restart_does_not_forget_the_best(root: Path) -> None:
    """B71: 0.3, 0.1, restart, 0.5, 0.2: the one of 0.1 stays, because its number is in the folder."""
    with_losses(root, [0.3, 0.1])
    with_losses(root, [0.5, 0.2])
    assert indices(root) == [1, 3]
    assert recorded_metrics(root, 1) == {"total_loss": 0.1}


def test_b100_the_best_is_not_the_latest(root: Path) -> None:
    """B100: 0.5, 0.2, 0.9, NaN; what is not a number never wins."""
    with_losses(root, [0.5, 0.2, 0.9, math.nan])
    assert indices(root) == [1, 3]
    assert best_index(root, "total_loss") == 1


def test_the_best_is_known_after_a_restart(root: Path) -> None:
    hook = Scripted(root, step_interval=1, keep_best="total_loss")
    run(strategy(num_steps=3, validation_config=validating(), hooks=[hook]))
    assert indices(root) == [1, 2]
    again = Scripted(root, step_interval=1, keep_best="total_loss")
    what = rebuilt(root, validation_config=validating(), hooks=[again], num_steps=5)
    run(what)
    assert indices(root) == [3, 4]


def test_metrics_are_those_of_the_saved_weights(root: Path) -> None:
    what = strategy(num_steps=4, validation_config=validating(every_n_steps=2), hooks=[])
    hook = CheckpointHook(root, step_interval=1)
    what.register_hook(hook)
    run(what)
    assert [bool(recorded_metrics(root, index)) for index in range(4)] == [False, True, False, True]
    assert recorded_metrics(root, 3)["total_loss"] == pytest.approx(float(what.last_validation["total_loss"]), rel=0)
    assert "EnergyMSELoss" in recorded_metrics(root, 3)


def test_the_best_needs_a_validation(root: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"CheckpointHook\(keep_best='total_loss'\) compares validations, but"):
        run(strategy(hooks=[CheckpointHook(root, step_interval=1, keep_best="total_loss")]))


@pytest.mark.parametrize("options", [{"keep_last": 0}, {"keep_best": ""}])
def test_wrong_options(options: Any) -> None:
    with pytest.raises(ValidationError, match=next(iter(options))):
        CheckpointHook("x", step_interval=1, **options)


def test_pruning_by_hand(root: Path) -> None:
    what = strategy()
    for _ in range(4):
        save(what, root)
    assert prune(root, [1]) == [0, 2]  # the newest stays unasked
    assert indices(root) == [1, 3]
    assert retain(root, None, None) == []
    assert best_index(root, "total_loss") is None


def test_a_damaged_record_has_no_metrics(root: Path) -> None:
    save(strategy(), root)
    (root / record_file(0)).write_text("{")
    assert recorded_metrics(root, 0) == {}


def test_pruning_on_request(root: Path) -> None:
    what = strategy()
    for _ in range(5):
        save(what, root)
    before = contents(root)
    assert prune_checkpoints(root, keep_last=2, dry_run=True) == [0, 1, 2]
    assert contents(root) == before
    assert prune_checkpoints(root, keep_last=2) == [0, 1, 2]
    assert indices(root) == [3, 4]


def test_what_is_not_complete_does_not_count_as_kept(root: Path) -> None:
    what = strategy()
    for _ in range(4):
        save(what, root)
    for index in (2, 3):
        (root / f"models/main/checkpoints/{index}.pt").unlink()
    assert prune_checkpoints(root, keep_last=1) == [0, 2]
    assert indices(root) == [1, 3]


def test_nothing_is_pruned_by_mistake(root: Path) -> None:
    save(strategy(), root)
    save(strategy(), root)
    with pytest.raises(ValueError, match="say which checkpoints stay"):
        prune_checkpoints(root)
    with pytest.raises(ValueError, match="keep_last must be at least 1; got 0"):
        prune_checkpoints(root, keep_last=0)
    with pytest.raises(ValueError, match="has recorded 'energy_mae'; recorded are none"):
        prune_checkpoints(root, keep_best="energy_mae")
    with pytest.raises(FileNotFoundError, match="holds no checkpoints"):
        prune_checkpoints(root / "absent", keep_last=1)
    assert indices(root) == [0, 1]
