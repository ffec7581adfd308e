"""The status of a job, from events to the screen."""

from __future__ import annotations

import itertools
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from elastic_resume import constants
from elastic_resume.agent import status
from elastic_resume.agent.status import (
    MAX_READ_BYTES,
    EventFilter,
    EventTail,
    PeerEventLog,
    ReceivedStatus,
    StatusReporter,
    load_past_incidents,
)
from elastic_resume.errors import RendezvousLostError, UsageError
from elastic_resume.events import Event, EventLog, parse_line
from elastic_resume.policy.incidents import MAX_GENERATIONS, RECOVERY_BUCKETS_S, IncidentTracker
from elastic_resume.rendezvous.core.events import DeliverPeerStatus
from elastic_resume.rendezvous.core.quorum import Incarnation, View
from elastic_resume.rendezvous.core.status import EventLines, NodeStatus, StatusUpdate
from elastic_resume.rendezvous.net.status import RendezvousStatus
from elastic_resume.report import status as status_command
from elastic_resume.report.status import MAX_NODES, fit_screen, format_screen

A, B, C = (Incarnation(name, "1", f"{name}:1", None) for name in "abc")


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
    """Peers have seen steps that the resume no longer finds."""
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
    """Events come from other nodes."""
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
    """Every node sends its events again to a new leader."""
    tracker = IncidentTracker()
    events = [
        ROUND_1,
        *(event for number in range(1, 2 * MAX_GENERATIONS) for event in kill(number, 100.0 * number)),
    ]
    for event in [*events, *events]:
        tracker.record(event)
    assert tracker.totals().incidents == {"signal": 2 * MAX_GENERATIONS - 1}


def test_tracker_ignores_generations_beyond_limit() -> None:
    """One broken member must not push real incidents out."""
    tracker = IncidentTracker()
    for event in [ROUND_1, *kill(1, 100.0)]:
        tracker.record(event, 2)
    for number in range(9 * 10**15, 9 * 10**15 + 2 * MAX_GENERATIONS):
        for event in kill(number, 100.0):
            tracker.record(event, 10)
    assert [incident.generation for incident in tracker.incidents()] == [1]


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


def test_load_past_incidents_learns_the_members_from_peers(tmp_path: Path) -> None:
    """Node b was no rank 0: only what a sent names the nodes that were lost. Made-up numbers are ignored."""

    def start(node: str, generation: int, nodes: int, pid: int) -> Event:
        return {"event": "round", "node": node, "t": 100.0 * generation, "pid": pid,
                "generation": generation, "num_nodes": nodes}  # fmt: skip

    def resume(generation: int, *nodes: str) -> Event:
        t = 100.0 * generation + 1
        return {"event": "resume", "node": "a", "t": t, "generation": generation, "nodes": nodes}

    own, peers = tmp_path / constants.EVENTS_FILE, tmp_path / constants.PEER_EVENTS_FILE
    restarted: Event = {"event": "agent-start", "node": "b", "t": 250.0, "pid": 2}
    own.write_bytes(lines(start("b", 1, 3, 1), start("b", 2, 2, 1), restarted, start("b", 3, 2, 2)))
    after = lines({**restarted, "node": "a"}, start("a", 3, 2, 2), resume(3, "a", "b"))
    before = [start("a", 1, 3, 1), resume(1, "c", "a", "b"), start("a", 2, 2, 1), resume(2, "a", "b")]
    peers.write_bytes(lines(*before, resume(99, "x")) + after)
    tracker = load_past_incidents(own, own.stat().st_size, peers)
    assert tracker.totals().incidents == {"node-lost": 1, "job": 1}
    assert [incident.node for incident in tracker.incidents()] == ["c", ""]


@pytest.mark.parametrize(("end", "kinds"), [("done", {}), ("signalled", {}), ("failed", {"unknown": 1})])
def test_tracker_sees_no_incident_in_finished_job(end: str, kinds: dict[str, int]) -> None:
    """A job that was done or stopped and starts again had no failure."""
    tracker = IncidentTracker()
    over = {**kill(1, 50.0)[1], "message": "generation 1 is over: the workers of b stopped"}
    ended: Event = {"event": "agent-end", "node": "b", "t": 60.0, "outcome": end}
    for event in [ROUND_1, over, {**ended, "outcome": []}, ended, {**ROUND_1, "t": 70.0, "generation": 2}]:
        tracker.record(event)
    assert tracker.totals().incidents == kinds


