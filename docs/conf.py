"""Sphinx configuration. `make docs` builds the site into docs/_build, with warnings as errors."""

from __future__ import annotations

from importlib.metadata import version as installed_version

project = "elastic_resume"
author = "the elastic_resume authors"
project_copyright = "2026, the elastic_resume authors"
version = release = installed_version("elastic-resume")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx_argparse_cli",
]
exclude_patterns = ["_build"]
nitpicky = False

myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_default_options = {"members": True, "show-inheritance": True}
default_role = "any"

# The part of PyTorch's inventory that the pages refer to lies beside this file: a build needs no network.
intersphinx_mapping = {"torch": ("https://docs.pytorch.org/docs/stable/", "torch.inv")}

html_theme = "furo"
html_title = "elastic_resume"
html_static_path = ["_static"]
html_theme_options = {"source_edit_link": "", "navigation_with_keys": True}
