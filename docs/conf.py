"""Sphinx configuration. `make docs` builds the site into docs/_build, with warnings as errors."""

from __future__ import annotations

import sys
from importlib.metadata import version as installed_version
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

import torch_inventory  # noqa: E402 - it lies in _ext

project = "elastic_resume"
author = "the elastic_resume authors"
project_copyright = "2026, the elastic_resume authors"
version = release = installed_version("elastic-resume")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "reference_pages",
]
exclude_patterns = ["_build"]
nitpicky = True

myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 4

python_maximum_signature_line_length = 88
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_default_options = {"members": True, "show-inheritance": True}
default_role = "any"

INVENTORY = HERE / "_build" / "torch.inv"
torch_inventory.write(INVENTORY)
intersphinx_mapping = {"torch": (torch_inventory.BASE_URL, str(INVENTORY))}

html_theme = "furo"
html_title = "elastic_resume"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {"source_edit_link": "", "navigation_with_keys": True}
