"""A script that Lightning starts again for its second rank, run to its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest


def run_two_ranks(script: Path, folder: Path, *, limit: float = 100.0) -> None:
    """Run ``script folder`` in the folder; its output is shown if it fails or takes longer than ``limit`` [s]."""
    environment = {key: value for key, value in os.environ.items() if key not in {"MASTER_PORT", "LOCAL_RANK"}}
    process = subprocess.Popen(
        [sys.executable, str(script), str(folder)],
        cwd=folder,
        env={**environment, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"two ranks did not end within {limit:g} s:\n{output[-3000:]}")
    assert process.returncode == 0, output[-6000:]
