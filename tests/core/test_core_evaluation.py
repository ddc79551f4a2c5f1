"""Evaluation by a Trainer, shared among ranks, and without leaving a graph behind."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from core_rigs import (
    At,
    ConstGrad,
    Harm,
    Recorder,
    batches,
    config,
    force_loss,
    per_graph,
    run,
    sgd,
    strategy,
    structures,
    trainer,
    w_of,
)
from lightning.pytorch import Trainer
from torch import Tensor, nn

from nvalchemi_lightning.data import DataLoader
from nvalchemi_lightning.errors import (
    ConfigurationError,
)
from nvalchemi_lightning.feeding import OneLoader
from nvalchemi_lightning.losses import (
    BaseLossFunction,
)
from nvalchemi_lightning.module import AlchemiModule
from nvalchemi_lightning.stages import TrainingStage
from nvalchemi_lightning.validation import (
    ValidationConfig,
)
from nvalchemi_lightning.validation.evaluation import EvaluationLoader

Stage = TrainingStage


def truth(batch: Any, w: float = 1.0) -> tuple[Tensor, Tensor]:
    return per_graph(0.5 * w * batch.positions.square().sum(-1), batch), -w * batch.positions


@pytest.mark.parametrize("options", [{}, {"inference_mode": True}, {"inference_mode": False}], ids=str)
def test_forces_outside_training(options: dict[str, Any]) -> None:
    """B04: validate, test and predict differentiate without a flag of the user's."""
    module = AlchemiModule(models=Harm(), loss_fn=force_loss(), optimizer_configs=sgd())
    data = OneLoader(batches(2, 3, seed=9))
    t = trainer(**options)
    t.fit(module, OneLoader(batches(1)), data)
    w = w_of(module.recipe)
    expected = module.recipe.last_validation["total_loss"].item()  # type: ignore[index]
    (validated,) = t.validate(module, data, verbose=False)
    (tested,) = t.test(module, data, verbose=False)
    assert validated["validation/total_loss"] == pytest.approx(expected, rel=1e-6)
    assert tested["test/total_loss"] == pytest.approx(expected, rel=1e-6)
    predicted = t.predict(module, data)
    assert predicted is not None
    for batch, output in zip(batches(2, 3, seed=9), predicted, strict=True):
        energy, forces = truth(batch, w)
        torch.testing.assert_close(output["energy"], energy)
        torch.testing.assert_close(output["predicted_forces"], forces)
        assert not any(value.requires_grad for value in output.values())


def test_evaluation_needs_no_optimizer() -> None:
    module = AlchemiModule(models=Harm(), loss_fn=force_loss())
    t = trainer()
    (result,) = t.validate(module, OneLoader(batches(2)), verbose=False)
    assert result["validation/total_loss"] > 0.0
    assert t.predict(module, OneLoader(batches(2))) is not None


def test_a_configured_pass_through_a_trainer() -> None:
    module = AlchemiModule(models=Harm(), loss_fn=force_loss(), validation_config=config(name="holdout"))
    (result,) = trainer().validate(module, verbose=False)
    assert set(result) >= {"holdout/total_loss", "holdout/EnergyMSELoss", "holdout/ForceMSELoss"}
    assert {name.partition("/")[0] for name in result} == {"holdout"}


def test_a_trainer_that_validates_without_data_says_so() -> None:
    module = AlchemiModule(models=Harm(), loss_fn=force_loss())
    with pytest.raises((ConfigurationError, ValueError), match=r"validation_config|dataloader"):
        trainer().validate(module, verbose=False)


def test_evaluation_by_a_trainer_fires_the_stages_of_validation() -> None:
    recorder = Recorder()
    module = AlchemiModule(models=Harm(), loss_fn=force_loss(), hooks=[recorder])
    trainer().validate(module, OneLoader(batches(2)), verbose=False)
    assert recorder.names == ["[BEFORE_FORWARD]", "[AFTER_FORWARD]", "AFTER_VALIDATION"]
    recorder.rows.clear()
    trainer().predict(module, OneLoader(batches(2)))
    assert recorder.names == ["[BEFORE_FORWARD]", "[AFTER_FORWARD]"]


def test_a_share_of_the_validation_batches() -> None:
    module = AlchemiModule(models=Harm(), loss_fn=force_loss(), optimizer_configs=sgd())
    trainer(limit_val_batches=1).fit(module, OneLoader(batches(1)), OneLoader(batches(2, 3)))
    assert module.recipe.last_validation["num_structures"] == 2  # type: ignore[index]


def test_no_validation_batches_is_no_validation() -> None:
    recorder = Recorder([Stage.AFTER_VALIDATION])
    run(strategy(validation_config=config(), hooks=[recorder]), batches(1), limit_val_batches=0)
    assert recorder.rows == []


