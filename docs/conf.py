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
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "tables",
]
exclude_patterns = ["_build", "_generated"]

html_theme = "furo"
html_title = f"nvalchemi-lightning {release}"

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3

autodoc_default_options = {"exclude-members": "model_config, model_post_init"}
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings give the types together with shapes and units
default_role = "py:obj"
# A reference into this package must resolve; there is no index of the other packages to check against.
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!nvalchemi_lightning\.).*")]

napoleon_google_docstring = False
napoleon_use_rtype = False
