"""The data module, and loaders under a Lightning Trainer."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
import torch.distributed as dist
from feeding_structures import make_structures
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from nvalchemi_lightning.data import AtomicDataZarrReader, Batch, DataLoader, Dataset, InMemoryDataset, MultiDataset
from nvalchemi_lightning.datamodule import AtomicDataModule
from nvalchemi_lightning.errors import ConfigurationError


class Training(LightningModule):
    """Records which structures it sees; optimises something trivial."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seen: dict[str, list] = {"train": [], "val": [], "test": [], "predict": []}

    def _note(self, kind: str, batch: Batch) -> list[int]:
        numbers = batch.energy.flatten().int().tolist()
        self.seen[kind].append(numbers)
        return numbers

    def training_step(self, batch, batch_index):
        self._note("train", batch)
        return self.weight * batch.energy.sum()

    def predict_step(self, batch, batch_index):
        return self._note("predict", batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Evaluating(Training):
    """Evaluates as well."""

    def validation_step(self, batch, batch_index):
        self._note("val", batch)

    def test_step(self, batch, batch_index):
        self._note("test", batch)


def trainer(**options) -> Trainer:
    return Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **options,
    )


# Lightning uses a part of torch that is going away; under the strategies of this package it is silent.
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")


def test_feeding_data_module_under_a_trainer(store):
    data = AtomicDataModule(store, store, store, store, batch_size=8, eval_batch_size=20)
    module = Evaluating()
    running = trainer(max_epochs=2)
    running.fit(module, datamodule=data)
    first, second = module.seen["train"][:3], module.seen["train"][3:]
    assert [len(batch) for batch in first] == [8, 8, 4]
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(20))
    assert first != second
    assert module.seen["val"] == [list(range(20))] * 2
    running.test(module, datamodule=data, verbose=False)
    assert module.seen["test"] == [list(range(20))]
    assert running.predict(module, datamodule=data) == [list(range(20))]


@pytest.mark.filterwarnings("ignore:Your .* sampler has shuffling enabled")  # Lightning's, about what is tested here
def test_feeding_own_loaders_under_a_trainer(store):
    """Lightning makes the loader anew for prediction; the copy reads the same."""
    loader = DataLoader(Dataset(AtomicDataZarrReader(store)), batch_size=8, num_workers=1, seed=3, shuffle=True)
    module = Training()
    running = trainer(max_epochs=3)
    running.fit(module, train_dataloaders=loader)
    epochs = [module.seen["train"][start : start + 3] for start in (0, 3, 6)]
    for epoch, seen in enumerate(epochs):
        loader.set_epoch(epoch)
        assert [batch.energy.flatten().int().tolist() for batch in loader] == seen
    assert running.predict(module, dataloaders=DataLoader(Dataset(AtomicDataZarrReader(store)), batch_size=20))[0] == [
        *range(20)
    ]
    predicted = running.predict(module, dataloaders=loader)
    loader.set_epoch(3)
    assert predicted == [batch.energy.flatten().int().tolist() for batch in loader]


class Saving(Callback):
    """Saves after some batches."""

    def __init__(self, folder, steps):
        self.folder, self.steps = folder, steps

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step in self.steps:
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


@pytest.mark.parametrize("workers", [0, 1])
def test_feeding_state_travels_in_a_lightning_checkpoint(store, tmp_path, workers):
    """A run that is resumed after any batch sees what an uninterrupted one sees."""

    def loader():
        data = Dataset(AtomicDataZarrReader(store))
        return DataLoader(data, batch_size=4, shuffle=True, num_workers=workers)

    whole = Training()
    trainer(max_epochs=3, callbacks=[Saving(tmp_path, {3, 5, 7})]).fit(whole, train_dataloaders=loader())
    for step in (3, 5, 7):
        resumed = Training()
        trainer(max_epochs=3).fit(resumed, train_dataloaders=loader(), ckpt_path=tmp_path / f"{step}.ckpt")
        assert resumed.seen["train"] == whole.seen["train"][step:]


def test_feeding_without_a_validation_set(store):
    data = AtomicDataModule(store, batch_size=20)
    for name in ("test", "predict"):
        with pytest.raises(ConfigurationError, match=rf"there is no {name} set; give AtomicDataModule\({name}=...\)"):
            getattr(data, f"{name}_dataloader")()
    with pytest.raises(ConfigurationError, match="there is no train set"):
        AtomicDataModule(val=store).train_dataloader()
    module = Training()
    trainer(max_epochs=1).fit(module, datamodule=data)
    assert len(module.seen["train"]) == 1


def shifted(data):
    data.energy = data.energy + 100
    return data


@pytest.mark.parametrize("kind", ["path", "text", "dataset", "memory", "list", "batch"])
def test_feeding_data_module_sources_and_transforms(store, kind):
    structures = make_structures(20)
    sources = {
        "path": store,
        "text": str(store),
        "dataset": Dataset(AtomicDataZarrReader(store)),
        "memory": InMemoryDataset(structures),
        "list": structures,
        "batch": Batch.from_data_list(structures),
    }
    source = sources[kind]
    data = AtomicDataModule(source, source, batch_size=20, transforms=[shifted], train_transforms=[shifted])
    (train,), (val,) = data.train_dataloader(), data.val_dataloader()
    assert sorted(train.energy.flatten().tolist()) == list(range(200, 220))
    assert val.energy.flatten().tolist() == list(range(100, 120))
    assert next(iter(AtomicDataModule(val=source, batch_size=1).val_dataloader())).energy.item() == 0.0


def test_feeding_data_module_options(store, monkeypatch):
    def renamed(batch):
        batch.energy = batch.energy * 0
        return batch

    data = AtomicDataModule(
        store, store, fields=["energy"], batch_size=6, drop_last=True, seed=4, batch_transforms=[renamed]
    )
    loader = data.train_dataloader()
    assert (len(loader), loader.seed, loader.sampler.seed) == (3, 4, 4)
    assert all("forces" not in batch and not batch.energy.any() for batch in loader)
    several = MultiDataset(InMemoryDataset(make_structures(2)))
    assert len(AtomicDataModule(several).train_dataloader()) == 1
    with pytest.raises(ConfigurationError, match="transforms cannot be added to the train set, a MultiDataset"):
        AtomicDataModule(several, transforms=[shifted]).train_dataloader()
    with pytest.raises(ConfigurationError, match=r"0 sample\(s\)"):
        AtomicDataModule([]).train_dataloader()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    assert (data.train_dataloader().sampler.pad, data.val_dataloader().sampler.pad) == (True, False)
    assert len(next(iter(data.val_dataloader()))) == 6
    assert len(data.val_dataloader()) == 2
