"""What a validation pass evaluates and reports, and what it leaves untouched."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
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
    Unsized,
    batches,
    constant_loss,
    cuts,
    force_loss,
    per_graph,
    run,
    sgd,
    strategy,
    structures,
    trainer,
    w_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import Trainer
from pydantic import ValidationError
from torch import Tensor, nn

from nvalchemi_lightning.data import Batch, DataLoader
from nvalchemi_lightning.errors import (
    ConfigurationError,
    ConfigurationTypeError,
    DataError,
    MissingTargetError,
    TrainingStateError,
    UnknownNameError,
)
from nvalchemi_lightning.feeding import OneLoader
from nvalchemi_lightning.losses import (
    BaseLossFunction,
    ComposedLossFunction,
    EnergyMAELoss,
    EnergyMSELoss,
    ForceMSELoss,
    StressMSELoss,
)
from nvalchemi_lightning.module import AlchemiModule
from nvalchemi_lightning.stages import TrainingStage
from nvalchemi_lightning.validation import (
    BatchValidationCallback,
    SummaryAccumulator,
    ValidationConfig,
    ensure_reiterable_validation_data,
)
from nvalchemi_lightning.validation.evaluation import Evaluation, EvaluationLoader

Stage = TrainingStage
CPU = torch.device("cpu")


def config(*sizes: int, **fields: Any) -> ValidationConfig:
    return ValidationConfig(**{"validation_data": batches(*sizes or (2, 3), seed=9), **fields})


# The configuration


@pytest.mark.parametrize("data", [iter([1]), (batch for batch in ()), map(str, ())])
def test_one_shot_data_is_refused(data: Any) -> None:
    with pytest.raises(ValidationError, match=r"must be a re-iterable container such as a list or a DataLoader; got "):
        ValidationConfig(validation_data=data)
    with pytest.raises(ConfigurationError, match="which is empty after one pass"):
        ensure_reiterable_validation_data(data)


@pytest.mark.parametrize("data", [None, 3, "data.zarr", b"data"])
def test_data_that_cannot_be_iterated_is_refused(data: Any) -> None:
    with pytest.raises(ValidationError, match=f"validation_data must be iterable; got {type(data).__name__}"):
        ValidationConfig(validation_data=data)


def test_reiterable_data_is_handed_back() -> None:
    data = [1, 2]
    assert ensure_reiterable_validation_data(data) is data
    assert ensure_reiterable_validation_data(Unsized(data)).items is data


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"every_n_epochs": 1, "every_n_steps": 5}, "every_n_epochs=1 and every_n_steps=5 exclude each other; set one"),
        ({"every_n_epochs": 0}, "greater than or equal to 1"),
        ({"every_n_steps": -1}, "greater than or equal to 1"),
        ({"grad_mode": "on"}, "'auto', 'enabled' or 'disabled'"),
        ({"use_ema": True}, "'auto', 'always' or 'never'"),
        ({"use_mixed_precision": "yes"}, "'auto', 'always' or 'never'"),
        ({"name": ""}, "at least 1 character"),
        ({"validation_fn": 3}, "expected a callable; got 3"),
        ({"batch_callback": "print"}, "expected a callable; got 'print'"),
    ],
)
def test_wrong_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config(**fields)


def test_a_misspelt_setting_names_the_nearest() -> None:
    with pytest.raises(
        ValidationError, match="ValidationConfig has no field 'every_n_epoch'; did you mean 'every_n_epoch"
    ):
        config(every_n_epoch=1)


def test_a_leaf_loss_is_wrapped_and_anything_else_refused() -> None:
    assert isinstance(config(loss_fn=EnergyMSELoss()).loss_fn, ComposedLossFunction)
    assert config().loss_fn is None
    with pytest.raises(
        ConfigurationTypeError, match="loss_fn must be a BaseLossFunction or ComposedLossFunction; got int"
    ):
        config(loss_fn=3)


def test_the_defaults() -> None:
    made = config().model_dump(exclude={"validation_data"})
    assert made == {
        "validation_fn": None,
        "loss_fn": None,
        "every_n_epochs": None,
        "every_n_steps": None,
        "grad_mode": "auto",
        "set_eval": True,
        "use_ema": "auto",
        "use_mixed_precision": "auto",
        "batch_callback": None,
        "name": "validation",
    }


def test_a_mapping_becomes_a_configuration() -> None:
    what = strategy(validation_config={"validation_data": batches(1), "every_n_epochs": 1})
    assert isinstance(what.validation_config, ValidationConfig)


@pytest.mark.parametrize("data", [[], (), Unsized([])], ids=["list", "tuple", "unsized"])
@pytest.mark.parametrize("door", ["validate", "run"])
def test_empty_data_is_an_error_before_or_at_the_pass(data: Any, door: str) -> None:
    what = strategy(validation_config=ValidationConfig(validation_data=data))
    with pytest.raises(ValueError, match=r"validation_data produced no batches\."):
        what.validate() if door == "validate" else run(what, batches(1))
    assert isinstance(data, Unsized) or what.step_count == 0


@pytest.mark.parametrize("data", [structures(2), [{"positions": 1}], [None]], ids=["AtomicData", "dict", "None"])
def test_data_that_is_no_batch_is_named(data: Any) -> None:
    what = strategy(validation_config=ValidationConfig(validation_data=data))
    with pytest.raises(DataError, match=rf"yielded {type(data[0]).__name__}; .* Batch objects .*DataLoader"):
        what.validate()


def test_one_batch_is_no_validation_data() -> None:
    with pytest.raises((ValidationError, DataError), match=r"one Batch|\[batch\]"):
        strategy(validation_config=ValidationConfig(validation_data=batches(2)[0])).validate()


# The summary


def test_the_summary_has_the_documented_keys() -> None:
    summary = strategy(validation_config=config()).validate()
    assert set(summary) >= {
        "name",
        "total_loss",
        "per_component_unweighted",
        "per_component_weight",
        "per_component_raw_weight",
        "per_component_sample",
        "per_component_sample_count",
        "num_batches",
        "model_source",
        "ema_model_keys",
        "precision",
        "distributed_reduced",
    }
    names = ["EnergyMSELoss", "ForceMSELoss"]
    for key in [key for key in summary if key.startswith("per_component")]:
        assert list(summary[key]) == names, key
    scalars = [summary["total_loss"], *summary["per_component_unweighted"].values()]
    scalars += summary["per_component_sample"].values()
    assert all((value.dtype, value.shape, value.device) == (torch.float64, (), CPU) for value in scalars)
    assert not any(value.requires_grad for value in scalars)
    assert summary["per_component_weight"] == {names[0]: 1 / 11, names[1]: 10 / 11}
    assert summary["per_component_raw_weight"] == {names[0]: 1.0, names[1]: 10.0}
    assert summary["per_component_sample_count"] == dict.fromkeys(names, 5)
    assert (summary["name"], summary["num_batches"], summary["num_structures"]) == ("validation", 2, 5)
    assert (summary["model_source"], summary["ema_model_keys"]) == ("live", [])
    assert (summary["precision"], summary["distributed_reduced"]) == ("float32", False)


def test_the_values_of_the_summary_by_hand() -> None:
    data = batches(2, 3, seed=9)
    summary = strategy(validation_config=config()).validate()
    energies, forces, atoms = [], [], []
    for batch in data:
        error = batch.positions.square().sum(-1) * 0.5
        energies += per_graph(error, batch).square().flatten().tolist()
        forces += per_graph(batch.positions.square().sum(-1), batch).flatten().tolist()
        atoms += batch.num_nodes_per_graph.tolist()
    energy = sum(energies) / 5
    force = sum(f / n / 3 for f, n in zip(forces, atoms, strict=True)) / 5
    assert summary["per_component_unweighted"]["EnergyMSELoss"].item() == pytest.approx(energy, abs=1e-12)
    assert summary["per_component_unweighted"]["ForceMSELoss"].item() == pytest.approx(force, abs=1e-12)
    assert summary["total_loss"].item() == pytest.approx(energy / 11 + force * 10 / 11, abs=1e-12)
    assert summary["per_component_sample"]["EnergyMSELoss"].item() == pytest.approx(energy / 11, abs=1e-12)


DATA = structures(9, seed=3)


def evaluated(sizes: list[int], loss: Any) -> dict[str, Any]:
    evaluation = Evaluation(strategy(loss_fn=loss), ValidationConfig(validation_data=()), CPU)
    for index, cut in enumerate(cuts(DATA, sizes)):
        evaluation.add(Batch.from_data_list(list(cut)), index)
    return evaluation.summary()


@st.composite
def splits(draw: st.DrawFn) -> list[int]:
    ends = sorted(draw(st.sets(st.integers(1, len(DATA) - 1))) | {len(DATA)})
    return [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]


@settings(deadline=None, max_examples=40)
@given(sizes=splits(), per_atom=st.booleans())
def test_the_numbers_do_not_depend_on_how_the_data_is_cut(sizes: list[int], per_atom: bool) -> None:
    """B27: graphs of different sizes in batches of different sizes give one number."""
    loss = EnergyMSELoss(per_atom=per_atom) + EnergyMAELoss() * 2.0 + ForceMSELoss(normalize_by_atom_count=per_atom)
    whole, cut = evaluated([len(DATA)], loss), evaluated(sizes, loss)
    assert cut["num_structures"] == whole["num_structures"] == len(DATA)
    assert cut["num_batches"] == len(sizes)
    assert cut["total_loss"].item() == pytest.approx(whole["total_loss"].item(), abs=1e-12, rel=1e-12)
    for key in ("per_component_unweighted", "per_component_sample"):
        for name, value in whole[key].items():
            assert cut[key][name].item() == pytest.approx(value.item(), abs=1e-12, rel=1e-12), (key, name)
    assert cut["per_component_sample_count"] == whole["per_component_sample_count"]


def test_a_small_last_batch_weighs_what_it_is() -> None:
    """B27: 8 structures with loss 1 and one with 10 in batches of 4, 4 and 1 are 2.0, everywhere it is shown."""
    seen: list[Any] = []
    what = strategy(
        models=ConstGrad(),
        loss_fn=constant_loss(),
        num_steps=1,
        optimizer_configs=sgd(1e-9),
        validation_config=ValidationConfig(validation_data=batches(4, 4, 1, energies=[1.0] * 8 + [10.0])),
        hooks=[At(Stage.AFTER_VALIDATION, lambda ctx: seen.append(ctx.validation))],
    )
    run(what, batches(1))
    assert seen == [what.last_validation]
    assert seen[0]["total_loss"].item() == pytest.approx(2.0, abs=1e-6)


def test_labels_that_nobody_has_are_not_counted() -> None:
    """B95: a component without a label is NaN with count 0, the total is finite, and nothing is logged for it."""

    def forward(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        output = model(batch)
        stress = output["energy"].new_zeros(batch.num_graphs, 3, 3)
        return {"predicted_energy": output["energy"], "predicted_forces": output["forces"], "predicted_stress": stress}

    data = batches(2, 3)
    for batch in data:
        batch.stress = torch.full((batch.num_graphs, 3, 3), torch.nan, dtype=torch.float64)
    loss = EnergyMSELoss() + ForceMSELoss() + StressMSELoss()
    module = AlchemiModule(models=Harm(), loss_fn=loss, training_fn=forward, optimizer_configs=sgd())
    t = trainer()
    t.fit(module, OneLoader(data), OneLoader(data))
    summary = module.recipe.last_validation
    assert summary is not None
    assert summary["per_component_unweighted"]["StressMSELoss"].isnan()
    assert summary["per_component_count"]["StressMSELoss"] == 0
    assert summary["per_component_count"]["EnergyMSELoss"] == 5
    assert summary["total_loss"].isfinite()
    assert torch.isfinite(torch.tensor(w_of(module.recipe)))
    assert "validation/EnergyMSELoss" in t.callback_metrics
    assert not [key for key in t.callback_metrics if "tress" in key]


def test_labels_that_are_not_trained_do_not_appear() -> None:
    """B118: stress labels without a stress term give no stress number."""
    data = batches(2, 3)
    for batch in data:
        batch.stress = torch.ones(batch.num_graphs, 3, 3, dtype=torch.float64)
    module = AlchemiModule(models=Harm(), loss_fn=force_loss(), optimizer_configs=sgd())
    t = trainer()
    t.fit(module, OneLoader(data), OneLoader(data))
    assert not [key for key in t.callback_metrics if "tress" in key]
    assert not [key for key in module.recipe.last_validation["metrics"] if "tress" in key]  # type: ignore[index]


def test_a_term_with_weight_zero_is_marked_by_its_weight() -> None:
    what = strategy(loss_fn=EnergyMSELoss() + ForceMSELoss() * 0.0, validation_config=config())
    assert what.validate()["per_component_weight"] == {"EnergyMSELoss": 1.0, "ForceMSELoss": 0.0}


def test_a_missing_label_of_validation_data_is_named() -> None:
    what = strategy(loss_fn=EnergyMSELoss() + StressMSELoss(), validation_config=config(grad_mode="enabled"))
    with pytest.raises(
        MissingTargetError, match="Validation batch is missing target attribute 'stress' required by Stre"
    ):
        what.validate()


def test_the_loss_of_the_configuration_is_used() -> None:
    what = strategy(validation_config=config(loss_fn=EnergyMSELoss()))
    assert list(what.validate()["per_component_unweighted"]) == ["EnergyMSELoss"]


def test_a_pass_without_a_batch_is_an_error() -> None:
    with pytest.raises(DataError, match=r"validation_data produced no batches\."):
        SummaryAccumulator({"EnergyMSELoss": 1.0}, CPU).summary("validation")


# The pass


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
    assert not what.lifecycle.active


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


# Evaluation by a Trainer


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
    assert validated["validate/total_loss"] == pytest.approx(expected, rel=1e-6)
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
    assert result["validate/total_loss"] > 0.0
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
