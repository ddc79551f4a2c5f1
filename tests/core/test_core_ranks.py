"""Two ranks on the CPU give the numbers of one process, decide alike, and fail together."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from core_rank_script import (
    Harm,
    force_loss,
    noted_run,
    numbered,
    partly_labelled,
    ragged_run,
    sgd,
    two,
    validation_of_five,
)
from core_rigs import trainer, w_of
from rank_rigs import run_two_ranks

from nvalchemi_lightning.counters import Counters
from nvalchemi_lightning.data import DataLoader
from nvalchemi_lightning.hooks import GradientAccumulationHook
from nvalchemi_lightning.module import AlchemiModule

SCRIPT = Path(__file__).with_name("core_rank_script.py")
Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Run the script once and return what rank 0 and rank 1 found."""
    folder = tmp_path_factory.mktemp("ranks")
    run_two_ranks(SCRIPT, folder)
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in (0, 1)]


def test_two_ranks_train_like_one_process_with_the_joined_batch(found: Found) -> None:
    """B05, B62: structures of different sizes, means over structures and over atoms, to 1e-12 after every step."""
    first, second = (rank["ragged"] for rank in found)
    assert first["weights"] == second["weights"]
    single = ragged_run(6)
    expected = torch.tensor(single["weights"], dtype=torch.float64)
    torch.testing.assert_close(torch.tensor(first["weights"], dtype=torch.float64), expected, rtol=0, atol=1e-12)
    joined = [sorted(a + b) for a, b in zip(first["numbers"], second["numbers"], strict=True)]
    assert joined == [sorted(numbers) for numbers in single["numbers"]]
    assert first["numbers"] != second["numbers"]


def test_the_counters_of_two_ranks(found: Found) -> None:
    for rank, results in enumerate(found):
        assert results["ragged"]["ranks"] == [rank]
        assert results["ragged"]["counts"] == [[step, 2 * step, step] for step in (1, 2, 3, 4)]
        assert results["ragged"]["counters"] == {
            "step_count": 4,
            "global_step_count": 8,
            "batch_count": 4,
            "epoch_count": 2,
            "epoch_step_count": 0,
        }


def test_gradients_are_shared_whoever_runs_backward(found: Found) -> None:
    """B05: the default and a claimant of DO_BACKWARD, with every way to set up DDP."""
    module = AlchemiModule(models=Harm(), optimizer_configs=sgd(), loss_fn=force_loss())
    trainer().fit(module, DataLoader(numbered(12), batch_size=4))
    expected = module.recipe.models["main"].w.item()
    first, second = (rank["owners_of_backward"] for rank in found)
    assert first == second
    assert len(first) == 6
    assert first == {name: [pytest.approx(expected, rel=0, abs=1e-12)] for name in first}


@pytest.mark.parametrize("normalize", ["labels", "graphs", "atoms", "batch"])
def test_windows_of_two_ranks_are_those_of_one_process(found: Found, normalize: str) -> None:
    """Graphs of different sizes, labels missing, the last window of an epoch half as long."""
    hook = GradientAccumulationHook(2, normalize=normalize)  # type: ignore[arg-type]
    single = noted_run(DataLoader(partly_labelled(12), batch_size=4), hook)
    for rank in found:
        ours = rank["accumulated"][normalize]
        assert ours["weights"] == pytest.approx(single["weights"], rel=0, abs=1e-12)
        assert at_steps(ours["gradients"]) == pytest.approx(at_steps(single["gradients"]), rel=0, abs=1e-12)
        assert ours["counters"] == {**single["counters"], "global_step_count": 8}


def at_steps(values: list[float]) -> list[float]:
    """Return what was noted at the ends of windows, of two epochs of three batches."""
    return [values[i] for i in (1, 2, 4, 5)]


def test_windows_of_two_ranks_are_large_batches(found: Found) -> None:
    whole = partly_labelled(12)
    large = noted_run([whole[list(range(8))], whole[list(range(8, 12))]])
    for rank in found:
        ours = rank["accumulated"]["labels"]
        for key in ("weights", "gradients"):
            assert at_steps(ours[key]) == pytest.approx(large[key], rel=0, abs=1e-12)


@pytest.mark.parametrize("options", ["{'static_graph': True}", "{'find_unused_parameters': True}"])
def test_windows_do_not_depend_on_how_ddp_is_set_up(found: Found, options: str) -> None:
    """B05: static graph and unused parameters under accumulation."""
    for rank in found:
        expected = rank["accumulated"]["labels"]["weights"]
        assert rank["accumulated"][options]["weights"] == pytest.approx(expected, rel=0, abs=1e-12)


