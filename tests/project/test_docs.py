"""Every Python block of the documentation runs, page by page, in a folder that holds the example data alone."""

from __future__ import annotations

import importlib
import re
import shutil
from pathlib import Path

import pytest

import nvalchemi_lightning

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SKIP = r"(?P<skip><!-- not executed: \S.*? -->\n+)?"
BLOCK = re.compile(SKIP + r"^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> list[tuple[int, str]]:
    """Return line number and code of every block that is to run."""
    found = [match for match in BLOCK.finditer(text) if not match["skip"]]
    return [(text.count("\n", 0, match.start("code")), match["code"]) for match in found]


def with_blocks() -> list[Path]:
    pages = [page for page in PAGES if "_build" not in page.parts and "_generated" not in page.parts]
    return [page for page in pages if blocks(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", with_blocks(), ids=lambda page: str(page.relative_to(ROOT)))
def test_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(ROOT / "examples" / "data" / "molecules.extxyz.gz", tmp_path)
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__docs__"}
    for line, code in blocks(page.read_text(encoding="utf-8")):
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
"""


def test_only_unmarked_python_blocks_are_run() -> None:
    assert blocks(PAGE) == [(2, "x = 1\n")]


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
