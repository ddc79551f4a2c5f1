"""What two ranks do, one check after the other; every rank writes its findings to ``<folder>/rank_<rank>.json``.

Lightning starts this script again for the second rank.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from core_rigs import (
    QUIET,
    At,
    ConstGrad,
    Harm,
    Unsized,
    adam,
    batches,
    constant_loss,
    force_loss,
    per_graph,
    sgd,
    structures,
)
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.optim.lr_scheduler import ReduceLROnPlateau

from nvalchemi_lightning.data import Batch, DataLoader
from nvalchemi_lightning.feeding import OneLoader
from nvalchemi_lightning.hooks import GradientAccumulationHook
from nvalchemi_lightning.losses import EnergyMAELoss, EnergyMSELoss, ForceMSELoss
from nvalchemi_lightning.module import AlchemiModule
from nvalchemi_lightning.owner import SingleOwnerDDP
from nvalchemi_lightning.stages import TrainingStage
from nvalchemi_lightning.strategy import TrainingStrategy
from nvalchemi_lightning.validation import ValidationConfig

Stage = TrainingStage


class Biased(nn.Module):
    """A well with an energy shift, which takes no part in a loss of forces alone."""

    requires_autograd = True

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        self.shift = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, batch: Any) -> dict[str, Tensor]:
        positions = batch.positions.detach().requires_grad_(True)
        energy = per_graph(0.5 * self.w * positions.square().sum(-1) + self.shift, batch)
        forces = -torch.autograd.grad(energy.sum(), positions, create_graph=self.training)[0]
        return {"energy": energy, "forces": forces}


def every_loss() -> Any:
    """Return means over structures and over atoms."""
    return (
        EnergyMSELoss()
        + EnergyMSELoss(per_atom=True)
        + EnergyMAELoss()
        + ForceMSELoss() * 10.0
        + ForceMSELoss(normalize_by_atom_count=False) * 3.0
    )


def numbered(count: int) -> Batch:
    """Return structures of 1, 2, 3, 1, ... atoms that carry their number."""
    batch = Batch.from_data_list(structures(count, seed=4))
    batch.add_key("number", [torch.tensor([[index]]) for index in range(count)], level="system")
    return batch


class Trace:
    """A hook that notes the weights and the structures of every batch."""

    stage = Stage.AFTER_BATCH
    frequency = 1

    def __init__(self) -> None:
        self.weights: list[list[float]] = []
        self.numbers: list[list[int]] = []
        self.counts: list[list[int]] = []
        self.ranks: set[int] = set()

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        self.weights.append([parameter.item() for parameter in ctx.model.parameters()])
        self.numbers.append(ctx.batch.number.flatten().tolist())
        self.counts.append([ctx.step_count, ctx.global_step_count, ctx.batch_count])
        self.ranks.add(ctx.global_rank)


def ragged_run(batch_size: int, **options: Any) -> dict[str, Any]:
    """Train on structures of different sizes, in shuffled order."""
    trace = Trace()
    loader = DataLoader(numbered(12), batch_size=batch_size, shuffle=True, seed=3)
    what = TrainingStrategy(
        models=Biased(), optimizer_configs=adam(0.05), loss_fn=every_loss(), num_epochs=2, hooks=[trace]
    )
    what.run(loader, enable_progress_bar=False, **options)
    counters = vars(what.counters)
    return {**{key: list(value) for key, value in vars(trace).items()}, "counters": dict(counters)}


def two(**options: Any) -> Trainer:
    defaults = {"strategy": "nvalchemi_ddp", "devices": 2, "max_epochs": 1}
    return Trainer(**{**QUIET, **defaults, **options})


def ragged() -> dict[str, Any]:
    return ragged_run(3, strategy="nvalchemi_ddp", devices=2)


def owners_of_backward() -> dict[str, Any]:
    """B05: whoever runs backward, and however DDP is set up, gradients are those of all ranks."""
    weights: dict[str, list[float]] = {}
    for claimed in (False, True):
        for options in ({}, {"static_graph": True}, {"find_unused_parameters": True}):
            hooks = [At(Stage.DO_BACKWARD, lambda ctx: ctx.loss.backward())] if claimed else []
            module = AlchemiModule(models=Harm(), optimizer_configs=sgd(), loss_fn=force_loss(), hooks=hooks)
            loader = DataLoader(numbered(12), batch_size=2)
            two(strategy=SingleOwnerDDP(**options)).fit(module, loader)
            weights[f"claimed={claimed} {options}"] = [module.recipe.models["main"].w.item()]
    return weights


class Shares:
    """Counts how often DDP averages gradients."""

    stage = Stage.BEFORE_TRAINING
    frequency = 1

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        ctx.workflow.running.trainer.strategy.model.register_comm_hook(None, lambda _, bucket: self.average(bucket))

    def average(self, bucket: Any) -> Any:
        self.count += 1
        return allreduce_hook(None, bucket)


def partly_labelled(count: int) -> Batch:
    """Return `numbered` structures of which every third has no energy and the last two have no forces."""
    batch = numbered(count)
    batch.energy[::3] = float("nan")
    batch.forces[-5:] = float("nan")
    return batch


def noted_run(loader: Any, *hooks: Any, **options: Any) -> dict[str, Any]:
    """Train and return the weight and the gradient after every batch."""
    noted = Noted()
    what = TrainingStrategy(
        models=Harm(), optimizer_configs=adam(0.05), loss_fn=every_loss(), num_epochs=2, hooks=[noted, *hooks]
    )
    what.run(loader, enable_progress_bar=False, **options)
    return {"weights": noted.weights, "gradients": noted.gradients, "counters": dict(vars(what.counters))}


class Noted:
    """A hook that notes the gradient and the weight of every batch."""

    frequency = 1
    stage = Stage.AFTER_OPTIMIZER_STEP

    def __init__(self) -> None:
        self.weights: list[float] = []
        self.gradients: list[float] = []

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        self.weights.append(ctx.model.w.item())
        self.gradients.append(ctx.model.w.grad.item())


def accumulated() -> dict[str, Any]:
    """Windows of two ranks; gradients are shared once per step."""
    found: dict[str, Any] = {}
    for normalize in ("labels", "graphs", "atoms", "batch"):
        shares = Shares()
        hook = GradientAccumulationHook(2, normalize=normalize)  # type: ignore[arg-type]
        loader = DataLoader(partly_labelled(12), batch_size=2)
        found[normalize] = noted_run(loader, hook, shares, strategy="nvalchemi_ddp", devices=2)
        found[normalize]["shares"] = shares.count
    for options in ({"static_graph": True}, {"find_unused_parameters": True}):
        ddp = SingleOwnerDDP(**options)
        loader = DataLoader(partly_labelled(12), batch_size=2)
        found[str(options)] = noted_run(loader, GradientAccumulationHook(2), strategy=ddp, devices=2)
    return found


def accumulated_stop() -> dict[str, Any]:
    """The second rank asks to stop at the first batch of a window: both train the window to its end."""

    def stop(ctx: Any) -> None:
        if ctx.global_rank == 1 and ctx.batch_count == 1:
            ctx.workflow.stop("enough")

    hooks = [GradientAccumulationHook(4), At(Stage.AFTER_BATCH, stop)]
    module = AlchemiModule(models=Harm(), optimizer_configs=sgd(), loss_fn=force_loss(), hooks=hooks)
    two(max_epochs=3).fit(module, DataLoader(numbered(24), batch_size=1))
    return {"counters": dict(vars(module.recipe.counters))}


def validation_of_five(trainer: Callable[..., Trainer] = two) -> dict[str, Any]:
    """B10: five samples with losses 1, 2, 3, 4 and 100 are 22.0 on any number of ranks."""
    found: dict[str, Any] = {}
    energies = [1.0, 2.0, 3.0, 4.0, 100.0]
    data = structures(5, energies=energies)
    loaders = {
        "list": batches(1, 1, 1, 1, 1, energies=energies),
        "loader": DataLoader(data, batch_size=1),
        "pairs": DataLoader(data, batch_size=2),
        "unsized": Unsized(batches(1, 1, 1, 1, 1, energies=energies)),
    }
    for name, loader in loaders.items():
        seen: list[float] = []
        config = ValidationConfig(
            validation_data=loader,
            batch_callback=lambda seen=seen, **given: seen.extend(given["batch"].energy.flatten().tolist()),
        )
        module = AlchemiModule(
            models=ConstGrad(), optimizer_configs=sgd(1e-12), loss_fn=constant_loss(), validation_config=config
        )
        trainer().fit(module, OneLoader(batches(1, energies=[-1e6])))
        summary = module.recipe.last_validation
        assert summary is not None
        found[name] = {
            "total": summary["total_loss"].item(),
            "structures": summary["num_structures"],
            "batches": summary["num_batches"],
            "reduced": summary["distributed_reduced"],
            "seen": seen,
        }
    module = AlchemiModule(models=ConstGrad(), loss_fn=constant_loss())
    (result,) = trainer().validate(module, DataLoader(data, batch_size=2), verbose=False)
    found["trainer.validate"] = result["validation/total_loss"]
    return found


def decisions() -> dict[str, Any]:
    """B53: schedulers, early stopping and native checkpoints decide alike on ranks with different local losses."""
    summaries: list[float] = []
    rates: list[float] = []
    hooks = [
        At(Stage.AFTER_VALIDATION, lambda ctx: summaries.append(ctx.validation["total_loss"].item())),
        At(Stage.AFTER_BATCH, lambda ctx: rates.append(ctx.optimizers[0].param_groups[0]["lr"])),
    ]
    plateau = sgd(1.0, scheduler_cls=ReduceLROnPlateau, scheduler_kwargs={"patience": 0, "factor": 0.5})
    module = AlchemiModule(models=ConstGrad(), optimizer_configs=plateau, loss_fn=constant_loss(), hooks=hooks)
    saver = ModelCheckpoint("saved", monitor="validation/total_loss", save_top_k=-1, filename="{step}")
    stopper = EarlyStopping("validation/total_loss", patience=3)
    t = two(max_epochs=50, callbacks=[saver, stopper], enable_checkpointing=True)
    # Rank 0 evaluates the first and the last structure, rank 1 the other.
    t.fit(module, OneLoader(batches(1, 1, energies=[-1e6] * 2)), OneLoader(batches(1, 1, 1, energies=[0.0, 1e3, 5.0])))
    return {
        "summaries": summaries,
        "rates": rates,
        "steps": module.recipe.step_count,
        "best": Path(saver.best_model_path).name,
        "score": float(stopper.best_score),
        "monitored": float(t.callback_metrics["validation/total_loss"]),
        "files": sorted(path.name for path in Path("saved").iterdir()),
    }


class Uneven:
    """Three batches on rank 0 and two on rank 1."""

    def __init__(self) -> None:
        self.items = batches(1, 1, 1)

    @property
    def mine(self) -> list[Batch]:
        return self.items[torch.distributed.get_rank() :] if torch.distributed.is_initialized() else self.items

    def __len__(self) -> int:
        return len(self.mine)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.mine)


def errors() -> dict[str, Any]:
    """B63, B81 and second owners: an error on every rank, before the first step."""
    found: dict[str, Any] = {}

    def attempt(name: str, loader: Callable[[], Any], *, hooks: Any = (), **fields: Any) -> None:
        defaults = {"models": Harm(), "optimizer_configs": sgd(), "loss_fn": force_loss(), "hooks": hooks}
        module = AlchemiModule(**{**defaults, **fields})
        try:
            two(max_epochs=2).fit(module, loader())
        except Exception as error:  # noqa: BLE001  reported to the test
            notes = " ".join(getattr(error, "__notes__", ()))
            found[name] = [type(error).__name__, f"{error} {notes}".strip(), module.recipe.step_count]
        else:
            found[name] = ["nothing", "", module.recipe.step_count]

    def ready() -> OneLoader:
        return OneLoader(batches(2, 3))

    attempt("uneven", lambda: OneLoader(Uneven()))
    attempt("one sample", lambda: DataLoader(structures(1), batch_size=1))
    attempt("drop_last", lambda: DataLoader(structures(3), batch_size=2, drop_last=True))
    attempt("one validation batch", ready, validation_config=ValidationConfig(validation_data=batches(1)))
    attempt("backward", ready, hooks=[At(Stage.AFTER_LOSS, lambda ctx: ctx.loss.backward())])
    attempt("step", ready, hooks=[At(Stage.AFTER_BACKWARD, lambda ctx: ctx.optimizers[0].step())])
    attempt("unused", ready, models=Biased(), loss_fn=ForceMSELoss())
    return found


def stop_of_one_rank() -> dict[str, Any]:
    """Ask to stop on the second rank alone. The last check: ranks that disagree cannot go on together."""

    def stop(ctx: Any) -> None:
        if ctx.global_rank == 1 and ctx.step_count == 2:
            ctx.workflow.stop("enough")

    module = AlchemiModule(
        models=Harm(), optimizer_configs=sgd(), loss_fn=force_loss(), hooks=[At(Stage.AFTER_BATCH, stop)]
    )
    error = ""
    try:
        two(max_epochs=3).fit(module, DataLoader(numbered(12), batch_size=2))
    except RuntimeError as raised:
        error = str(raised)
    return {"steps": module.recipe.step_count, "error": error}


CHECKS = (
    ragged,
    owners_of_backward,
    accumulated,
    accumulated_stop,
    validation_of_five,
    decisions,
    errors,
    stop_of_one_rank,
)


def main(folder: Path) -> None:
    warnings.simplefilter("error")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    found = {}
    for check in CHECKS:
        found[check.__name__] = check()
        (folder / f"rank_{torch.distributed.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
