"""The files that other tools read: CITATION.cff, issue forms, the workflow, and the changelog's form."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import yaml

from elastic_resume import __version__
from tests.support.paths import ROOT

FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
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


@pytest.mark.parametrize(
    "path", [path for path in FORMS if path.name != "config.yml"], ids=lambda path: path.stem
)
def test_issue_form_has_what_the_site_requires(path: Any) -> None:
    """Each field has a label and an id of its own."""
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= set(form)
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert {field["type"] for field in fields} <= {"textarea", "input", "dropdown", "checkboxes"}
    assert all(field["attributes"]["label"] for field in fields)
    ids = [field["id"] for field in fields]
    assert len(set(ids)) == len(ids) > 0


def test_bug_form_asks_for_doctor_and_report() -> None:
    """The commands' outputs say more than a description."""
    text = (ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text()
    assert "elastic-resume doctor" in text
    assert "elastic-resume report --json" in text


def test_workflow_runs_the_script_of_ci() -> None:
    """What must pass stands in one place."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    commands = [step["run"] for step in workflow["jobs"]["test"]["steps"] if "run" in step]
    assert [command.split()[-1] for command in commands] == [".ci/run"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


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
