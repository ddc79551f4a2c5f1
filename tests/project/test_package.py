"""What importing the package does and does not do, and what it exports."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from test_layers import LAYERED, LIGHTNING_BEGINS, MODULES, layer

import nvalchemi_lightning

ROOT = Path(__file__).resolve().parents[2]


def in_fresh_process(code: str, folder: Path) -> object:
    """Run ``code`` in a new interpreter inside ``folder`` and return the JSON that it prints last."""
    done = subprocess.run([sys.executable, "-B", "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


LOADED = "import json, sys; print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"


def test_the_top_package_is_light(tmp_path: Path) -> None:
    loaded = in_fresh_process(f"import nvalchemi_lightning; {LOADED}", tmp_path)
    assert "nvalchemi_lightning" in loaded
    assert not {"lightning", "pytorch_lightning", "torch", "numpy", "zarr", "ase"} & set(loaded)


def test_nothing_below_the_line_loads_lightning(tmp_path: Path) -> None:
    below = [module for module in LAYERED if layer(module) < LIGHTNING_BEGINS]
    loaded = in_fresh_process(f"import {', '.join(below)}; {LOADED}", tmp_path)
    assert "torch" in loaded
    assert not {"lightning", "pytorch_lightning", "lightning_fabric"} & set(loaded)


OTHERS = "import lightning.pytorch, pydantic, torch, torchmetrics, vesin, zarr"

WATCH = """
import importlib, json, sys
acts = []
def watch(event, args):
    if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        acts.append(f"{event} {args[0]} {args[1]}")
    elif event in ("os.mkdir", "os.remove", "os.rename", "os.putenv", "socket.connect", "subprocess.Popen"):
        acts.append(f"{event} {args}")
sys.addaudithook(watch)
"""

REPORT = "print(json.dumps(acts))"


def test_importing_changes_nothing(tmp_path: Path) -> None:
    """What other packages do when they are imported is not ours, so they are imported before the watch begins."""
    imports = "\n".join(f"importlib.import_module({name!r})" for name in MODULES)
    assert in_fresh_process(f"{OTHERS}\n{WATCH}\n{imports}\n{REPORT}", tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_the_watch_sees_a_write(tmp_path: Path) -> None:
    assert in_fresh_process(f"{WATCH}\nopen('trace', 'w').close()\n{REPORT}", tmp_path) == ["open trace w"]


def test_exports_are_sorted_and_unique() -> None:
    names = nvalchemi_lightning.__all__
    assert list(names) == sorted(set(names))


@pytest.mark.parametrize("name", nvalchemi_lightning.__all__)
def test_every_export_exists(name: str) -> None:
    assert getattr(nvalchemi_lightning, name) is not None
    assert name in dir(nvalchemi_lightning)


def test_a_misspelt_export_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="TrainingStrategyy"):
        _ = nvalchemi_lightning.TrainingStrategyy


@pytest.mark.parametrize("module", [module for module, path in MODULES.items() if path.name == "__init__.py"])
def test_packages_have_what_they_list(module: str) -> None:
    package = importlib.import_module(module)
    missing = [name for name in getattr(package, "__all__", ()) if not hasattr(package, name)]
    assert not missing, f"{module}.__all__ names {missing}, which it does not have"


def test_the_version_is_written_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert version("nvalchemi-lightning") == project["version"]
    assert nvalchemi_lightning.__version__ == project["version"]


def test_constraints_allow_what_the_project_requires() -> None:
    """An install with constraints.txt can only succeed if every pinned version lies in the declared range."""
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    extras = project["optional-dependencies"]
    for text in [*project["dependencies"], *extras["ase"], *extras["dev"], *extras["docs"]]:
        requirement = Requirement(text)
        pinned = pins[requirement.name]
        assert requirement.specifier.contains(pinned), f"{text}: constraints.txt has {pinned}"
