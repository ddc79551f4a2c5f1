"""States of strangers: they are what their place needs, or refused before anything changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_rigs import Counting, rebuilt
from hostile_rigs import edited, with_state

from nvalchemi_lightning.errors import (
    AlchemiError,
    StoreError,
)

RESUMED: list[tuple[Callable[[Any], Any], str]] = [
    (lambda state: {"ranks": state["ranks"]}, "schema_version is None"),
    (lambda state: state.update(ranks=[1]), r"does not hold a state per rank but \[1\]"),
    (lambda state: state["ranks"].update({-1: {}}), "does not hold a state per rank"),
    (lambda state: state["ranks"].update({0: 5}), "the state of rank 0 is 5"),
    (lambda state: state["ranks"][0].update(validated_at="x"), "validated_at is 'x'"),
    (lambda state: state["ranks"][0].update(validation_due=1), "validation_due 1"),
    (lambda state: state["ranks"][0].update(random=None), "holds no random states but None"),
    (lambda state: state["ranks"][0].update(pass_began=[]), r"holds no random states but \[\]"),
    (lambda state: state["ranks"][0]["random"].update(python={}), "random state of python is none"),
    (lambda state: state["ranks"][0]["random"]["python"].update(words=torch.ones(3)), "random state of python"),
    (lambda state: state["ranks"][0]["random"]["python"].update(gauss="x"), "random state of python is none"),
    (lambda state: state["ranks"][0]["random"]["numpy"].update(position=10**9), "random state of numpy is none"),
    (lambda state: state["ranks"][0]["random"]["numpy"].update(words=torch.ones(3)), "random state of numpy"),
    (lambda state: state["ranks"][0]["random"].update(torch=torch.zeros(8)), "random state of torch is none"),
    (lambda state: state["ranks"][0]["random"].update(cuda=torch.zeros(8)), "random state of cuda is none"),
]


@pytest.mark.parametrize(("change", "match"), RESUMED, ids=[match[:40] for _, match in RESUMED])
def test_random_states_are_checked_before_anything_changes(
    folder: Path, change: Callable[[Any], Any], match: str
) -> None:
    with_state(folder, "lightning", change)
    generators = torch.get_rng_state()
    with pytest.raises(StoreError, match=rf"lightning/checkpoints/0.pt is damaged: .*{match}"):
        rebuilt(folder, hooks=[Counting()])
    assert torch.equal(torch.get_rng_state(), generators)


STATE_CHANGES: list[tuple[str, Callable[[Any], Any], str]] = [
    ("hooks", lambda state: dict.fromkeys(state, 5), "does not hold a state per hook"),
    (
        "hooks",
        lambda state: {key: {} for key in state},
        "the state of the hook checkpoint_rigs.Counting:0 does not fit",
    ),
    ("models/main", lambda state: {0: torch.ones(1)}, "does not hold a state with names"),
    ("models/main", lambda state: [1], "does not hold a state but a list"),
    ("models/main", lambda state: {"x": torch.empty(1, device="meta")}, "does not hold numbers in all its tensors"),
    ("models/main", lambda state: dict.fromkeys(state, 5), r"has shape \(4, 3\), in the checkpoint a int"),
    ("models/main", lambda state: {k: v.to_sparse() for k, v in state.items()}, "in the checkpoint torch.sparse_coo"),
    ("models/main", lambda state: {k: v.long() for k, v in state.items()}, "in the checkpoint integer shape"),
    ("models/main", lambda state: {k: v.to(torch.complex64) for k, v in state.items()}, "in the checkpoint complex"),
    ("optimizers/main_optimizer", lambda state: {}, "does not hold the state of an optimizer"),
    ("optimizers/main_optimizer", lambda state: {**state, "state": {"x": {}}}, "not hold the state of an optimizer"),
    ("optimizers/main_optimizer", lambda state: state["param_groups"][0].update(lr="x"), r"group\[0\]\['lr'\] is 'x'"),
    ("optimizers/main_optimizer", lambda state: state["state"][0].pop("step"), "does not fit: KeyError: 'step'"),
    ("schedulers/main_scheduler", lambda state: {**state, "step": 1}, "it would replace 'step' of StepLR"),
    ("schedulers/main_scheduler", lambda state: {**state, "optimizer": 1}, "it would replace 'optimizer' of StepLR"),
    ("schedulers/main_scheduler", lambda state: {**state, "base_lrs": "x"}, r"\['base_lrs'\] is 'x'; it must be like"),
]


@pytest.mark.parametrize(("component", "change", "match"), STATE_CHANGES, ids=[m[:40] for _, _, m in STATE_CHANGES])
def test_states_are_what_their_place_needs(
    folder: Path, component: str, change: Callable[[Any], Any], match: str
) -> None:
    with_state(folder, component, change)
    with pytest.raises(AlchemiError, match=match):
        rebuilt(folder, hooks=[Counting()])


def test_names_of_parameters_that_are_too_few(folder: Path) -> None:
    def shorter(manifest: dict[str, Any]) -> dict[str, Any]:
        names = manifest["associations"]["main"]["optimizer_parameter_names"]["main_optimizer"]
        names.append(names[0])
        return manifest

    edited(folder, "manifest.json", shorter)
    with pytest.raises(StoreError, match="it has 4 parameters, named are 5"):
        rebuilt(folder, hooks=[Counting()])
