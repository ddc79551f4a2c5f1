"""The documentation runs, page by page, in a folder that holds the example data alone.

Python blocks are executed. Console blocks hold commands of ours behind ``$``, each with what it prints; a line ``...``
stands for any lines.
"""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import nvalchemi_lightning

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SKIP = r"(?P<skip><!-- not executed: \S.*? -->\n+)?"
BLOCK = re.compile(SKIP + r"^```(?P<kind>python|console)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ (?P<words>(?:.*\\\n)*.*)\n(?P<output>(?:(?!\$ ).*\n)*)", re.MULTILINE)
OURS = "nvalchemi-lightning"


class Block(NamedTuple):
    """A block that is to run."""

    line: int
    kind: str
    code: str


def blocks(text: str) -> list[Block]:
    """Return every block that is to run."""
    found = [match for match in BLOCK.finditer(text) if not match["skip"]]
    return [Block(text.count("\n", 0, match.start("code")), match["kind"], match["code"]) for match in found]


def run_console(code: str) -> None:
    """Run the commands of a console block and compare what they print."""
    for command in COMMAND.finditer(code):
        first, *rest = shlex.split(command["words"].replace("\\\n", " "))
        assert first == OURS, f"a console block runs {OURS} alone; mark others as bash: {command['words']}"
        words = [sys.executable, "-m", "nvalchemi_lightning", *rest]
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        assert matches(command["output"], done.stdout), f"$ {command['words']}\n{done.stdout}"


def matches(expected: str, printed: str) -> bool:
    pattern = re.escape(expected.rstrip() + "\n").replace(re.escape("...\n"), r"(?:.*\n)*")
    return re.fullmatch(pattern, printed.rstrip() + "\n") is not None


def with_blocks() -> list[Path]:
    pages = [page for page in PAGES if "_build" not in page.parts and "_generated" not in page.parts]
    return [page for page in pages if blocks(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", with_blocks(), ids=lambda page: str(page.relative_to(ROOT)))
def test_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(ROOT / "examples" / "data" / "molecules.extxyz.gz", tmp_path)
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__docs__"}
    for line, kind, code in blocks(page.read_text(encoding="utf-8")):
        if kind == "console":
            run_console(code)
            continue
        # The padding makes tracebacks point at the lines of the page.
        exec(compile("\n" * line + code, str(page), "exec"), namespace)


PAGE = """
```python
x = 1
```
<!-- not executed: needs a GPU -->
```python
y = 1
```
```bash
ls
```
```console
$ nvalchemi-lightning nonsense
no
```
"""


def test_only_unmarked_blocks_are_run() -> None:
    assert blocks(PAGE) == [(2, "python", "x = 1\n"), (12, "console", "$ nvalchemi-lightning nonsense\nno\n")]


def test_console_output_is_compared() -> None:
    usage = "Usage: nvalchemi-lightning [OPTIONS] COMMAND [ARGS]...\n"
    run_console(f"$ nvalchemi-lightning \\\n    nonsense\n{usage}...\n$ nvalchemi-lightning nonsense\n{usage}...\n")
    with pytest.raises(AssertionError, match="No such command"):
        run_console("$ nvalchemi-lightning nonsense\nsomething else\n")
    with pytest.raises(AssertionError, match="alone"):
        run_console("$ ls\n")


DIRECTIVE = re.compile(r"^\.\. auto(?P<kind>\w+):: (?P<name>[\w.]+)", re.MULTILINE)


def documented(text: str) -> list[object]:
    """Return the objects that a page of the reference describes."""
    found: list[object] = []
    for directive in DIRECTIVE.finditer(text):
        if directive["kind"] == "module":
            module = importlib.import_module(directive["name"])
            found += [getattr(module, name) for name in module.__all__ if name in dir(module)]
        else:
            module_name, _, name = directive["name"].rpartition(".")
            found.append(getattr(importlib.import_module(module_name), name))
    return found


def test_every_public_name_is_documented() -> None:
    described = [thing for page in (ROOT / "docs" / "api").glob("*.md") for thing in documented(page.read_text())]
    missing = [
        name
        for name in nvalchemi_lightning.__all__
        if not any(getattr(nvalchemi_lightning, name) is thing for thing in described)
    ]
    assert not missing, f"add these names to a page of docs/api: {missing}"
