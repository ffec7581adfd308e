"""Test the verdict, alerts, faults, checkpoints and lanes of a report, and where its logs come from."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
from markupsafe import escape

from elastic_resume import constants, events
from elastic_resume.archive.address import parse_address
from elastic_resume.cli import main
from elastic_resume.events import Event
from elastic_resume.policy import wording
from elastic_resume.policy.flight_recorder import Collective
from elastic_resume.policy.reasons import WorkersStopped, to_json
from elastic_resume.policy.stalls import Activity, Stall
from elastic_resume.report import generations, html, summary
from elastic_resume.report.checkpoints import CheckpointEntry
from elastic_resume.report.formatting import format_seconds
from elastic_resume.report.loader import load_run
from tests.support import report_runs
from tests.support.paths import ROOT
from tests.support.report_runs import (
    Job,
    failed,
    half_lost,
    job_killed,
    job_stopped,
    killed,
    node_killed,
    unfinished,
    worker_killed,
)


def nothing() -> Job:
    """Return a job without events."""
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
def test_verdict_has_outcome_step_and_cost(make: Callable[[], Job], begins: str, price: str) -> None:
    """It says how the run ended or stands."""
    text = summary.build_run_report(make().events).verdict.text
    assert text.startswith(begins)
    assert price in text


def test_sentence_of_an_alert_is_printed_once_with_its_time() -> None:
    """First as a hint; the list of what happened names its kind."""
    job = Job().begun()
    job.add(112, "commit-failed", "n1", step=4, error="disk full")
    job.add(115, "commit-failed", "n1", step=8, error="disk full")
    job.add(116, "snapshot-ignored", "n1", error="wrong digest", step=9)
    report = summary.build_run_report(job.events)
    text = summary.format_text(report)
    assert [text.count(alert.text) for alert in report.alerts] == [1, 1]
    assert "n1: commit-failed, see above (2 times, for 3.0 s, not resolved)" in text
    assert summary.format_text(replace(report, verdict=replace(report.verdict, hints=()))).count("full") == 1


def test_hints_begin_with_the_worst() -> None:
    """A silent run gets a hint if the present is known."""
    look = summary.build_run_report(failed().events).verdict.hints
    cause = "rank 2 on node n2 ended with exit code 1: ValueError: loss is nan"
    assert look[0] == f"generation 2 ended: {cause}"
    report = summary.build_run_report(worker_killed().events, now=1115.5)
    assert report.verdict.hints == ("no event for 16 min 40 s: check whether the job still runs",)
    assert summary.build_run_report(killed().events).verdict.hints == ()


def test_node_that_fails_repeatedly_gets_a_hint() -> None:
    """It is the root cause of three failures of three."""
    job = Job().begun()
    for t in (110, 120, 130):
        job.exit(t + 0.5, 2, signal="SIGBUS")
        job.begin(t + 5, 10, "n0", "n1", "n2")
    assert (
        "node n2 is the root cause of 3 of 3 failures" in summary.build_run_report(job.events).verdict.hints
    )


# ---- alerts and faults ---------------------------------------------------------------------------------


def test_failed_commits_are_one_alert_until_the_next_commit() -> None:
    """An alert that lasts is not resolved."""
    job = Job().begun()
    for t in (111, 112, 113):
        job.add(t, "commit-failed", "n1", generation=1, step=t - 100, error=f"step {t}: [Errno 28] full")
    job.add(120, "commit", "n1", generation=1, step=20, bytes=7, seconds=0.1, path="/x/g000001-s0000000020")
    job.add(130, "commit-failed", "n1", generation=1, step=30, error="[Errno 5]")
    first, second = (
        item for item in summary.build_run_report(job.events).alerts if item.kind == "commit-failed"
    )
    assert (first.t, first.last_t, first.count, first.is_resolved) == (111, 120, 3, True)
    assert (second.t, second.count, second.is_resolved) == (130, 1, False)


def test_each_kind_of_alert_has_severity_and_node() -> None:
    """A hang that another node caused is only a note; one that it may have caused is called so."""
    report = summary.build_run_report(report_runs.make_eventful_run().events)
    found = {item.kind: (item.severity, item.node) for item in report.alerts}
    bad = {"commit-failed": "n2", "quarantine": "n3", "hang": "n2", "replicas-differ": "n0"}
    bad |= {"hang-detector-failed": "n0", "unauthenticated": "n3"}
    notes = {"drain": "n1", "preemption-notice": "n1"}
    assert found == {kind: ("bad", node) for kind, node in bad.items()} | {
        kind: ("note", node) for kind, node in notes.items()
    }
    job = Job().begun()
    hang = {"generation": 1, "step": 10, "seconds": 40.0, "suspects": [], "waits_for_other_node": True}
    job.add(150, "hang", "n0", **hang)
    alert = summary.build_run_report(job.events).alerts[0]
    assert (alert.severity, alert.text[-15:]) == ("note", "of another node")
    collective = Collective(4711, "all_reduce", "0 (default_pg)")
    waits = to_json(Stall(Activity.COLLECTIVE, "t.py:3 in f", collective=collective))
    job.add(160, "hang", "n0", **hang, waiting={"1": waits})
    text = "rank 1 waits in all_reduce #4711 of group 0 (default_pg) at t.py:3 in f"
    assert text in summary.build_run_report(job.events).alerts[1].text
    suspects = [{"rank": 2, "reason": to_json(Stall(Activity.BACKWARD))}]
    job.add(200, "hang", "n1", generation=1, step=10, seconds=40.0, suspects=suspects, kill_delay_s=15.0)
    assert "perhaps rank 2 is in backward()" in summary.build_run_report(job.events).alerts[2].text


@pytest.mark.parametrize(
    ("verdict", "severity"),
    [("proved", "note"), ("rounding", "note"), ("resumed", "note"), ("not proved", "bad")],
)
def test_verdict_about_a_resume_is_bad_only_if_it_is_not_proved(verdict: str, severity: str) -> None:
    """Its text is that of the event."""
    job = Job().begun()
    job.add(150, "proof", "n0", generation=2, step=10, verdict=verdict, message="what it says")
    alert = summary.build_run_report(job.events).alerts[0]
    assert (alert.kind, alert.severity, alert.text) == ("proof", severity, "what it says")


def test_injected_faults_do_not_change_the_history() -> None:
    """Only the nodes' events decide the root cause."""
    job = report_runs.make_eventful_run()
    report = summary.build_run_report(job.events)
    assert [(item.number, item.kind, item.node, item.generation) for item in report.faults] == [
        (1, "kill-worker", "n1", 1),
        (2, "disk-full", "n2", 2),
        (3, "kill-node", "n3", 3),
    ]
    without = [item for item in job.events if item["event"] != "fault"]
    assert summary.build_run_report(without).history == report.history


