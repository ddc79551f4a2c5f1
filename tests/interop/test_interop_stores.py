"""Stores of one product in the other, whole and damaged; needs nvalchemi-toolkit 0.3.0 (``nox -s interop``)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ase.io
import numpy as np
import pytest
import torch
from ase.build import bulk, molecule
from ase.calculators.singlepoint import SinglePointCalculator
from interop_rigs import edges, fields, our_strategy, reference, reference_model, run

from nvalchemi_lightning.data import (
    AtomicData,
    AtomicDataZarrReader,
    AtomicDataZarrWriter,
    DataLoader,
    Dataset,
    NeighborListTransform,
    convert,
    origin_of,
    provenance_of,
    repair_store,
)
from nvalchemi_lightning.errors import DataError, StoreError
from nvalchemi_lightning.models import AtomicStatistics, DemoModel, DemoModelWrapper

theirs = reference()
pytestmark = [pytest.mark.filterwarnings("default")]


def write_frames(path: Path, count: int) -> Path:
    """Write molecules and crystals; forces for every second one, stress for the crystals alone."""
    generator = np.random.default_rng(0)
    frames = []
    for number in range(count):
        atoms = molecule("H2O") if number % 3 else bulk("NaCl", "rocksalt", a=5.6)
        atoms.rattle(0.1, seed=number)
        labels: dict[str, Any] = {"energy": -1000.123456789 * (number + 1)}
        if number % 2:
            labels["forces"] = generator.normal(size=(len(atoms), 3))
        if atoms.pbc.any():
            labels["stress"] = generator.normal(size=6)
        atoms.calc = SinglePointCalculator(atoms, **labels)
        frames.append(atoms)
    ase.io.write(path, frames)
    return path


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare bits, but for the axis of one structure; NaN is itself."""
    same = one.dtype == other.dtype and one.numel() == other.numel()
    return same and torch.allclose(one.reshape(other.shape), other, rtol=0, atol=0, equal_nan=True)


def assert_read_alike(path: Path) -> None:
    """Compare what both readers make of a store, and let the reference check it."""
    ours, other = AtomicDataZarrReader(path), theirs.AtomicDataZarrReader(path)
    other.check_integrity()
    assert len(ours) == len(other)
    assert ours.field_levels.keys() == other.field_levels.keys()
    for number in range(len(ours)):
        mine, (read, told) = ours.read(number)[0], other.read(number)
        assert told["physical_index"] == ours.read(number)[1]["physical_index"]
        assert mine.keys() == read.keys()
        for name, value in mine.items():
            assert equal(read[name], value), f"{name} of {number}"


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    convert(write_frames(folder / "frames.extxyz", 12), folder / "data.zarr", split=(0.75, 0.25))
    AtomicStatistics.fit(Dataset(AtomicDataZarrReader(folder / "data_train.zarr")), cutoff=4.0).save(
        folder / "data_train.zarr"
    )
    return folder


@pytest.mark.parametrize("part", ["train", "val"])
def test_what_convert_writes_is_read_alike(converted: Path, part: str) -> None:
    store = converted / f"data_{part}.zarr"
    assert_read_alike(store)
    read, _ = theirs.AtomicDataZarrReader(store).read(0)
    assert (read["energy"].dtype, read["positions"].dtype) == (torch.float64, torch.float32)


def test_the_references_loader_hands_out_what_convert_writes(converted: Path) -> None:
    # With its validation the reference casts labels to the dtype of positions; without, it hands out what is stored.
    reader = theirs.AtomicDataZarrReader(converted / "data_train.zarr")
    ours = AtomicDataZarrReader(converted / "data_train.zarr").read_batch(range(9))
    for skip, dtype in ((True, torch.float64), (False, torch.float32)):
        dataset = theirs.Dataset(reader, device="cpu", skip_validation=skip)
        loaded = list(theirs.DataLoader(dataset, batch_size=4))
        assert [batch.num_graphs for batch in loaded] == [4, 4, 1]
        assert equal(torch.cat([batch.energy for batch in loaded]), ours.energy.to(dtype))
        assert equal(torch.cat([batch.forces for batch in loaded]), ours.forces)
        assert ours.forces.isnan().any()


