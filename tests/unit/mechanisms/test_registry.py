"""Test which mechanisms an agent has a part of."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elastic_resume.mechanisms import registry
from elastic_resume.mechanisms.mechanism import (
    AgentContext,
    AgentPart,
    Mechanism,
    StepObserver,
    WorkerContext,
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


@pytest.mark.parametrize(
    ("switches", "made", "warnings"),
    [
        ([["shared"], ["shared"]], [0, 1, 2], []),
        ([[], []], [0, 2], []),
        ([["shared"], []], [0, 2], ["--shared is ignored: rank 0 has it and rank 1 does not."]),
        ([["other"], ["shared"]], [0, 2], ["--shared is ignored: rank 1 has it and rank 0 does not."]),
    ],
)
def test_observer_with_a_switch_is_made_on_all_ranks_or_on_none(
    switches: list[list[str]],
    made: list[int],
    warnings: list[str],
    *,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It may use a collective, for which the other ranks would not come. Indices stay the same."""
    recorded: list[int] = []

    def make(context: WorkerContext) -> StepObserver:
        context.record(7)
        return StepObserver()

    makers = [functools.partial(make) for _ in range(3)]
    monkeypatch.setattr(registry, "_OBSERVER_MAKERS", makers)
    monkeypatch.setattr(registry, "_OWN_SWITCHES", dict(zip(makers, ["", "shared", ""], strict=True)))
    for rank in range(2):
        context = cast("Any", SimpleNamespace(rank=rank, _replace=SimpleNamespace))
        recorded.clear()
        found = registry.make_step_observers(context, lambda index, _: recorded.append(index), switches)
        assert len(found) == len(made)
        assert recorded == made
    assert [record.message.partition(" Give")[0] for record in caplog.records] == warnings
