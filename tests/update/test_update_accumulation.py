"""GradientAccumulationHook: what its gradients are, what it refuses, and how it goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import Trainer
from pydantic import ValidationError
from torch import Tensor
from update_rigs import At, ConstGrad, Noting, Stage, adam, constant, run, sgd, strategy, w_of
from update_window_rigs import Potential, cut, gradients, labelled, same, three_terms

from nvalchemi_lightning.errors import ConfigurationError, MissingTargetError, SecondOwnerError, TrainingStateError
from nvalchemi_lightning.feeding import OneLoader
from nvalchemi_lightning.hooks import EMAHook, GradientAccumulationHook, GradientClipHook, TrainingUpdateHook
from nvalchemi_lightning.losses import (
    EnergyHuberLoss,
    EnergyMAELoss,
    EnergyMSELoss,
    ForceHuberLoss,
    ForceL2NormLoss,
    ForceMSELoss,
    LinearWeight,
    StressHuberLoss,
    assemble_loss_targets,
)
from nvalchemi_lightning.module import AlchemiModule
from nvalchemi_lightning.strategy import TrainingStrategy

SIZES = (1, 4, 2, 5)
MISSING = [(1, "energy"), (3, "forces"), (4, "energy"), (5, "stress"), (6, "stress"), (6, "forces"), (0, "stress")]
LOSSES: dict[str, Callable[[], Any]] = {
    "default means": three_terms,
    "over atoms and components": lambda: (
        EnergyMSELoss(per_atom=True) + ForceMSELoss(normalize_by_atom_count=False) * 10.0 + ForceL2NormLoss()
    ),
    "robust": lambda: EnergyHuberLoss() + EnergyMAELoss() + ForceHuberLoss() * 2.0 + StressHuberLoss(),
    "scheduled": lambda: LinearWeight(start=1.0, end=0.0, num_steps=3) * EnergyMSELoss() + ForceMSELoss(),
}


# The gradient


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("missing", [(), MISSING], ids=["all labels", "labels missing"])
def test_the_gradient_is_that_of_the_large_batch(loss: str, missing: list[tuple[int, str]]) -> None:
    data = labelled(sum(SIZES), missing=missing)
    window = gradients(cut(data, SIZES), GradientAccumulationHook(4), loss_fn=LOSSES[loss]())
    whole = gradients(cut(data, [sum(SIZES)]), loss_fn=LOSSES[loss]())
    assert same(window, whole)


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_any_cut_gives_the_gradients_of_the_large_batches(drawn: st.DataObject) -> None:
    """Any sizes, any missing labels, any window, the last one of the epoch included."""
    sizes = drawn.draw(st.lists(st.integers(1, 4), min_size=1, max_size=6), label="sizes")
    steps = drawn.draw(st.integers(1, 4), label="steps")
    entries = [(i, name) for i in range(sum(sizes)) for name in ("energy", "forces", "stress")]
    missing = drawn.draw(st.sets(st.sampled_from(entries)), label="missing")
    # Some structure has each label, else the batches would not have the field.
    data = labelled(sum(sizes) + 1, missing=missing)
    windows = [sum(sizes[start : start + steps]) for start in range(0, len(sizes), steps)]
    assert same(gradients(cut(data, sizes), GradientAccumulationHook(steps)), gradients(cut(data, windows)))


def test_a_window_of_one_batch_changes_no_bit() -> None:
    loader = cut(labelled(5), (2, 3))
    for ours, theirs in zip(gradients(loader, GradientAccumulationHook(1)), gradients(loader), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("normalize", ["graphs", "atoms", "batch"])
def test_the_other_means_weigh_whole_batches(normalize: str) -> None:
    loader = cut(labelled(sum(SIZES)), SIZES)
    amounts = {"graphs": [b.num_graphs for b in loader], "atoms": [len(b.positions) for b in loader], "batch": [1] * 4}
    alone = [gradients([batch])[0] for batch in loader]
    total = sum(amounts[normalize])
    expected = [
        sum((amount / total * each[k] for amount, each in zip(amounts[normalize], alone, strict=True)), torch.zeros(()))
        for k in range(len(alone[0]))
    ]
    assert same(gradients(loader, GradientAccumulationHook(4, normalize=normalize)), [expected])


def test_weights_of_atoms_are_exact_for_means_over_atoms() -> None:
    """And weights of graphs are for means over graphs, as long as no label is missing."""
    data = labelled(sum(SIZES))
    for normalize, loss in (
        ("atoms", EnergyMSELoss(per_atom=True) + ForceMSELoss(normalize_by_atom_count=False)),
        ("graphs", three_terms()),
    ):
        hook = GradientAccumulationHook(4, normalize=normalize)
        assert same(gradients(cut(data, SIZES), hook, loss_fn=loss), gradients(cut(data, [12]), loss_fn=loss))


def test_half_precision_and_clipping_see_the_window_once() -> None:
    """The norm that is clipped is that of the large batch."""
    data, clips = labelled(sum(SIZES)), [GradientClipHook(max_norm=1e-3) for _ in range(2)]
    gradients(cut(data, SIZES), GradientAccumulationHook(4), clips[0])
    gradients(cut(data, [12]), clips[1])
    norms: list[Any] = [clip.last_total_norm for clip in clips]
    torch.testing.assert_close(norms[0], norms[1], rtol=0, atol=1e-12)


# What cannot be known


@pytest.mark.parametrize(("fields", "message"), [
    ({"steps": 0}, "greater than or equal to 1"),
    ({"steps": -2}, "greater than or equal to 1"),
    ({"steps": 1.5}, "valid integer"),
    ({}, "Field required"),
    ({"steps": 2, "normalize": "mean"}, "'labels', 'graphs', 'atoms' or 'batch'"),
    ({"steps": 2, "normalise": "batch"}, "no field 'normalise'; did you mean 'normalize'"),
])  # fmt: skip
def test_options_are_checked(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        GradientAccumulationHook(**fields)


def test_the_number_of_batches_comes_first() -> None:
    assert GradientAccumulationHook(4) == GradientAccumulationHook(steps=4, normalize="labels")


def replacing(function: Callable[[Any], Tensor]) -> At:
    return At(Stage.AFTER_LOSS, lambda ctx: setattr(ctx, "loss", function(ctx)))


def test_a_replaced_loss_has_no_counts() -> None:
    loader = cut(labelled(6), (2, 4))
    hook = replacing(lambda ctx: ctx.loss * 2.0)
    with pytest.raises(TrainingStateError, match=r"a hook has replaced ctx\.loss.*Hook\(2, normalize='graphs'\)"):
        gradients(loader, GradientAccumulationHook(2), hook)
    doubled = gradients(loader, GradientAccumulationHook(2, normalize="graphs"), hook)
    single = gradients(loader, GradientAccumulationHook(2, normalize="graphs"))
    assert same(doubled, [[2.0 * gradient for gradient in single[0]]])


def test_labels_that_a_hook_changes_are_noticed() -> None:
    def forget(ctx: Any) -> None:
        ctx.batch.energy[0] = float("nan")

    with pytest.raises(TrainingStateError, match=r"EnergyMSELoss divides by 1, but its labels were counted as 2 when"):
        gradients(cut(labelled(6), (2, 4)), GradientAccumulationHook(2), At(Stage.BEFORE_FORWARD, forget))


def from_predictions(loss_fn: Any, predictions: Any, batch: Any, **options: Any) -> dict[str, Tensor]:
    return {**assemble_loss_targets(loss_fn, predictions, batch, **options), "energy": predictions["teacher_energy"]}


def test_targets_that_are_predicted_are_not_known_ahead() -> None:
    loader = cut(labelled(6), (2, 4))
    message = "reads the prediction 'teacher_energy'.*normalize='graphs'"
    with pytest.raises(TrainingStateError, match=message):
        gradients(loader, GradientAccumulationHook(2), loss_target_assembler=from_predictions)


def test_an_assembler_that_only_renames_is_asked_ahead() -> None:
    def renaming(loss_fn: Any, predictions: Any, batch: Any, **options: Any) -> dict[str, Tensor]:
        assert "anything" not in list(predictions)
        assert len(predictions) in (0, 3)
        return {"energy": batch.energy, "forces": batch.forces, "stress": batch.stress}

    data = labelled(6)
    window = gradients(cut(data, (2, 4)), GradientAccumulationHook(2), loss_target_assembler=renaming)
    assert same(window, gradients(cut(data, (6,))))


def test_a_label_that_the_batches_lack_is_named_before_any_forward_pass() -> None:
    what = strategy(GradientAccumulationHook(2), loss_fn=EnergyMSELoss(target_key="energie"))
    with pytest.raises(MissingTargetError, match=r"missing target attribute 'energie'.*did you mean 'energy'"):
        run(what, constant(2))


# One accumulation


def test_two_of_them_are_refused() -> None:
    message = "exclusive key 'GradientAccumulationHook' .*Keep one of them"
    with pytest.raises(ValidationError, match=message):
        strategy(GradientAccumulationHook(2), GradientAccumulationHook(4))
    what = strategy(GradientAccumulationHook(2))
    with pytest.raises(ConfigurationError, match=message):
        what.register_hook(GradientAccumulationHook(2))


def test_accumulation_by_the_trainer_is_refused() -> None:
    """B99."""
    message = r"accumulate_grad_batches=4\) .*use hooks=\[GradientAccumulationHook\(4\)\]"
    with pytest.raises(SecondOwnerError, match=message):
        run(strategy(GradientAccumulationHook(4)), constant(4), accumulate_grad_batches=4)


def test_a_second_conversion_of_epochs_into_steps_is_refused() -> None:
    message = r"GradientAccumulationHook\(4\) makes num_epochs=2 passes.*leave epoch_step_modifier out"
    with pytest.raises(ValidationError, match=message):
        strategy(GradientAccumulationHook(4), num_epochs=2, epoch_step_modifier=0.25)
    what = strategy(num_epochs=2, epoch_step_modifier=0.25)
    what.register_hook(GradientAccumulationHook(4))
    with pytest.raises(ConfigurationError, match=message):
        run(what, constant(4))
    assert what.counters.batch_count == 0
    assert (
        run(strategy(GradientAccumulationHook(2), num_steps=2, epoch_step_modifier=0.25), constant(4)).step_count == 2
    )


# Alone


def test_train_batch_makes_windows_of_calls() -> None:
    what = strategy(GradientAccumulationHook(2, normalize="batch"))
    seen = []
    for batch in constant(5):
        what.train_batch(batch)
        seen.append((what.step_count, what.counters.batch_count, w_of(what)))
    assert seen == [(0, 1, 0.0), (1, 2, -1.0), (1, 3, -1.0), (2, 4, -2.0), (2, 5, -2.0)]


@pytest.mark.parametrize("normalize", ["labels", "graphs", "atoms"])
def test_train_batch_does_not_know_a_window(normalize: str) -> None:
    what = strategy(GradientAccumulationHook(2, normalize=normalize))
    message = rf"normalize='{normalize}'.*train_batch hands over.*GradientAccumulationHook\(2, normalize='batch'\)"
    with pytest.raises(TrainingStateError, match=message):
        what.train_batch(constant(1)[0])
    assert what.counters.batch_count == 0
    single = strategy(GradientAccumulationHook(1, normalize=normalize))
    single.train_batch(constant(1)[0])
    assert (single.step_count, w_of(single)) == (1, -1.0)


def test_a_run_begins_a_window_of_its_own() -> None:
    what = strategy(GradientAccumulationHook(2, normalize="batch"), num_epochs=1)
    what.train_batch(constant(1)[0])
    run(what, constant(2))
    assert (what.step_count, w_of(what)) == (1, -1.0)
    what.train_batch(constant(1)[0])
    assert (what.step_count, w_of(what)) == (1, -1.0)


def test_the_hook_tells_when_it_was_not_asked() -> None:
    hook = GradientAccumulationHook(2)
    ctx = strategy(hook).context(None)
    with pytest.raises(TrainingStateError, match="not asked at BEFORE_BATCH"):
        hook(ctx, Stage.DO_OPTIMIZER_STEP, False)


def test_the_doors_take_the_same_steps() -> None:
    """`run`, the user's own Trainer, and `train_batch`, with the mean that all of them know."""

    def fresh(**fields: Any) -> dict[str, Any]:
        hooks = [GradientAccumulationHook(2, normalize="batch")]
        return {"models": Potential(), "optimizer_configs": adam(), "loss_fn": three_terms(), "hooks": hooks, **fields}

    loader = cut(labelled(8), (2, 3, 1, 2))
    by_run = run(TrainingStrategy(**fresh(num_epochs=1)), loader)
    module = AlchemiModule(**fresh())
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = Trainer(strategy="nvalchemi", accelerator="cpu", logger=False, max_epochs=1, **quiet)
    trainer.fit(module, OneLoader(loader))
    by_hand = TrainingStrategy(**fresh(num_epochs=1))
    for batch in loader:
        by_hand.train_batch(batch)
    assert trainer.global_step == module.recipe.step_count == by_run.step_count == by_hand.step_count == 2
    for one in (module.recipe, by_hand):
        for ours, theirs in zip(one.models["main"].parameters(), by_run.models["main"].parameters(), strict=True):
            assert torch.equal(ours, theirs)


