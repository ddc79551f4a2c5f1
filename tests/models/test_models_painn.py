"""How PaiNN is made, called, differentiated, cast and stored."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ase import Atoms
from ase.io import read
from models_rigs import Join
from torch import Tensor

from nvalchemi_lightning.data import AtomicData, Batch
from nvalchemi_lightning.data.feeding.edge_transform import NeighborListTransform
from nvalchemi_lightning.errors import ConfigurationError, DataError, UnknownNameError
from nvalchemi_lightning.models import AtomicStatistics, PaiNN
from nvalchemi_lightning.specs import create_model_spec_from_json
from nvalchemi_lightning.specs.model_spec import model_spec

Make = Callable[..., PaiNN]


def snapshot(batch: Batch) -> dict[str, tuple[Tensor, Tensor, int, bool]]:
    return {name: (value, value.clone(), value._version, value.requires_grad) for name, value in batch}


@pytest.mark.parametrize("with_edges", [True, False])
def test_a_call_does_not_change_the_batch(small: Make, join: Join, structures: list[Atoms], with_edges: bool) -> None:
    batch = join(*structures)
    if with_edges:
        batch = NeighborListTransform(4.0)(batch)
    before = snapshot(batch)
    small(active_outputs=("energy", "forces", "stress"))(batch)
    assert {name for name, _ in batch} == before.keys()
    for name, (tensor, values, version, required) in before.items():
        now = batch[name]
        assert now is tensor
        assert now._version == version
        assert now.requires_grad == required
        assert torch.equal(now, values)


def test_shapes_and_dtypes(join: Join, small: Make, structures: list[Atoms]) -> None:
    for dtype in (torch.float32, torch.float64):
        batch = join(*structures, dtype=dtype)
        outputs = small(active_outputs=("stress", "energy", "forces")).to(dtype)(batch)
        count = len(structures)
        shapes = {"energy": (count, 1), "forces": (batch.num_nodes, 3), "stress": (count, 3, 3)}
        assert {name: tuple(value.shape) for name, value in outputs.items()} == shapes
        assert {value.dtype for value in outputs.values()} == {dtype}


def test_a_single_structure_is_a_batch_of_one(small: Make, join: Join, structures: list[Atoms]) -> None:
    model = small(active_outputs=("energy", "forces", "stress")).eval()
    for atoms in structures:
        single = model(AtomicData.from_atoms(atoms, dtype=torch.float64))
        batched = model(join(atoms))
        assert all(torch.equal(single[name], batched[name]) for name in batched)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("surroundings", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_b04_derivatives_work_everywhere(
    small: Make, join: Join, structures: list[Atoms], surroundings: Callable[[], Any], training: bool
) -> None:
    model = small(active_outputs=("energy", "forces", "stress"))
    expected = model(join(*structures))
    model.train(training)
    with surroundings():
        outputs = model(join(*structures))
        recording = training and torch.is_grad_enabled()
    for name, value in expected.items():
        torch.testing.assert_close(outputs[name], value, rtol=0, atol=1e-12)
        assert outputs[name].requires_grad == recording


def test_b04_data_of_inference_mode_can_be_trained_on(small: Make, join: Join, structures: list[Atoms]) -> None:
    with torch.inference_mode():
        batch = NeighborListTransform(4.0)(join(*structures))
    model = small()
    model(batch)["forces"].square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_b04_evaluation_keeps_no_graph(small: Make, join: Join, structures: list[Atoms]) -> None:
    model, batch = small(active_outputs=("energy", "forces", "stress")).eval(), join(*structures)

    def tensors_alive_after(calls: int) -> int:
        kept = [model(batch) for _ in range(calls)]
        assert not any(value.grad_fn or value.requires_grad for outputs in kept for value in outputs.values())
        gc.collect()
        return sum(type(thing) is Tensor for thing in gc.get_objects())

    tensors_alive_after(2)
    assert tensors_alive_after(12) - tensors_alive_after(2) == 10 * 3


def test_positions_that_require_gradients_are_used(small: Make, join: Join, structures: list[Atoms]) -> None:
    model = small().eval()
    expected = model(join(*structures))["forces"]
    batch = join(*structures)
    batch.positions.requires_grad_()
    outputs = model(batch)
    (gradient,) = torch.autograd.grad(outputs["energy"].sum(), batch.positions)
    torch.testing.assert_close(-gradient, expected, rtol=0, atol=1e-12)
    assert not outputs["forces"].requires_grad


def test_second_derivatives_equal_differences_of_forces(small: Make, join: Join) -> None:
    batch, h = join(Atoms("OH2", [[0, 0, 0], [0, 0.7, 0.6], [0, -0.8, 0.6]])), 1e-5
    model = small()
    batch.positions.requires_grad_()
    row = torch.autograd.grad(model(batch)["forces"][1, 2], batch.positions)[0]
    start, forces = batch.positions.detach(), []
    for step in (h, -h):
        batch.positions = start.clone()
        batch.positions[0, 1] += step
        forces.append(model(batch)["forces"][1, 2].item())
    assert row[0, 1].item() == pytest.approx((forces[0] - forces[1]) / (2 * h), abs=1e-6)


def test_gradients_of_a_force_loss_equal_differences(small: Make, join: Join, structures: list[Atoms]) -> None:
    model, batch, h = small(active_outputs=("energy", "forces", "stress")), join(*structures), 1e-6

    def loss() -> Tensor:
        outputs = model(batch)
        return sum(value.square().mean() for value in outputs.values())  # type: ignore[return-value]

    loss().backward()
    for name, parameter in model.named_parameters():
        index = int(parameter.grad.abs().argmax())
        with torch.no_grad():
            values = []
            for step in (h, -2 * h):
                parameter.view(-1)[index] += step
                values.append(loss().item())
            parameter.view(-1)[index] += h
        slope = (values[0] - values[1]) / (2 * h)
        assert parameter.grad.view(-1)[index].item() == pytest.approx(slope, rel=1e-4, abs=1e-7), name


def test_a_loss_of_forces_alone_reaches_every_parameter(small: Make, join: Join, structures: list[Atoms]) -> None:
    model = small()
    model(join(*structures))["forces"].square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_b106_nobody_asks_for_stress(
    small: Make, join: Join, structures: list[Atoms], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object) -> Tensor:
        raise RuntimeError("stress was computed")

    model = small()
    monkeypatch.setattr("nvalchemi_lightning.models.painn.stress_of_edges", forbidden)
    assert set(model(join(*structures))) == {"energy", "forces"}
    model.set_config("active_outputs", {"energy", "stress"})
    with pytest.raises(RuntimeError, match="stress was computed"):
        model(join(*structures))


def test_energy_alone_is_not_differentiated(small: Make, join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(active_outputs=("energy",))
    monkeypatch.setattr(torch.autograd, "grad", None)
    outputs = model(join(Atoms("OH2", torch.eye(3).numpy())))
    assert list(outputs) == ["energy"]
    assert outputs["energy"].requires_grad


def test_b52_totals_are_added_up_in_float64(join: Join) -> None:
    references = (-123456.789012345, -0.1)
    atoms = [Atoms("O1000", torch.rand(1000, 3).numpy() * 1e3), Atoms("O")]
    model = PaiNN(hidden=8, elements=(8, 1), reference_energies=references, cutoff=1e-3)
    single = model(join(*atoms, dtype=torch.float32))["energy"]
    double = model.double()(join(*atoms))["energy"]
    assert double.dtype == torch.float64
    exact = 1000 * double[1, 0].item()
    assert double[0, 0].item() == pytest.approx(exact, rel=1e-13)
    # A sum in float32 would be off by many times the last digit, 8 eV here.
    assert abs(single[0, 0].item() - exact) <= 4.0


def test_b52_casts_leave_references_and_scale_exact(small: Make) -> None:
    values = {"scale": 1 / 3, "reference_energies": (-math.pi * 1e5,), "elements": (1,)}
    model = PaiNN(hidden=8, **values)
    for change in (model.float, model.half, model.bfloat16, model.double, lambda: model.to(torch.float32)):
        change()
        assert model.energy_scale.item() == values["scale"]
        assert model.element_energies.tolist() == [-math.pi * 1e5]
    assert model.embedding.weight.dtype == torch.float32
    assert PaiNN(hidden=8, **values).to("meta").energy_scale.is_meta


def test_b52_the_default_dtype_has_no_influence(small: Make, join: Join, structures: list[Atoms]) -> None:
    batch = join(*structures)
    expected = small()(batch)["forces"]
    torch.manual_seed(0)
    model = small()
    assert torch.get_default_dtype() == torch.float32
    torch.set_default_dtype(torch.float16)
    try:
        forces = model(batch)["forces"]
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(forces, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gives_nearly_the_same_and_finite_gradients(
    small: Make, join: Join, structures: list[Atoms], dtype: torch.dtype
) -> None:
    model = small(active_outputs=("energy", "forces", "stress")).float()
    batch = join(*structures, Atoms("Cu", cell=torch.eye(3).numpy() * 2.6, pbc=True), dtype=torch.float32)
    expected = model(batch)
    with torch.autocast("cpu", dtype=dtype):
        outputs = model(batch)
    for name, value in outputs.items():
        assert value.dtype == torch.float32
        assert (value - expected[name]).abs().max() < 0.1 * expected[name].abs().max()
    sum(value.square().mean() for value in outputs.values()).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_the_model_builds_its_own_neighbors(small: Make, join: Join, structures: list[Atoms]) -> None:
    batch, model = join(*structures), small()
    without, with_edges = model(batch), model(NeighborListTransform(4.0)(batch))
    assert all(torch.equal(without[name], with_edges[name]) for name in without)


def test_edges_may_be_int32_and_without_shifts(small: Make, join: Join) -> None:
    batch, model = join(Atoms("OH2", torch.eye(3).numpy())), small()
    expected = model(batch)["forces"]
    batch.neighbor_list = NeighborListTransform(4.0)(batch).neighbor_list.int()
    assert torch.equal(model(batch)["forces"], expected)


def test_periodic_edges_need_their_images(small: Make, join: Join, crystal: Atoms) -> None:
    batch = NeighborListTransform(4.0)(join(crystal))
    del batch.neighbor_list_shifts
    with pytest.raises(DataError, match="the batch is periodic and has neighbor_list but no neighbor_list_shifts"):
        small()(batch)


def test_the_spec_rebuilds_the_model(small: Make, join: Join, structures: list[Atoms]) -> None:
    model = small(num_layers=2, neighbors_per_atom=7.5)
    model.set_config("active_outputs", {"energy", "forces", "stress"})
    form = model_spec(model).model_dump()
    assert form["cls_path"].startswith("nvalchemi_lightning.models.")
    rebuilt = create_model_spec_from_json(form).build().double()
    rebuilt.load_state_dict(model.state_dict())
    batch = join(*structures)
    expected, outputs = model(batch), rebuilt(batch)
    assert outputs.keys() == expected.keys()
    assert all(torch.equal(outputs[name], expected[name]) for name in expected)


def test_the_spec_of_a_default_model_rebuilds_it() -> None:
    model = PaiNN()
    rebuilt = create_model_spec_from_json(model_spec(model).model_dump()).build()
    assert rebuilt.state_dict().keys() == model.state_dict().keys()
    assert rebuilt.embedding.num_embeddings == 118


def test_the_state_is_plain(small: Make, tmp_path: Path) -> None:
    torch.save(small().state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert state["energy_scale"].dtype == state["element_energies"].dtype == torch.float64
    assert all(value.isfinite().all() for value in state.values())


def test_from_statistics_takes_over_what_the_data_say(shared: Path) -> None:
    frames = read(shared / "data" / "ethanol_train.extxyz.gz", ":20")
    data = [AtomicData.from_atoms(atoms) for atoms in frames]
    statistics = AtomicStatistics.fit(data, cutoff=5.0)
    model = PaiNN.from_statistics(statistics, hidden=16)
    assert model.elements == (1, 6, 8)
    assert model.scale == statistics.force_scale
    assert model.neighbors_per_atom == 8.0
    batch = Batch.from_data_list(data)
    outputs = model(batch)
    assert (outputs["energy"] - batch.energy).abs().max() / 9 < 3.0
    # An untrained model predicts forces of the right size.
    assert 0.1 < outputs["forces"].std() / batch.forces.std() < 10
    assert PaiNN.from_statistics(statistics, hidden=16, scale=2.0).scale == 2.0


def test_from_statistics_without_labels() -> None:
    data = AtomicData(positions=torch.zeros(1, 3), atomic_numbers=torch.tensor([6]))
    model = PaiNN.from_statistics(AtomicStatistics.fit([data], cutoff=5.0), hidden=8)
    assert (model.scale, model.reference_energies, model.neighbors_per_atom) == (1.0, (0.0,), 10.0)


@pytest.mark.parametrize("number", [0, 94, 119])
def test_an_unknown_element_is_named(small: Make, number: int) -> None:
    batch = Batch.from_levels(
        node={"positions": torch.rand(4, 3).double(), "atomic_numbers": torch.tensor([1, 1, 6, number])},
        num_nodes_per_graph=[2, 2],
    )
    with pytest.raises(DataError, match=rf"atomic number {number} of atom 3 in structure 1 .* \(1, 6, 8, 29, 79\)"):
        small()(batch)


def test_an_unknown_element_has_no_energy_where_looking_is_skipped(small: Make, join: Join) -> None:
    model, batch = small(), join(Atoms("H"), Atoms("Pu"))
    model._species = lambda graph: model.species_of[graph.numbers]  # type: ignore[method-assign]
    assert model(batch)["energy"].isnan().flatten().tolist() == [False, True]


def test_positions_must_have_the_dtype_of_the_model(small: Make, join: Join) -> None:
    with pytest.raises(DataError, match=r"positions are torch.float32 but the model is torch.float64; use model.to\("):
        small()(join(Atoms("H"), dtype=torch.float32))


def test_active_outputs_are_checked(small: Make) -> None:
    with pytest.raises(UnknownNameError, match="PaiNN has no output 'stres'; did you mean 'stress'"):
        small(active_outputs=("energy", "stres"))
    model = small()
    with pytest.raises(UnknownNameError, match="PaiNN has no output 'dipole'; it has"):
        model.set_config("active_outputs", {"dipole"})
    assert model.active_outputs == ("energy", "forces")


@pytest.mark.parametrize("name", ["hidden", "num_layers", "num_radial", "neighbors_per_atom", "cutoff"])
def test_sizes_must_be_positive(name: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"{name} must be (a )?positive.*, got 0"):
        PaiNN(**{name: 0})


@pytest.mark.parametrize("elements", [(), (0,), (119,), (1, 1)])
def test_elements_are_checked(elements: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError, match="elements must be distinct atomic numbers from 1 to 118, got"):
        PaiNN(elements=elements)


@pytest.mark.parametrize("elements", [None, (1, 6)])
def test_reference_energies_belong_to_elements(elements: tuple[int, ...] | None) -> None:
    with pytest.raises(ConfigurationError, match="reference_energies has 1 numbers; give one for each of elements"):
        PaiNN(elements=elements, reference_energies=(1.0,))