def test_the_reference_trains_on_what_convert_writes_where_its_losses_leave_out_missing_labels(
    converted: Path,
) -> None:
    dataset = theirs.Dataset(theirs.AtomicDataZarrReader(converted / "data_train.zarr"), device="cpu")
    loss = theirs.EnergyMSELoss() + theirs.ForceMSELoss(ignore_nonfinite=True)
    model = reference_model()
    theirs.TrainingStrategy(
        models=model,
        optimizer_configs=theirs.OptimizerConfig(optimizer_cls=torch.optim.Adam, optimizer_kwargs={"lr": 1e-3}),
        loss_fn=loss,
        training_fn=theirs.default_training_fn,
        num_epochs=1,
    ).run(theirs.DataLoader(dataset, batch_size=4))
    assert all(weight.isfinite().all() for weight in model.parameters())


def test_every_change_that_we_make_leaves_a_store_that_the_reference_reads(tmp_path: Path) -> None:
    store = tmp_path / "data.zarr"
    convert(write_frames(tmp_path / "frames.extxyz", 9), store)
    writer = AtomicDataZarrWriter(store)
    more = [AtomicData.from_atoms(atoms) for atoms in ase.io.read(tmp_path / "frames.extxyz", index=":3")]
    for change in (
        lambda: writer.append(more),
        lambda: writer.add_custom("weight", torch.arange(12.0)[:, None], "system"),
        lambda: writer.delete([0, 5]),
        writer.defragment,
        lambda: repair_store(store),
    ):
        change()
        assert_read_alike(store)
    assert len(AtomicDataZarrReader(store)) == 10


def test_edges_of_ours_are_read_alike_after_every_change(tmp_path: Path) -> None:
    store, writer = tmp_path / "edges.zarr", AtomicDataZarrWriter(tmp_path / "edges.zarr")
    generator = torch.Generator().manual_seed(0)
    structures = [NeighborListTransform(3.0)(AtomicData(**fields(size, generator))) for size in (2, 5, 3, 4)]
    writer.write(structures[:2])
    writer.append(structures[2:])
    writer.delete([0])
    assert_read_alike(store)
    writer.defragment()
    assert_read_alike(store)
    read, _ = theirs.AtomicDataZarrReader(store).read(2)
    assert torch.equal(read["neighbor_list"].long(), structures[3].neighbor_list.long())


def test_the_reference_extends_a_converted_store_and_we_still_tell_origins(tmp_path: Path) -> None:
    store = tmp_path / "data.zarr"
    frames = write_frames(tmp_path / "frames.extxyz", 6)
    convert(frames, store)
    theirs.AtomicDataZarrWriter(store).append(theirs_of(AtomicDataZarrReader(store).read_batch([3])[0]))
    theirs.AtomicDataZarrWriter(store).delete([0])
    assert_read_alike(store)
    assert origin_of(store, 0) is not None
    assert origin_of(store, 6) is None
    assert repair_store(store, dry_run=True).is_sound
    AtomicDataZarrWriter(store).defragment()
    assert_read_alike(store)


def test_what_the_reference_defragments_we_read_without_what_it_dropped(tmp_path: Path) -> None:
    # It writes the store anew with the attributes that it knows.
    store = tmp_path / "data.zarr"
    convert(write_frames(tmp_path / "frames.extxyz", 6), store)
    AtomicStatistics.fit(Dataset(AtomicDataZarrReader(store)), cutoff=4.0).save(store)
    before = AtomicDataZarrReader(store).read_batch([0, 2, 3, 4, 5])
    theirs.AtomicDataZarrWriter(store).delete([1])
    theirs.AtomicDataZarrWriter(store).defragment()
    assert_read_alike(store)
    assert equal(AtomicDataZarrReader(store).read_batch(range(5)).energy, before.energy)
    assert provenance_of(store) is None
    with pytest.raises(DataError, match="holds no statistics"):
        AtomicStatistics.load(store)


def test_a_store_of_the_reference_is_converted(tmp_path: Path) -> None:
    structures = theirs_with_edges((2, 3), torch.Generator().manual_seed(0))
    theirs.AtomicDataZarrWriter(tmp_path / "theirs.zarr").write(structures)
    convert(tmp_path / "theirs.zarr", tmp_path / "ours.zarr")
    assert_read_alike(tmp_path / "ours.zarr")
    batch = AtomicDataZarrReader(tmp_path / "ours.zarr").read_batch([0, 1])
    assert torch.equal(batch.forces, torch.cat([structure.forces for structure in structures]))


