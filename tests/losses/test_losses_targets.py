"""Targets from a batch, and the supervised loss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from losses_rigs import Structures

from nvalchemi_lightning.errors import ConfigurationTypeError, MissingPredictionError, MissingTargetError
from nvalchemi_lightning.losses import (
    EnergyMAELoss,
    EnergyMSELoss,
    ForceMSELoss,
    StressMSELoss,
    assemble_loss_targets,
    composition,
    compute_supervised_loss,
    loss_target_keys,
)

LOSS = EnergyMSELoss() + 10 * ForceMSELoss() + EnergyMAELoss()


def as_batch(structures: Structures) -> SimpleNamespace:
    return SimpleNamespace(**structures.targets, **structures.metadata)


def test_target_keys_are_unique_and_ordered() -> None:
    assert loss_target_keys(LOSS) == ("energy", "forces")


def test_names_of_the_reference_module() -> None:
    assert composition.loss_target_keys is loss_target_keys
    assert composition.compute_supervised_loss is compute_supervised_loss


def test_targets_come_from_the_batch() -> None:
    structures = Structures([2, 3])
    batch = as_batch(structures)
    targets = assemble_loss_targets(LOSS, {}, batch)
    assert targets["energy"] is batch.energy
    assert list(targets) == ["energy", "forces"]
    assert list(assemble_loss_targets(LOSS, {}, batch, target_keys=("stress",))) == ["stress"]


def test_supervised_loss_equals_the_composition() -> None:
    structures = Structures([2, 3])
    output = compute_supervised_loss(LOSS, structures.predictions, as_batch(structures), step=3, epoch=1)
    plain = LOSS(structures.predictions, structures.targets, missing_is_nan=True, **structures.metadata)
    assert output["total_loss"].item() == plain["total_loss"].item()


def test_metadata_that_the_batch_lacks_is_not_invented() -> None:
    batch = SimpleNamespace(energy=torch.zeros(2, 1))
    predictions = {"predicted_energy": torch.ones(2, 1)}
    output = compute_supervised_loss(1.0 * EnergyMSELoss(), predictions, batch, step=0, epoch=None)
    assert output["total_loss"].item() == 1.0


def test_count_reducer_is_handed_on() -> None:
    structures = Structures([2, 3])
    output = compute_supervised_loss(
        1.0 * EnergyMSELoss(),
        structures.predictions,
        as_batch(structures),
        step=0,
        epoch=0,
        count_reducer=lambda counts: 10 * counts,
    )
    assert output["total_loss"].item() == pytest.approx(structures.call(EnergyMSELoss()).item() / 10)


def test_an_assembler_of_ones_own_gets_everything() -> None:
    structures = Structures([2, 3])
    seen: dict[str, Any] = {}

    def assembler(
        loss_fn: Any, predictions: Any, batch: Any, *, workflow: Any, target_keys: Any, batch_label: str
    ) -> dict[str, torch.Tensor]:
        seen.update(workflow=workflow, target_keys=target_keys, batch_label=batch_label, loss_fn=loss_fn)
        return {"teacher": predictions["teacher_energy"]}

    predictions = structures.predictions | {"teacher_energy": structures.targets["energy"]}
    loss = 1.0 * EnergyMSELoss(target_key="teacher")
    output = compute_supervised_loss(
        loss,
        predictions,
        SimpleNamespace(),
        step=0,
        epoch=0,
        workflow="the strategy",
        target_assembler=assembler,
        target_keys=("teacher",),
        batch_label="Validation batch",
    )
    assert seen == {
        "workflow": "the strategy",
        "target_keys": ("teacher",),
        "batch_label": "Validation batch",
        "loss_fn": loss,
    }
    assert output["total_loss"].item() == pytest.approx(structures.call(EnergyMSELoss()).item())


@pytest.mark.parametrize(
    "batch",
    [
        SimpleNamespace(energies=1, forces=2, _private=3),
        SimpleNamespace(keys=lambda: ["forces", "energies"]),
        SimpleNamespace(keys={"node": {"forces"}, "system": {"energies"}}),
    ],
)
def test_a_missing_target_names_loss_key_and_fields(batch: Any) -> None:
    message = (
        r"Validation batch is missing target attribute 'energy' required by EnergyMSELoss and EnergyMAELoss; "
        r"did you mean 'energies'\? It has energies, forces; add the label"
    )
    with pytest.raises(MissingTargetError, match=message):
        assemble_loss_targets(LOSS, {}, batch, batch_label="Validation batch")


def test_a_target_that_is_none_is_missing() -> None:
    with pytest.raises(AttributeError, match="Batch is missing target attribute 'stress' required by StressMSELoss"):
        assemble_loss_targets(1.0 * StressMSELoss(), {}, SimpleNamespace(stress=None))


def test_a_batch_without_fields() -> None:
    with pytest.raises(MissingTargetError, match=r"required by the loss\. It has no fields"):
        assemble_loss_targets(LOSS, {}, object(), target_keys=("other",))


def test_a_missing_prediction_names_what_there_is() -> None:
    structures = Structures([2, 3])
    predictions = {"forces": structures.predictions["predicted_forces"]}
    message = r"EnergyMSELoss needs the prediction 'predicted_energy', which is absent \(available: 'forces'\)"
    with pytest.raises(MissingPredictionError, match=message):
        compute_supervised_loss(LOSS, predictions, as_batch(structures), step=0, epoch=0)


def test_a_single_term_is_refused() -> None:
    with pytest.raises(
        AttributeError, match=r"single term and has no components; pass as_composed_loss\(EnergyMSELoss"
    ):
        compute_supervised_loss(EnergyMSELoss(), {}, SimpleNamespace(), step=0, epoch=0)


def test_the_assembler_must_return_a_mapping() -> None:
    with pytest.raises(ConfigurationTypeError, match="must return a mapping of target keys to tensors; got list"):
        compute_supervised_loss(
            LOSS, {}, SimpleNamespace(), step=0, epoch=0, target_assembler=lambda *args, **kwargs: []
        )
