"""The same structures, batches and models in the classes of both products."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nvalchemi_lightning import EnergyMSELoss, ForceMSELoss, OptimizerConfig, TrainingStrategy

SIZES = ((2, 3, 4), (5, 1))


def reference() -> Any:
    """Return the reference's classes and functions, under one roof; skip the tests of a module where it is absent."""
    pytest.importorskip("nvalchemi", reason="nvalchemi-toolkit is not installed")
    return Reference()


class Reference:
    """Names of the reference, looked up where it keeps them."""

    @property
    def _homes(self) -> Iterator[Any]:
        import nvalchemi.data
        import nvalchemi.data.datapipes
        import nvalchemi.models.demo
        import nvalchemi.training
        import nvalchemi.training.hooks

        yield from (
            nvalchemi.data,
            nvalchemi.data.datapipes,
            nvalchemi.models.demo,
            nvalchemi.training,
            nvalchemi.training.hooks,
        )

    def __getattr__(self, name: str) -> Any:
        return next(getattr(home, name) for home in self._homes if hasattr(home, name))


def fields(size: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return a structure of random atoms."""
    return {
        "positions": torch.randn(size, 3, generator=generator),
        "atomic_numbers": torch.randint(1, 9, (size,), generator=generator),
        "energy": torch.randn(1, 1, generator=generator),
        "forces": torch.randn(size, 3, generator=generator),
    }


def edges(size: int) -> dict[str, torch.Tensor]:
    """Return edges between all atoms of a structure."""
    pairs = [(i, j) for i in range(size) for j in range(size) if i != j]
    list_ = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
    return {"neighbor_list": list_, "neighbor_list_shifts": torch.zeros(len(pairs), 3, dtype=torch.int32)}


def batches(data_class: Any, batch_class: Any) -> list[Any]:
    """Return the batches of `SIZES`, always the same numbers."""
    generator = torch.Generator().manual_seed(0)
    return [batch_class.from_data_list([data_class(**fields(size, generator)) for size in sizes]) for sizes in SIZES]


def reference_batches() -> list[Any]:
    """Return the batches in the reference's classes."""
    return batches(Reference().AtomicData, Reference().Batch)


def reference_model() -> Any:
    """Return the reference's demo potential, always the same weights."""
    torch.manual_seed(0)
    model = Reference().DemoModelWrapper(Reference().DemoModel(hidden_dim=8))
    model.model_config.active_outputs = {"energy", "forces"}
    return model


def our_strategy(model: Any, **options: Any) -> TrainingStrategy:
    """Return a recipe of ours."""
    defaults: dict[str, Any] = {
        "optimizer_configs": OptimizerConfig(
            optimizer_cls=torch.optim.Adam,
            lr=1e-3,
            scheduler_cls=torch.optim.lr_scheduler.StepLR,
            scheduler_kwargs={"step_size": 2, "gamma": 0.5},
        ),
        "loss_fn": EnergyMSELoss() + ForceMSELoss() * 10.0,
        "num_epochs": 2,
    }
    return TrainingStrategy(models=model, **{**defaults, **options})


def their_strategy(model: Any, **options: Any) -> Any:
    """Return the same recipe in the reference."""
    theirs = Reference()
    defaults: dict[str, Any] = {
        "optimizer_configs": theirs.OptimizerConfig(
            optimizer_cls=torch.optim.Adam,
            optimizer_kwargs={"lr": 1e-3},
            scheduler_cls=torch.optim.lr_scheduler.StepLR,
            scheduler_kwargs={"step_size": 2, "gamma": 0.5},
        ),
        "loss_fn": theirs.EnergyMSELoss() + theirs.ForceMSELoss() * 10.0,
        "training_fn": theirs.default_training_fn,
        "num_epochs": 2,
    }
    return theirs.TrainingStrategy(models=model, **{**defaults, **options})


def run(strategy: Any, loader: Any = None) -> Any:
    """Run a strategy of either product on batches of the reference, and return it."""
    options = {"enable_progress_bar": False} if isinstance(strategy, TrainingStrategy) else {}
    strategy.run(reference_batches() if loader is None else loader, **options)
    return strategy


def assert_same_weights(one: Any, other: Any) -> None:
    """Compare the tensors of two models bit by bit."""
    left, right = one.state_dict(), other.state_dict()
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name
