"""How the command begins and ends."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest
from cli_rigs import run_here, run_process

from nvalchemi_lightning.cli import data
from nvalchemi_lightning.errors import DataError, SecondOwnerError

HEAVY = ("torch", "zarr", "lightning", "ase", "matplotlib")


def test_help_lists_the_groups_and_loads_nothing_heavy() -> None:
    code = f"""
import sys
from nvalchemi_lightning.cli.main import main
assert main(["--help"]) == 0
assert main(["data", "--help"]) == 0
sys.exit(", ".join(name for name in {HEAVY} if name in sys.modules) or 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "data" in done.stdout


def test_a_wrong_command_names_the_nearest() -> None:
    outcome = run_process("dat")
    assert outcome.code == 2
    assert "data" in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (DataError("frame 3 is bad"), 2, "error: frame 3 is bad\n"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "x.xyz"), 2, "x.xyz: No such file or directory"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "No space left on device"),
        (SecondOwnerError("two owners"), 1, "error: two owners\n"),
        (ImportError("needs ASE"), 1, "error: needs ASE\n"),
    ],
)
def test_errors_become_a_line_and_a_code(
    error: Exception, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = [*data.app.registered_commands]
    monkeypatch.setattr(data.app, "registered_commands", commands)

    @data.app.command("fail")
    def fail() -> None:
        raise error

    outcome = run_here(capsys, "data", "fail")
    assert outcome.code == code
    assert line in outcome.err
    assert "Traceback" not in outcome.err
    assert "Traceback" in run_here(capsys, "data", "fail", "--debug").err


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data.app, "registered_commands", [*data.app.registered_commands])

    @data.app.command("fail")
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_here_without_capture()


def run_here_without_capture() -> int:
    from nvalchemi_lightning.cli.main import main

    return main(["data", "fail"])