# Going on


def trained(hooks: list[Any], loader: Any, **fields: Any) -> TrainingStrategy:
    what = TrainingStrategy(
        models=Potential(), optimizer_configs=adam(0.1), loss_fn=three_terms(), hooks=hooks, num_epochs=2, **fields
    )
    run(what, loader)
    return what


def equal(ours: Any, theirs: Any) -> bool:
    pairs = zip(ours.models["main"].parameters(), theirs.models["main"].parameters(), strict=True)
    return ours.counters == theirs.counters and all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("normalize", ["labels", "batch"])
@pytest.mark.parametrize("batch_count", [1, 2, 3, 4, 5, 7, 9])
def test_a_checkpoint_anywhere_in_a_window_goes_on_bitwise(batch_count: int, normalize: str, tmp_path: Path) -> None:
    """B46: windows of 3 batches in epochs of 5."""
    loader = cut(labelled(11, missing=MISSING), (1, 2, 3, 4, 1))

    def save(ctx: Any) -> None:
        if ctx.batch_count == batch_count:
            ctx.workflow.save_checkpoint(tmp_path)

    hook = GradientAccumulationHook(3, normalize=normalize)
    straight = trained([hook, At(Stage.AFTER_BATCH, save)], loader)
    assert hook.state_dict() == {}
    resumed = GradientAccumulationHook(3, normalize=normalize)
    again = TrainingStrategy(
        models=Potential(), optimizer_configs=adam(0.1), loss_fn=three_terms(), hooks=[resumed], num_epochs=2
    )
    again.restore_checkpoint(tmp_path)
    assert bool(resumed.state_dict()) is (batch_count % 5 % 3 != 0)
    again.save_checkpoint(tmp_path / "again")  # what waits for its batch is saved again
    again.restore_checkpoint(tmp_path / "again")
    run(again, loader)
    assert equal(again, straight)