# ---- lines on their way --------------------------------------------------------------------------------


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
        assert tail.read() == [(line("one"), json.loads(line("one")))]
        file.write(line("two")[9:] + "\nno event\n")
        file.flush()
        assert [event["event"] for _, event in tail.read()] == ["two"]
        file.write("x" * 99 + "\n")
        many = line("many")
        file.write("\n".join([many] * (MAX_READ_BYTES // (len(many) + 1))) + "\n" + line("last") + "\n")
    found = [event["event"] for _, event in tail.read()]
    assert set(found) == {"many", "last"}
    assert found[-1] == "last"
    assert EventTail(tmp_path / "nowhere").read() == []


def test_event_tail_returns_own_lines_when_disk_fails(tmp_path: Path) -> None:
    """A failing disk may lose the line that reports it."""
    path = tmp_path / "node" / "events.jsonl"
    tail = EventTail(path)
    log = EventLog(path, on_line=tail.add_own_line, node="a")
    written = [log.emit("commit-failed", error="Input/output error")]  # there is no such directory
    assert [event for _, event in tail.read()] == written
    path.parent.mkdir()
    other = {**log.emit("commit", step=7), "pid": 1}
    with open(path, "a") as file:
        file.write(json.dumps(other) + "\n")
    assert [event.get("step") for _, event in tail.read()] == [7, 7]
    assert tail.read() == []


def test_event_filter_forwards_first_step_and_one_a_minute() -> None:
    """All nodes finish the same steps."""
    event_filter = EventFilter()
    steps = [(g, t) for g in (1, 2) for t in (0, 30, 61, 90, 122)]
    forwarded = [
        (g, t)
        for g, t in steps
        if event_filter.should_forward({"event": "step", "generation": g, "t": 1000 * g + t})
    ]
    assert forwarded == [(g, t) for g in (1, 2) for t in (0, 61, 122)]
    assert event_filter.should_forward({"event": "step", "generation": 2, "t": 5})  # its clock was set back
    assert event_filter.should_forward({"event": "verdict", "t": 0})
    assert not event_filter.should_forward({"event": "fork-server-ready", "t": 0})


def test_peer_event_log_keeps_newest_lines_within_limit(tmp_path: Path) -> None:
    """The older half is dropped, at the end of a line."""
    path = tmp_path / constants.PEER_EVENTS_FILE
    peers = PeerEventLog(path, max_bytes=2000)
    for number in range(100):
        peers.append([json.dumps({"event": "commit", "t": 1.0, "step": number})])
    events = [parse_line(line) for line in path.read_text().splitlines()]
    steps = [event["step"] for event in events if event]
    assert path.stat().st_size <= 2000
    assert steps == list(range(100 - len(events), 100))
    assert len(steps) > 8
    assert peers.lost_lines == 0


def test_peer_event_log_counts_lines_that_disk_refuses(tmp_path: Path) -> None:
    """Neither a missing directory nor a full disk raises. A line is written whole or not at all."""
    directory = tmp_path / "missing"
    peers = PeerEventLog(directory / constants.PEER_EVENTS_FILE)
    peers.append(["x", "y"])
    assert peers.lost_lines == 2
    directory.mkdir()
    peers.append(["z"])
    assert (directory / constants.PEER_EVENTS_FILE).read_text() == "z\n"
    full = PeerEventLog(Path("/dev/full"))
    full.append(["x"])
    assert (peers.lost_lines, full.lost_lines) == (2, 1)


def test_reporter_counts_only_gaps_as_lost_lines(tmp_path: Path) -> None:
    """Lines that an earlier leader got are not lost."""
    sampler: Any = None  # only the thread uses it, which is not started
    reporter = StatusReporter(tmp_path, "job", sampler, EventTail(tmp_path / "none"))
    for first, count in ((5000, 3), (5001, 3), (5010, 1)):
        update = StatusUpdate(None, first, EventLines(("x",) * count))
        reporter.on_peer_status(DeliverPeerStatus(B, update, 1))
    assert json.loads(reporter.render_status(RendezvousStatus(A, True, A)))["lost_event_lines"] == 6


# ---- the document and its screen -----------------------------------------------------------------------


def make_document(
    count: int = 2, *, view: RendezvousStatus | None = None, trouble: int | None = None
) -> dict[str, Any]:
    """A document of a leader and as many nodes."""
    members = tuple(Incarnation(f"n{i}", "1", f"n{i}:1") for i in range(count))
    statuses = {
        member.node: ReceivedStatus(
            NodeStatus(
                generation=3,
                step=100 + (i == 1),
                steps_per_s=2.5,
                world_size=count,
                snapshot_step=99,
                problem="disk full" if i == trouble else "",
            ),
            0.0,
        )
        for i, member in enumerate(members)
    }
    tracker = IncidentTracker()
    for event in [ROUND_1, *kill(1, 100.0, lost=3), *kill(2, 200.0)]:
        tracker.record(event)
    view = view or RendezvousStatus(members[0], True, members[0], View(3, members, members[0]), 3, ("n9",))
    made = status.build_status_document(view, statuses, tracker, run_id="job", lost_event_lines=0)
    return dict(json.loads(json.dumps(made)))


def test_screen_shows_view_steps_and_incidents() -> None:
    """The screen has nodes, steps, snapshots, and incidents with cause and cost."""
    text = "\n".join(format_screen(make_document()))
    for words in (
        "job job: generation 3, 2 nodes, 2 ranks, led by n0",
        "step 101, 2.5 steps/s",
        "spares: n9",
        "2 incidents (2 signal), 3 steps recomputed",
        "rank 1 on node b was killed by SIGKILL",
        "99, ",
    ):
        assert words in text


def test_screen_without_world_names_what_is_missing() -> None:
    """It names the missing nodes too."""
    view = RendezvousStatus(A, True, A, None, 3, (), ("c",), "2 of 3 nodes are here")
    text = "\n".join(format_screen(make_document(view=view)))
    assert "no world, led by a" in text
    assert "waiting: 2 of 3 nodes are here" in text
    assert "missing: c" in text
    alone = RendezvousStatus(B, generation=3, waiting_reason="it calls a:1")
    assert "no leader" in "\n".join(format_screen(make_document(view=alone)))
    assert "over for all" in "\n".join(
        format_screen(make_document(view=RendezvousStatus(B, end_reason="over for all")))
    )


def test_screen_of_many_nodes_shows_those_with_problems() -> None:
    """The screen stays one screen."""
    lines = format_screen(make_document(1000, trouble=777))
    assert len(lines) < MAX_NODES + 20
    assert any("n777" in line and "disk full" in line for line in lines)
    assert f"and {1000 - MAX_NODES} more" in lines


@pytest.mark.parametrize("nodes", [2, 24, 1000])
@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (40, 8), (200, 60), (1, 1)])
def test_screen_fits_terminal(nodes: int, columns: int, rows: int) -> None:
    """A larger screen would scroll; nodes with problems stay visible."""
    document = make_document(nodes, trouble=1)
    document["spares"] = [f"spare-{number}" for number in range(1000)]
    lines = fit_screen(document, columns, rows)
    assert len(lines) <= rows
    assert max(map(len, lines)) <= columns
    assert "job job: generation 3"[:columns] in lines[0]
    assert len("\n".join(format_screen(document))) < 6000
    if rows >= 24:
        assert any(" n1 " in line for line in lines)
        assert any("2 incidents" in line for line in lines)


# ---- finding agents ------------------------------------------------------------------------------------


def write_endpoint_file(node_dir: Path, run_id: str) -> Path:
    """Write an agent endpoint file as an agent does."""
    node_dir.mkdir(parents=True)
    path = node_dir / constants.AGENT_ENDPOINT_FILE
    path.write_text(
        json.dumps(
            {"run_id": run_id, "address": "127.0.0.1:1", "endpoints": ["127.0.0.1:2"], "key": "00" * 32}
        )
    )
    return path


def find(path: Path | None, **more: Any) -> status_command.JobEndpoint:
    """Call `find_job` without flags."""
    return status_command.find_job(path, **{"endpoint": None, "run_id": None, "token_file": None, **more})


def test_find_job_accepts_any_directory_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several jobs the named one is found."""
    for name in [key for key in os.environ if key.startswith(("ELASTIC_", "SLURM", "PET_"))]:
        monkeypatch.delenv(name)
    path = write_endpoint_file(tmp_path / "one" / "n0", "one")
    for place in (tmp_path, tmp_path / "one", tmp_path / "one" / "n0"):
        job = find(place)
        assert (job.run_id, job.addresses) == ("one", ["127.0.0.1:1", "127.0.0.1:2"])
    monkeypatch.setenv(constants.ENV_CKPT_DIR, str(tmp_path))
    assert find(None).run_id == "one"
    write_endpoint_file(tmp_path / "two" / "n0", "two")
    with pytest.raises(UsageError, match=r"2 jobs run here \(one, two\): choose one with --rdzv-id"):
        find(tmp_path)
    assert find(tmp_path, run_id="two").run_id == "two"
    for damage in ("", "[]", "{}", "[" * 9999, '{"run_id": 1, "address": 2, "endpoints": [], "key": ""}'):
        path.write_text(damage)
        assert find(tmp_path).run_id == "two"
    with pytest.raises(UsageError, match=r"--rdzv-endpoint and --rdzv-id"):
        find(tmp_path / "one")
    with pytest.raises(UsageError, match="add --rdzv-id"):
        find(None, endpoint="127.0.0.1:1")
    with pytest.raises(RendezvousLostError, match=r"127\.0\.0\.1:1: .*refused"):
        find(None, endpoint="127.0.0.1:1", run_id="x").query_leader()


@pytest.mark.parametrize(
    ("environ", "own", "others"),
    [
        (
            {"SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "1"},
            "slurm-9_1-train",
            ["slurm-9_10-train", "slurm-9_2-train", "slurm-9-train", "slurm-90-train"],
        ),
        ({"SLURM_JOB_ID": "9"}, "slurm-9-train", ["slurm-90-train", "slurm-9_1-train"]),
        ({"SLURM_JOB_ID": "9"}, "slurm-9", ["slurm-90"]),
        (
            {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "ELASTIC_RESUME_JOB": "train"},
            "train",
            ["train-2", "trainer"],
        ),
    ],
)
def test_find_job_does_not_match_longer_job_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], own: str, others: list[str]
) -> None:
    """Element 1 of an array is not element 10."""
    for name in [key for key in os.environ if key.startswith(("ELASTIC_", "SLURM", "PET_", "KUBERNETES_"))]:
        monkeypatch.delenv(name)
    for name, value in {constants.ENV_CKPT_DIR: str(tmp_path), **environ}.items():
        monkeypatch.setenv(name, value)
    for run_id in others:
        write_endpoint_file(tmp_path / run_id / "n0", run_id)
    write_endpoint_file(tmp_path / own / "n0", own)
    assert find(None).run_id == own


@pytest.mark.parametrize(
    "malformed",
    [
        {"leader": 5},
        {"leader": {}},
        {"address": None},
        {"world": []},
        {"world": {"addresses": [1]}},
        {"is_leader": None},
        {"version": []},
    ],
)
def test_query_leader_rejects_malformed_document(
    monkeypatch: pytest.MonkeyPatch, malformed: dict[str, Any]
) -> None:
    """The agent holds the key, but its answer is checked."""
    document = make_document()
    answers = [json.dumps({**document, **malformed}).encode(), json.dumps(document).encode()]
    monkeypatch.setattr(status_command, "query_agent", lambda *_, **__: answers.pop(0))
    with pytest.raises(RendezvousLostError, match=r"not a status document|has version"):
        status_command.JobEndpoint("job", b"", ["a:1"]).query_leader()
    assert status_command.JobEndpoint("job", b"", ["a:1"]).query_leader()["is_leader"]