def test_the_sanity_check_of_a_trainer_is_no_validation() -> None:
    recorder = Recorder([Stage.AFTER_VALIDATION])
    module = AlchemiModule(models=Harm(), loss_fn=force_loss(), optimizer_configs=sgd(), hooks=[recorder], num_steps=1)
    t: Trainer = trainer(num_sanity_val_steps=2, max_epochs=-1)
    seen: list[Any] = []
    module.recipe.register_hook(At(Stage.BEFORE_BATCH, lambda ctx: seen.append(ctx.validation)))
    t.fit(module, OneLoader(batches(1)), OneLoader(batches(1, 1, 1)))
    assert seen == [None]
    assert recorder.rows == [("AFTER_VALIDATION", 1, 1, 1, 0)]


@pytest.mark.parametrize(("rank", "world", "expected"), [(0, 1, "abcde"), (0, 2, "ace"), (1, 2, "bd"), (2, 3, "c")])
def test_the_ranks_share_the_batches(rank: int, world: int, expected: str) -> None:
    named = dict(zip("abcde", batches(1, 1, 1, 1, 1), strict=True))
    share = EvaluationLoader.wrap(EvaluationLoader.wrap(list(named.values())), rank, world)
    assert [name for batch in share for name in named if named[name] is batch] == list(expected)
    assert len(share) == len(expected)


def test_fewer_batches_than_ranks_are_refused() -> None:
    with pytest.raises(
        ConfigurationError, match="has 1 batches for 2 ranks; use smaller batches so that each gets one"
    ):
        EvaluationLoader([1], 0, 2)


# Memory


@pytest.fixture
def graph_tensors() -> Iterator[Callable[[], int]]:
    """Return what counts the tensors with a graph that were made since."""

    def count() -> int:
        gc.collect()
        return sum(1 for thing in gc.get_objects() if issubclass(type(thing), Tensor) and thing.grad_fn is not None)

    gc.collect()
    gc.freeze()
    yield count
    gc.unfreeze()


def test_no_graph_outlives_its_batch(graph_tensors: Callable[[], int]) -> None:
    """B43: as many tensors with a graph before batch 100 as before batch 10, with and without validation."""
    counts: dict[int, int] = {}

    def measure(ctx: Any) -> None:
        if ctx.batch_count in (10, 60, 100):
            counts[ctx.batch_count] = graph_tensors()

    what = strategy(
        num_steps=101,
        hooks=[At(Stage.BEFORE_BATCH, measure)],
        validation_config=config(every_n_steps=20, grad_mode="enabled"),
    )
    run(what, batches(*[1] * 10))
    assert counts == {10: 0, 60: 0, 100: 0}
    assert graph_tensors() == 0
    kept = what.models["main"](batches(1)[0])
    assert graph_tensors() > 0, "the count must see a graph that is kept"
    assert kept


def test_no_graph_outlives_a_validation_batch(graph_tensors: Callable[[], int]) -> None:
    counts: list[int] = []

    class KeepsGraph(Harm):
        def forward(self, batch: Any) -> dict[str, Tensor]:
            counts.append(graph_tensors())
            positions = batch.positions.detach().requires_grad_(True)
            energy = per_graph(0.5 * self.w * positions.square().sum(-1), batch)
            forces = -torch.autograd.grad(energy.sum(), positions, create_graph=True)[0]
            return {"energy": energy, "forces": forces}

    strategy(models=KeepsGraph(), validation_config=config(*[1] * 8)).validate()
    assert len(counts) == 8
    assert counts[2:] == counts[1:-1]


def test_a_run_without_hooks_keeps_no_graph(graph_tensors: Callable[[], int]) -> None:
    run(strategy(), batches(2, 3))
    assert graph_tensors() == 0


def test_data_loaders_of_the_package_are_validation_data() -> None:
    loader = DataLoader(structures(5, seed=9), batch_size=2)
    summary = strategy(validation_config=ValidationConfig(validation_data=loader)).validate()
    expected = strategy(validation_config=config(5)).validate()
    assert summary["total_loss"].item() == pytest.approx(expected["total_loss"].item(), abs=1e-12)


class Custom(BaseLossFunction):
    """A user's own term: the mean of the predicted energies."""

    requires_eval_grad = False
    prediction_key = "predicted_energy"
    target_key = "energy"

    def compute_residual(self, pred: Tensor, target: Tensor, valid: Tensor) -> Tensor:
        return pred - target


@pytest.mark.parametrize("sizes", [[5], [2, 3], [1, 1, 3], [1] * 5], ids=str)
def test_a_term_of_ones_own_is_averaged_over_structures(sizes: list[int]) -> None:
    what = strategy(models=ConstGrad(), loss_fn=Custom(), validation_config=config(*sizes))
    expected = -sum(data.energy.item() for data in structures(5, seed=9)) / 5
    assert what.validate()["total_loss"].item() == pytest.approx(expected, abs=1e-12)


def test_an_error_of_the_model_is_handed_on_as_it_is() -> None:
    def broken(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        raise RuntimeError("sizes differ")

    what = strategy(validation_config=config(validation_fn=broken))
    with pytest.raises(RuntimeError, match="sizes differ") as caught:
        what.validate()
    assert not hasattr(caught.value, "__notes__")
