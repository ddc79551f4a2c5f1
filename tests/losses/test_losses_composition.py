"""Compositions: operators, weights, names, calls, and what they refuse."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from losses_rigs import Structures
from torch import Tensor, nn

from nvalchemi_lightning.errors import (
    ConfigurationError,
    ConfigurationTypeError,
    DataError,
    LabelNotFoundError,
    MissingPredictionError,
    MissingTargetError,
)
from nvalchemi_lightning.losses import (
    BaseLossFunction,
    ComposedLossFunction,
    ConstantWeight,
    EnergyMAELoss,
    EnergyMSELoss,
    ForceL2NormLoss,
    ForceMSELoss,
    LinearWeight,
    PiecewiseWeight,
    StressMSELoss,
    as_composed_loss,
)
from nvalchemi_lightning.specs import create_model_spec_from_json

RAMP = LinearWeight(start=0.0, end=1.0, num_steps=4)


class Custom(BaseLossFunction):
    """A term that says nothing about itself."""

    prediction_key, target_key = "predicted_energy", "energy"

    def compute_residual(self, pred: Tensor, target: Tensor, valid: Tensor) -> Tensor:
        return torch.where(valid, pred - target, 0.0).square()


def call(loss: ComposedLossFunction, batch: Structures | None = None, **extra: Any) -> dict[str, Any]:
    batch = batch or Structures([2, 3])
    return loss(batch.predictions, batch.targets, **batch.metadata, **extra)


@pytest.mark.parametrize("factor", [2, 2.0, np.float64(2), np.float32(2), np.int64(2)])
def test_numbers_weight_a_term(factor: Any) -> None:
    for loss in (factor * EnergyMSELoss(), EnergyMSELoss() * factor, factor * as_composed_loss(EnergyMSELoss())):
        assert isinstance(loss, ComposedLossFunction)
        assert loss.weights == (2.0,)
        assert type(loss.weights[0]) is float


@pytest.mark.parametrize("factor", [True, np.True_, torch.tensor(2.0), "2", None])
@pytest.mark.parametrize("loss", [EnergyMSELoss(), as_composed_loss(EnergyMSELoss())])
def test_other_factors_are_refused(loss: nn.Module, factor: Any) -> None:
    with pytest.raises(TypeError):
        loss * factor
    with pytest.raises(TypeError):
        factor * loss


@pytest.mark.parametrize("loss", [EnergyMSELoss(), as_composed_loss(EnergyMSELoss())])
def test_there_is_no_subtraction_or_division(loss: Any) -> None:
    for operation in (
        lambda: loss - loss,
        lambda: -loss,
        lambda: loss / 2,
        lambda: 1 + loss,
        lambda: loss + 1,
    ):
        with pytest.raises(TypeError, match=r"unsupported operand|bad operand"):
            operation()


def test_a_schedule_weights_a_term_but_no_composition() -> None:
    assert (RAMP * EnergyMSELoss()).weights == (RAMP,)
    assert (EnergyMSELoss() * RAMP).weights == (RAMP,)
    with pytest.raises(ConfigurationTypeError, match=r"multiply its terms, as in schedule \* EnergyMSELoss\(\)"):
        RAMP * as_composed_loss(EnergyMSELoss())


def test_sums() -> None:
    energy, force, stress = EnergyMSELoss(), ForceMSELoss(), StressMSELoss()
    assert (energy + force).weights == (1.0, 1.0)
    assert sum([energy]) is energy
    composed = sum([energy, force, stress])
    assert composed.terms == [energy, force, stress]
    assert sum([composed]) is composed
    loss = energy + 10 * force
    assert loss.weights == (1.0, 10.0)
    assert (loss + stress).weights == (1.0, 10.0, 1.0)
    assert (stress + loss).terms == [stress, energy, force]
    assert (loss + 2 * stress).weights == (1.0, 10.0, 2.0)


def test_sums_inherit_the_settings() -> None:
    loss = ComposedLossFunction([EnergyMSELoss()], normalize_weights=False, dtype_policy="prediction_to_target")
    other = ComposedLossFunction([StressMSELoss()], normalize_weights=False, dtype_policy="target_to_prediction")
    plain = ComposedLossFunction([StressMSELoss()], normalize_weights=False)
    for combined in (ForceMSELoss() + loss, loss + ForceMSELoss(), 2 * loss, loss + other, plain + loss):
        assert not combined.normalize_weights
        assert combined.dtype_policy == "prediction_to_target"
    with pytest.raises(
        ConfigurationError, match="different normalize_weights cannot be added: False on the left, True"
    ):
        loss + as_composed_loss(ForceMSELoss())


def test_products_reach_every_weight() -> None:
    loss = 2 * (RAMP * EnergyMSELoss() + 3 * ForceMSELoss())
    assert loss.weights[1] == 6.0
    assert loss.current_weight(step=2) == pytest.approx([1 / 7, 6 / 7])
    loss.normalize_weights = False
    assert loss.current_weight(step=2) == [1.0, 6.0]


def test_nested_compositions_are_flattened() -> None:
    inner = ComposedLossFunction(
        [EnergyMSELoss(), ForceMSELoss()],
        weights=[2.0, RAMP],
        normalize_weights=False,
        dtype_policy="prediction_to_target",
    )
    outer = ComposedLossFunction([inner, StressMSELoss()], weights=[3.0, None])
    assert outer.names == ("EnergyMSELoss", "ForceMSELoss", "StressMSELoss")
    assert outer.normalize_weights
    assert outer.dtype_policy is None
    outer.normalize_weights = False
    assert outer.current_weight(step=4) == [6.0, 3.0, 1.0]


def test_names_count_repeated_classes() -> None:
    energy = EnergyMSELoss()
    loss = ComposedLossFunction([energy, ForceMSELoss(), energy, EnergyMSELoss(per_atom=True)])
    names = ("EnergyMSELoss_0", "ForceMSELoss", "EnergyMSELoss_1", "EnergyMSELoss_2")
    assert loss.names == names
    output = call(loss)
    assert tuple(output["per_component_unweighted"]) == names
    values = output["per_component_unweighted"]
    assert values["EnergyMSELoss_0"].item() == values["EnergyMSELoss_1"].item()
    assert loss.weight_factors() == dict.fromkeys(names, 0.25)


def test_output() -> None:
    batch = Structures([2, 3])
    loss = EnergyMSELoss() + 3 * ForceMSELoss(normalize_by_atom_count=False)
    output = call(loss, batch)
    energy, force = (batch.call(term) for term in loss.terms)
    assert output["per_component_raw_weight"] == {"EnergyMSELoss": 1.0, "ForceMSELoss": 3.0}
    assert output["per_component_weight"] == {"EnergyMSELoss": 0.25, "ForceMSELoss": 0.75}
    assert output["total_loss"].item() == pytest.approx(0.25 * energy.item() + 0.75 * force.item(), rel=1e-14)
    assert output["per_component_unweighted"]["ForceMSELoss"].requires_grad
    assert list(output["per_component_sample"]) == ["EnergyMSELoss"]
    sample = output["per_component_sample"]["EnergyMSELoss"]
    assert not sample.requires_grad
    assert sample.tolist() == pytest.approx((0.25 * loss.terms[0].per_sample_loss).tolist())
    output["total_loss"].backward()
    assert all(batch.predictions[key].grad is not None for key in ("predicted_energy", "predicted_forces"))


def test_output_is_a_plain_dictionary_with_the_documented_keys() -> None:
    output = call(as_composed_loss(EnergyMSELoss()))
    assert type(output) is dict
    assert list(output) == [
        "total_loss",
        "per_component_unweighted",
        "per_component_weight",
        "per_component_raw_weight",
        "per_component_sample",
        "per_component_sum",
        "per_component_count",
    ]


def test_effective_weight_of_a_lone_schedule_is_one() -> None:
    output = call(RAMP * EnergyMSELoss(), step=1)
    assert output["per_component_weight"] == {"EnergyMSELoss": 1.0}
    assert output["per_component_raw_weight"] == {"EnergyMSELoss": 0.25}


def test_weights_follow_step_and_epoch() -> None:
    by_epoch = PiecewiseWeight(boundaries=(1,), values=(1.0, 3.0), per_epoch=True)
    loss = ComposedLossFunction([EnergyMSELoss(), ForceMSELoss()], weights=[RAMP, by_epoch], normalize_weights=False)
    assert call(loss, step=2, epoch=1)["per_component_weight"] == {"EnergyMSELoss": 0.5, "ForceMSELoss": 3.0}
    with pytest.raises(ConfigurationError, match=r"schedule of ForceMSELoss counts in epochs \(per_epoch=True\); pass"):
        call(loss, step=2)
    with pytest.raises(ConfigurationError, match="counts in epochs"):
        call(2 * loss, step=2)


def test_negative_weights_are_allowed() -> None:
    assert (3 * EnergyMSELoss() + -1 * ForceMSELoss()).current_weight() == [1.5, -0.5]


@pytest.mark.parametrize(
    ("weights", "total"), [([0.0, 0.0], "0.0"), ([1.0, -1.0], "0.0"), ([-2.0, 1.0], "-1.0"), ([1e308, 1e308], "inf")]
)
def test_weights_that_cannot_be_normalized(weights: list[float], total: str) -> None:
    loss = ComposedLossFunction([EnergyMSELoss(), ForceMSELoss()], weights=weights)
    message = rf"sum is not strictly positive \(sum={total}\) for .*'EnergyMSELoss': {weights[0]}.* at step=7, epoch=2"
    with pytest.raises(ConfigurationError, match=message.replace("+", r"\+")):
        call(loss, step=7, epoch=2)
    with pytest.raises(ConfigurationError, match="sum is not strictly positive"):
        loss.current_weight()


def test_a_schedule_that_starts_at_zero_alone() -> None:
    with pytest.raises(ConfigurationError, match=r"sum is not strictly positive \(sum=0\.0\)"):
        call(RAMP * EnergyMSELoss())


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_nonfinite_numbers_are_refused_at_the_call(weight: float) -> None:
    loss = weight * EnergyMSELoss()
    with pytest.raises(ConfigurationError, match=f"the weight of EnergyMSELoss is not finite: {weight} at step=0"):
        call(loss)


class Schedule:
    """A schedule that returns what it is given."""

    def __init__(self, result: Any) -> None:
        self.result = result
        self.per_epoch = False

    def __call__(self, step: int, epoch: int) -> Any:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    def to_spec(self) -> Any:
        raise NotImplementedError


def test_a_schedule_of_ones_own() -> None:
    assert call(Schedule(2) * EnergyMSELoss())["per_component_raw_weight"] == {"EnergyMSELoss": 2.0}


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        (torch.tensor(1.0), TypeError, "does not satisfy the LossWeightSchedule contract: it must return a float; got"),
        (None, TypeError, "must return a float; got NoneType"),
        (math.nan, ValueError, "the weight of EnergyMSELoss is not finite: nan"),
        (TypeError("bad"), TypeError, r"LossWeightSchedule contract: Schedule\(step, epoch\) failed: bad"),
        (RuntimeError("mine"), RuntimeError, "mine"),
    ],
)
def test_a_schedule_that_misbehaves(result: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(Schedule(result) * EnergyMSELoss())


def test_construction_errors() -> None:
    with pytest.raises(ConfigurationError, match="components must contain at least one loss term"):
        ComposedLossFunction([])
    with pytest.raises(ConfigurationTypeError, match=r"components\[1\] must be a BaseLossFunction .*; got MSELoss"):
        ComposedLossFunction([EnergyMSELoss(), nn.MSELoss()])
    with pytest.raises(ConfigurationError, match="got 1 weights for 2 components; give one weight each"):
        ComposedLossFunction([EnergyMSELoss(), ForceMSELoss()], weights=[1.0])
    for weight in (True, "1", torch.tensor(1.0)):
        with pytest.raises(ConfigurationTypeError, match=r"weights\[0\] must be a float or LossWeightSchedule; got"):
            ComposedLossFunction([EnergyMSELoss()], weights=[weight])
    with pytest.raises(ConfigurationTypeError, match=r"a schedule is a callable with per_epoch and to_spec\(\)"):
        ComposedLossFunction([EnergyMSELoss()], weights=[lambda step, epoch: 1.0])
    with pytest.raises(ConfigurationError, match="dtype_policy must be one of"):
        ComposedLossFunction([EnergyMSELoss()], dtype_policy="loose")


def test_dtype_policy_reaches_the_strict_terms_only() -> None:
    pair = {"predicted_energy": torch.ones(2, 1), "predicted_stress": torch.ones(2, 3, 3)}
    targets = {"energy": torch.zeros(2, 1).double(), "stress": torch.zeros(2, 3, 3).double()}
    loss = EnergyMSELoss() + StressMSELoss(dtype_policy="target_to_prediction")
    with pytest.raises(DataError, match="EnergyMSELoss: prediction and target dtype mismatch"):
        loss(pair, targets)
    loss.dtype_policy = "prediction_to_target"
    values = loss(pair, targets)["per_component_unweighted"]
    assert values["EnergyMSELoss"].dtype is torch.float64
    assert values["StressMSELoss"].dtype is torch.float32
    assert loss.terms[0].dtype_policy == "strict"
    with pytest.raises(ConfigurationError, match="dtype_policy must be one of"):
        loss.dtype_policy = "other"
    assert loss.dtype_policy == "prediction_to_target"


class Keyless(Custom):
    """A term without keys."""

    prediction_key = None
    target_key = None


def test_missing_keys_and_values() -> None:
    energies = {"predicted_energy": torch.zeros(2, 1)}
    targets = {"energy": torch.zeros(2, 1)}
    loss = as_composed_loss(EnergyMSELoss())
    message = (
        r"EnergyMSELoss needs the prediction 'predicted_energy', which is absent; did you mean 'predicted_energies'\? "
        r"\(available: 'predicted_energies'\)"
    )
    with pytest.raises(MissingPredictionError, match=message):
        loss({"predicted_energies": energies["predicted_energy"]}, targets)
    with pytest.raises(LabelNotFoundError, match=r"needs the target 'energy', which is absent \(available: nothing\)"):
        loss(energies, {})
    with pytest.raises(
        ConfigurationTypeError, match="EnergyMSELoss: the prediction 'predicted_energy' must be a tensor; got NoneType"
    ):
        loss({"predicted_energy": None}, targets)
    with pytest.raises(ConfigurationTypeError, match="EnergyMSELoss: the target 'energy' must be a tensor; got list"):
        loss(energies, {"energy": [0.0]})
    term = Keyless()
    with pytest.raises(MissingTargetError, match="Keyless has no prediction_key, which a composition needs"):
        as_composed_loss(term)(energies, targets)
    term.prediction_key = "predicted_energy"
    with pytest.raises(AttributeError, match="Keyless has no target_key"):
        as_composed_loss(term)(energies, targets)
    term.target_key = "energy"
    assert as_composed_loss(term)(energies, targets)["total_loss"].item() == 0.0


def test_an_error_of_the_mapping_itself_is_not_hidden() -> None:
    class Broken(dict[str, Tensor]):
        def __getitem__(self, key: str) -> Tensor:
            raise KeyError("storage")

    with pytest.raises(KeyError, match="storage"):
        as_composed_loss(EnergyMSELoss())(Broken(predicted_energy=torch.zeros(1)), {"energy": torch.zeros(1)})


@pytest.mark.parametrize(
    ("sample", "error", "message"),
    [
        ([1.0], TypeError, r"Sampled\.per_sample_loss must be a tensor; got list"),
        (torch.ones(2, 1), ValueError, r"Sampled\.per_sample_loss must be 1-D, one entry per graph; got \(2, 1\)"),
    ],
)
def test_per_sample_losses_are_checked(sample: Any, error: type[Exception], message: str) -> None:
    class Sampled(Custom):
        def reduce(self, residual: Tensor, valid: Tensor, ctx: Any, **metadata: Any) -> Tensor:
            self.per_sample_loss = sample
            return residual.mean()

    with pytest.raises(error, match=message):
        call(as_composed_loss(Sampled()))


def test_a_sample_of_ones_own_is_detached() -> None:
    class Sampled(Custom):
        def reduce(self, residual: Tensor, valid: Tensor, ctx: Any, **metadata: Any) -> Tensor:
            self.per_sample_loss = residual.squeeze(1)
            return residual.mean()

    output = call(as_composed_loss(Sampled()))
    assert not output["per_component_sample"]["Sampled"].requires_grad


def test_a_term_must_return_a_tensor() -> None:
    class Scalar(Custom):
        def reduce(self, residual: Tensor, valid: Tensor, ctx: Any, **metadata: Any) -> Any:
            return 1.0

    with pytest.raises(ConfigurationTypeError, match="Scalar must return a tensor; got float"):
        call(as_composed_loss(Scalar()))


def test_requires_eval_grad() -> None:
    assert not (EnergyMSELoss() + EnergyMAELoss()).requires_eval_grad()
    assert (EnergyMAELoss() + ForceL2NormLoss()).requires_eval_grad()
    assert (Custom() + ForceL2NormLoss()).requires_eval_grad()
    with pytest.raises(ConfigurationError, match=r"Cannot infer whether Custom_0, Custom_1 needs gradients.*grad_mode"):
        ComposedLossFunction([Custom(), EnergyMSELoss(), Custom()]).requires_eval_grad()


def test_as_composed_loss() -> None:
    loss = EnergyMSELoss() + ForceMSELoss()
    assert as_composed_loss(loss) is loss
    assert as_composed_loss(EnergyMSELoss()).names == ("EnergyMSELoss",)
    with pytest.raises(ConfigurationTypeError, match=r"loss_fn must be a BaseLossFunction or .*; got MSELoss"):
        as_composed_loss(nn.MSELoss())


def test_spec_round_trip() -> None:
    loss = ComposedLossFunction(
        [EnergyMAELoss(), 2.0 * (RAMP * ForceMSELoss(target_key="teacher_forces"))],
        weights=[ConstantWeight(value=1.0), 3.0],
        normalize_weights=False,
        dtype_policy="prediction_to_target",
    )
    form = loss.to_spec().model_dump()
    assert form["cls_path"] == "nvalchemi_lightning.losses.composition.ComposedLossFunction"
    rebuilt = create_model_spec_from_json(form).build()
    assert rebuilt.weights == loss.weights
    assert repr(rebuilt) == repr(loss)
    assert rebuilt.current_weight(step=2) == loss.current_weight(step=2) == [1.0, 3.0]


def test_repr_shows_weights_and_settings() -> None:
    text = repr(EnergyMSELoss() + 10 * ForceMSELoss())
    assert "weights=[1.0, 10.0], normalize_weights=True, dtype_policy=None" in text
    assert "EnergyMSELoss(target_key='energy'" in text
