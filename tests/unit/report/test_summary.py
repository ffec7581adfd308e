"""What a report tells besides generations: its verdict, troubles, faults, copies, and from whose logs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import pytest

from elastic_resume import constants, events
from elastic_resume.cli import main
from elastic_resume.events import Event
from elastic_resume.report import html, summary
from elastic_resume.report.checkpoints import CheckpointEntry
from elastic_resume.report.loader import load_run
from elastic_resume.report.summary import RunReport
from tests.support import report_runs
from tests.support.paths import ROOT
from tests.support.report_runs import (
    Job,
    exception,
    job_killed,
    job_stopped,
    killed,
    node_killed,
    worker_killed,
)


def failed() -> Job:
    """Agents give up."""
    job = exception()
    job.fail(116, 2, "ValueError", "loss is nan")
    job.exit(116.1, 2, code=1)
    for node in job.nodes:
        told = "node n2 gave up: the same exception at the same step three times."
        job.add(117, "agent-end", node, outcome="failed", exit_code=1, message=told)
    return job


def unfinished() -> Job:
    """Nothing follows a death."""
    job = Job().begun()
    job.exit(110.2, 1, signal="SIGKILL")
    return job


def nothing() -> Job:
    """No event."""
    return Job()


@pytest.mark.parametrize(
    ("make", "begins", "price"),
    [
        (
            killed,
            "Finished at step 20 after 37 s.",
            "1 failure, 6.0 s downtime, 2 steps recomputed; goodput 57 %.",
        ),
        (failed, "FAILED at step 11 after 27 s: node n2 gave up: the same exception", "2 failures, "),
        (job_stopped, "Running, or killed as a whole, at step 11 after", "No failure; "),
        (
            job_killed,
            "Running, or killed as a whole, at step 9 after",
            "1 failure, 60 min 02 s downtime, 3 steps recomputed",
        ),
        (
            unfinished,
            "Down at step 10 after 20 s, not recovered: rank 1 on node n1 was killed by SIGKILL.",
            "1 failure, ",
        ),
        (nothing, "No training yet.", ""),
    ],
)
def test_the_verdict(make: Callable[[], Job], begins: str, price: str) -> None:
    """How it ended or stands, at which step, and what it cost."""
    text = summary.build_run_report(make().events).verdict.text
    assert text.startswith(begins)
    assert price in text


def test_what_to_look_at() -> None:
    """The worst first; a silent run is asked about where the present is known."""
    look = summary.build_run_report(failed().events).verdict.hints
    cause = "rank 2 on node n2 ended with exit code 1: ValueError: loss is nan"
    assert look[0] == f"generation 2 ended: {cause}"
    told = summary.build_run_report(worker_killed().events, now=1115.5)
    assert told.verdict.hints == ("no event for 16 min 40 s: check whether the job still runs",)
    assert summary.build_run_report(killed().events).verdict.hints == ()


def test_a_node_that_fails_often_is_named() -> None:
    """Three times of three."""
    job = Job().begun()
    for t in (110, 120, 130):
        job.exit(t + 0.5, 2, signal="SIGBUS")
        job.begin(t + 5, 10, "n0", "n1", "n2")
    assert (
        "node n2 is the root cause of 3 of 3 failures" in summary.build_run_report(job.events).verdict.hints
    )


# ---- troubles and faults -------------------------------------------------------------------------------


def texts(told: RunReport, kind: str) -> list[str]:
    """What is told of one kind of trouble."""
    return [one.text for one in told.alerts if one.kind == kind]


def test_a_disk_that_refuses_is_one_trouble_with_a_beginning_and_an_end() -> None:
    """However often it says so, until it takes a checkpoint again; and what lasts is said to last."""
    job = Job().begun()
    for t in (111, 112, 113):
        job.add(t, "commit-failed", "n1", generation=1, step=t - 100, error=f"step {t}: [Errno 28] full")
    job.add(120, "commit", "n1", generation=1, step=20, bytes=7, seconds=0.1, path="/x/g000001-s0000000020")
    job.add(130, "commit-failed", "n1", generation=1, step=30, error="[Errno 5]")
    first, second = (
        one for one in summary.build_run_report(job.events).alerts if one.kind == "commit-failed"
    )
    assert (first.t, first.last_t, first.count, first.is_resolved) == (111, 120, 3, True)
    assert (second.t, second.count, second.is_resolved) == (130, 1, False)


def test_a_slow_disk_is_told_by_its_own_usual_speed() -> None:
    """Five times as long, and a second at least."""
    job = Job().begun()
    for index, seconds in enumerate((0.3, 0.3, 0.4, 0.3, 9.0, 0.3, 1.2)):
        job.add(111 + 10 * index, "commit", "n0", generation=1, step=index, bytes=7, seconds=seconds)
    assert texts(summary.build_run_report(job.events), "slow-disk") == [
        "a commit took 9.0 s, typically 0.30 s"
    ]


def test_every_kind_of_trouble_has_its_sentence() -> None:
    """All that an eventful run holds, each on its node; a hang that another node made is only noted."""
    told = summary.build_run_report(report_runs.make_eventful_run().events)
    said = {one.kind: (one.severity, one.node) for one in told.alerts}
    bad = {"commit-failed": "n2", "quarantine": "n3", "hang": "n2", "replicas-differ": "n0"}
    bad |= {"hang-detector-failed": "n0", "unauthenticated": "n3", "slow-disk": "n2"}
    notes = {"drain": "n1", "preemption-notice": "n1"}
    assert said == {kind: ("bad", node) for kind, node in bad.items()} | {
        kind: ("note", node) for kind, node in notes.items()
    }
    job = Job().begun()
    job.add(150, "hang", "n0", generation=1, step=10, seconds=40.0, suspects=[], elsewhere=True)
    assert summary.build_run_report(job.events).alerts[0].severity == "note"


def test_a_fault_stands_beside_what_followed_and_explains_nothing() -> None:
    """The cause of an end is what nodes saw, whatever somebody says to have broken."""
    job = report_runs.make_eventful_run()
    told = summary.build_run_report(job.events)
    assert [(one.number, one.kind, one.node, one.generation) for one in told.faults] == [
        (1, "kill-worker", "n1", 1),
        (2, "disk-full", "n2", 2),
        (3, "kill-node", "n3", 3),
    ]
    without = [one for one in job.events if one["event"] != "fault"]
    assert summary.build_run_report(without).history == told.history


# ---- copies --------------------------------------------------------------------------------------------


def test_the_ledger_knows_what_became_of_each_copy() -> None:
    """Written, pruned, set aside, begun with, or gone though nobody said so."""
    job = Job()
    job.agents(90, "n0", "n1")
    job.begin(100, 0, "n0", "n1", kind="cold")
    for step in (10, 20, 30, 40):
        path = f"/d/g000001-s{step:010}"
        job.add(100 + step, "commit", "n0", generation=1, step=step, bytes=5, seconds=0.1, path=path)
    job.add(131, "prune", "n0", path="/d/g000001-s0000000010")
    job.add(132, "quarantine", "n0", path="/d/quarantine/g000001-s0000000020.1", reason="torn")
    source = {"source_node": "n0", "source_generation": 1}
    job.begin(150, 30, "n0", "n1", source_tier="disk", **source)
    job.begin(160, 35, "n0", "n1", source_tier="memory", **source)
    here = CheckpointEntry(Path("/d"), "r", "n0", "valid", generation=1, step=30)
    found = {
        (one.step, one.tier): one
        for one in summary.build_run_report(job.events, checkpoint_entries=[here]).saved_states
    }
    states = {key: (one.state, one.verified, one.loaded_by) for key, one in found.items()}
    assert states == {
        (10, "disk"): ("pruned", False, ()),
        (20, "disk"): ("quarantined", False, ()),
        (30, "disk"): ("valid", True, (2,)),
        (35, "memory"): ("used", True, (3,)),
        (40, "disk"): ("lost", False, ()),
    }
    assert {one.state for one in summary.build_run_report(job.events).saved_states if one.step == 40} == {
        "committed"
    }


# ---- lanes ---------------------------------------------------------------------------------------------


def test_a_dead_node_is_gone_until_its_agent_is_back() -> None:
    """Then it waits for the world that takes it."""
    job = node_killed()
    job.agents(130, "n2")
    job.stop(139, 0, 1)
    job.begin(142, 20, "n0", "n1", "n2", lacking=["n2"])
    lane = {one.node: one for one in html.build_lanes(summary.build_run_report(job.events))}["n2"]
    spans = [(span.activity, span.start_t, span.end_t) for span in lane.spans]
    assert spans[-4:-1] == [("offline", 110, 130), ("idle", 130, 140), ("preparing", 140, 142)]
    assert [mark.text for mark in lane.marks] == ["generation 1: node n2 was lost"]


def test_a_lane_never_has_more_than_can_be_seen() -> None:
    """Spans become columns that are split by what fills them; no mark is lost, they are counted."""
    spans = [html.Span("training" if i % 3 else "offline", i, i + 1, "") for i in range(9000)]
    (column,) = html.merge_into_columns(spans, 0, 9000, 100)
    assert (column.start_t, column.end_t) == (0, 9000)
    assert column.shares == (("training", 0.667), ("offline", 0.333))
    first, second = html.merge_into_columns(
        spans[:5250], 0, 9000, 6
    )  # of the last that is not empty, half is
    assert (first.end_t, second.end_t) == (4500, 6000)
    assert sum(share for _, share in second.shares) == pytest.approx(0.5)
    marks = [html.TimelineMark("incident", t, "died") for t in range(9000)]
    few = html.cluster_marks(marks, 0, 9000, 60)
    assert len(few) == 60
    assert sum(int(one.text.split()[0]) for one in few) == 9000


# ---- logs of several places ----------------------------------------------------------------------------


def write(path: Path, found: list[Event], torn: bytes = b"") -> None:
    """A log of these events."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(one, separators=(",", ":")).encode() + b"\n" for one in found]
    path.write_bytes(torn.join(lines))


