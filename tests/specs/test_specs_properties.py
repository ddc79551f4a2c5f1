"""Generated recipes: text, spec and object lead to one another without loss."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specs_rigs import Net, strategy, trusting_rigs
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, ReduceLROnPlateau, SequentialLR, StepLR

from nvalchemi_lightning.hooks import EMAHook, GradientAccumulationHook, GradientClipHook, SpikeSkipHook
from nvalchemi_lightning.hooks.recipes import hook_from, hook_spec
from nvalchemi_lightning.losses import (
    ComposedLossFunction,
    ConstantWeight,
    CosineWeight,
    EnergyHuberLoss,
    EnergyMAELoss,
    EnergyMSELoss,
    ForceHuberLoss,
    ForceL2NormLoss,
    ForceMSELoss,
    LinearWeight,
    PiecewiseWeight,
    StressHuberLoss,
    StressMSELoss,
)
from nvalchemi_lightning.optim import OptimizerConfig, ParamGroup
from nvalchemi_lightning.specs import BaseSpec, create_model_spec, create_model_spec_from_json, without_timestamps
from nvalchemi_lightning.specs.model_spec import model_spec
from nvalchemi_lightning.strategy import TrainingStrategy

quick = settings(deadline=None, max_examples=25)


@pytest.fixture(autouse=True, scope="module")
def _trusted() -> Iterator[None]:
    with trusting_rigs():
        yield


def assert_text_round_trip(spec: BaseSpec) -> BaseSpec:
    """Text → spec → text is the same text, time of making included."""
    text = spec.model_dump_json()
    again = create_model_spec_from_json(json.loads(text))
    assert again.model_dump_json() == text
    assert again == spec
    return again


numbers = st.floats(1e-6, 10.0)
counts = st.integers(1, 50)


# Losses and their schedules -----------------------------------------------------------------------------------------

per_epoch = st.booleans()
schedules = st.one_of(
    st.builds(ConstantWeight, value=numbers, per_epoch=per_epoch),
    st.builds(LinearWeight, start=numbers, end=numbers, num_steps=counts, per_epoch=per_epoch),
    st.builds(CosineWeight, start=numbers, end=numbers, num_steps=counts, per_epoch=per_epoch),
    st.builds(PiecewiseWeight, boundaries=st.just((2, 5)), values=st.tuples(numbers, numbers, numbers)),
)
flags = st.booleans()
plain = st.sampled_from([EnergyMSELoss, EnergyMAELoss, ForceMSELoss, ForceL2NormLoss, StressMSELoss])
huber = st.sampled_from([EnergyHuberLoss, ForceHuberLoss, StressHuberLoss])
terms = st.one_of(
    st.builds(lambda cls, flag: cls(ignore_nonfinite=flag), plain, flags),
    st.builds(lambda cls, flag, delta: cls(ignore_nonfinite=flag, delta=delta), huber, flags, numbers),
    st.builds(EnergyMSELoss, per_atom=flags, target_key=st.just("dft_energy")),
)


@st.composite
def losses(draw: Any) -> ComposedLossFunction:
    weighted = draw(st.lists(st.tuples(terms, st.one_of(numbers, schedules)), min_size=1, max_size=3))
    components, weights = zip(*weighted, strict=True)
    return ComposedLossFunction(list(components), weights=list(weights), normalize_weights=draw(flags))


@quick
@given(loss=losses())
def test_losses_are_rebuilt_from_their_text(loss: ComposedLossFunction) -> None:
    spec = assert_text_round_trip(loss.to_spec())
    assert spec.build().to_spec() == spec


# Optimizers ---------------------------------------------------------------------------------------------------------

groups = st.lists(
    st.builds(ParamGroup, pattern=st.sampled_from(["*.bias", "main.layers.0.*"]), lr=numbers, weight_decay=numbers),
    max_size=2,
    unique_by=lambda group: group.label,
).map(tuple)
optimizers = st.one_of(
    st.fixed_dictionaries({"optimizer_cls": st.just(SGD), "optimizer_kwargs": st.fixed_dictionaries({"lr": numbers})}),
    st.fixed_dictionaries(
        {
            "optimizer_cls": st.sampled_from([Adam, AdamW]),
            "lr": numbers,
            "optimizer_kwargs": st.fixed_dictionaries({}, optional={"betas": st.just((0.5, 0.75)), "eps": numbers}),
        }
    ),
)
schedulers = st.one_of(
    st.just({}),
    st.fixed_dictionaries(
        {"scheduler_cls": st.just(StepLR), "scheduler_kwargs": st.fixed_dictionaries({"step_size": counts})}
    ),
    st.just(
        {
            "scheduler_cls": SequentialLR,
            "scheduler_kwargs": {
                "schedulers": [
                    create_model_spec(LinearLR, total_iters=2),
                    create_model_spec(CosineAnnealingLR, T_max=9),
                ],
                "milestones": [2],
            },
        }
    ),
    st.just(
        {
            "scheduler_cls": ReduceLROnPlateau,
            "scheduler_kwargs": {"patience": 3},
            "scheduler_metric_adapter": "total_loss",
        }
    ),
)
extras = st.fixed_dictionaries(
    {},
    optional={"param_groups": groups, "no_decay": st.just("bias_and_scale"), "parameters": st.just(("main.*",))},
)
configs = st.builds(
    lambda *parts: OptimizerConfig(**{k: v for part in parts for k, v in part.items()}), optimizers, schedulers, extras
)


@quick
@given(config=configs)
def test_optimizers_groups_and_schedules_are_rebuilt_from_their_text(config: OptimizerConfig) -> None:
    spec = assert_text_round_trip(config.to_spec())
    again = OptimizerConfig.from_spec(spec)
    assert again.to_spec() == spec
    assert (again.param_groups, again.parameters, again.no_decay) == (
        config.param_groups,
        config.parameters,
        config.no_decay,
    )
    assert again.lr == config.lr


# Models and hooks ---------------------------------------------------------------------------------------------------

layers = st.one_of(
    st.builds(nn.Linear, st.integers(1, 4), st.integers(1, 4), flags, dtype=st.sampled_from([torch.float64, None])),
    st.builds(nn.LayerNorm, st.integers(1, 4), eps=numbers),
    st.builds(nn.Dropout, st.sampled_from([0.0, 0.5])),
    st.builds(nn.Conv1d, st.just(2), st.just(2), st.sampled_from([1, 3])),
    st.builds(Net, st.integers(1, 4)),
)
hooks = st.one_of(
    st.builds(EMAHook, decay=st.floats(0, 0.99), update_every=counts, warmup=flags, use_buffers=flags),
    st.builds(GradientAccumulationHook, counts, normalize=st.sampled_from(["labels", "graphs", "atoms", "batch"])),
    st.builds(GradientClipHook, max_norm=numbers),
    st.builds(SpikeSkipHook, factor=numbers, max_consecutive=counts),
)


@quick
@given(layer=layers)
def test_models_are_rebuilt_from_their_text(layer: nn.Module) -> None:
    spec = assert_text_round_trip(model_spec(layer))
    assert model_spec(spec.build()) == spec


@quick
@given(hook=hooks)
def test_hooks_are_rebuilt_from_their_text(hook: Any) -> None:
    spec = assert_text_round_trip(hook_spec(hook))
    assert hook_spec(hook_from(json.loads(spec.model_dump_json()))) == spec


# Strategies ---------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=15)
@given(
    loss=losses(),
    config=configs.filter(lambda c: c.scheduler_cls is not ReduceLROnPlateau),
    hook=hooks,
    duration=st.one_of(st.fixed_dictionaries({"num_steps": counts}), st.fixed_dictionaries({"num_epochs": counts})),
    width=st.integers(1, 4),
)
def test_strategies_are_rebuilt_from_their_text(
    loss: ComposedLossFunction, config: OptimizerConfig, hook: Any, duration: dict[str, int], width: int
) -> None:
    fields = {"num_steps": None, **duration}
    what = strategy(models=Net(width), loss_fn=loss, optimizer_configs=config, hooks=[hook], **fields)
    form = json.loads(json.dumps(what.to_spec_dict(), allow_nan=False))
    again = TrainingStrategy.from_spec_dict(form, hooks="saved")
    assert without_timestamps(json.loads(json.dumps(again.to_spec_dict()))) == without_timestamps(form)
    text = json.loads(json.dumps(again.to_checkpoint_dict()))
    assert without_timestamps(
        TrainingStrategy.from_checkpoint_dict(text, hooks="saved").to_checkpoint_dict()
    ) == without_timestamps(text)
