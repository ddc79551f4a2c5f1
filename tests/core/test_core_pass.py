"""One validation pass: modes, gradients, hooks, the callback, averaged weights; and what it leaves untouched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import zarr
from core_rigs import (
    At,
    ConstGrad,
    Harm,
    Recorder,
    batches,
    config,
    constant_loss,
    per_graph,
    run,
    sgd,
    strategy,
    w_of,
)
from torch import Tensor, nn

from nvalchemi_lightning.errors import (
    ConfigurationError,
    ConfigurationTypeError,
    TrainingStateError,
    UnknownNameError,
)
from nvalchemi_lightning.losses import (
    EnergyMSELoss,
    ForceMSELoss,
)
from nvalchemi_lightning.stages import TrainingStage
from nvalchemi_lightning.validation import (
    BatchValidationCallback,
    ValidationConfig,
)

Stage = TrainingStage


def test_the_validation_function_has_the_shape_of_the_training_function() -> None:
    def constant(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"predicted_energy": batch.energy + 2.0, "predicted_forces": batch.forces}

    what = strategy(validation_config=config(validation_fn=constant))
    assert what.validate()["per_component_unweighted"]["EnergyMSELoss"].item() == pytest.approx(4.0)


@pytest.mark.parametrize("mode", ["auto", "enabled", "disabled"])
def test_the_grad_mode_of_a_model_without_gradients(mode: str) -> None:
    seen: list[bool] = []

    class Probe(ConstGrad):
        def forward(self, batch: Any) -> dict[str, Tensor]:
            seen.append(torch.is_grad_enabled())
            return super().forward(batch)

    what = strategy(models=Probe(), loss_fn=constant_loss(), validation_config=config(1, grad_mode=mode))
    what.validate()
    assert seen == [mode == "enabled"]
    run(what, batches(1))
    assert seen[1:] == [True, mode == "enabled"]


def test_a_force_loss_turns_gradients_on() -> None:
    model = Harm()
    del type(model).requires_autograd
    try:
        strategy(models=model, loss_fn=ForceMSELoss(), validation_config=config()).validate()
    finally:
        Harm.requires_autograd = True


def test_a_model_that_needs_autograd_validates_an_energy_loss() -> None:
    strategy(loss_fn=EnergyMSELoss(), validation_config=config()).validate()


class Undeclared(nn.Module):
    """A model that differentiates without saying so."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Harm()

    def forward(self, batch: Any) -> dict[str, Tensor]:
        output: dict[str, Tensor] = self.inner(batch)
        return output


def test_a_model_that_differentiates_without_saying_so_works_or_is_told_what_to_set() -> None:
    what = strategy(models=Undeclared(), loss_fn=EnergyMSELoss(), validation_config=config())
    try:
        what.validate()
    except Exception as error:  # noqa: BLE001  whatever it is, it must name the setting
        assert "grad_mode" in "".join([str(error), *getattr(error, "__notes__", ())])  # noqa: PT017


def test_an_undeclared_term_is_told_what_to_set() -> None:
    class Silent(EnergyMSELoss):
        requires_eval_grad = None

    what = strategy(models=ConstGrad(), loss_fn=Silent(), validation_config=config())
    with pytest.raises(ConfigurationError, match=r"Cannot infer whether Silent needs gradients.*grad_mode"):
        what.validate()
    what.validation_config = config(grad_mode="disabled")
    what.validate()


def tree() -> nn.Module:
    class Tree(Harm):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout())
            self.frozen[0].eval()

    return Tree()


@pytest.mark.parametrize("set_eval", [True, False])
@pytest.mark.parametrize("door", ["validate", "run"])
def test_every_mode_is_restored(set_eval: bool, door: str) -> None:
    model, seen = tree(), []
    before = [module.training for module in model.modules()]
    check = At(Stage.BEFORE_FORWARD, lambda ctx: ctx.validating and seen.append([m.training for m in model.modules()]))
    what = strategy(models=model, validation_config=config(1, set_eval=set_eval), hooks=[check])
    what.validate() if door == "validate" else run(what, batches(1))
    assert seen == [[False] * len(before) if set_eval else before]
    assert [module.training for module in model.modules()] == before


