"""Test that the flag, the variable and the file of --config turn the sharing on in workers."""

from __future__ import annotations

import pytest

from elastic_resume.mechanisms import registry


@pytest.mark.parametrize(("text", "is_on"), [("true", True), ("on", True), ("false", False), ("", False)])
def test_switch_reaches_the_workers_environment(text: str, is_on: bool) -> None:
    """Under torchrun a user sets the variable; under an agent the flag and the file of --config do too."""
    (option,) = registry._SWITCHES
    assert (registry.read_switches({option.variable: text}) == [option.field]) is is_on
    exported = registry.export_switches({option.field: is_on})
    assert (registry.read_switches(exported) == [option.field]) is is_on
