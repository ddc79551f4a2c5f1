"""Two ranks that draw random numbers of their own are stopped and end exactly as if they had not been."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rank_rigs import run_two_ranks
from resume_rigs import SCENARIOS, Noisy

from nvalchemi_lightning.specs import trust
from nvalchemi_lightning.strategy import TrainingStrategy

SCRIPT = Path(__file__).with_name("resume_rank_script.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the script once and return its folder."""
    folder = tmp_path_factory.mktemp("ranks")
    run_two_ranks(SCRIPT, folder, limit=200.0)
    return folder


def test_two_ranks_go_on_bit_for_bit(folder: Path) -> None:
    for rank in (0, 1):
        found = json.loads((folder / f"found_{rank}").read_text())
        # The states of hooks are those of rank 0; the losses that this one notes differ from rank to rank.
        own = [] if rank == 0 else ["Log"]
        assert found == {name: [own, own, own] for name in found}


def test_another_number_of_ranks_goes_on_and_says_that_it_is_not_exact(folder: Path) -> None:
    trust("resume_rigs")
    scenario = SCENARIOS["plain"]
    what = TrainingStrategy.load_checkpoint(folder / "own0", 0, models=Noisy(), hooks=scenario.fields(5)["hooks"])
    with pytest.warns(UserWarning, match=r"random states of 2 rank\(s\), this run has 1; it goes on, but not bit for"):
        what.run(scenario.loader(), enable_progress_bar=False)
    assert what.epoch_count == 3
