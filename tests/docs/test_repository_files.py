"""The files that other tools read: CITATION.cff, issue forms, the workflow, and the changelog's form."""

from __future__ import annotations

import re

import yaml

from elastic_resume import __version__
from tests.support.paths import ROOT

CHANGE_KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]


def test_citation_has_the_required_keys_and_the_package_version() -> None:
    """The keys that version 1.2.0 of the Citation File Format requires, and none that it does not know."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    required = {"cff-version", "message", "title", "authors"}
    optional = {
        "abstract",
        "type",
        "version",
        "date-released",
        "license",
        "keywords",
        "url",
        "repository-code",
    }
    assert required <= set(citation) <= required | optional
    assert (citation["cff-version"], citation["type"]) == ("1.2.0", "software")
    assert citation["version"] == __version__
    assert citation["license"] == "Apache-2.0"


def test_changelog_keeps_the_form() -> None:
    """Versions with a date below `Unreleased`, and only the six kinds of changes, in their order."""
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    headings = [version.partition("\n")[0] for version in versions]
    assert headings[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", heading) for heading in headings[1:])
    for version in versions:
        kinds = re.findall(r"^### (.*)$", version, re.MULTILINE)
        assert kinds == [kind for kind in CHANGE_KINDS if kind in kinds]
