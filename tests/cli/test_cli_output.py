"""Tables, JSON and progress."""

from __future__ import annotations

import io
import json
import sys

import pytest

from nvalchemi_lightning.cli.output import progress, show_json, show_table, size_text


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


ROWS = [("energy", 3, 0.5), ("forces [eV/A]", 1200, None)]


def test_a_pipe_gets_aligned_lines(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(["label", "count", "rms"], ROWS, "Labels")
    assert capsys.readouterr().out == (
        "Labels\nlabel          count  rms\nenergy             3  0.5\nforces [eV/A]   1200\n"
    )


def test_a_terminal_gets_a_drawn_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    show_table(["label", "count", "rms"], ROWS, "Labels")
    drawn = sys.stdout.getvalue()
    assert "┏" in drawn
    assert "forces [eV/A]" in drawn  # not taken for markup


def test_json_is_strict(capsys: pytest.CaptureFixture[str]) -> None:
    show_json({"count": 3})
    assert json.loads(capsys.readouterr().out) == {"count": 3}
    with pytest.raises(ValueError, match="Out of range float"):
        show_json({"rms": float("nan")})


@pytest.mark.parametrize("total", [None, 3])
def test_a_bar_is_for_terminals_alone(total: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    with progress("reading", total) as advance:
        advance()
        advance(2)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("total", "end"), [(None, "3"), (3, "3/3")])
def test_a_bar_counts(total: int | None, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress("reading [a]", total) as advance:
        advance()
        advance(2)
    assert "reading [a]" in sys.stderr.getvalue()
    assert end in sys.stderr.getvalue()


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (2.5e6, "2.5 MB"), (4e15, "4e+03 TB")],
)
def test_sizes_are_readable(count: float, text: str) -> None:
    assert size_text(count) == text