def test_a_store_of_the_reference_trains_here(tmp_path: Path) -> None:
    structures = theirs_with_edges((2, 3, 4), torch.Generator().manual_seed(0))
    theirs.AtomicDataZarrWriter(tmp_path / "theirs.zarr").write(structures)
    loader = DataLoader(Dataset(AtomicDataZarrReader(tmp_path / "theirs.zarr")), batch_size=2, shuffle=True)
    assert run(our_strategy(DemoModelWrapper(DemoModel(hidden_dim=8))), loader).step_count == 4


# Stores that the reference damages -------------------------------------------------------------------------------


def theirs_of(structure: AtomicData) -> Any:
    """Return a structure of ours in the reference's class."""
    return theirs.AtomicData(**{name: value for name, value in structure if name in theirs.AtomicData.model_fields})


def theirs_with_edges(sizes: tuple[int, ...], generator: torch.Generator, **extra: Any) -> list[Any]:
    """Return structures of the reference in which every atom has edges to all others."""
    made = [{**fields(size, generator), **edges(size), **extra} for size in sizes]
    return [
        theirs.AtomicData(**{name: value for name, value in values.items() if value is not None}) for values in made
    ]


Damage = Callable[[Path, torch.Generator], list[Any]]


def append_with_edges(store: Path, generator: torch.Generator) -> list[Any]:
    parts = [theirs_with_edges(sizes, generator) for sizes in ((2, 3, 4), (3, 2), (5,))]
    writer = theirs.AtomicDataZarrWriter(store)
    writer.write(parts[0])
    writer.append(parts[1])
    writer.append(parts[2])
    return [structure for part in parts for structure in part]


def append_to_ours(store: Path, generator: torch.Generator) -> list[Any]:
    first = [AtomicData(**fields(size, generator), **edges(size)) for size in (2, 3)]
    more = theirs_with_edges((4, 2), generator)
    AtomicDataZarrWriter(store).write(first)
    theirs.AtomicDataZarrWriter(store).append(more)
    return [*first, *more]


def delete_and_defragment(store: Path, generator: torch.Generator) -> list[Any]:
    structures = theirs_with_edges((2, 3, 4, 2, 3), generator)
    writer = theirs.AtomicDataZarrWriter(store)
    writer.write(structures)
    writer.delete([0, 2])
    writer.defragment()
    return [structures[1], *structures[3:]]


def append_and_defragment(store: Path, generator: torch.Generator) -> list[Any]:
    structures = append_with_edges(store, generator)
    theirs.AtomicDataZarrWriter(store).delete([1, 3])
    theirs.AtomicDataZarrWriter(store).defragment()
    return [structures[0], structures[2], *structures[4:]]


def defragment_and_append(store: Path, generator: torch.Generator) -> list[Any]:
    structures = delete_and_defragment(store, generator)
    more = theirs_with_edges((4, 2), generator)
    theirs.AtomicDataZarrWriter(store).append(more)
    return [*structures, *more]


def append_without_forces(store: Path, generator: torch.Generator) -> list[Any]:
    first, more = theirs_with_edges((2, 3), generator), theirs_with_edges((3, 2), generator, forces=None)
    theirs.AtomicDataZarrWriter(store).write(first)
    theirs.AtomicDataZarrWriter(store).append(more)
    return [*first, *more]


@pytest.mark.parametrize(
    "damage",
    [
        append_with_edges,
        append_to_ours,
        delete_and_defragment,
        append_and_defragment,
        defragment_and_append,
        append_without_forces,
    ],
)
def test_what_the_reference_damages_is_refused_and_repaired(tmp_path: Path, damage: Damage) -> None:
    store = tmp_path / "store.zarr"
    expected = damage(store, torch.Generator().manual_seed(0))
    reader = AtomicDataZarrReader(store)
    with pytest.raises(StoreError, match="repair_store"):
        reader.read_batch(range(len(reader)))
    assert not repair_store(store, dry_run=True).is_sound
    assert repair_store(store, fill_short=True).is_sound
    assert_read_alike(store)
    for number, structure in enumerate(expected):
        read, _ = AtomicDataZarrReader(store).read(number)
        for name in ("positions", "energy", "forces", "neighbor_list", "neighbor_list_shifts"):
            wanted = getattr(structure, name)
            if wanted is None:
                assert read[name].isnan().all(), f"{name} of {number}"
            else:
                assert equal(read[name], wanted), f"{name} of {number}"
