"""What a validation pass evaluates and reports, and what it leaves untouched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from core_rigs import (
    At,
    ConstGrad,
    Harm,
    Unsized,
    batches,
    config,
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
from pydantic import ValidationError
from torch import Tensor, nn

from nvalchemi_lightning.data import Batch
from nvalchemi_lightning.errors import (
    ConfigurationError,
    ConfigurationTypeError,
    DataError,
    MissingTargetError,
)
from nvalchemi_lightning.feeding import OneLoader
from nvalchemi_lightning.losses import (
    ComposedLossFunction,
    EnergyMAELoss,
    EnergyMSELoss,
    ForceMSELoss,
    StressMSELoss,
)
from nvalchemi_lightning.module import AlchemiModule
from nvalchemi_lightning.stages import TrainingStage
from nvalchemi_lightning.validation import (
    SummaryAccumulator,
    ValidationConfig,
    ensure_reiterable_validation_data,
)
from nvalchemi_lightning.validation.evaluation import Evaluation

Stage = TrainingStage
CPU = torch.device("cpu")


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
