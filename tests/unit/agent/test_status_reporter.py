"""What an agent knows of its node and of the job's incidents."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from elastic_resume import constants
from elastic_resume.agent.status_reporter import (
    MAX_LISTED_MEMBERS,
    MAX_READ_BYTES,
    EventTail,
    StatusReporter,
    load_past_incidents,
)
from elastic_resume.events import Event, EventLog
from elastic_resume.rendezvous.core.world import Incarnation, View
from elastic_resume.rendezvous.net.status_server import RendezvousStatus
from elastic_resume.report.agent_status import parse_reply
from elastic_resume.report.incident_tracker import MAX_GENERATIONS, RECOVERY_BUCKETS_S, IncidentTracker


def kill(generation: int, t: float, *, lost: int = 0, after_s: float = 0.4) -> list[Event]:
    """Build the events of a node whose worker is killed in a generation and that starts the next."""
    cause = {"kind": "signal", "node": "b", "rank": 1, "text": "was killed by SIGKILL", "step": 7}
    events: list[Event] = [
        {"event": "worker-exit", "t": t, "exit_code": -9, "signal": "SIGKILL", "stopped": False},
        {
            "event": "rendezvous",
            "t": t + 0.1,
            "what": "restart",
            "message": f"generation {generation} is over: the workers of b stopped",
        },
        {
            "event": "verdict",
            "t": t + 0.2,
            "generation": generation,
            "root_causes": [cause],
            "secondary_failures": [],
        },
        {"event": "round", "t": t + 0.2, "generation": generation + 1},
        {"event": "resume", "t": t + 0.3, "generation": generation + 1, "recomputed_steps": lost},
        {"event": "step", "t": t + after_s, "generation": generation + 1, "step": 8},
        {"event": "step", "t": t + after_s + 9, "generation": generation + 1, "step": 9},
    ]
    return [{"node": "b", **event} for event in events]


ROUND_1: Event = {"event": "round", "node": "b", "t": 1.0, "generation": 1}


def test_tracker_reports_cause_and_cost_of_incident() -> None:
    """The recovery lasts from the first sign to the first step of the next generation."""
    tracker = IncidentTracker()
    for event in [ROUND_1, *kill(1, 100.0, lost=3)]:
        tracker.record(event)
    (incident,) = tracker.incidents()
    assert (incident.generation, incident.kind, incident.t, incident.recomputed_steps) == (
        1,
        "signal",
        100.0,
        3,
    )
    assert incident.cause == "rank 1 on node b was killed by SIGKILL"
    assert incident.recovery_s == pytest.approx(0.4)


@pytest.mark.parametrize("by", [-3600.0, 3600.0])
def test_tracker_ignores_wall_clock_jumps(by: float) -> None:
    """Durations come from CLOCK_BOOTTIME; another boot is not compared."""
    tracker = IncidentTracker()
    for event in [ROUND_1, *kill(1, 100.0)]:
        jumped = by if event["event"] == "step" and event["generation"] == 2 else 0.0
        tracker.record({**event, "t": event["t"] + jumped, "b": event["t"] + 7000.0, "boot": "one"})
    other = {"event": "step", "node": "c", "t": 105.0, "generation": 2, "step": 1, "b": 3.0, "boot": "two"}
    tracker.record(other)
    (incident,) = tracker.incidents()
    assert incident.recovery_s == pytest.approx(0.4)


def test_tracker_counts_steps_that_resume_did_not_find() -> None:
    """The events have steps that the resume no longer finds."""
    tracker = IncidentTracker()
    for event in [ROUND_1, *kill(1, 100.0), *kill(2, 200.0)]:
        tracker.record(
            {**event, "step": 4} if event["event"] == "resume" and event["generation"] == 3 else event
        )
    assert [incident.recomputed_steps for incident in tracker.incidents()] == [0, 5]


def test_tracker_takes_leader_reason_without_verdict() -> None:
    """A view that grew is no incident."""
    tracker = IncidentTracker()
    tracker.record(ROUND_1)
    for number, reason in ((1, "newcomers are here"), (2, "c is silent")):
        text = f"generation {number} is over: {reason}"
        tracker.record({"event": "rendezvous", "node": "b", "t": 5.0, "what": "restart", "message": text})
        tracker.record({"event": "round", "node": "b", "t": 6.0, "generation": number + 1})
    assert [(incident.generation, incident.kind, incident.cause) for incident in tracker.incidents()] == [
        (2, "unknown", "c is silent")
    ]


def test_tracker_totals_count_forgotten_incidents() -> None:
    """All incidents count; a bounded number is kept."""
    tracker = IncidentTracker()
    tracker.record(ROUND_1)
    for number in range(1, 3 * MAX_GENERATIONS):
        for event in kill(number, 100.0 * number, lost=2, after_s=number % 2 + 0.7):
            tracker.record(event)
    totals = tracker.totals()
    assert totals.incidents == {"signal": 3 * MAX_GENERATIONS - 1}
    assert totals.recomputed_steps == 2 * (3 * MAX_GENERATIONS - 1)
    assert sum(totals.recovery_buckets) == 3 * MAX_GENERATIONS - 1
    assert totals.recovery_buckets[RECOVERY_BUCKETS_S.index(1.0)] == MAX_GENERATIONS * 3 // 2 - 1
    assert len(tracker.incidents()) < MAX_GENERATIONS


def test_tracker_accepts_malformed_and_unordered_events() -> None:
    """A disk may return anything."""
    tracker = IncidentTracker()
    malformed: list[Any] = [
        None,
        -1,
        "x",
        [],
        {},
        1 << 60,
        10**400,
        1e300,
        float("nan"),
        [{"kind": "signal", "rank": "x"}],
        [[]],
    ]
    events = [*kill(1, 100.0), *kill(2, 200.0)]
    for event, value in itertools.product(events, malformed):
        for key in event:
            if key != "event":
                tracker.record({**event, key: value})
    tracker = IncidentTracker()
    random.Random(4).shuffle(events)
    for event in [ROUND_1, *events]:
        tracker.record(event)
    assert tracker.totals().incidents == {"signal": 2}


def test_tracker_ignores_repeated_events() -> None:
    """Logs of several places overlap."""
    tracker = IncidentTracker()
    events = [
        ROUND_1,
        *(event for number in range(1, 2 * MAX_GENERATIONS) for event in kill(number, 100.0 * number)),
    ]
    for event in [*events, *events]:
        tracker.record(event)
    assert tracker.totals().incidents == {"signal": 2 * MAX_GENERATIONS - 1}


def test_tracker_ignores_late_events_of_earlier_generation() -> None:
    """Lines may be repeated from the middle of a generation."""
    tracker = IncidentTracker()
    for event in [ROUND_1, *kill(1, 100.0), kill(1, 100.0)[0], *kill(2, 200.0)]:
        tracker.record(event)
    assert [incident.t for incident in tracker.incidents()] == [100.0, 200.0]


def test_tracker_infers_incident_from_missing_agent() -> None:
    """Only a leader writes the reason; an agent that disappears may have been killed."""

    def ended(*rounds: tuple[int, int | None], why: str = "") -> list[int]:
        """Return the generations with an incident after these rounds: generation and agent's pid."""
        tracker = IncidentTracker()
        for t, (number, pid) in enumerate(rounds):
            tracker.record({**ROUND_1, "t": 10.0 * t, "generation": number, "pid": pid})
        tracker.record({**kill(1, 5.0)[1], "message": f"generation 1 is over: {why}"} if why else ROUND_1)
        return [incident.generation for incident in tracker.incidents()]

    assert ended((1, 7), (2, 7), (3, 8)) == [2]
    assert ended((1, 7), (2, 8), (3, 8)) == [1]
    assert ended((1, None), (2, None), (3, None)) == [1, 2], "unknown processes"
    assert ended((1, 7), (2, 7), (1, 7), (2, 7), (3, 8)) == [2], "repeated lines"
    assert ended((1, 7), (2, 7), why="the leader has lost its quorum") == [1]


