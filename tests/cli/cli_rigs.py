"""Running the command in this process, and as a process of its own."""

from __future__ import annotations

import subprocess
import sys
from typing import NamedTuple

import pytest

from nvalchemi_lightning.cli.main import main


class Outcome(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


def run_here(capsys: pytest.CaptureFixture[str], *words: object) -> Outcome:
    """Run a command in this process, which is quick."""
    capsys.readouterr()
    code = main([str(word) for word in words])
    return Outcome(code, *capsys.readouterr())


def run_process(*words: object, folder: object = None) -> Outcome:
    """Run a command in a process of its own, as a user does."""
    command = [sys.executable, "-m", "nvalchemi_lightning", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)  # type: ignore[call-overload]
    return Outcome(done.returncode, done.stdout, done.stderr)
