"""Structures without a label: they neither contribute nor count, and never give a NaN."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from losses_rigs import EVERY_TERM, NAN, Structures, label

from nvalchemi_lightning.losses import (
    BaseLossFunction,
    EnergyMSELoss,
    ForceHuberLoss,
    ForceMSELoss,
    StressHuberLoss,
    StressMSELoss,
    compute_supervised_loss,
)


def as_batch(structures: Structures) -> SimpleNamespace:
    return SimpleNamespace(**structures.targets, **structures.metadata)


def trained(loss: Any, structures: Structures) -> dict[str, Any]:
    output = compute_supervised_loss(loss, structures.predictions, as_batch(structures), step=0, epoch=0)
    output["total_loss"].backward()
    return output


def test_partly_labelled_batch_b11() -> None:
    """B11: A has energy, forces and stress, B lacks stress, C has forces only."""
    batch = Structures([3, 1, 4], seed=8)
    alone = Structures([3, 1, 4], seed=8)
    for graph in (1, 2):
        batch.hide("stress", graph)
    batch.hide("energy", 2)
    loss = EnergyMSELoss() + ForceMSELoss() + StressMSELoss()
    output = trained(loss, batch)
    values = {name: value.item() for name, value in output["per_component_unweighted"].items()}
    assert values["EnergyMSELoss"] == pytest.approx(alone.subset([0, 1]).call(EnergyMSELoss()).item(), rel=1e-12)
    assert values["ForceMSELoss"] == pytest.approx(alone.call(ForceMSELoss()).item(), rel=1e-12)
    assert values["StressMSELoss"] == pytest.approx(alone.subset([0]).call(StressMSELoss()).item(), rel=1e-12)
    assert [count.item() for count in output["per_component_count"].values()] == [2, 3, 1]
    gradients = {key: pred.grad for key, pred in batch.predictions.items()}
    assert all(torch.isfinite(gradient).all() for gradient in gradients.values())
    assert torch.all(gradients["predicted_stress"][1:] == 0)
    assert torch.all(gradients["predicted_stress"][0] != 0)
    assert gradients["predicted_energy"][2].item() == 0


def test_a_molecule_without_a_cell_b13() -> None:
    """B13: the stress of a molecule is NaN in the prediction, too; the value is the crystal's alone."""
    batch = Structures([3, 2], seed=6).hide("stress", 0)
    with torch.no_grad():
        batch.predictions["predicted_stress"][0] = NAN
    crystal = Structures([3, 2], seed=6).subset([1])
    for stress in (StressMSELoss(), StressHuberLoss()):
        for pred in batch.predictions.values():
            pred.grad = None
        output = trained(EnergyMSELoss() + ForceMSELoss() + stress, batch)
        assert torch.isfinite(output["total_loss"])
        value = output["per_component_unweighted"][type(stress).__name__].item()
        assert value == pytest.approx(crystal.call(stress).item(), rel=1e-12)
        for pred in batch.predictions.values():
            assert torch.isfinite(pred.grad).all()
        assert torch.all(batch.predictions["predicted_stress"].grad[0] == 0)


def test_a_batch_of_molecules_only_b13() -> None:
    batch = Structures([3, 2]).hide("stress", 0).hide("stress", 1)
    with torch.no_grad():
        batch.predictions["predicted_stress"][:] = NAN
    output = trained(EnergyMSELoss() + StressMSELoss(), batch)
    assert output["per_component_unweighted"]["StressMSELoss"].item() == 0.0
    assert torch.isfinite(output["total_loss"])
    assert torch.all(batch.predictions["predicted_stress"].grad == 0)


def test_labels_that_no_structure_has_count_zero_b95() -> None:
    """B95: no stress label at all; its count says so, and the total is finite."""
    batch = Structures([3, 2]).hide("stress", 0).hide("stress", 1)
    output = trained(EnergyMSELoss() + ForceMSELoss() + StressMSELoss(), batch)
    assert output["per_component_count"]["StressMSELoss"].item() == 0
    assert torch.isfinite(output["total_loss"])


def test_labels_without_a_term_do_not_appear_b118() -> None:
    """B118: the data has stress, the loss does not: no entry speaks of stress."""
    output = trained(EnergyMSELoss() + ForceMSELoss(), Structures([3, 2]))
    for value in output.values():
        if isinstance(value, dict):
            assert list(value) == ["EnergyMSELoss", "ForceMSELoss"]


@pytest.mark.parametrize("term", EVERY_TERM, ids=label)
def test_no_label_at_all(term: BaseLossFunction) -> None:
    batch = Structures([3, 2]).hide(term.target_key, 0).hide(term.target_key, 1)
    with torch.no_grad():
        batch.predictions[term.prediction_key][0] = NAN
    value = batch.call(term, missing_is_nan=True)
    value.backward()
    assert value.item() == 0.0
    assert torch.all(batch.predictions[term.prediction_key].grad == 0)
    output = (1.0 * term)(batch.predictions, batch.targets, missing_is_nan=True, **batch.metadata)
    (count,) = output["per_component_count"].values()
    assert count.item() == 0


@pytest.mark.parametrize("term", EVERY_TERM, ids=label)
def test_a_hidden_label_is_as_good_as_an_absent_structure(term: BaseLossFunction) -> None:
    batch = Structures([2, 1, 4], seed=3)
    rest = batch.subset([0, 2])
    batch.hide(term.target_key, 1)
    with torch.no_grad():
        batch.predictions[term.prediction_key][2 if term.target_key == "forces" else 1] = NAN
    value = batch.call(term, missing_is_nan=True)
    assert value.item() == pytest.approx(rest.call(term).item(), rel=1e-12)
    value.backward()
    assert torch.isfinite(batch.predictions[term.prediction_key].grad).all()


def test_one_missing_component_leaves_the_others() -> None:
    target = torch.zeros(2, 3)
    target[0, 0] = NAN
    pred = torch.full((2, 3), 2.0)
    metadata = {"batch_idx": torch.tensor([0, 1]), "num_graphs": 2}
    assert ForceMSELoss()(pred, target, missing_is_nan=True, **metadata).item() == 4.0
    loss = ForceHuberLoss(delta=5.0)
    assert loss(pred, target, missing_is_nan=True, **metadata).item() == 2.0