@pytest.mark.parametrize("door", ["validate", "run"])
def test_every_mode_is_restored_after_a_failure(door: str) -> None:
    def fail(**_: Any) -> None:
        raise ZeroDivisionError("in the callback")

    model = tree()
    before = [module.training for module in model.modules()]
    what = strategy(models=model, validation_config=config(batch_callback=fail))
    with pytest.raises(ZeroDivisionError, match="in the callback"):
        what.validate() if door == "validate" else run(what, batches(1))
    assert [module.training for module in model.modules()] == before
    assert not what.scope.active


def test_a_pass_changes_no_weight_and_no_gradient() -> None:
    model = Harm()
    model.w.grad = torch.tensor(3.0, dtype=torch.float64)
    strategy(models=model, validation_config=config(grad_mode="enabled")).validate()
    assert (model.w.item(), model.w.grad.item()) == (1.0, 3.0)


def test_hooks_prepare_validation_batches_without_changing_the_data() -> None:
    def shift(ctx: Any) -> None:
        if ctx.validating:
            ctx.batch.positions = ctx.batch.positions * 0.0

    data = batches(2, seed=9)
    kept = data[0].positions.clone()
    what = strategy(validation_config=ValidationConfig(validation_data=data), hooks=[At(Stage.BEFORE_FORWARD, shift)])
    first, second = what.validate(), what.validate()
    assert torch.equal(data[0].positions, kept)
    assert first["total_loss"] == second["total_loss"]


def test_a_hook_may_redirect_predictions_of_a_pass() -> None:
    def truth(ctx: Any) -> None:
        ctx.predictions = {"predicted_energy": ctx.batch.energy, "predicted_forces": ctx.batch.forces}

    what = strategy(validation_config=config(), hooks=[At(Stage.AFTER_FORWARD, truth)])
    assert what.validate()["total_loss"] == 0.0


def test_a_pass_that_returns_no_mapping_is_refused() -> None:
    what = strategy(validation_config=config(validation_fn=lambda model, batch: [1]))
    with pytest.raises(ConfigurationTypeError, match="must return a mapping of predictions; got list"):
        what.validate()


def test_validating_alone_fires_after_validation() -> None:
    recorder = Recorder([Stage.AFTER_VALIDATION])
    what = strategy(validation_config=config(), hooks=[recorder])
    summary = what.validate()
    assert recorder.names == ["AFTER_VALIDATION"]
    assert what.last_validation is summary


def test_validating_from_a_hook_of_a_run() -> None:
    totals: list[float] = []
    recorder = Recorder([Stage.AFTER_VALIDATION])
    validate = At(Stage.AFTER_BATCH, lambda ctx: totals.append(ctx.workflow.validate()["total_loss"].item()))
    run(strategy(hooks=[validate, recorder], validation_config=config(), num_steps=2), batches(2, 3))
    assert len(totals) == 2
    assert totals[0] > totals[1]
    assert recorder.rows == [("AFTER_VALIDATION", 1, 1, 0, 1), ("AFTER_VALIDATION", 2, 2, 0, 2)]


def test_every_pass_is_a_whole_pass() -> None:
    """B32: also after an interrupted pass and after a run that stopped within an epoch."""
    counts: list[int] = []
    broken = [2]

    def count(*, batch_count: int, **_: Any) -> None:
        if broken and batch_count == broken[0]:
            broken.pop()
            raise ZeroDivisionError("once")
        counts.append(batch_count)

    what = strategy(num_steps=3, validation_config=config(1, 1, 1, 1, 1, every_n_steps=3, batch_callback=count))
    with pytest.raises(ZeroDivisionError):
        run(what, batches(1, 1))
    assert counts == [0, 1]
    counts.clear()
    what.num_steps = 7
    run(what, batches(1, 1))
    assert counts == [0, 1, 2, 3, 4] * 2
    assert what.last_validation["num_batches"] == 5  # type: ignore[index]


# The callback


class ZarrBatchSink:
    def __init__(self, store):
        self._store = store

    def __call__(self, *, batch, predictions, loss, batch_count, step_count, epoch):
        group = self._store.require_group(f"step_{step_count}")
        group[f"batch_{batch_count}"] = predictions["energy"].cpu().numpy()


