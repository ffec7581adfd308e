"""Test what an agent does at its end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic_resume.agent.main import _Agent
from elastic_resume.mechanisms.mechanism import AgentPart


class Recorder(AgentPart):
    """Records what it gets."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    def observe(self, event: dict[str, Any]) -> None:
        """See AgentPart."""
        self.got.append(event["event"])

    def finish(self) -> None:
        """See AgentPart."""
        self.got.append("finish")


class Broken(AgentPart):
    """Has a defect."""

    def observe(self, event: dict[str, Any]) -> None:
        """See AgentPart."""
        raise KeyError(event["event"])


def test_defect_of_a_mechanism_does_not_change_how_the_job_has_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The others get the last events, and the agent its exit code."""
    recorder = Recorder()
    tail = SimpleNamespace(read=lambda: [{"event": "agent-end", "t": 0.0}])
    agent = object.__new__(_Agent)
    vars(agent).update(event_tail=tail, controller=SimpleNamespace(parts=[Broken(), recorder]))
    agent._finish_parts()
    assert recorder.got == ["agent-end", "finish"]
    assert "a part of the agent failed at its end" in caplog.text
