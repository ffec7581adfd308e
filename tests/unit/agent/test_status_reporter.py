"""What an agent knows of its node and of the job's incidents."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from elastic_resume.agent.status_reporter import (
    MAX_LISTED_MEMBERS,
    MAX_READ_BYTES,
    EventTail,
    StatusReporter,
)
from elastic_resume.events import Event, EventLog
from elastic_resume.mechanisms.mechanism import AgentPart, StatusMember, encode_body
from elastic_resume.rendezvous.client import RendezvousClient
from elastic_resume.rendezvous.core.world import Incarnation, View
from elastic_resume.rendezvous.net.status_server import RendezvousStatus
from elastic_resume.report.agent_status import NodeStatus, parse_reply


@dataclass(frozen=True)
class Count:
    """A member of the status."""

    value: int


def test_event_tail_returns_each_complete_line_once(tmp_path: Path) -> None:
    """A partial line waits; beyond the limit the oldest lines are skipped."""
    path = tmp_path / "events.jsonl"

    def line(event: str, pid: int = 1) -> str:
        return json.dumps({"t": 1.0, "event": event, "pid": pid})

    path.write_text(line("before") + "\n")
    tail = EventTail(path)
    assert tail.read() == []
    with open(path, "a") as file:
        file.write(line("one") + "\n" + line("two")[:9])
        file.flush()
        assert tail.read() == [json.loads(line("one"))]
        file.write(line("two")[9:] + "\nno event\n")
        file.flush()
        assert [event["event"] for event in tail.read()] == ["two"]
        file.write("x" * 99 + "\n")
        many = line("many")
        file.write("\n".join([many] * (MAX_READ_BYTES // (len(many) + 1))) + "\n" + line("last") + "\n")
    found = [event["event"] for event in tail.read()]
    assert set(found) == {"many", "last"}
    assert found[-1] == "last"
    assert EventTail(tmp_path / "nowhere").read() == []


def test_event_tail_returns_own_lines_when_disk_fails(tmp_path: Path) -> None:
    """A failing disk may lose the line that reports it."""
    path = tmp_path / "node" / "events.jsonl"
    tail = EventTail(path)
    log = EventLog(path, on_line=tail.add_own_line, node="a")
    written = [log.emit("commit-failed", error="Input/output error")]  # there is no such directory
    assert tail.read() == written
    path.parent.mkdir()
    other = {**log.emit("commit", step=7), "pid": 1}
    with open(path, "a") as file:
        file.write(json.dumps(other) + "\n")
    assert [event.get("step") for event in tail.read()] == [7, 7]
    assert tail.read() == []


def test_defect_of_a_mechanism_costs_the_others_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They get all events, and their members are in the status; each error is logged once."""

    class Defective(AgentPart):
        def observe(self, event: Event) -> None:
            raise KeyError(event["event"])

        def update(self, client: RendezvousClient) -> object:
            raise ValueError(client)

    class Counting(AgentPart):
        count = 0

        def observe(self, event: Event) -> None:
            self.count += bool(event)

        def update(self, client: RendezvousClient) -> object:
            del client
            return Count(self.count)

    tail = EventTail(tmp_path / "events.jsonl")
    sampler, client = Mock(), Mock()
    sampler.sample.return_value = NodeStatus()
    counted = StatusMember("counted", Count, str)
    reporter = StatusReporter(tmp_path, sampler, {Defective(): None, Counting(): counted}, tail)
    reporter._client = client
    log = EventLog(tmp_path / "events.jsonl", on_line=tail.add_own_line, node="a")
    for kind in ("one", "two", "two"):
        log.emit(kind)
    reporter._try_update()
    reporter._try_update()
    assert reporter._sample is not None
    assert reporter._sample[1].mechanisms == (("counted", encode_body(Count(3))),)
    assert caplog.text.count("status: internal error") == 3


@pytest.mark.parametrize("is_leader", [True, False])
def test_reply_of_follower_names_members_of_small_views_only(tmp_path: Path, is_leader: bool) -> None:
    """Ten thousand followers would else send ten thousand names each. Before the first sample it says so."""
    sampler: Any = None  # only the thread uses it, which is not started
    for count in (MAX_LISTED_MEMBERS, MAX_LISTED_MEMBERS + 1):
        members = tuple(Incarnation(f"n{i}", f"disk-{i}", 1, f"n{i}:1") for i in range(count))
        view = View(3, members, members[0])
        reporter = StatusReporter(tmp_path, sampler, {}, EventTail(tmp_path / "none"))
        own = members[0 if is_leader else 1]
        reply = parse_reply(reporter.render_status(RendezvousStatus(own, is_leader, members[0], view, 3)))
        assert reply.rendezvous.view is not None
        named = is_leader or count == MAX_LISTED_MEMBERS
        assert reply.rendezvous.view.members == (members if named else ())
        assert (reply.rendezvous.leader, reply.node_status) == (members[0], None)