def test_the_sink_of_the_guide_writes_every_batch(tmp_path: Path) -> None:
    store = zarr.open_group(tmp_path / "sink.zarr", mode="w")
    what = strategy(num_steps=2, validation_config=config(every_n_steps=1, batch_callback=ZarrBatchSink(store)))
    run(what, batches(1, 1))
    assert sorted(store) == ["step_1", "step_2"]
    written = zarr.open_group(tmp_path / "sink.zarr", mode="r")
    energies = written["step_2/batch_1"][:]
    batch = batches(2, 3, seed=9)[1]
    expected = per_graph(0.5 * w_of(what) * batch.positions.square().sum(-1), batch)
    assert torch.allclose(torch.from_numpy(energies), expected)


def test_the_callback_gets_detached_values_by_keyword() -> None:
    calls: list[dict[str, Any]] = []
    what = strategy(num_steps=2, validation_config=config(batch_callback=lambda **given: calls.append(given)))
    run(what, batches(1, 1))
    assert isinstance(ZarrBatchSink({}), BatchValidationCallback)
    assert [call["batch_count"] for call in calls] == [0, 1]
    for call in calls:
        assert set(call) == {"batch", "predictions", "loss", "batch_count", "step_count", "epoch"}
        assert (call["step_count"], call["epoch"]) == (2, 1)
        assert call["batch"].num_graphs in (2, 3)
        assert not any(value.requires_grad for value in call["predictions"].values())
        assert set(call["predictions"]) == {"predicted_energy", "predicted_forces"}
        assert call["predictions"]["energy"] is call["predictions"]["predicted_energy"]
        assert not call["loss"]["total_loss"].requires_grad
        assert not any(value.requires_grad for value in call["loss"]["per_component_unweighted"].values())
    with pytest.raises(KeyError, match=r"no prediction .*stress.*predicted_energy"):
        calls[0]["predictions"]["stress"]


# Averaged weights and mixed precision


def test_the_slot_of_averaged_weights() -> None:
    what = strategy(validation_config=config())
    live = what.validate()["total_loss"]
    what.set_inference_model(Harm(2.0))
    averaged = what.validate()
    assert averaged["total_loss"].item() == pytest.approx(0.0, abs=1e-20)
    assert (averaged["model_source"], averaged["ema_model_keys"]) == ("ema", ["main"])
    what.validation_config = config(use_ema="never")
    assert what.validate()["total_loss"] == live
    assert what.last_validation["model_source"] == "live"  # type: ignore[index]
    assert w_of(what) == 1.0


def named(**fields: Any) -> Any:
    def forward(models: Any, batch: Any) -> dict[str, Tensor]:
        outputs = [models["a"](batch), models["b"](batch)]
        return {f"predicted_{key}": 0.5 * (outputs[0][key] + outputs[1][key]) for key in ("energy", "forces")}

    models = {"a": Harm(), "b": Harm(3.0)}
    return strategy(models=models, training_fn=forward, optimizer_configs={"a": [sgd()]}, **fields)


def test_averaged_weights_of_named_models() -> None:
    what = named(validation_config=config())
    assert what.validate()["total_loss"].item() == pytest.approx(0.0, abs=1e-20)
    what.set_inference_model(Harm(2.0), model_key="a")
    mixed = what.validate()
    assert (mixed["model_source"], mixed["ema_model_keys"]) == ("mixed", ["a"])
    assert mixed["total_loss"].item() > 0.01
    what.set_inference_model(Harm(2.0), model_key="b")
    averaged = what.validate()
    assert (averaged["model_source"], averaged["ema_model_keys"]) == ("ema", ["a", "b"])
    assert averaged["total_loss"].item() == pytest.approx(0.0, abs=1e-20)


def test_averaged_weights_may_be_demanded() -> None:
    what = named(validation_config=config(use_ema="always"))
    with pytest.raises(TrainingStateError, match=r"inference_model slot lacks averaged weights, missing: \['a', 'b'\]"):
        what.validate()
    what.set_inference_model(Harm(2.0), model_key="a")
    with pytest.raises(TrainingStateError, match=r"missing: \['b'\]"):
        what.validate()


def test_a_model_key_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"'c'.*\['a', 'b'\]"):
        named().set_inference_model(Harm(), model_key="c")


def test_mixed_precision_may_be_demanded() -> None:
    what = strategy(validation_config=config(use_mixed_precision="always"))
    with pytest.raises(TrainingStateError, match="no MixedPrecisionHook is registered; register one or use 'auto'"):
        what.validate()