def test_gradients_are_shared_once_per_window(found: Found) -> None:
    """Four steps of six batches; within a window every rank has a gradient of its own."""
    first, second = (rank["accumulated"]["labels"] for rank in found)
    assert first["shares"] == second["shares"] == 4
    alike = [abs(one - other) < 1e-12 for one, other in zip(first["gradients"], second["gradients"], strict=True)]
    assert alike == [False, True, True, False, True, True]


def test_ranks_stop_together_at_the_end_of_a_window(found: Found) -> None:
    for rank in found:
        assert rank["accumulated_stop"]["counters"]["step_count"] == 1
        assert rank["accumulated_stop"]["counters"]["batch_count"] == 4


@pytest.mark.parametrize("ranks", [1, 2])
def test_five_validation_samples_are_five(found: Found, ranks: int) -> None:
    """B10: on one rank and on two; the callback sees each sample once over all ranks."""
    parts = [validation_of_five(trainer)] if ranks == 1 else [rank["validation_of_five"] for rank in found]
    for part in parts:
        assert part["trainer.validate"] == pytest.approx(22.0, rel=1e-6)
        for name in ("list", "loader", "pairs", "unsized"):
            assert part[name]["total"] == pytest.approx(22.0, abs=1e-9), name
            assert part[name]["structures"] == 5
            assert part[name]["batches"] == (3 if name == "pairs" else 5)
            assert part[name]["reduced"] is (ranks == 2)
    for name in ("list", "loader", "pairs", "unsized"):
        assert sorted(chain(*(part[name]["seen"] for part in parts))) == [1.0, 2.0, 3.0, 4.0, 100.0]
        assert all(part[name]["seen"] for part in parts)


def test_ranks_decide_alike(found: Found) -> None:
    """B53: summary, learning rate, early stop and best checkpoint."""
    first, second = (rank["decisions"] for rank in found)
    assert first == second
    # Two batches per epoch, every step moves the weight by the rate: labels 0, 1000 and 5 are approached or left.
    assert first["summaries"][0] == pytest.approx((2 + 1002 + 7) / 3)
    assert first["summaries"] == sorted(first["summaries"])
    assert first["rates"] == pytest.approx([1, 1, 1, 1, 0.5, 0.5, 0.25, 0.25])
    assert first["steps"] == 8
    assert first["best"] == "step=2.ckpt"
    assert first["score"] == pytest.approx(first["summaries"][0])
    assert first["monitored"] == pytest.approx(first["summaries"][-1])
    assert first["files"] == ["step=2.ckpt", "step=4.ckpt", "step=6.ckpt", "step=8.ckpt"]


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("uneven", "ConfigurationError", r"different numbers of batches per epoch, [3, 2]"),
        ("one sample", "ConfigurationError", r"[1, 0]"),
        ("drop_last", "ConfigurationError", "3 sample"),
        ("one validation batch", "ConfigurationError", "1 batches for 2 ranks"),
        ("backward", "SecondOwnerError", "was accumulated at AFTER_LOSS"),
        ("step", "SecondOwnerError", "SGD.step() was called at AFTER_BACKWARD"),
    ],
)
def test_every_rank_fails_before_the_first_step(found: Found, name: str, kind: str, message: str) -> None:
    """B63, B81: never a hang, and the same message everywhere."""
    for results in found:
        error, text, steps = results["errors"][name]
        assert (error, steps) == (kind, 0)
        assert message in text


def test_parameters_without_a_gradient_are_explained(found: Found) -> None:
    for results in found:
        error, text, _ = results["errors"]["unused"]
        assert error == "RuntimeError"
        assert "SingleOwnerDDP(find_unused_parameters=True)" in text


def test_a_stop_request_of_one_rank_stops_both(found: Found) -> None:
    first, second = (rank["stop_of_one_rank"] for rank in found)
    assert first == second
    assert first["error"] == ""
    assert first["steps"] in (2, 3)


def test_forked_ranks_bring_weights_and_counters_back() -> None:
    """The variant for notebooks, which needs no script."""
    single = AlchemiModule(models=Harm(), optimizer_configs=sgd(), loss_fn=force_loss())
    trainer().fit(single, DataLoader(numbered(12), batch_size=4))
    module = AlchemiModule(models=Harm(), optimizer_configs=sgd(), loss_fn=force_loss())
    two(strategy="nvalchemi_ddp_notebook").fit(module, DataLoader(numbered(12), batch_size=2))
    assert w_of(module.recipe) == pytest.approx(w_of(single.recipe), rel=0, abs=1e-12)
    assert module.recipe.counters == Counters(3, 6, 3, 1, 0)