def test_the_loss_of_the_window_is_logged_also_after_a_restart(tmp_path: Path) -> None:
    data, logged = labelled(7), []

    def note(ctx: Any) -> None:
        logged.append(ctx.workflow.requests.scalars.get("loss/window"))
        if ctx.batch_count == 1 and not (tmp_path / "manifest.json").exists():
            ctx.workflow.save_checkpoint(tmp_path)

    def fresh() -> TrainingStrategy:
        hooks = [GradientAccumulationHook(2), At(Stage.AFTER_BATCH, note)]
        return strategy(*hooks, models=Potential(), loss_fn=three_terms(), optimizer_configs=sgd(0.0))

    run(fresh(), cut(data, (3, 4)))
    whole: list[Tensor] = []
    note_whole = At(Stage.AFTER_BATCH, lambda ctx: whole.append(ctx.loss))
    run(strategy(note_whole, models=Potential(), loss_fn=three_terms()), cut(data, (7,)))
    again = fresh()
    again.restore_checkpoint(tmp_path)
    run(again, cut(data, (3, 4)))
    assert logged[0] is None
    torch.testing.assert_close(logged[1], whole[0], rtol=0, atol=1e-12)
    assert torch.equal(logged[2], logged[1])


class OnceError(Exception):
    """Raised once by a hook of these tests."""


