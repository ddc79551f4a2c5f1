"""Whatever the files of a folder contain, loading works or says what is wrong."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_rigs import Counting, rebuilt
from hostile_rigs import RECORD, STATES, STRATEGY
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nvalchemi_lightning.errors import (
    AlchemiError,
)

DOCUMENTED = (AlchemiError, FileNotFoundError)

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["os.system", "torch.nn.Linear", "../../x", "cpu", "cuda:99"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["cls_path", "__type__", "__enum__", "__value__", "data", "dtype", "shape", "a", "main"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)
tensor_values = json_values | st.sampled_from(
    [torch.zeros(2), torch.zeros(0), torch.ones(3, dtype=torch.int64), torch.zeros(2, 2).to_sparse(), b"x", (1, 2)]
)


def places_in(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return [path, *(place for key, item in items for place in places_in(item, (*path, key)))]


def replaced(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    parent = content
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    return content


FUZZED = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def loads_or_says_why(root: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*is damaged")
        warnings.filterwarnings("ignore", "(?s).*the checkpoint has (no state|states) of")
        with suppress(*DOCUMENTED):
            rebuilt(root, hooks=[Counting()])


@pytest.mark.parametrize("name", ["manifest.json", STRATEGY, RECORD])
@FUZZED
@given(data=st.data())
def test_any_json_gives_a_checkpoint_or_one_of_our_errors(
    saved: Path, tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    content = json.loads((saved / name).read_text())
    place = data.draw(st.sampled_from(places_in(content)))
    changed = replaced(content, place, data.draw(json_values))
    root = tmp_path_factory.mktemp("fuzz") / "root"
    shutil.copytree(saved, root)
    if name != RECORD:
        (root / RECORD).unlink()
    (root / name).write_text(json.dumps(changed))
    loads_or_says_why(root)


@pytest.mark.parametrize("component", STATES)
@FUZZED
@given(data=st.data())
def test_any_state_gives_a_checkpoint_or_one_of_our_errors(
    saved: Path, tmp_path_factory: pytest.TempPathFactory, component: str, data: st.DataObject
) -> None:
    name = f"{component}/checkpoints/0.pt"
    content = torch.load(saved / name, weights_only=True)
    place = data.draw(st.sampled_from(places_in(content)))
    changed = replaced(content, place, copy.deepcopy(data.draw(tensor_values)))
    root = tmp_path_factory.mktemp("fuzz") / "root"
    shutil.copytree(saved, root)
    (root / RECORD).unlink()
    torch.save(changed, root / name)
    loads_or_says_why(root)
