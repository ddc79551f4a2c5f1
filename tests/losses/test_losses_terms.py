"""Each term by hand: formulas, layouts, dtypes, and what it refuses."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from losses_rigs import ENERGY, EVERY_TERM, FORCE, HUBER, NAN, STRESS, Structures, label, penalty, seeds, sizes_strategy
from torch import Tensor

from nvalchemi_lightning.errors import ConfigurationError, ConfigurationTypeError, DataError
from nvalchemi_lightning.losses import (
    BaseLossFunction,
    EnergyHuberLoss,
    EnergyMAELoss,
    EnergyMSELoss,
    ForceHuberLoss,
    ForceL2NormLoss,
    ForceMSELoss,
    StressHuberLoss,
    StressMSELoss,
)

slow_cases = settings(deadline=None, max_examples=20)


def by_hand(term: BaseLossFunction, batch: Structures) -> float:
    """Evaluate a term with plain Python loops."""
    pred = batch.predictions[term.prediction_key].detach().tolist()
    target = batch.targets[term.target_key].tolist()
    if isinstance(term, ENERGY):
        return energy_by_hand(term, [p[0] - t[0] for p, t in zip(pred, target, strict=True)], batch.sizes)
    residuals = [difference(p, t) for p, t in zip(pred, target, strict=True)]
    if isinstance(term, STRESS):
        return mean([mean([penalty(term, r) for row in matrix for r in row]) for matrix in residuals])
    atoms = [
        [math.hypot(*r)] if isinstance(term, ForceL2NormLoss) else [penalty(term, c) for c in r] for r in residuals
    ]
    if not term.normalize_by_atom_count:
        return mean([loss for atom in atoms for loss in atom])
    graphs, start = [], 0
    for size in batch.sizes:
        graphs.append(mean([loss for atom in atoms[start : start + size] for loss in atom]))
        start += size
    return mean(graphs)


def energy_by_hand(term: Any, residuals: list[float], sizes: list[int]) -> float:
    if not term.per_atom:
        return mean([penalty(term, r) for r in residuals])
    losses = [penalty(term, r / n) for r, n in zip(residuals, sizes, strict=True)]
    if isinstance(term, EnergyHuberLoss):
        return mean(losses)
    return sum(n * loss for n, loss in zip(sizes, losses, strict=True)) / sum(sizes)


def difference(pred: Any, target: Any) -> Any:
    if isinstance(pred, float):
        return pred - target
    return [difference(p, t) for p, t in zip(pred, target, strict=True)]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize("term", EVERY_TERM, ids=label)
@slow_cases
@given(sizes=sizes_strategy, seed=seeds)
def test_matches_plain_python(term: BaseLossFunction, sizes: list[int], seed: int) -> None:
    batch = Structures(sizes, seed)
    assert batch.call(term).item() == pytest.approx(by_hand(term, batch), rel=1e-12)


@pytest.mark.parametrize("term", EVERY_TERM, ids=label)
def test_gradient(term: BaseLossFunction) -> None:
    batch = Structures([1, 3, 2], seed=5)
    target = batch.targets[term.target_key]
    inputs = (batch.predictions[term.prediction_key],)
    assert torch.autograd.gradcheck(lambda pred: term(pred, target, **batch.metadata), inputs)


@pytest.mark.parametrize("cls", ENERGY)
@pytest.mark.parametrize("per_atom", [True, False])
def test_energies_of_both_shapes_agree(cls: type[BaseLossFunction], per_atom: bool) -> None:
    """The reference broadcasts (B,) energies with (B, 1) counts to (B, B) (its defect B1)."""
    batch = Structures([1, 4, 2])
    term = cls(per_atom=per_atom)
    column = batch.call(term)
    samples = term.per_sample_loss
    flat = term(batch.predictions["predicted_energy"].squeeze(1), batch.targets["energy"].squeeze(1), **batch.metadata)
    assert column.item() == flat.item()
    assert torch.equal(samples, term.per_sample_loss)


def test_per_atom_mse_of_flat_energies() -> None:
    pred, target = torch.tensor([1.0, 2.0]), torch.zeros(2)
    value = EnergyMSELoss(per_atom=True)(pred, target, num_nodes_per_graph=torch.tensor([1, 4]))
    assert value.item() == pytest.approx(0.4)


@pytest.mark.parametrize("shape", [(), (3, 2), (3, 1, 1), (2, 0)])
def test_other_energy_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match=r"EnergyMSELoss needs one energy per graph, shape \(B, 1\) or \(B,\); got"):
        EnergyMSELoss()(torch.zeros(shape), torch.zeros(shape))


def test_total_and_per_atom_energy_of_mixed_sizes_b93() -> None:
    """B93: 1 and 100 atoms, both off by 1e-3 per atom."""
    counts = torch.tensor([1, 100])
    pred, target = 1e-3 * counts.double().unsqueeze(1), torch.zeros(2, 1, dtype=torch.float64)
    per_atom, total = EnergyMSELoss(per_atom=True), EnergyMSELoss()
    per_atom(pred, target, num_nodes_per_graph=counts)
    total(pred, target)
    assert per_atom.per_sample_loss.tolist() == pytest.approx([1e-6, 1e-6])
    assert total.per_sample_loss.tolist() == pytest.approx([1e-6, 1e-2])


def test_supercell_b116() -> None:
    """B116: stress, per-atom energy and force losses are the same for a cell and its 2x1x1 supercell."""
    cell = Structures([3], seed=2)
    twice = Structures([6])
    twice.targets = {
        "energy": 2 * cell.targets["energy"],
        "forces": cell.targets["forces"].repeat(2, 1),
        "stress": cell.targets["stress"],
    }
    twice.predictions = {
        "predicted_energy": 2 * cell.predictions["predicted_energy"],
        "predicted_forces": cell.predictions["predicted_forces"].repeat(2, 1),
        "predicted_stress": cell.predictions["predicted_stress"],
    }
    for term in EVERY_TERM:
        factor = 1.0
        if isinstance(term, EnergyMSELoss) and not term.per_atom:
            factor = 4.0
        if isinstance(term, EnergyMAELoss | EnergyHuberLoss) and not term.per_atom:
            continue
        assert twice.call(term).item() == pytest.approx(factor * cell.call(term).item(), rel=1e-12)


@pytest.mark.parametrize("cls", FORCE)
@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("as_mask", [True, False])
def test_padded_forces_agree_with_dense_ones(cls: type[BaseLossFunction], balanced: bool, as_mask: bool) -> None:
    batch = Structures([2, 4, 1], seed=3)
    term = cls(normalize_by_atom_count=balanced)
    counts = torch.tensor(batch.sizes)
    rows = torch.arange(4) < counts.unsqueeze(1)
    padded = []
    for values in (batch.predictions["predicted_forces"].detach(), batch.targets["forces"]):
        block = torch.full((3, 4, 3), NAN, dtype=torch.float64)
        block[rows] = values
        padded.append(block)
    padded[0].requires_grad_()
    value = term(*padded, num_nodes_per_graph=rows if as_mask else counts)
    value.backward()
    dense = batch.call(term)
    dense.backward()
    assert value.item() == pytest.approx(dense.item(), rel=1e-12)
    assert torch.all(padded[0].grad[~rows] == 0)
    torch.testing.assert_close(padded[0].grad[rows], batch.predictions["predicted_forces"].grad)
    assert term.per_sample_loss is None if not balanced else term.per_sample_loss.shape == (3,)


def test_l2_gradient_is_zero_at_zero_error() -> None:
    pred = torch.zeros(2, 3, requires_grad=True)
    ForceL2NormLoss(normalize_by_atom_count=False)(pred, torch.zeros(2, 3)).backward()
    assert torch.equal(pred.grad, torch.zeros(2, 3))


def test_l2_leaves_out_an_atom_with_one_bad_component() -> None:
    target = torch.tensor([[1.0, 0.0, NAN], [3.0, 4.0, 0.0]])
    assert ForceL2NormLoss(normalize_by_atom_count=False)(torch.zeros(2, 3), target).item() == 5.0


@pytest.mark.parametrize("cls", FORCE)
@pytest.mark.parametrize("shape", [(3,), (6, 1), (6, 4), (2, 2, 2, 3)])
def test_other_force_shapes_are_refused_b3(cls: type[BaseLossFunction], shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match=rf"{cls.__name__} needs forces of shape \(V, 3\), or padded \(B, V_max, 3\)"):
        cls()(torch.zeros(shape), torch.zeros(shape), batch_idx=torch.zeros(6, dtype=torch.long), num_graphs=1)


@pytest.mark.parametrize("term", EVERY_TERM, ids=label)
def test_integers_are_refused_b3(term: BaseLossFunction) -> None:
    batch = Structures([2, 1])
    pred, target = batch.predictions[term.prediction_key].long(), batch.targets[term.target_key].long()
    with pytest.raises(DataError, match=r"needs floating point tensors; got torch\.int64"):
        term(pred, target, **batch.metadata)


def test_two_dimensional_batch_idx_is_refused_b3() -> None:
    with pytest.raises(DataError, match=r"batch_idx must be a 1-D integer tensor.* got shape \(2, 1\)"):
        ForceMSELoss()(torch.zeros(2, 3), torch.zeros(2, 3), batch_idx=torch.zeros(2, 1).long(), num_graphs=1)


@pytest.mark.parametrize("cls", FORCE)
def test_num_graphs_may_be_a_tensor_and_batch_idx_int32_b3(cls: type[BaseLossFunction]) -> None:
    batch = Structures([2, 1])
    term = cls(normalize_by_atom_count=True)
    metadata = batch.metadata | {"num_graphs": torch.tensor(2), "batch_idx": batch.metadata["batch_idx"].int()}
    value = term(batch.predictions["predicted_forces"], batch.targets["forces"], **metadata)
    assert value.item() == batch.call(term).item()


@pytest.mark.parametrize("cls", STRESS)
@pytest.mark.parametrize("shape", [(2, 6), (6,), (3, 3), (2, 3, 2), ()])
def test_other_stress_shapes_are_refused_b2(cls: type[BaseLossFunction], shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match=rf"{cls.__name__} needs stress of shape \(B, 3, 3\); got") as caught:
        cls()(torch.zeros(shape), torch.zeros(shape))
    assert ("Voigt" in str(caught.value)) == (shape[-1:] == (6,))


def test_the_voigt_advice_is_right() -> None:
    """The conversion in the message gives the tensor that has these components (order of ASE)."""
    with pytest.raises(DataError) as caught:
        StressMSELoss()(torch.zeros(1, 6), torch.zeros(1, 6))
    expression = re.search(r"use stress(\[.*)$", str(caught.value))[1]
    stress = torch.tensor([[0, 1, 2, 12, 2 * 100, 1 * 100]])  # xx yy zz yz xz xy, told apart by value
    full = eval(f"stress{expression}", {"stress": stress})
    assert full.tolist() == [[[0, 100, 200], [100, 1, 12], [200, 12, 2]]]


@pytest.mark.parametrize("term", EVERY_TERM, ids=label)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_does_not_overflow_b5(term: BaseLossFunction, dtype: torch.dtype) -> None:
    """An fp16 residual of 300 squares to more than fp16 holds; counts above 256 are not exact in bf16."""
    batch = Structures([300, 1], dtype=torch.float32)
    pred = torch.full_like(batch.targets[term.target_key], 300.0).to(dtype)
    target = torch.zeros_like(pred)
    value = term(pred, target, **batch.metadata)
    assert value.dtype is torch.float32
    expected = term(pred.float(), target.float(), **batch.metadata)
    assert value.item() == pytest.approx(expected.item(), rel=1e-6)
    assert math.isfinite(value.item())


def test_atom_counts_are_wide_b5() -> None:
    pred = torch.tensor([[259.0]], dtype=torch.bfloat16)
    loss = EnergyMAELoss()
    value = loss(pred, torch.zeros_like(pred), num_nodes_per_graph=torch.tensor([259]))
    assert value.item() == pytest.approx(pred.item() / 259, rel=1e-6)


@pytest.mark.parametrize("term", EVERY_TERM, ids=label)
def test_declares_whether_it_needs_gradients_b4(term: BaseLossFunction) -> None:
    assert term.requires_eval_grad is not isinstance(term, ENERGY)


@pytest.mark.parametrize("cls", HUBER)
@pytest.mark.parametrize("delta", [0.0, -1.0, math.inf, NAN])
def test_delta_must_be_finite_and_positive_b8(cls: type[BaseLossFunction], delta: float) -> None:
    with pytest.raises(ConfigurationError, match=f"{cls.__name__}: delta must be finite and positive; got {delta}"):
        cls(delta=delta)


@pytest.mark.parametrize("term", EVERY_TERM, ids=label)
def test_dtype_and_shape_must_agree(term: BaseLossFunction) -> None:
    batch = Structures([2, 1])
    pred, target = batch.predictions[term.prediction_key], batch.targets[term.target_key]
    with pytest.raises(DataError, match=r"dtype mismatch; prediction_key='predicted_.*torch\.float64.*torch\.float32"):
        term(pred, target.float()[:1], **batch.metadata)
    with pytest.raises(DataError, match="shape must match exactly for elementwise loss"):
        term(pred, target[:1], **batch.metadata)


def test_energies_of_two_shapes_do_not_broadcast() -> None:
    with pytest.raises(DataError, match=r"EnergyMSELoss: shape must match exactly.*\(2, 1\).*\(2,\)"):
        EnergyMSELoss()(torch.zeros(2, 1), torch.zeros(2))


@pytest.mark.parametrize(
    ("policy", "dtype"), [("prediction_to_target", torch.float64), ("target_to_prediction", torch.float32)]
)
def test_dtype_policy(policy: Any, dtype: torch.dtype) -> None:
    pred, target = torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.float64)
    assert EnergyMSELoss(dtype_policy=policy)(pred, target).dtype is dtype
    term = EnergyMSELoss()
    term.dtype_policy = policy
    assert term(pred, target).dtype is dtype


def test_dtype_policy_is_checked_on_every_assignment() -> None:
    term = EnergyMSELoss()
    with pytest.raises(ConfigurationError, match=r"one of 'strict', .*; got 'strickt'; did you mean 'strict'\?"):
        term.dtype_policy = "strickt"
    assert term.dtype_policy == "strict"
    with pytest.raises(ConfigurationError, match="dtype_policy must be one of"):
        ForceMSELoss(dtype_policy=None)


@pytest.mark.parametrize(
    ("term", "drop", "message"),
    [
        (ForceMSELoss(), "batch_idx", "ForceMSELoss requires batch_idx=... metadata."),
        (ForceMSELoss(), "num_graphs", "ForceMSELoss requires num_graphs=... metadata."),
        (ForceL2NormLoss(), "batch_idx", "ForceL2NormLoss requires batch_idx=... metadata."),
        (EnergyMAELoss(), "num_nodes_per_graph", "per-atom energy loss requires num_nodes_per_graph=... metadata."),
    ],
)
def test_missing_metadata(term: BaseLossFunction, drop: str, message: str) -> None:
    batch = Structures([2, 1])
    metadata = {key: value for key, value in batch.metadata.items() if key != drop}
    pair = batch.predictions[term.prediction_key], batch.targets[term.target_key]
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        term(*pair, **metadata)
    holder = type("Holder", (), batch.metadata)()
    assert term(*pair, batch=holder).item() == batch.call(term).item()
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        term(*pair, batch=object(), **metadata)


def test_explicit_metadata_beats_the_batch() -> None:
    holder = type("Holder", (), {"num_nodes_per_graph": torch.tensor([7])})()
    loss = EnergyMAELoss()
    value = loss(torch.ones(1, 1), torch.zeros(1, 1), batch=holder, num_nodes_per_graph=torch.tensor([2]))
    assert value.item() == 0.5


def test_padded_forces_need_counts() -> None:
    block = torch.zeros(2, 3, 3)
    with pytest.raises(ConfigurationError, match=r"padded force loss requires num_nodes_per_graph=\.\.\. metadata\."):
        ForceMSELoss()(block, block)
    with pytest.raises(DataError, match=r"must be \(B,\) counts or a \(B, V_max\) mask .* got shape \(3,\)"):
        ForceMSELoss()(block, block, num_nodes_per_graph=torch.tensor([1, 2, 3]))


def test_counts_must_be_a_tensor_of_one_entry_per_energy() -> None:
    energies = torch.zeros(2, 1)
    with pytest.raises(ConfigurationTypeError, match="per-atom energy loss: num_nodes_per_graph must be a tensor; got"):
        EnergyMAELoss()(energies, energies, num_nodes_per_graph=[1, 2])
    with pytest.raises(DataError, match=r"gives \(3,\) counts for 2 energies"):
        EnergyMAELoss()(energies, energies, num_nodes_per_graph=torch.tensor([1, 2, 3]))


def test_counts_may_be_a_node_mask() -> None:
    mask = torch.tensor([[True, False, False], [True, True, True]])
    pred = torch.tensor([[1.0], [6.0]])
    assert EnergyMAELoss()(pred, torch.zeros(2, 1), num_nodes_per_graph=mask).item() == pytest.approx(7 / 4)


def test_an_empty_graph_does_not_divide_by_zero() -> None:
    loss = EnergyMAELoss()
    value = loss(torch.ones(2, 1), torch.zeros(2, 1), num_nodes_per_graph=torch.tensor([0, 1]))
    assert value.item() == 1.0


def test_nonfinite_labels_propagate_or_not() -> None:
    target = torch.tensor([[NAN], [1.0], [math.inf]])
    assert math.isnan(EnergyMSELoss()(torch.zeros(3, 1), target).item())
    assert math.isinf(EnergyMSELoss()(torch.zeros(2, 1), target[1:]).item())
    assert EnergyMSELoss(ignore_nonfinite=True)(torch.zeros(3, 1), target).item() == 1.0


@pytest.mark.parametrize("term", EVERY_TERM, ids=label)
def test_all_labels_ignored_gives_zero_with_zero_gradient(term: BaseLossFunction) -> None:
    batch = Structures([2, 1])
    masking = type(term)(**{**settings_of(term), "ignore_nonfinite": True})
    batch.targets = {key: torch.full_like(value, NAN) for key, value in batch.targets.items()}
    value = batch.call(masking)
    value.backward()
    assert value.item() == 0.0
    assert torch.all(batch.predictions[term.prediction_key].grad == 0)


def settings_of(term: BaseLossFunction) -> dict[str, Any]:
    names = ("per_atom", "normalize_by_atom_count", "delta")
    return {name: getattr(term, name) for name in names if hasattr(term, name)}


@pytest.mark.parametrize("term", EVERY_TERM, ids=label)
def test_a_nan_prediction_of_a_real_label_shows(term: BaseLossFunction) -> None:
    batch = Structures([2, 1])
    with torch.no_grad():
        batch.predictions[term.prediction_key][0] = NAN
    assert math.isnan(batch.call(term, missing_is_nan=True).item())


@pytest.mark.parametrize("term", EVERY_TERM, ids=label)
def test_repr_shows_the_settings(term: BaseLossFunction) -> None:
    for name, value in settings_of(term).items():
        assert f"{name}={value!r}" in repr(term)
    assert f"target_key={term.target_key!r}" in repr(term)


def test_defaults() -> None:
    def flags(term: Any) -> tuple[Any, ...]:
        mode = getattr(term, "per_atom", getattr(term, "normalize_by_atom_count", None))
        return mode, term.ignore_nonfinite, getattr(term, "delta", None)

    assert flags(EnergyMSELoss()) == (False, False, None)
    assert flags(EnergyMAELoss()) == (True, True, None)
    assert flags(EnergyHuberLoss()) == (True, True, 0.01)
    assert flags(ForceMSELoss()) == (True, False, None)
    assert flags(ForceHuberLoss()) == (False, True, 0.01)
    assert flags(ForceL2NormLoss()) == (True, True, None)
    assert flags(StressMSELoss()) == (None, False, None)
    assert flags(StressHuberLoss()) == (None, True, 0.01)


def test_a_term_holds_no_state() -> None:
    for term in EVERY_TERM:
        assert term.state_dict() == {}
        assert not list(term.parameters())


@pytest.mark.parametrize("term", [t for t in EVERY_TERM if not isinstance(t, ENERGY)], ids=label)
def test_an_unlabelled_graph_dilutes_unless_missing_is_nan_b6(term: BaseLossFunction) -> None:
    batch = Structures([2, 3], seed=1)
    alone = batch.subset([0]).call(term).item()
    batch.hide(term.target_key, 1)
    masking = type(term)(**{**settings_of(term), "ignore_nonfinite": True})
    balanced = getattr(term, "normalize_by_atom_count", True)
    assert batch.call(masking).item() == pytest.approx(alone / 2 if balanced else alone)
    assert batch.call(masking, missing_is_nan=True).item() == pytest.approx(alone)
    assert batch.call(term, missing_is_nan=True).item() == pytest.approx(alone)


def test_permutation_of_the_atoms_of_a_batch_is_irrelevant() -> None:
    batch = Structures([3, 2], seed=9)
    order = torch.tensor([4, 0, 3, 1, 2])
    for term in (ForceMSELoss(), ForceL2NormLoss()):
        metadata = batch.metadata | {"batch_idx": batch.metadata["batch_idx"][order]}
        pred: Tensor = batch.predictions["predicted_forces"][order]
        value = term(pred, batch.targets["forces"][order], **metadata)
        assert value.item() == pytest.approx(batch.call(term).item(), rel=1e-12)