def failing(stage: Any, batch_count: int) -> At:
    left = [True]

    def fail(ctx: Any) -> None:
        if ctx.batch_count == batch_count and left:
            left.pop()
            raise OnceError

    return At(stage, fail)


def test_a_failed_forward_pass_leaves_the_window_open() -> None:
    loader = cut(labelled(11), (1, 2, 3, 4, 1))
    straight = trained([GradientAccumulationHook(3)], loader)
    what = strategy(
        GradientAccumulationHook(3), failing(Stage.AFTER_FORWARD, 4), models=Potential(), loss_fn=three_terms(),
        optimizer_configs=adam(0.1), num_epochs=2,
    )  # fmt: skip
    with pytest.raises(OnceError):
        run(what, loader)
    assert equal(run(what, loader), straight)


def test_a_window_that_failed_after_its_backward_begins_anew() -> None:
    """Its gradients are half old and half new: the remaining batches are a window of their own."""
    what = strategy(GradientAccumulationHook(3), failing(Stage.AFTER_BACKWARD, 1), num_epochs=1)
    with pytest.raises(OnceError):
        run(what, constant(5))
    assert what.counters.batch_count == 1
    run(what, constant(5))
    assert (what.step_count, what.counters.batch_count, w_of(what)) == (2, 5, -2.0)


