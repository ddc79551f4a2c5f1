"""Check built archives and the installed wheel: ``python check_dist.py FOLDER``, from outside the checkout."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import tarfile
import zipfile
from importlib.metadata import metadata
from pathlib import Path

import nvalchemi_lightning


def require(condition: bool, message: str) -> None:
    """Stop with ``message`` unless ``condition`` holds."""
    if not condition:
        sys.exit(f"dist: {message}")


folder = Path(sys.argv[1])
(wheel,) = folder.glob("*.whl")
(sdist,) = folder.glob("*.tar.gz")

in_wheel = zipfile.ZipFile(wheel).namelist()
foreign = [name for name in in_wheel if not name.startswith(("nvalchemi_lightning/", "nvalchemi_lightning-"))]
require(not foreign, f"{wheel.name} has files outside the package: {foreign}")
require("nvalchemi_lightning/py.typed" in in_wheel, f"{wheel.name} lacks py.typed, so users get no types")
require(any(name.endswith("/licenses/LICENSE") for name in in_wheel), f"{wheel.name} lacks LICENSE")

with tarfile.open(sdist) as archive:
    in_sdist = {name.partition("/")[2] for name in archive.getnames()}
for needed in ("LICENSE", "README.md", "pyproject.toml", "constraints.txt", "noxfile.py", "tests/conftest.py"):
    require(needed in in_sdist, f"{sdist.name} lacks {needed}")

require(Path(nvalchemi_lightning.__file__).is_relative_to(sys.prefix), "the installed wheel is not what is imported")
info = metadata("nvalchemi-lightning")
require(info["Version"] in wheel.name, f"{wheel.name} is not version {info['Version']}")
require(info["License-Expression"] == "Apache-2.0", "the licence is missing from the metadata")

modules = [module.name for module in pkgutil.walk_packages(nvalchemi_lightning.__path__, "nvalchemi_lightning.")]
for name in modules:
    importlib.import_module(name)
print(f"{wheel.name}: {len(modules)} modules import with the declared requirements alone; {sdist.name}: complete")
