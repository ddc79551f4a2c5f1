"""Sphinx configuration."""

from __future__ import annotations

import sys
from importlib.metadata import version as installed_version
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

project = "nvalchemi-lightning"
author = "the nvalchemi-lightning authors"
copyright = f"2026, {author}"
version = release = installed_version("nvalchemi-lightning")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "tables",
]
exclude_patterns = ["_build", "_generated"]

html_theme = "furo"
html_title = f"nvalchemi-lightning {release}"

myst_enable_extensions = ["colon_fence", "dollarmath", "deflist"]
myst_heading_anchors = 3

autosummary_generate = True
autosummary_imported_members = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings give the types together with shapes and units
default_role = "any"

napoleon_google_docstring = False
napoleon_use_rtype = False
