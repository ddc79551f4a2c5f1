"""Real files through the whole chain: structures, store, loader, training, evaluation."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from ase.io import read

from nvalchemi_lightning import (
    EnergyMSELoss,
    ForceMSELoss,
    OptimizerConfig,
    StressMSELoss,
    TrainingStage,
    TrainingStrategy,
    ValidationConfig,
)
from nvalchemi_lightning.data import (
    AtomicData,
    AtomicDataZarrReader,
    AtomicDataZarrWriter,
    DataLoader,
    Dataset,
    InMemoryDataset,
    NeighborListTransform,
)
from nvalchemi_lightning.models import AtomicStatistics, PaiNN

CUTOFF = 3.0  # [A]; short, so that the large structures take no time
OUTPUTS = ("energy", "forces", "stress")
NAMES = {"energy": "EnergyMSELoss", "forces": "ForceMSELoss", "stress": "StressMSELoss"}


def converted(path, **options) -> list[AtomicData]:
    return [AtomicData.from_atoms(atoms, **options) for atoms in read(path, ":")]


class Watch:
    """Notes the losses and how many structures had each label."""

    stage = TrainingStage.AFTER_LOSS
    frequency = 1

    def __init__(self):
        self.losses: list[float] = []
        self.counts: Counter = Counter()
        self.without: Counter = Counter()

    def __call__(self, ctx, stage):
        """Note a batch."""
        self.losses.append(ctx.loss.item())
        for name, count in ctx.losses["per_component_count"].items():
            self.counts[name] += int(count)
            self.without[name] += int(count) == 0


def potential(structures, dtype=torch.float32) -> PaiNN:
    torch.manual_seed(0)
    statistics = AtomicStatistics.fit(structures, cutoff=CUTOFF)
    return PaiNN.from_statistics(statistics, hidden=8, num_layers=2, cutoff=CUTOFF, active_outputs=OUTPUTS).to(dtype)


def trained(model, loader, watch, *, epochs=1, validation=None) -> TrainingStrategy:
    strategy = TrainingStrategy(
        models=model,
        optimizer_configs=OptimizerConfig(lr=1e-4),
        loss_fn=EnergyMSELoss() + ForceMSELoss() + StressMSELoss(),
        validation_config=None if validation is None else ValidationConfig(validation_data=validation),
        num_epochs=epochs,
        hooks=[watch],
    )
    strategy.run(loader)
    return strategy


def stored(structures, path) -> Dataset:
    AtomicDataZarrWriter(path).write(map(NeighborListTransform(CUTOFF), structures))
    return Dataset(AtomicDataZarrReader(path))


def labelled(structures) -> dict[str, int]:
    return {NAMES[name]: sum(name in data for data in structures) for name in NAMES}


@pytest.mark.parametrize(
    ("file", "known"),
    [
        ("mixed_missing_labels", {"EnergyMSELoss": 353, "ForceMSELoss": 343, "StressMSELoss": 160}),
        ("mixed_missing_as_nan", None),
    ],
)
def test_feeding_missing_labels_train_with_the_right_counts(shared, tmp_path, file, known):
    """B11, B49: also where a whole batch has no structure with a label."""
    structures = converted(shared / f"data/{file}.extxyz.gz")
    expected = labelled(structures)
    assert known in (None, expected)
    dataset, watch = stored(structures, tmp_path / "s"), Watch()
    trained(potential(structures), DataLoader(dataset, batch_size=4), watch)
    assert len(watch.losses) == -(-len(structures) // 4)
    assert all(torch.tensor(watch.losses).isfinite())
    assert watch.counts == expected
    assert watch.without["StressMSELoss"] >= (24 if known else 1)


def test_feeding_absent_and_nan_labels_train_alike(shared):
    """The same frames with labels left out, or written as NaN, give the same losses."""
    as_nan = converted(shared / "data/mixed_missing_as_nan.extxyz.gz")
    absent = converted(shared / "data/mixed_missing_labels.extxyz.gz")[: len(as_nan)]
    losses = []
    for structures in (absent, as_nan):
        watch = Watch()
        dataset = InMemoryDataset(structures, prepare=[NeighborListTransform(CUTOFF)])
        trained(potential(structures), DataLoader(dataset, batch_size=16, shuffle=True), watch)
        losses.append(watch.losses)
    assert losses[0] == losses[1]


def test_feeding_every_legal_frame_trains_and_evaluates(shared, tmp_path):
    """B13, B24: molecules beside crystals, no edges, one atom, 500 atoms, 2000 eV/A, -2.5e6 eV."""
    structures = converted(shared / "data/nasty/nasty_valid.extxyz")
    dataset, watch = stored(structures, tmp_path / "s"), Watch()
    model = potential(structures)
    loader = DataLoader(dataset, batch_size=4, shuffle=True)
    strategy = trained(model, loader, watch, epochs=2, validation=DataLoader(dataset, batch_size=7))
    assert len(watch.losses) == 14
    assert all(torch.tensor(watch.losses).isfinite())
    assert watch.counts["EnergyMSELoss"] == 2 * len(structures)
    assert watch.counts["StressMSELoss"] == 2 * sum("stress" in data for data in structures)
    assert all(value.isfinite().all() for value in model.parameters())
    assert math.isfinite(strategy.last_validation["total_loss"])
    assert strategy.last_validation["per_component_count"] == labelled(structures)
    for batch in DataLoader(dataset, batch_size=1):
        assert all(value.isfinite().all() for value in model.eval()(batch).values())


def test_feeding_twins_agree_after_training(shared, tmp_path):
    """Frames that describe the same system have the same energy per atom, however they are written or fed."""
    frames = read(shared / "data/nasty/nasty_valid.extxyz", ":")
    structures = converted(shared / "data/nasty/nasty_valid.extxyz", dtype=torch.float64)
    dataset = stored(structures, tmp_path / "s")
    model = potential(structures, torch.float64)
    trained(model, DataLoader(dataset, batch_size=5, shuffle=True), Watch())
    (batch,) = DataLoader(dataset, batch_size=len(structures))
    output = model.eval()(batch)
    per_atom = output["energy"].flatten() / batch.num_nodes_per_graph
    place = {atoms.info["case"]: number for number, atoms in enumerate(frames)}
    twins = [(number, place[atoms.info["twin_of"]]) for number, atoms in enumerate(frames) if "twin_of" in atoms.info]
    assert len(twins) == 9
    for number, twin in twins:
        assert per_atom[number].item() == pytest.approx(per_atom[twin].item(), rel=1e-9)
    alone = model(dataset.__getitems__([place["bulk_500_atoms"]]))
    torch.testing.assert_close(alone["energy"][0], output["energy"][place["bulk_500_atoms"]], rtol=1e-12, atol=0)