# ---- checkpoints ---------------------------------------------------------------------------------------


def test_checkpoints_are_counted_by_state_and_place() -> None:
    """The newest valid one counts by generation first. Commits mark the timeline."""
    job = Job().begun()
    job.add(105, "commit", "n0", generation=1, step=5, bytes=5, seconds=0.1, path="/d/g000001-s0000000005")
    here = [
        CheckpointEntry(Path("/d"), "r", node, state, generation=generation, step=step)
        for node, state, generation, step in (
            ("n0", "valid", 1, 30), ("n1", "valid", 2, 20), ("n1", "bad", 2, 40), ("n0", "quarantined", 1, 9)
        )
    ]  # fmt: skip
    report = summary.build_run_report(job.events, checkpoint_entries=here)
    assert report.newest_checkpoint_step == 20
    assert "2 checkpoints on n0 n1, newest: step 20, 1 bad, 1 in quarantine" in summary.format_text(report)
    listed = json.loads(summary.format_json(report))["checkpoints"]
    assert [(entry["path"], entry["state"]) for entry in listed] == [("/d", entry.state) for entry in here]
    place = parse_address("", "s3://b/r/g000003-s0000000010")
    archived = CheckpointEntry(place, "r", "n7", "valid", generation=3, step=10)
    both = summary.build_run_report(job.events, checkpoint_entries=[*here, archived])
    text = "2 checkpoints on n0 n1, 1 checkpoint in the archive, newest: step 10, 1 bad"
    assert text in summary.format_text(both)
    assert str(place) in summary.format_json(both)
    marks = [mark.text for lane in html.build_lanes(report) for mark in lane.marks]
    assert marks == ["checkpoint of step 5"]
    assert summary.build_run_report(job.events).newest_checkpoint_step is None


