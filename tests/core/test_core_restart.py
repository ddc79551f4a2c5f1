"""Counters, positions within an epoch, and loaders of every kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from core_rigs import At, Harm, Recorder, Unsized, batches, force_loss, run, sgd, strategy, structures, trainer
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import BatchSampler, SequentialSampler
from torch.utils.data import DataLoader as TorchLoader

from nvalchemi_lightning.counters import Counters
from nvalchemi_lightning.data import Batch, DataLoader
from nvalchemi_lightning.errors import ConfigurationError, ConfigurationTypeError, DataError
from nvalchemi_lightning.feeding import EpochLoader, OneLoader, as_loader, loader_length
from nvalchemi_lightning.module import AlchemiModule
from nvalchemi_lightning.resume import ResumePoint
from nvalchemi_lightning.stages import TrainingStage

Stage = TrainingStage

# Reconciling counters with a loader of known length


@pytest.mark.parametrize(
    ("given", "length", "expected"),
    [
        ({}, 3, (0, 0, 0)),
        # whole epochs that were counted as batches are carried
        ({"epoch_step_count": 3, "batch_count": 3}, 3, (1, 0, 3)),
        ({"epoch_step_count": 7, "batch_count": 7}, 3, (2, 1, 7)),
        ({"epoch_step_count": 7, "batch_count": 10, "epoch_count": 1}, 3, (3, 1, 10)),
        # a position that is given must agree with the progress, where there is any
        ({"epoch_step_count": 2}, 3, (0, 2, 2)),
        ({"epoch_step_count": 2, "epoch_count": 4}, 3, (4, 2, 14)),
        ({"epoch_step_count": 2, "epoch_count": 1, "batch_count": 5}, 3, (1, 2, 5)),
        ({"epoch_step_count": 2, "epoch_count": 1, "step_count": 5}, 3, (1, 2, 5)),
        ({"epoch_step_count": 2, "epoch_count": 1, "batch_count": 5, "step_count": 1}, 3, (1, 2, 5)),
        # without a position, progress beyond the epochs becomes one
        ({"step_count": 4, "epoch_count": 1}, 3, (1, 1, 4)),
        ({"batch_count": 4}, 3, (1, 1, 4)),
        ({"batch_count": 9, "epoch_count": 1}, 3, (3, 0, 9)),
        ({"batch_count": 3, "epoch_count": 1, "step_count": 1}, 3, (1, 0, 3)),
    ],
)
def test_counters_are_made_to_agree(given: dict[str, int], length: int, expected: tuple[int, int, int]) -> None:
    counters = Counters(**given)
    counters.reconcile(length)
    assert (counters.epoch_count, counters.epoch_step_count, counters.batch_count) == expected
    assert counters.step_count == given.get("step_count", 0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"epoch_step_count": 2, "epoch_count": 1, "batch_count": 4},
            r"the progress 4 \(batch_count=4, step_count=0\) does not match .* = 1 \* 3 \+ 2 = 5; run with the loader",
        ),
        (
            {"epoch_step_count": 1, "step_count": 2},
            r"the progress 2 \(batch_count=0, step_count=2\) does not match .* = 0 \* 3 \+ 1 = 1",
        ),
        ({"epoch_count": 2, "batch_count": 5}, r"the progress 5 .* is smaller than .* = 2 \* 3 \+ 0 = 6"),
        ({"epoch_count": 1}, r"the progress 0 .* is smaller than .* = 1 \* 3 \+ 0 = 3"),
    ],
)
def test_counters_that_contradict_each_other_are_refused(given: dict[str, int], message: str) -> None:
    counters = Counters(**given)
    kept = Counters(**given)
    with pytest.raises(ConfigurationError, match=f"restart counters are inconsistent: {message}"):
        counters.reconcile(3)
    assert counters == kept


@settings(deadline=None, max_examples=60)
@given(length=st.integers(1, 6), batches_done=st.integers(0, 20))
def test_reconciling_keeps_what_agrees(length: int, batches_done: int) -> None:
    epochs, position = divmod(batches_done, length)
    counters = Counters(batch_count=batches_done, epoch_count=epochs, epoch_step_count=position)
    kept = Counters(**vars(counters))
    counters.reconcile(length)
    counters.reconcile(length)
    assert counters == kept


@pytest.mark.parametrize("name", vars(Counters()))
@pytest.mark.parametrize("value", [-1, 1.0, True, "1", None])
def test_a_count_is_a_natural_number(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} must be an integer >= 0; got {value!r}"):
        Counters(**{name: value})
    with pytest.raises(ValueError, match=f"{name} must be an integer >= 0"):
        strategy(**{name: value})


def test_counting_batches_and_epochs() -> None:
    counters = Counters()
    counters.batch_done(stepped=True, world_size=4)
    counters.batch_done(stepped=False, world_size=4)
    counters.batch_done(stepped=True, in_epoch=False)
    assert counters == Counters(step_count=2, global_step_count=5, batch_count=3, epoch_step_count=2)
    counters.epoch_done()
    assert counters == Counters(step_count=2, global_step_count=5, batch_count=3, epoch_count=1)


def test_counters_are_keywords_and_attributes() -> None:
    what = strategy(num_steps=99, step_count=5, batch_count=7, epoch=2, epoch_step_count=1, global_step_count=10)
    assert (what.step_count, what.batch_count, what.epoch_count, what.epoch) == (5, 7, 2, 2)
    assert (what.epoch_step_count, what.global_step_count) == (1, 10)


def test_a_global_count_that_is_absent_follows_the_steps() -> None:
    what = run(strategy(num_steps=4, step_count=3, batch_count=3, epoch_step_count=3), batches(*[1] * 5))
    assert (what.step_count, what.global_step_count) == (4, 4)


# Positions


class Loader:
    """Five numbered batches, with the methods that a test asks for."""

    def __init__(self, items: list[Batch], *, positions: bool = True, sampler: Any = None) -> None:
        self.items = items
        self.start = 0
        self.epochs: list[int] = []
        self.steps: list[int] = []
        self.drawn: list[int] = []
        self.sampler = Sampler(self.epochs) if sampler is None else sampler
        if positions:
            self.set_epoch_step = self._set_epoch_step

    def _set_epoch_step(self, step: int) -> None:
        self.steps.append(step)
        self.start = step

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Batch]:
        start, self.start = self.start, 0
        for index in range(start, len(self.items)):
            self.drawn.append(index)
            yield self.items[index]


class Sampler:
    """Notes the epochs it is told."""

    def __init__(self, epochs: list[int]) -> None:
        self.epochs = epochs

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def numbered(count: int) -> list[Batch]:
    """Return batches of one structure each that carry their number."""
    made = batches(*[1] * count)
    for index, batch in enumerate(made):
        batch.number = torch.tensor([[index]])
    return made


def trained(loader: Any, **fields: Any) -> list[int]:
    """Return the numbers of the batches of a run."""
    seen: list[int] = []
    run(strategy(hooks=[At(Stage.BEFORE_BATCH, lambda ctx: seen.append(ctx.batch.number.item()))], **fields), loader)
    return seen


def test_a_loader_that_knows_positions_is_told_once() -> None:
    loader = Loader(numbered(5))
    assert trained(loader, num_steps=6, step_count=3, epoch_step_count=3) == [3, 4, 0]
    assert (loader.epochs, loader.steps) == ([0, 1], [3])
    assert loader.drawn == [3, 4, 0]


def test_a_loader_that_does_not_is_skipped_through() -> None:
    loader = Loader(numbered(5), positions=False)
    assert trained(loader, num_steps=6, step_count=3, epoch_step_count=3) == [3, 4, 0]
    assert loader.epochs == [0, 1]
    assert loader.drawn == [0, 1, 2, 3, 4, 0]


def test_progress_alone_becomes_a_position() -> None:
    assert trained(numbered(3), num_steps=6, step_count=4, epoch=1) == [1, 2]


def test_no_batch_is_drawn_beyond_the_target() -> None:
    loader = Loader(numbered(5))
    assert trained(loader, num_steps=7) == [0, 1, 2, 3, 4, 0, 1]
    assert loader.drawn == [0, 1, 2, 3, 4, 0, 1]


@pytest.mark.parametrize("positions", [True, False])
@settings(deadline=None, max_examples=6)
@given(first=st.integers(1, 9), length=st.integers(1, 4))
def test_two_runs_are_one(positions: bool, first: int, length: int) -> None:
    """B115, for every place at which the first run may stop."""
    seen: list[int] = []
    what = strategy(num_steps=first, hooks=[At(Stage.BEFORE_BATCH, lambda ctx: seen.append(ctx.batch.number.item()))])
    loader = Loader(numbered(length), positions=positions)
    run(what, loader)
    what.num_steps = 10
    run(what, loader)
    assert seen == [index % length for index in range(10)]
    assert what.counters == Counters(10, 10, 10, *divmod(10, length))


@pytest.mark.parametrize("where", ["loader", "sampler", "batch_sampler", "batch_sampler.sampler"])
def test_whoever_knows_epochs_is_told_once_per_pass(where: str) -> None:
    """B119: custom batch samplers too; a resumed run goes on with its epoch."""

    class Holder:
        pass

    loader: Any = Loader(numbered(2), sampler=Holder())
    owner = loader
    if where != "loader":
        loader.batch_sampler = Holder()
        *path, last = where.split(".")
        for name in path:
            owner = getattr(owner, name)
        setattr(owner, last, Holder()) if not hasattr(owner, last) else None
        owner = getattr(owner, last)
    owner.set_epoch = loader.epochs.append
    what = run(strategy(num_epochs=3), loader)
    assert loader.epochs == [0, 1, 2]
    loader.epochs.clear()
    what.num_epochs = 4
    run(what, loader)
    assert loader.epochs == [3]
    loader.epochs.clear()
    trained(loader, num_epochs=3, epoch=1, step_count=2)
    assert loader.epochs == [1, 2]


class EpochBatches(BatchSampler):
    """A batch sampler of a user's own whose order depends on the epoch."""

    def __init__(self, count: int) -> None:
        super().__init__(SequentialSampler(range(count)), 2, False)
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        yield from sorted(super().__iter__(), key=lambda cut: (cut[0] // 2 + self.epochs[-1]) % len(self))


@pytest.mark.parametrize("door", ["run", "trainer"])
@pytest.mark.parametrize("kind", ["torch", "package"])
def test_batch_samplers_of_data_loaders_are_told(door: str, kind: str) -> None:
    """B119."""
    data = structures(6)
    for index, item in enumerate(data):
        item.add_system_property("number", torch.tensor([[index]]))
    sampler = EpochBatches(6)
    if kind == "torch":
        loader: Any = TorchLoader(data, batch_sampler=sampler, collate_fn=Batch.from_data_list)
    else:
        loader = DataLoader(data, batch_sampler=sampler)
    seen: list[list[int]] = []
    hook = At(Stage.BEFORE_BATCH, lambda ctx: seen.append(ctx.batch.number.flatten().tolist()))
    if door == "run":
        run(strategy(num_epochs=3, hooks=[hook]), loader)
    else:
        module = AlchemiModule(models=Harm(), optimizer_configs=sgd(), loss_fn=force_loss(), hooks=[hook])
        trainer(max_epochs=3).fit(module, loader)
    assert sampler.epochs == [0, 1, 2]
    pairs = [[0, 1], [2, 3], [4, 5]]
    assert seen == [*pairs, *pairs[2:], *pairs[:2], *pairs[1:], *pairs[:1]]


def test_a_shuffled_torch_loader_is_trained_over() -> None:
    loader = TorchLoader(structures(5), batch_size=2, shuffle=True, collate_fn=Batch.from_data_list)
    what = run(strategy(num_epochs=2), loader)
    assert (what.step_count, what.epoch_count) == (6, 2)


def test_a_shorter_loader_than_the_position_is_refused() -> None:
    what = run(strategy(num_steps=4), numbered(5))
    what.num_steps = 9
    with pytest.raises(ConfigurationError, match="stopped after batch 4 of epoch 0, but this dataloader has 3 batches"):
        run(what, numbered(3))
    assert what.counters == Counters(4, 4, 4, 0, 4)


def test_another_loader_after_a_whole_epoch_is_fine() -> None:
    what = run(strategy(num_steps=5), numbered(5))
    what.num_steps = 8
    run(what, numbered(2))
    assert what.counters == Counters(8, 8, 8, 2, 1)


def test_contradicting_counters_stop_a_run_before_its_first_batch() -> None:
    recorder = Recorder([Stage.BEFORE_BATCH])
    what = strategy(num_steps=9, batch_count=4, epoch=1, epoch_step_count=2, hooks=[recorder])
    with pytest.raises(ConfigurationError, match="restart counters are inconsistent"):
        run(what, numbered(3))
    assert recorder.rows == []


def test_a_hook_may_replace_the_loader_at_setup() -> None:
    seen: list[int] = []

    def replace(ctx: Any) -> None:
        ctx.workflow.active_dataloader = numbered(4)[2:]

    hooks = [At(Stage.SETUP, replace), At(Stage.BEFORE_BATCH, lambda ctx: seen.append(ctx.batch.number.item()))]
    what = run(strategy(num_epochs=2, hooks=hooks), numbered(3))
    assert seen == [2, 3, 2, 3]
    assert what.active_dataloader is None


# Loaders that cannot be


@pytest.mark.parametrize("loader", [None, 3, "data.zarr", b"data", object()])
def test_what_cannot_be_iterated_is_no_loader(loader: Any) -> None:
    with pytest.raises(ConfigurationTypeError, match="dataloader must be an iterable of Batch; got"):
        run(strategy(), loader)


@pytest.mark.parametrize("loader", [[], (), {}])
def test_an_empty_loader_is_refused(loader: Any) -> None:
    """B81: nothing trained is no success."""
    with pytest.raises(ConfigurationError, match="dataloader must contain at least one batch; got an empty"):
        run(strategy(), loader)


def test_an_empty_loader_of_unknown_length_is_refused() -> None:
    """B81."""
    what = strategy(num_steps=3)
    with pytest.raises(
        ConfigurationError, match=r"no batches before reaching the target step count 3; the Unsized is emp"
    ):
        run(what, Unsized([]))
    assert what.counters == Counters()


def test_a_one_shot_loader_trains_as_far_as_it_goes() -> None:
    assert trained(iter(numbered(3)), num_steps=3) == [0, 1, 2]
    with pytest.raises(ConfigurationError, match=r"target step count 4; the \w+ is empty or can be iterated only once"):
        trained(iter(numbered(3)), num_steps=4)


class Promising(Unsized):
    """A loader that is wrong about its length."""

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize("duration", [{"num_epochs": 2}, {"num_steps": 5}])
def test_a_length_that_promises_too_much_is_named(duration: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match=r"\b3\b.*\b2 batches"):
        run(strategy(**duration), Promising(numbered(2)))


def test_epochs_need_a_loader_of_known_length() -> None:
    with pytest.raises(ConfigurationError, match=r"num_epochs requires a sized dataloader, .* set num_steps instead"):
        run(strategy(num_epochs=1), Unsized(numbered(2)))


def test_a_share_that_rounds_to_nothing_is_refused() -> None:
    """B81."""
    with pytest.raises((ConfigurationError, MisconfigurationException), match="limit_train_batches"):
        run(strategy(), numbered(3), limit_train_batches=0.01)


@pytest.mark.parametrize("share", [0, 0.0])
def test_a_share_of_nothing_is_refused(share: float) -> None:
    """B81."""
    with pytest.raises((ConfigurationError, MisconfigurationException), match="limit_train_batches"):
        run(strategy(), numbered(3), limit_train_batches=share)


@pytest.mark.parametrize(
    ("loader", "kind"),
    [(structures(2), "AtomicData"), ([{"positions": 1}], "dict"), ([(1, 2)], "tuple"), ([None], "NoneType")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_batch_is_named(loader: Any, kind: str) -> None:
    with pytest.raises(
        DataError, match=rf"yielded {kind}; training needs Batch objects \(nvalchemi_lightning.data.Dat"
    ):
        run(strategy(), loader)


def test_one_batch_is_no_loader() -> None:
    with pytest.raises((ConfigurationTypeError, DataError), match=r"one Batch|\[batch\]"):
        run(strategy(), numbered(1)[0])


def test_positions_that_are_not_finite_are_refused_before_the_model_is_called() -> None:
    data = numbered(2)
    data[0].positions[0, 0] = torch.nan
    with pytest.raises(DataError, match="the first batch has positions that are not finite"):
        run(strategy(), data)


# The wrappers alone


def test_the_length_of_a_loader() -> None:
    class Refusing(Unsized):
        def __len__(self) -> int:
            raise NotImplementedError

    assert loader_length([1, 2]) == 2
    assert loader_length(Unsized([1])) is None
    assert loader_length(Refusing([1])) is None


def test_a_loader_is_handed_back_as_it_is() -> None:
    items = [1]
    assert as_loader(items) is items
    wrapped = OneLoader(items)
    assert (len(wrapped), list(wrapped), OneLoader.unwrap(wrapped), OneLoader.unwrap(3)) == (1, [1], items, 3)


def test_an_epoch_loader_follows_counters_and_target() -> None:
    counters = Counters(epoch_step_count=1)
    done: list[bool] = []
    skipped: list[int] = []
    epochs = EpochLoader(numbered(3), counters, lambda: bool(done), 3, ResumePoint(), skipped.append)
    assert len(epochs) == 3
    passing = iter(epochs)
    assert next(passing).number.item() == 1
    assert (epochs.delivered, epochs.exhausted, skipped) == (2, False, [1])
    done.append(True)
    assert list(passing) == []
    assert epochs.exhausted is False
    done.clear()
    assert [batch.number.item() for batch in epochs] == [1, 2]
    assert epochs.exhausted is True
    with pytest.raises(TypeError, match="list has no length"):
        len(EpochLoader(numbered(1), counters, bool, None, ResumePoint(), print))
