"""Models and batches of the reference in our runs; needs nvalchemi-toolkit 0.3.0 (``nox -s interop``)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interop_rigs import (
    SIZES,
    assert_same_weights,
    batches,
    our_strategy,
    reference,
    reference_batches,
    reference_model,
    run,
    their_strategy,
)

from nvalchemi_lightning import EnergyMSELoss, TrainingStrategy, ValidationConfig
from nvalchemi_lightning.data import AtomicData, Batch, NeighborListTransform
from nvalchemi_lightning.hooks import (
    EMAHook,
    GradientAccumulationHook,
    GradientClipHook,
    MixedPrecisionHook,
    NeighborListHook,
    SpikeSkipHook,
    StageTimingHook,
    TraceHook,
)
from nvalchemi_lightning.models import DemoModel, DemoModelWrapper, PaiNN

theirs = reference()
pytestmark = [pytest.mark.filterwarnings("default")]

HOOKS: dict[str, Callable[[], list[Any]]] = {
    "none": list,
    "accumulation": lambda: [GradientAccumulationHook(2)],
    "averaging": lambda: [EMAHook(decay=0.9)],
    "clipping": lambda: [GradientClipHook(max_norm=0.1)],
    "mixed precision": lambda: [MixedPrecisionHook(precision="bf16")],
    "neighbors": lambda: [NeighborListHook(cutoff=4.0)],
    "skipping": lambda: [SpikeSkipHook()],
    "watching": lambda: [TraceHook(), StageTimingHook()],
}


def painn() -> PaiNN:
    torch.manual_seed(0)
    return PaiNN(cutoff=4.0, hidden=8, elements=list(range(1, 9)))


def our_batches() -> list[Batch]:
    return batches(AtomicData, Batch)


def test_models_and_batches_of_the_reference_train_to_the_same_bits() -> None:
    ours, other = run(our_strategy(reference_model())), run(their_strategy(reference_model()))
    assert_same_weights(ours.models["main"], other.models["main"])


def test_our_demo_model_is_the_references() -> None:
    model, ours = reference_model(), DemoModelWrapper(DemoModel(hidden_dim=8))
    ours.load_state_dict(model.state_dict())
    for mine, other in zip(our_batches(), reference_batches(), strict=True):
        a, b = ours(mine), model(other)
        torch.testing.assert_close(a["energy"], b["energy"])
        torch.testing.assert_close(a["forces"], b["forces"])


@pytest.mark.parametrize("name", HOOKS)
def test_batches_of_the_reference_train_as_ours_do(name: str) -> None:
    on_theirs = run(our_strategy(painn(), hooks=HOOKS[name]()), reference_batches())
    on_ours = run(our_strategy(painn(), hooks=HOOKS[name]()), our_batches())
    assert on_theirs.step_count == on_ours.step_count
    assert_same_weights(on_theirs.models["main"], on_ours.models["main"])


@pytest.mark.parametrize("name", HOOKS)
def test_a_model_of_the_reference_trains_with_our_hooks(name: str) -> None:
    start, strategy = reference_model(), run(our_strategy(reference_model(), hooks=HOOKS[name]()))
    assert strategy.step_count == (2 if name == "accumulation" else 4)
    pairs = zip(start.parameters(), strategy.models["main"].parameters(), strict=True)
    assert any(not torch.equal(before, after) for before, after in pairs)


def test_missing_labels_count_alike_in_windows_of_batches_of_the_reference() -> None:
    def trained(loader: list[Any]) -> Any:
        loader[0].energy[1] = float("nan")
        loader[0].forces[3:5] = float("nan")
        return run(our_strategy(painn(), hooks=[GradientAccumulationHook(2)]), loader).models["main"]

    assert_same_weights(trained(reference_batches()), trained(our_batches()))


def test_a_spike_in_batches_of_the_reference_is_skipped() -> None:
    loader = reference_batches() * 15
    spike = reference_batches()[0]
    spike.energy = spike.energy * 1e6
    strategy = our_strategy(painn(), num_epochs=1, hooks=[SpikeSkipHook()])
    run(strategy, [*loader, spike, *reference_batches()])
    assert (strategy.step_count, strategy.batch_count) == (32, 33)


def test_validation_on_batches_of_the_reference_gives_our_numbers() -> None:
    def validated(loader: list[Any]) -> Any:
        config = ValidationConfig(validation_data=loader, every_n_epochs=1)
        summary = run(our_strategy(painn(), validation_config=config), loader).last_validation
        return float(summary["total_loss"]), summary["num_structures"]

    assert validated(reference_batches()) == validated(our_batches())


def test_a_model_of_the_reference_validates() -> None:
    strategy = TrainingStrategy(
        models=reference_model(),
        loss_fn=EnergyMSELoss(),
        num_steps=1,
        validation_config=ValidationConfig(validation_data=reference_batches()),
    )
    assert strategy.validate()["num_structures"] == sum(map(len, SIZES))


def test_edges_are_written_to_batches_of_the_reference_again_and_again() -> None:
    batch, ours = reference_batches()[0], our_batches()[0]
    for cutoff in (4.0, 2.0):
        made = NeighborListTransform(cutoff)(batch)
        expected = NeighborListTransform(cutoff)(ours)
        assert torch.equal(made.neighbor_list, expected.neighbor_list)
        assert torch.equal(made.neighbor_list_shifts, expected.neighbor_list_shifts)
        assert made.num_edges_list == expected.num_edges_per_graph.tolist()


def test_the_neighbor_config_of_the_reference_is_taken() -> None:
    from nvalchemi.models.base import NeighborConfig

    assert NeighborListHook(NeighborConfig(cutoff=4.0)).cutoff == 4.0


def mace() -> Any:
    """Return a small MACE of random weights in the reference's wrapper."""
    import numpy as np
    from e3nn import o3
    from mace.modules import RealAgnosticInteractionBlock, ScaleShiftMACE
    from nvalchemi.models.mace import MACEWrapper

    torch.manual_seed(0)
    model = ScaleShiftMACE(
        r_max=4.0,
        num_bessel=4,
        num_polynomial_cutoff=5,
        max_ell=1,
        interaction_cls=RealAgnosticInteractionBlock,
        interaction_cls_first=RealAgnosticInteractionBlock,
        num_interactions=2,
        num_elements=8,
        hidden_irreps=o3.Irreps("4x0e+4x1o"),
        MLP_irreps=o3.Irreps("4x0e"),
        atomic_energies=np.zeros(8),
        avg_num_neighbors=3.0,
        atomic_numbers=list(range(1, 9)),
        correlation=2,
        gate=torch.nn.functional.silu,
        atomic_inter_scale=1.0,
        atomic_inter_shift=0.0,
    )
    return MACEWrapper(model, train=True)


def test_mace_in_the_references_wrapper_trains_on_either_batches() -> None:
    pytest.importorskip("mace", reason="mace-torch is not installed")
    start = mace()

    def trained(loader: list[Any]) -> Any:
        hooks = [
            NeighborListHook(start.model_config.neighbor_config),
            EMAHook(decay=0.9),
            GradientAccumulationHook(2),
            GradientClipHook(max_norm=1.0),
        ]
        return run(our_strategy(copy.deepcopy(start), hooks=hooks), loader)

    on_theirs, on_ours = trained(reference_batches()), trained(our_batches())
    assert on_theirs.step_count == 2
    for mine, other in zip(on_ours.models["main"].parameters(), on_theirs.models["main"].parameters(), strict=True):
        assert torch.equal(mine, other)
