"""Test which mechanisms an agent has a part of."""

from __future__ import annotations

from typing import Any, cast

import pytest

from elastic_resume.mechanisms import registry
from elastic_resume.mechanisms.mechanism import (
    AgentContext,
    AgentPart,
    Mechanism,
)


@pytest.mark.parametrize(
    ("settings", "made"),
    [({}, ["always"]), ({"place": ""}, ["always"]), ({"place": "s3://b/x"}, ["always", "s3://b/x"])],
)
def test_agent_has_no_part_of_a_mechanism_without_its_setting(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], made: list[str]
) -> None:
    """Its modules would cost each start some ten milliseconds."""
    found = []

    def make(context: AgentContext) -> AgentPart:
        found.append(context.settings["place"])
        return AgentPart()

    def make_always(_: AgentContext) -> AgentPart:
        found.append("always")
        return AgentPart()

    mechanisms = (
        Mechanism(make_agent_part=make_always),
        Mechanism(make_agent_part=make, needs_setting="place"),
    )
    monkeypatch.setattr(registry, "MECHANISMS", mechanisms)
    nothing = cast("Any", None)
    context = AgentContext(
        *(nothing, nothing, nothing, nothing, nothing, nothing), settings, *(nothing, nothing, nothing)
    )
    assert len(registry.make_agent_parts(context)) == len(made)
    assert found == made


def test_fork_server_imports_what_each_worker_imports() -> None:
    """Else each worker would import them anew after a restart, within `er.resume`."""
    names = [name.removeprefix("elastic_resume.mechanisms.") for name in registry.WORKER_MODULES]
    assert {"curves.recorder", "curves.notes", "preemption.boundaries", "slow_ranks.own_time"} <= {*names}
    assert not [name for name in names if name.startswith("archive.")], "its part is the agent's"
