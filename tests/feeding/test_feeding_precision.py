"""B52: energies that float32 cannot hold, from file to loss; and precision as nobody's global state."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from ase.build import bulk
from ase.io import read, write

from nvalchemi_lightning import EnergyMSELoss, ForceMSELoss, OptimizerConfig, TrainingStrategy, ValidationConfig
from nvalchemi_lightning.data import (
    AtomicData,
    AtomicDataZarrReader,
    AtomicDataZarrWriter,
    Batch,
    DataLoader,
    Dataset,
    InMemoryDataset,
    MultiDataset,
    NeighborListTransform,
)
from nvalchemi_lightning.errors import DataError
from nvalchemi_lightning.metrics import EnergyMAE
from nvalchemi_lightning.models import AtomicStatistics, DemoModel, DemoModelWrapper, PaiNN
from nvalchemi_lightning.training_fn import default_training_fn

OFFSET = -2.5e6 + 20.4422717  # [eV]; neighboring float32 numbers are 0.25 eV apart here


class Structure(AtomicData):
    """A structure whose energy stays in float64."""

    precision_preserving_keys = frozenset({"energy"})


@pytest.fixture
def file(tmp_path):
    """Return a file of four crystals whose energies differ by millielectronvolts."""
    frames = []
    for number in range(4):
        atoms = bulk("Cu", cubic=True)
        atoms.rattle(0.05, seed=number)
        atoms.info["energy"] = OFFSET + 1e-3 * number
        atoms.arrays["forces"] = atoms.positions * 0.0
        frames.append(atoms)
    write(tmp_path / "frames.extxyz", frames)
    return tmp_path / "frames.extxyz"


EXPECTED = [OFFSET + 1e-3 * number for number in range(4)]


def loaded(file, tmp_path) -> Dataset:
    """Write the file to a store and return the data set over it."""
    path = tmp_path / "precise.zarr"
    if not path.exists():
        structures = [Structure.from_atoms(atoms) for atoms in read(file, ":")]
        AtomicDataZarrWriter(path).write(map(NeighborListTransform(3.0), structures))
    return Dataset(AtomicDataZarrReader(path))


def same(data):
    return data


@pytest.mark.parametrize("kind", ["store", "workers", "memory", "transformed", "several", "moved"])
def test_feeding_float64_energies_arrive_exactly(file, tmp_path, kind):
    dataset = loaded(file, tmp_path)
    sets = {
        "memory": InMemoryDataset(reader=dataset.reader),
        "transformed": Dataset(dataset.reader, transforms=[same]),
        "several": MultiDataset(
            InMemoryDataset([NeighborListTransform(3.0)(AtomicData.from_atoms(bulk("Cu")))]), dataset
        ),
    }
    loader = DataLoader(sets.get(kind, dataset), batch_size=2, num_workers=kind == "workers")
    batches = [batch.to("cpu") for batch in loader]
    energies = torch.cat([batch.energy for batch in batches]).flatten()
    assert energies[~energies.isnan()].tolist() == EXPECTED
    assert {batch.energy.dtype for batch in batches} == {torch.float64}
    assert {batch.positions.dtype for batch in batches} == {batch.forces.dtype for batch in batches} == {torch.float32}


def model(**options) -> PaiNN:
    torch.manual_seed(0)
    return PaiNN(hidden=8, num_layers=2, cutoff=3.0, elements=[29], reference_energies=[OFFSET / 4], **options)


def test_feeding_float32_potential_sees_differences_of_float64_labels(file, tmp_path):
    """The loss of a float32 model equals that of the same model without the offset, in labels and references."""
    (batch,) = DataLoader(loaded(file, tmp_path), batch_size=4)
    near = batch.clone()
    near.energy = batch.energy - OFFSET
    potential, bare = model(), model()
    bare.element_energies.zero_()
    predicted, small = potential(batch)["energy"], bare(near)["energy"]
    assert predicted.dtype == small.dtype == torch.float64
    assert potential.embedding.weight.dtype == torch.float32
    torch.testing.assert_close(predicted - OFFSET, small, rtol=0, atol=1e-9)
    loss = EnergyMSELoss(per_atom=True)
    values = [
        loss(output, data.energy, num_nodes_per_graph=data.num_nodes_per_graph)
        for output, data in ((predicted, batch), (small, near))
    ]
    torch.testing.assert_close(values[0], values[1], rtol=1e-6, atol=0)


def test_feeding_float32_labels_ask_for_float32_totals(file):
    """What the caller's labels cannot hold is not computed; the limit is documented at the potential."""
    batch = Batch.from_data_list([AtomicData.from_atoms(atoms) for atoms in read(file, ":")])
    assert batch.energy.dtype == torch.float32
    assert len(set(batch.energy.flatten().tolist())) == 1
    potential = model()
    assert potential(batch)["energy"].dtype == torch.float32
    assert potential(batch.clone(drop=["energy"]))["energy"].dtype == torch.float32
    assert potential.double()(batch.to(dtype=torch.float64))["energy"].dtype == torch.float64


