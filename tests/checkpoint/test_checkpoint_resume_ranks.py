"""Two ranks that draw random numbers of their own are stopped and end exactly as if they had not been."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from resume_rigs import SCENARIOS, Noisy

from nvalchemi_lightning.specs import trust
from nvalchemi_lightning.strategy import TrainingStrategy

SCRIPT = Path(__file__).with_name("resume_rank_script.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the script once and return its folder."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {key: value for key, value in os.environ.items() if key not in {"MASTER_PORT", "LOCAL_RANK"}}
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(folder)],
        cwd=folder,
        env={**environment, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=200)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"two ranks did not end within 200 s:\n{output[-3000:]}")
    assert process.returncode == 0, output[-6000:]
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