# ---- lanes ---------------------------------------------------------------------------------------------


def test_lane_of_lost_node_is_offline_until_its_agent_starts() -> None:
    """Then it is idle until the next world."""
    job = node_killed()
    job.agents(130, "n2")
    job.stop(139, 0, 1)
    job.begin(142, 20, "n0", "n1", "n2", receiving_nodes=["n2"])
    lane = {item.node: item for item in html.build_lanes(summary.build_run_report(job.events))}["n2"]
    spans = [(span.activity, span.start_t, span.end_t) for span in lane.spans]
    assert spans[-4:-1] == [("offline", 110.6, 130), ("idle", 130, 140), ("preparing", 140, 142)]
    assert [mark.text for mark in lane.marks] == ["generation 1: node n2 died"]


def test_marks_that_overlap_become_one_with_a_count() -> None:
    """None is lost."""
    marks = [html.TimelineMark("incident", t, "died") for t in range(9000)]
    few = html.cluster_marks(marks, 0, 9000, 60)
    assert len(few) == 60
    assert sum(int(mark.text.split()[0]) for mark in few) == 9000


# ---- logs of several places ----------------------------------------------------------------------------


def write_log(path: Path, found: list[Event], torn: bytes = b"") -> None:
    """Write a log of these events."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(item, separators=(",", ":")).encode() + b"\n" for item in found]
    path.write_bytes(torn.join(lines))


@pytest.fixture
def apart(tmp_path: Path) -> tuple[Path, Path, list[Event]]:
    """Write a run whose node directories lie in two places; the disk of n2 was wiped by a fault."""
    job = node_killed()
    by_node = {node: [item for item in job.events if item["node"] == node] for node in ("n0", "n1", "n2")}
    here, there = tmp_path / "a" / "run", tmp_path / "b" / "copies" / "n1"
    write_log(here / "n0" / constants.EVENTS_FILE, by_node["n0"])
    write_log(there / constants.EVENTS_FILE, by_node["n1"])
    fault = {"t": 110.0, "event": "fault", "node": "n2", "pid": 1, "number": 1, "what": "kill-node"}
    write_log(here / constants.FAULTS_FILE, [fault, *by_node["n2"], *by_node["n1"][:3], *by_node["n2"][:2]])
    return here, there, [*job.events, fault]


def test_logs_of_several_places_are_merged(apart: tuple[Path, Path, list[Event]]) -> None:
    """An event in two logs counts once."""
    here, there, every = apart
    found = load_run([here, there])
    assert sorted(map(repr, found.events)) == sorted(map(repr, every))
    assert summary.build_run_report(found.events).history == summary.build_run_report(every).history
    assert [item.kind for item in summary.build_run_report(found.events).faults] == ["kill-node"]
    assert len(load_run([here / "n0", there, here]).events) == len(every)


def test_torn_and_unreadable_logs_are_left_out(apart: tuple[Path, Path, list[Event]]) -> None:
    """Lines are torn, nested too deep or have an impossible time, and one log is a directory."""
    here, there, every = apart
    log = there / constants.EVENTS_FILE
    torn = log.read_bytes().replace(b"\n", b'\n{"t":1.0,"event":"st', 1)
    log.write_bytes(torn + b"\xff\xfe\n" + b"[" * 50_000 + b'\n{"t": 1')
    (here / "n9" / constants.EVENTS_FILE).mkdir(parents=True)
    assert len(load_run([here, there]).events) == len(every)
    odd = [{"t": 10**400, "event": "step", "node": "n0", "generation": 1, "step": 5}]
    write_log(here / "n8" / constants.EVENTS_FILE, odd)
    assert (
        summary.build_run_report(load_run([here, there]).events).history
        == summary.build_run_report(every).history
    )


def test_hang_report_that_is_no_regular_file_is_not_read(apart: tuple[Path, Path, list[Event]]) -> None:
    """A link could show any of the reader's files; a pipe would block."""
    here, _, _ = apart
    hangs = here / "n0" / "hangs"
    hangs.mkdir()
    (hangs / "a.txt").symlink_to("/proc/self/environ")
    (hangs / "b.txt").symlink_to("nowhere")
    os.mkfifo(hangs / "c.txt")
    (hangs / "d.txt").write_text("SUSPECT rank 2")
    write_log(here / "n1" / constants.EVENTS_FILE, [])
    (here / "n1" / "hangs").symlink_to(hangs)
    found = load_run([here])
    assert found.stacks == {"n0/d.txt": "SUSPECT rank 2"}
    assert sum("left out: not a regular file" in problem for problem in found.problems) == 7