def test_a_window_of_other_arguments_is_refused(tmp_path: Path) -> None:
    save = At(Stage.AFTER_BATCH, lambda ctx: ctx.batch_count == 1 and ctx.workflow.save_checkpoint(tmp_path))
    run(
        strategy(GradientAccumulationHook(2), save, models=Potential(), loss_fn=three_terms()), cut(labelled(2), (1, 1))
    )
    hook = GradientAccumulationHook(3)
    other = strategy(hook, models=Potential(), loss_fn=three_terms())
    message = r"within a window of GradientAccumulationHook\(steps=2, normalize='labels'\), which .*steps=3"
    with pytest.raises(ConfigurationError, match=message):
        other.restore_checkpoint(tmp_path)
    assert hook.state_dict() == {}


def test_each_of_several_ranks_keeps_its_own_window(monkeypatch: pytest.MonkeyPatch) -> None:
    hook = GradientAccumulationHook(2, normalize="batch")
    what = strategy(hook)
    what.train_batch(constant(1)[0])
    assert hook.rank_state_dict() == {}
    state = hook.state_dict()
    monkeypatch.setattr("nvalchemi_lightning.hooks.gradient_accumulation.rank_and_world", lambda: (0, 2))
    assert hook.state_dict() == {}
    assert hook.rank_state_dict().keys() == state.keys()
    fresh = GradientAccumulationHook(2, normalize="batch")
    fresh.load_rank_state_dict({})
    assert fresh.rank_state_dict() == {}
    fresh.load_rank_state_dict(state)
    assert fresh.rank_state_dict()["gradients"].keys() == state["gradients"].keys()


# Others


def test_averages_and_schedules_act_once_per_window() -> None:
    """B45, B26: warm-up over 4 steps of 4 batches; averages are those of the steps."""
    rates: list[float] = []
    warm_up = {"scheduler_cls": torch.optim.lr_scheduler.LinearLR}
    options = {"scheduler_kwargs": {"start_factor": 0.25, "total_iters": 3}}
    ema = EMAHook(decay=0.5)
    what = strategy(GradientAccumulationHook(4), ema, optimizer_configs=sgd(**warm_up, **options), num_epochs=1)

    def note(ctx: Any) -> None:
        if ctx.window.last:
            rates.append(ctx.optimizers[0].param_groups[0]["lr"])

    what.register_hook(At(Stage.BEFORE_OPTIMIZER_STEP, note))
    run(what, constant(16))
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert what.flat_optimizers()[1][0].last_epoch == ema.num_updates == what.step_count == 4
    assert what.counters.batch_count == 16


def test_hooks_are_told_what_will_be_skipped() -> None:
    noting = Noting()
    run(strategy(GradientAccumulationHook(2), noting), constant(3))
    middle = [("BEFORE_BATCH", False), ("DO_BACKWARD", False), ("DO_OPTIMIZER_STEP", True)]
    end = [("BEFORE_BATCH", True), ("DO_BACKWARD", False), ("DO_OPTIMIZER_STEP", False)]
    flushed = [("BEFORE_BATCH", False), ("DO_BACKWARD", False), ("DO_OPTIMIZER_STEP", False)]
    after = "AFTER_OPTIMIZER_STEP"
    assert noting.notes() == [*middle, (after, True), *end, (after, False), *flushed, (after, False)]


class VetoAt(TrainingUpdateHook):
    """Veto the steps of some batches."""

    priority = 40

    def __init__(self, *batches: int) -> None:
        self.batches = batches

    def __call__(self, ctx: Any, stage: Any, will_skip: bool) -> tuple[bool, Tensor | None]:
        return stage is not Stage.DO_OPTIMIZER_STEP or ctx.batch_count not in self.batches, ctx.loss


@pytest.mark.parametrize(("vetoed", "w", "steps"), [((1,), -2.0, 2), ((0,), -3.0, 3), ((1, 4), -1.0, 1)])
def test_a_veto_drops_the_window_whose_step_it_is(vetoed: tuple[int, ...], w: float, steps: int) -> None:
    """Batches 1, 3 and 4 end windows; a veto in the middle of one changes nothing."""
    what = run(strategy(GradientAccumulationHook(2), VetoAt(*vetoed), models=ConstGrad()), constant(5))
    assert (w_of(what), what.step_count) == (w, steps)
    assert what.counters.batch_count == 5
