"""The demo model reads the weights of the reference and trains."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ase import Atoms
from models_rigs import Join

from nvalchemi_lightning.data import AtomicData, AtomicDataZarrReader
from nvalchemi_lightning.errors import DataError
from nvalchemi_lightning.models import DemoModel, DemoModelWrapper
from nvalchemi_lightning.specs import create_model_spec_from_json, without_timestamps
from nvalchemi_lightning.specs.model_spec import model_spec


def make() -> DemoModelWrapper:
    return DemoModelWrapper(DemoModel(num_atom_types=20, hidden_dim=4)).double()


@pytest.mark.parametrize("index", ["0", "1", "2"])
def test_weights_of_the_reference_give_its_energies(shared: Path, index: str) -> None:
    folder = shared / "samples" / "ckpt_demo_async" / "models" / "main"
    model = create_model_spec_from_json(json.loads((folder / "spec.json").read_text())).build()
    assert isinstance(model, DemoModelWrapper)
    model.load_state_dict(torch.load(folder / "checkpoints" / f"{index}.pt", weights_only=True))
    batch = AtomicDataZarrReader(shared / "samples" / "mixed32.zarr").read_batch(range(8))
    oracle = json.loads((shared / "samples" / "ckpt_oracle.json").read_text())[index]["energy_first_batch"]
    torch.testing.assert_close(model(batch)["energy"].flatten(), torch.tensor(oracle), rtol=0, atol=1e-6)


def test_spec_round_trip(shared: Path) -> None:
    form = model_spec(DemoModelWrapper(DemoModel(hidden_dim=8))).model_dump()
    assert form["model"]["num_atom_types"] == 100
    rebuilt = create_model_spec_from_json(form).build()
    assert without_timestamps(model_spec(rebuilt).model_dump()) == without_timestamps(form)


def test_forces_are_the_slope_of_the_energy(join: Join, structures: list[Atoms]) -> None:
    model, batch, h = make().eval(), join(structures[0], Atoms("H")), 1e-5
    batch.atomic_numbers = batch.atomic_numbers.clamp(max=19)
    forces = model(batch)["forces"]
    start = batch.positions
    for atom, axis in ((0, 0), (4, 2), (9, 1)):
        energies = []
        for step in (h, -h):
            batch.positions = start.clone()
            batch.positions[atom, axis] += step
            energies.append(model(batch)["energy"].sum().item())
        assert forces[atom, axis].item() == pytest.approx(-(energies[0] - energies[1]) / (2 * h), rel=1e-5)


def test_energy_of_a_batch_is_that_of_its_structures(join: Join, structures: list[Atoms]) -> None:
    model = make()
    pair = [structures[0], structures[-1]]
    expected = [model(AtomicData.from_atoms(atoms, dtype=torch.float64))["energy"] for atoms in pair]
    assert [tuple(energy.shape) for energy in expected] == [(1, 1), (1, 1)]
    torch.testing.assert_close(model(join(*pair))["energy"], torch.cat(expected), rtol=0, atol=1e-12)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("surroundings", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_b04_forces_work_everywhere(
    join: Join, structures: list[Atoms], surroundings: Callable[[], Any], training: bool
) -> None:
    model = make().train(training)
    expected = model(join(structures[0]))["forces"]
    with surroundings():
        batch = join(structures[0])
        outputs = model(batch)
        recording = training and torch.is_grad_enabled()
    torch.testing.assert_close(outputs["forces"], expected, rtol=0, atol=1e-13)
    assert {value.requires_grad for value in outputs.values()} == {recording}
    assert not batch.positions.requires_grad


def test_energy_and_forces_train_every_weight(join: Join, structures: list[Atoms]) -> None:
    model = make()
    outputs = model(join(structures[0]))
    (outputs["energy"].sum() + outputs["forces"].square().sum()).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_energy_alone(join: Join, structures: list[Atoms]) -> None:
    model = make()
    model.set_config("active_outputs", {"energy"})
    outputs = model(join(structures[0]))
    assert list(outputs) == ["energy"]
    assert outputs["energy"].shape == (1, 1)


def test_elements_beyond_the_table_are_named(join: Join) -> None:
    with pytest.raises(DataError, match=r"atomic number 29 needs DemoModel\(num_atom_types=\.\.\.\) above it"):
        make()(join(Atoms("Cu")))