def test_read_run_includes_faults(apart: tuple[Path, Path, list[Event]]) -> None:
    """They stand in their place by time."""
    here, _, _ = apart
    assert [item["t"] for item in events.read_run(here) if item["event"] == "fault"] == [110.0]


def test_page_is_written_to_a_file(
    apart: tuple[Path, Path, list[Event]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The verdict is printed; a path that cannot be written is an error."""
    here, there, _ = apart
    hang = here / "n0" / "hangs" / "g1-s10.txt"
    hang.parent.mkdir()
    hang.write_text("SUSPECT rank 2")
    target = tmp_path / "report.html"
    assert main(["report", str(here), str(there), "--html", str(target)]) == 0
    assert capsys.readouterr().out.startswith("Running, or killed as a whole, at step 11")
    page = target.read_text()
    assert page.startswith("<!doctype html>")
    assert "SUSPECT rank 2" in page
    assert main(["report", str(here), "--html", str(tmp_path)]) == 1
    assert "the page cannot be written: Is a directory" in capsys.readouterr().err


def test_json_has_the_documented_members(
    apart: tuple[Path, Path, list[Event]], capsys: pytest.CaptureFixture[str]
) -> None:
    """docs/reference/report-json.md lists exactly these."""
    here, there, _ = apart
    assert main(["report", str(here), str(there), "--json"]) == 0
    members = json.loads(capsys.readouterr().out)
    assert (members["schema"], members["outcome"]) == (4, "open")
    documented = ROOT / "docs" / "reference" / "report-json.md"
    listed = [line.split("`")[1] for line in documented.read_text().splitlines() if line.startswith("| `")]
    assert set(members) == {name for name in listed if "." not in name}
    nested = {name for name in listed if "." in name}
    assert {f"generations.{name}" for name in members["generations"][0]} <= nested
    assert members["generations"][0]["end"]["text"] == "node n2 died"


def test_template_and_style_sheet_are_in_the_package() -> None:
    """Installed or not, importlib finds them."""
    for name in ("report.html.j2", "report.css"):
        assert resources.files("elastic_resume.report").joinpath(name).is_file()


def test_verdict_of_waiting_nodes_names_the_missing_ones() -> None:
    """Nodes without a quorum neither run nor were killed."""
    report = summary.build_run_report(half_lost().events, now=400)
    assert report.verdict.text.startswith(
        "Waiting for a quorum since 1970-01-01 00:01:54 UTC, at step 10 after 24 s: n2, n3 are missing. "
    )
    assert "No failure" not in report.verdict.text
    assert report.verdict.hints[0] == (
        "start n2, n3 again, with their disks; if they are gone for good: end the job, remove "
        "rendezvous.json from the node directories, and start it again"
    )
    assert report.history.wait == generations.JobWait(
        114, ("n2", "n3"), wording.describe(report_runs.WAITS_FOR_QUORUM)
    )
    assert ">waiting<" in html.render_page(report)


def test_wait_ends_with_the_next_generation_or_the_agents() -> None:
    """A wait that is over is no verdict."""
    job = half_lost()
    job.begin(200, 10, "n0", "n1")
    assert summary.build_run_report(job.events).history.wait is None
    job.add(201, "rendezvous", "n2", what="waiting", reason=to_json(report_runs.WAITS_FOR_QUORUM))
    assert summary.build_run_report(job.events).history.wait is None  # n2 is partitioned from n0 and n1
    job = half_lost()
    for node in ("n0", "n1"):
        job.add(150, "agent-end", node, outcome="signalled", exit_code=143, message="stopped by SIGTERM.")
    assert summary.build_run_report(job.events).history.wait is None


def test_job_waits_though_so_many_nodes_were_drained_that_no_view_is_possible() -> None:
    """Nobody stopped the job, until the others are stopped too."""
    job = half_lost()
    for node in ("n2", "n3"):
        job.add(114, "agent-end", node, outcome="signalled", exit_code=143, message="stopped by SIGTERM.")
    report = summary.build_run_report(job.events, now=400)
    assert report.history.outcome == "open"
    assert report.verdict.text.startswith("Waiting for a quorum since ")
    for node in ("n0", "n1"):
        job.add(500, "agent-end", node, outcome="signalled", exit_code=143, message="stopped by SIGTERM.")
    assert summary.build_run_report(job.events).history.outcome == "stopped"


def test_job_runs_though_a_drained_node_ends_later() -> None:
    """Its agent takes a moment longer than the others to begin without it."""
    job = Job().begun()
    job.begin(120, 11, "n0", "n2")
    job.add(121, "agent-end", "n1", outcome="signalled", exit_code=143, message="stopped by SIGTERM.")
    report = summary.build_run_report(job.events)
    assert report.history.outcome == "open"
    assert "Running" in report.verdict.text
    job.add(130, "agent-end", "n0", outcome="signalled", exit_code=143, message="stopped by SIGTERM.")
    assert summary.build_run_report(job.events).history.outcome == "stopped"


# ---- what the figures count ------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [report_runs.node_told_to_leave, job_stopped])
def test_requested_stop_is_in_no_recovery(make: Callable[[], Job]) -> None:
    """A drain, a preemption and an operator's stop have no recovery, in the page, as text or as JSON."""
    report = summary.build_run_report(make().events)
    assert report.history.generations[0].recovery_s is not None
    assert report.recoveries_s == []
    assert json.loads(summary.format_json(report))["median_recovery_s"] is None
    assert "<dt>recovery (median)</dt><dd>-</dd>" in html.render_page(report)
    assert "from the first sign" not in summary.format_text(report)


def test_drained_node_is_no_failure() -> None:
    """Page, text and JSON count it apart."""
    report = summary.build_run_report(report_runs.node_told_to_leave().events)
    assert (report.history.num_incidents, report.history.num_failures) == (1, 0)
    text = " ".join(summary.format_text(report).split())
    assert "No failure, 1 drain, 5.0 s downtime, 1 step recomputed" in text
    assert "<dt>failures</dt><dd>0</dd>" in html.render_page(report)
    job = report_runs.node_told_to_leave()
    job.exit(113, 1, signal="SIGKILL")
    job.begin(116, 11, "n0", "n1", "n2")
    assert "1 failure, 1 drain, " in summary.format_text(summary.build_run_report(job.events))


def test_recovery_tile_is_the_median_of_the_column() -> None:
    """Page, text and JSON have the median of the recoveries that the table shows; a join has none."""
    job = report_runs.node_returns()
    job.exit(113, 1, signal="SIGKILL")
    job.begin(116, 11, "n0", "n1", "n2")
    report = summary.build_run_report(job.events)
    assert any(row.end.kind == "joined" and row.recovery_s is not None for row in report.history.generations)
    assert [row.failure_recovery_s is None for row in report.history.generations] == [True, False, True]
    shown = [row.failure_recovery_s for row in report.history.generations]
    median_s = statistics.median(value for value in shown if value is not None)
    assert f"<dt>recovery (median)</dt><dd>{format_seconds(median_s)}</dd>" in html.render_page(report)
    assert f"{format_seconds(median_s)} from the first sign" in summary.format_text(report)
    assert json.loads(summary.format_json(report))["median_recovery_s"] == median_s
    assert summary.DOWNTIME_NOTE in " ".join(summary.format_text(report).split())
    assert escape(summary.DOWNTIME_NOTE.capitalize()) in html.render_page(report)


def test_interrupted_step_is_not_called_recomputed() -> None:
    """A run that recomputed no step names the step that the failure cut off apart."""
    job = Job()
    job.begin(100, 0, "n0", "n1", "n2")
    job.steps(110, 10)
    job.exit(110.6, 1, signal="SIGKILL")
    job.begin(115, 10, "n0", "n1", "n2")
    text = summary.format_text(summary.build_run_report(job.events))
    assert "no step recomputed" in text
    assert "interrupted steps" in text
    assert "recomputed steps" not in text


def test_crash_of_one_node_marks_its_lane_only() -> None:
    """Leases that expired on the others, and the change of the leader, are part of the crash."""
    job = node_killed()
    for node in ("n0", "n1"):
        for what in ("lease-expired", "leader-lost", "step-down"):
            job.add(111, "rendezvous", node, generation=1, what=what, message=what)
    report = summary.build_run_report(job.events)
    marked = [
        lane.node for lane in html.build_lanes(report) for mark in lane.marks if mark.kind != "checkpoint"
    ]
    assert marked == ["n2"]
    assert report.alerts == ()
    alone = Job().begun()
    alone.add(111, "rendezvous", "n0", generation=1, what="lease-expired", message="lease-expired")
    assert [alert.kind for alert in summary.build_run_report(alone.events).alerts] == ["lease-expired"]


def test_end_by_a_nodes_reason_marks_that_node() -> None:
    """A verdict without failures names the node whose workers stopped, and no other lane is marked."""
    job = Job()
    job.begin(100, 0, "n0", "n1", "n2")
    job.steps(110, 10)
    job.end_view(110.6, "n0", WorkersStopped("n1"))
    job.begin(115, 10, "n0", "n1", "n2")
    lanes = html.build_lanes(summary.build_run_report(job.events))
    assert [lane.node for lane in lanes for mark in lane.marks if mark.kind == "incident"] == ["n1"]


def test_error_that_ended_the_job_is_told_once() -> None:
    """The verdict has its text, and two ranks met it."""
    text = "the bucket is gone: create it, or correct the address"
    job = Job().begun()
    for rank in (0, 1):
        job.fail(110, rank, "ArchiveError", text)
        job.exit(110.1, rank, code=1)
    job.write_verdicts(110.9)
    message = f"node n0 gave up: rank 0 ended with exit code 1: ArchiveError: {text}."
    for node in job.nodes:
        job.add(111, "agent-end", node, outcome="failed", exit_code=1, message=message)
    shown = " ".join(summary.format_text(summary.build_run_report(job.events)).split())
    assert shown.count(text) == 1, shown
    assert "also rank 1 on node n1 ended with exit code 1: ArchiveError: the same" in shown