# ---- what an agent begins with -------------------------------------------------------------------------


def lines(*events: Event) -> bytes:
    """As a log has them."""
    return b"".join(json.dumps(event, separators=(",", ":")).encode() + b"\n" for event in events)


def test_load_past_incidents_reads_log_up_to_own_start(tmp_path: Path) -> None:
    """Later events come through the event tail. A torn line is skipped."""
    path = tmp_path / constants.EVENTS_FILE
    assert load_past_incidents(path, 0).incidents() == []
    step: Event = {"event": "step", "node": "b", "t": 150.0, "generation": 2, "step": 9}
    past = lines(ROUND_1, *kill(1, 100.0, lost=2), *[step] * 5000) + b"torn\0\xff\n"
    rest = lines(*kill(2, 200.0), *kill(3, 300.0))
    path.write_bytes(past + rest)
    assert load_past_incidents(path, len(past)).totals().incidents == {"signal": 1}
    assert load_past_incidents(path, len(past + rest)).totals().recomputed_steps == 2
    newest = load_past_incidents(path, len(past + rest), max_bytes=len(rest) + 9)
    assert [incident.generation for incident in newest.incidents()] == [3]


@pytest.mark.parametrize(("end", "kinds"), [("done", {}), ("signalled", {}), ("failed", {"unknown": 1})])
def test_tracker_sees_no_incident_in_finished_job(end: str, kinds: dict[str, int]) -> None:
    """A job that was done or stopped and starts again had no failure."""
    tracker = IncidentTracker()
    over = {**kill(1, 50.0)[1], "message": "generation 1 is over: the workers of b stopped"}
    ended: Event = {"event": "agent-end", "node": "b", "t": 60.0, "outcome": end}
    for event in [ROUND_1, over, {**ended, "outcome": []}, ended, {**ROUND_1, "t": 70.0, "generation": 2}]:
        tracker.record(event)
    assert tracker.totals().incidents == kinds


# ---- the event tail and the reply ----------------------------------------------------------------------


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


@pytest.mark.parametrize("is_leader", [True, False])
def test_reply_of_follower_names_members_of_small_views_only(tmp_path: Path, is_leader: bool) -> None:
    """Ten thousand followers would else send ten thousand names each. Before the first sample it says so."""
    sampler: Any = None  # only the thread uses it, which is not started
    for count in (MAX_LISTED_MEMBERS, MAX_LISTED_MEMBERS + 1):
        members = tuple(Incarnation(f"n{i}", f"disk-{i}", 1, f"n{i}:1") for i in range(count))
        view = View(3, members, members[0])
        reporter = StatusReporter(tmp_path, sampler, EventTail(tmp_path / "none"))
        own = members[0 if is_leader else 1]
        reply = parse_reply(reporter.render_status(RendezvousStatus(own, is_leader, members[0], view, 3)))
        assert reply.rendezvous.view is not None
        named = is_leader or count == MAX_LISTED_MEMBERS
        assert reply.rendezvous.view.members == (members if named else ())
        assert (reply.rendezvous.leader, reply.node_status) == (members[0], None)