@pytest.fixture
def apart(tmp_path: Path) -> tuple[Path, Path, list[Event]]:
    """A run whose nodes' directories lie in two places; n2's disk is gone, and n0 keeps what it told."""
    job = node_killed()
    by_node = {node: [one for one in job.events if one["node"] == node] for node in ("n0", "n1", "n2")}
    here, there = tmp_path / "a" / "run", tmp_path / "b" / "copies" / "n1"
    write(here / "n0" / constants.EVENTS_FILE, by_node["n0"])
    write(here / "n0" / constants.PEER_EVENTS_FILE, [*by_node["n2"], *by_node["n1"][:3], *by_node["n2"][:2]])
    write(there / constants.EVENTS_FILE, by_node["n1"])
    fault = {"t": 110.0, "event": "fault", "node": "n2", "pid": 1, "number": 1, "what": "kill-node"}
    write(here / constants.FAULTS_FILE, [fault])
    return here, there, [*job.events, fault]


def test_logs_of_several_places_are_one_run(apart: tuple[Path, Path, list[Event]]) -> None:
    """What the leader kept of a node that is gone, and of one that is there, is there once."""
    here, there, every = apart
    found = load_run([here, there])
    assert sorted(map(repr, found.events)) == sorted(map(repr, every))
    assert summary.build_run_report(found.events).history == summary.build_run_report(every).history
    assert [one.kind for one in summary.build_run_report(found.events).faults] == ["kill-node"]
    assert len(load_run([here / "n0", there, here]).events) == len(every)


