"""The reference's own values, gradients and per-sample losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nvalchemi_lightning import losses


def decoded(form: Any) -> Any:
    """Return a tensor from its JSON form; NaN and infinities are strings there."""
    if not (isinstance(form, dict) and "dtype" in form):
        return form

    def numbers(value: Any) -> Any:
        return [numbers(entry) for entry in value] if isinstance(value, list) else float(value)

    dtype = getattr(torch, form["dtype"])
    return torch.tensor(numbers(form["data"]), dtype=torch.float64).to(dtype).reshape(form["shape"])


@pytest.fixture(scope="module")
def oracle(shared: Path) -> dict[str, Any]:
    return json.loads((shared / "samples" / "loss_oracle.json").read_text(encoding="utf-8"))


def close(actual: Tensor, expected: Any) -> None:
    torch.testing.assert_close(actual, decoded(expected), rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("index", range(46))
def test_leaf_case(oracle: dict[str, Any], index: int) -> None:
    case = oracle["cases"][index]
    loss = getattr(losses, case["loss"])(**case["kwargs"])
    pred = decoded(case["pred"]).requires_grad_()
    value = loss(pred, decoded(case["target"]), **{key: decoded(form) for key, form in case["meta"].items()})
    value.backward()
    close(value.detach(), case["value"])
    close(pred.grad, case["grad"])
    if case["per_sample_loss"] is None:
        assert loss.per_sample_loss is None
    else:
        close(loss.per_sample_loss, case["per_sample_loss"])


def test_all_cases_are_covered(oracle: dict[str, Any]) -> None:
    assert len(oracle["cases"]) == 46


@pytest.mark.parametrize("index", range(4))
def test_composed_output(oracle: dict[str, Any], index: int) -> None:
    sample = oracle["composed"]
    inputs = {key: decoded(form) for key, form in sample["inputs"].items()}
    loss = losses.ComposedLossFunction(
        [losses.EnergyMSELoss(per_atom=True), losses.ForceMSELoss(), losses.StressMSELoss()],
        weights=[1.0, losses.LinearWeight(start=0.0, end=10.0, num_steps=4), 0.1],
        normalize_weights=sample["normalize_weights"],
    )
    expected = sample["outputs"][index]
    metadata = {"batch_idx": inputs["batch_idx"], "num_graphs": 3, "num_nodes_per_graph": inputs["num_nodes_per_graph"]}
    output = loss(inputs, inputs, step=expected["step"], **metadata)
    close(output["total_loss"], expected["total_loss"])
    for key in ("per_component_unweighted", "per_component_sample"):
        assert output[key].keys() == expected[key].keys()
        for name in expected[key]:
            close(output[key][name], expected[key][name])
    for key in ("per_component_weight", "per_component_raw_weight"):
        assert output[key] == pytest.approx(expected[key])


def test_schedules(oracle: dict[str, Any]) -> None:
    for name, sample in oracle["schedules"].items():
        schedule = getattr(losses, name.rstrip("0123456789"))(**sample["kwargs"])
        for step, value in sample["values"].items():
            assert schedule(int(step), 0) == pytest.approx(value, rel=1e-14), name
