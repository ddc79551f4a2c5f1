"""What the reference's objects and ours do with each other; needs nvalchemi-toolkit 0.3.0 (``nox -s interop``)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from nvalchemi_lightning import EnergyMSELoss, ForceMSELoss, OptimizerConfig, TrainingStrategy, ValidationConfig
from nvalchemi_lightning.data import AtomicData, AtomicDataZarrReader, AtomicDataZarrWriter, Batch
from nvalchemi_lightning.models import DemoModel, DemoModelWrapper

reference = pytest.importorskip("nvalchemi", reason="nvalchemi-toolkit is not installed")
pytestmark = [pytest.mark.filterwarnings("default")]

SIZES = ((2, 3, 4), (5, 1))


def fields(size: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        "positions": torch.randn(size, 3, generator=generator),
        "atomic_numbers": torch.randint(1, 9, (size,), generator=generator),
        "energy": torch.randn(1, 1, generator=generator),
        "forces": torch.randn(size, 3, generator=generator),
    }


def batches(data_class: Any, batch_class: Any) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [batch_class.from_data_list([data_class(**fields(size, generator)) for size in sizes]) for sizes in SIZES]


def reference_batches() -> list[Any]:
    from nvalchemi.data import AtomicData as ReferenceData
    from nvalchemi.data import Batch as ReferenceBatch

    return batches(ReferenceData, ReferenceBatch)


def reference_model() -> Any:
    from nvalchemi.models.demo import DemoModel as ReferenceModel
    from nvalchemi.models.demo import DemoModelWrapper as ReferenceWrapper

    torch.manual_seed(0)
    model = ReferenceWrapper(ReferenceModel(hidden_dim=8))
    model.model_config.active_outputs = {"energy", "forces"}
    return model


def train(model: Any, loader: list[Any]) -> TrainingStrategy:
    strategy = TrainingStrategy(
        models=model,
        optimizer_configs=OptimizerConfig(optimizer_cls=torch.optim.Adam, lr=1e-3),
        loss_fn=EnergyMSELoss() + ForceMSELoss() * 10.0,
        num_epochs=2,
    )
    strategy.run(loader, enable_progress_bar=False)
    return strategy


def test_models_and_batches_of_the_reference_train_to_the_same_bits() -> None:
    import nvalchemi.training as theirs

    ours = reference_model()
    other = copy.deepcopy(ours)
    train(ours, reference_batches())
    strategy = theirs.TrainingStrategy(
        models=other,
        optimizer_configs=theirs.OptimizerConfig(optimizer_cls=torch.optim.Adam, optimizer_kwargs={"lr": 1e-3}),
        loss_fn=theirs.EnergyMSELoss() + theirs.ForceMSELoss() * 10.0,
        training_fn=theirs.default_training_fn,
        num_epochs=2,
    )
    strategy.run(reference_batches())
    for mine, theirs_parameter in zip(ours.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs_parameter)


def test_our_demo_model_is_the_references() -> None:
    theirs, ours = reference_model(), DemoModelWrapper(DemoModel(hidden_dim=8))
    ours.load_state_dict(theirs.state_dict())
    for mine, other in zip(batches(AtomicData, Batch), reference_batches(), strict=True):
        a, b = ours(mine), theirs(other)
        torch.testing.assert_close(a["energy"], b["energy"])
        torch.testing.assert_close(a["forces"], b["forces"])


def test_a_model_of_the_reference_validates() -> None:
    strategy = TrainingStrategy(
        models=reference_model(),
        loss_fn=EnergyMSELoss(),
        num_steps=1,
        validation_config=ValidationConfig(validation_data=reference_batches()),
    )
    assert strategy.validate()["num_structures"] == sum(map(len, SIZES))


def test_stores_cross_both_ways(tmp_path: Path) -> None:
    from nvalchemi.data.datapipes import AtomicDataZarrReader as TheirReader
    from nvalchemi.data.datapipes import AtomicDataZarrWriter as TheirWriter

    mine, theirs = batches(AtomicData, Batch)[0], reference_batches()[0]
    AtomicDataZarrWriter(tmp_path / "ours.zarr").write(mine)
    TheirWriter(tmp_path / "theirs.zarr").write(theirs)
    read, _ = TheirReader(tmp_path / "ours.zarr").read(1)
    torch.testing.assert_close(read["positions"], mine.get_data(1).positions)
    torch.testing.assert_close(read["energy"].reshape(1, 1), mine.get_data(1).energy)
    again = AtomicDataZarrReader(tmp_path / "theirs.zarr").read_batch([0, 1, 2])
    torch.testing.assert_close(again.forces, theirs.forces)


def test_checkpoints_cross_both_ways(tmp_path: Path) -> None:
    import nvalchemi.training as theirs

    strategy = train(reference_model(), reference_batches())
    strategy.save_checkpoint(tmp_path / "ours")
    loaded = theirs.TrainingStrategy.load_checkpoint(
        tmp_path / "ours", models=reference_model(), training_fn=theirs.default_training_fn
    )
    assert loaded.step_count == 4
    for mine, other in zip(strategy.models["main"].parameters(), loaded.models["main"].parameters(), strict=True):
        assert torch.equal(mine, other)
    loaded.save_checkpoint(tmp_path / "theirs")
    back = TrainingStrategy.load_checkpoint(tmp_path / "theirs", models=reference_model())
    assert back.counters == strategy.counters