def test_torn_and_unreadable_logs_cost_themselves_only(apart: tuple[Path, Path, list[Event]]) -> None:
    """A line that a crash tore, one of no time at all, and a log that is a directory."""
    here, there, every = apart
    log = there / constants.EVENTS_FILE
    log.write_bytes(log.read_bytes().replace(b"\n", b'\n{"t":1.0,"event":"st', 1) + b'{"t": 1')
    (here / "n9" / constants.EVENTS_FILE).mkdir(parents=True)
    assert len(load_run([here, there]).events) == len(every)
    odd = [{"t": 10**400, "event": "step", "node": "n0", "generation": 1, "step": 5}]
    write(here / "n8" / constants.EVENTS_FILE, odd)
    assert (
        summary.build_run_report(load_run([here, there]).events).history
        == summary.build_run_report(every).history
    )


def test_what_only_looks_like_a_hang_is_not_read(apart: tuple[Path, Path, list[Event]]) -> None:
    """A link shows the reader's files to whoever gets the page; a pipe would be waited for without end."""
    here, _, _ = apart
    hangs = here / "n0" / "hangs"
    hangs.mkdir()
    (hangs / "a.txt").symlink_to("/proc/self/environ")
    (hangs / "b.txt").symlink_to("nowhere")
    os.mkfifo(hangs / "c.txt")
    (hangs / "d.txt").write_text("SUSPECT rank 2")
    (here / "n1").mkdir()
    (here / "n1" / "hangs").symlink_to(hangs)
    found = load_run([here])
    assert found.stacks == {"n0/d.txt": "SUSPECT rank 2"}
    assert sum("left out: not a regular file" in problem for problem in found.problems) == 7


def test_faults_are_events_of_a_run(apart: tuple[Path, Path, list[Event]]) -> None:
    """`events.read_run` gives them too, in their place."""
    here, _, _ = apart
    assert [one["t"] for one in events.read_run(here) if one["event"] == "fault"] == [110.0]


def test_the_page_is_written_to_a_file(
    apart: tuple[Path, Path, list[Event]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the verdict on the terminal; a place that cannot be written is said."""
    here, there, _ = apart
    hang = here / "n0" / "hangs" / "g1-s10.txt"
    hang.parent.mkdir()
    hang.write_text("SUSPECT rank 2")
    target = tmp_path / "report.html"
    assert main(["report", str(here), str(there), "--html", str(target)]) == 0
    assert capsys.readouterr().out.startswith("Running, or killed as a whole, at step 11")
    told = target.read_text()
    assert told.startswith("<!doctype html>")
    assert "SUSPECT rank 2" in told
    assert main(["report", str(here), "--html", str(tmp_path)]) == 1
    assert "the page cannot be written: Is a directory" in capsys.readouterr().err


def test_the_json_has_its_promised_members(
    apart: tuple[Path, Path, list[Event]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that docs/report.md lists, and no others."""
    here, there, _ = apart
    assert main(["report", str(here), str(there), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == 1
    documented = ROOT / "docs" / "report.md"
    listed = [line.split("`")[1] for line in documented.read_text().splitlines() if line.startswith("| `")]
    assert set(told) == {name for name in listed if "." not in name}
    nested = {name for name in listed if "." in name}
    assert {f"generations.{name}" for name in told["generations"][0]} <= nested
    assert told["generations"][0]["end"]["text"] == "node n2 was lost"


def test_the_parts_of_the_page_are_in_the_package() -> None:
    """Where importlib finds them, installed or not."""
    for name in ("report.html.j2", "report.css"):
        assert resources.files("elastic_resume.report").joinpath(name).is_file()