def test_feeding_float64_energies_are_learned_in_float32(file, tmp_path):
    """Without the digits the labels are all the same; with them the order of the structures is learned."""
    dataset = loaded(file, tmp_path)
    statistics = AtomicStatistics.fit(dataset)
    assert statistics.reference_energies[0] == pytest.approx(OFFSET / 4, rel=1e-9)
    potential = model(active_outputs=["energy"], scale=1e-3)
    strategy = TrainingStrategy(
        models=potential, optimizer_configs=OptimizerConfig(lr=1e-2), loss_fn=1e6 * EnergyMSELoss(), num_epochs=200
    )
    strategy.run(DataLoader(dataset, batch_size=4))
    (batch,) = DataLoader(dataset, batch_size=4)
    error = EnergyMAE()
    error.update(potential(batch)["energy"], batch.energy, batch.num_nodes_per_graph)
    assert error.compute() < 0.05e-3
    assert {value.dtype for value in potential.parameters()} == {torch.float32}


def test_feeding_float64_labels_meet_a_potential_of_float32_alone(file, tmp_path):
    """The default forward function compares in the precision of the labels, whatever the model returns."""
    potential = DemoModelWrapper(DemoModel(hidden_dim=8))
    (batch,) = DataLoader(loaded(file, tmp_path), batch_size=4)
    assert potential(batch)["energy"].dtype == torch.float32
    predictions = default_training_fn(potential, batch)
    assert predictions["predicted_energy"].dtype == torch.float64
    assert predictions["predicted_forces"].dtype == torch.float32
    strategy = TrainingStrategy(
        models=potential,
        optimizer_configs=OptimizerConfig(lr=1e-3),
        loss_fn=EnergyMSELoss() + ForceMSELoss(),
        num_epochs=1,
        validation_config=ValidationConfig(validation_data=DataLoader(loaded(file, tmp_path), batch_size=4)),
    )
    strategy.run(DataLoader(loaded(file, tmp_path), batch_size=2))
    assert math.isfinite(strategy.last_validation["total_loss"])


def test_feeding_the_error_of_a_large_label_is_exact_in_float64():
    """B52 (c): label -123456.789, prediction 0.001 off."""
    label = torch.tensor([[-123456.789]], dtype=torch.float64)
    atoms = torch.tensor([4])
    loss = EnergyMSELoss(per_atom=True)(label + 1e-3, label, num_nodes_per_graph=atoms)
    assert loss.item() == pytest.approx((float(label + 1e-3) - float(label)) ** 2 / 16, rel=1e-12)
    assert abs(loss.item() - 1e-6 / 16) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_feeding_a_store_keeps_every_dtype(tmp_path, dtype):
    """B52 (d)."""
    data = AtomicData(torch.zeros(2, 3, dtype=dtype), torch.tensor([1, 8], dtype=torch.int32))
    data.forces, data.energy = torch.ones(2, 3, dtype=dtype), torch.ones(1, 1, dtype=dtype)
    data.add_system_property("half", torch.ones(1, 1, dtype=torch.float16))
    data.add_node_property("mark", torch.tensor([3, 4], dtype=torch.int16))
    AtomicDataZarrWriter(tmp_path / "s").write([data, data])
    batch = AtomicDataZarrReader(tmp_path / "s").read_batch([1, 0])
    assert {name: value.dtype for name, value in batch} == {name: value.dtype for name, value in data}


def test_feeding_digits_are_not_lost_by_appending(file, tmp_path):
    dataset = loaded(file, tmp_path)
    plain = AtomicData.from_atoms(read(file))
    AtomicDataZarrWriter(tmp_path / "float32").write(plain)
    with pytest.raises(DataError, match=r"'energy' is float64 but .* stores it as float32, which would lose digits"):
        AtomicDataZarrWriter(tmp_path / "float32").append(dataset.__getitems__([0]).to_data_list())


def trained(dtype: torch.dtype, steps: int) -> list[torch.Tensor]:
    """Return the weights of a small potential after some steps in a precision."""
    structures = []
    for number in range(4):
        atoms = bulk("Cu", cubic=True)
        atoms.rattle(0.05, seed=number)
        data = AtomicData.from_atoms(atoms, dtype=dtype)
        data.energy, data.forces = torch.full((1, 1), -1.0, dtype=dtype), 0 * data.positions
        structures.append(data)
    torch.manual_seed(1)
    potential = PaiNN(hidden=8, num_layers=2, cutoff=3.0, elements=[29]).to(dtype)
    strategy = TrainingStrategy(
        models=potential,
        optimizer_configs=OptimizerConfig(lr=1e-2),
        loss_fn=EnergyMSELoss() + ForceMSELoss(),
        num_steps=steps,
    )
    strategy.run(DataLoader(structures, batch_size=2))
    return [copy.deepcopy(value.data) for value in potential.parameters()]


def test_feeding_precisions_alternate_in_one_process():
    """B52 (a), (b): the default dtype stays, and runs in other precisions change nothing."""
    before = torch.get_default_dtype()
    alone = {dtype: trained(dtype, 3) for dtype in (torch.float32, torch.float64)}
    for dtype in (torch.float64, torch.float32, torch.float64):
        again = trained(dtype, 3)
        assert all(torch.equal(one, two) for one, two in zip(again, alone[dtype], strict=True))
        assert {value.dtype for value in again} == {dtype}
        assert torch.get_default_dtype() == before
