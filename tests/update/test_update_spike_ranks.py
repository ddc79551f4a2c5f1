"""Two ranks decide together about a spike of one of them."""

from __future__ import annotations

import json
import math
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from rank_rigs import run_two_ranks
from update_rank_script import BROKEN, SPIKE

SCRIPT = Path(__file__).with_name("update_rank_script.py")
Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the script once and return the folder that it wrote to."""
    folder = tmp_path_factory.mktemp("ranks")
    run_two_ranks(SCRIPT, folder)
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    """Return what rank 0 and rank 1 found."""
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in (0, 1)]


def test_both_skip_what_spoils_one(found: Found) -> None:
    """B12: NaN on rank 1 alone in batch 3, a finite spike on rank 1 alone in batch 7."""
    first, second = (rank["patient"] for rank in found)
    assert BROKEN in second["numbers"][2]
    assert SPIKE in second["numbers"][6]
    assert not {BROKEN, SPIKE} & set(chain(*first["numbers"]))
    for name in ("steps", "skipped", "history", "weights", "averaged", "heard"):
        assert first[name] == second[name], name
    assert first["steps"] == [1, 2, 2, 3, 4, 5, 5, 6]
    assert first["skipped"] == 2
    assert first["error"] == second["error"] == ""
    assert all(math.isfinite(value) for value in chain(*first["weights"], *first["averaged"]))


def test_every_rank_tells_of_it(found: Found) -> None:
    for rank in found:
        nan, spike = rank["patient"]["heard"]
        assert nan.endswith(f"the loss is nan; look at the structures in memory number {BROKEN} (loss nan)")
        assert f"look at the structures in memory number {SPIKE} (loss " in spike


def test_the_file_is_written_once_and_names_structures_of_all_ranks(folder: Path, found: Found) -> None:
    broken, spike = (json.loads(line) for line in (folder / "quarantine.jsonl").read_text().splitlines())
    assert [suspect["number"] for suspect in broken["structures"]] == [BROKEN]
    joined = sorted(chain(*(rank["patient"]["numbers"][6] for rank in found)))
    assert sorted(suspect["number"] for suspect in spike["structures"]) == joined
    assert spike["structures"][0]["number"] == SPIKE


def test_both_end_with_the_same_error(found: Found) -> None:
    first, second = (rank["strict"]["error"] for rank in found)
    assert first == second
    assert first.startswith("1 steps in a row were skipped after 2 steps")
