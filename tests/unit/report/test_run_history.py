"""Test the history that a report derives from hand-made logs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_resume.events import Event
from elastic_resume.report import html, run_history, summary
from elastic_resume.report.checkpoints import CheckpointEntry
from elastic_resume.report.formatting import WIDTH
from elastic_resume.report.incident_tracker import GenerationEnd, IncidentTracker
from elastic_resume.report.run_history import build_history_from_events as build
from tests.support.report_runs import (
    GLOO,
    KILLED,
    NAN_2,
    Job,
    agent_killed,
    exception,
    finished_and_begun_anew,
    finished_and_run_again,
    job_killed,
    job_lost_its_power,
    job_stopped,
    newcomers_left_again,
    node_killed,
    node_killed_and_wiped,
    node_returns,
    node_told_to_leave,
    rank0_node_wiped,
    without_agents,
    worker_killed,
)


@pytest.mark.parametrize(
    ("story", "expected", "first", "price"),
    [
        (worker_killed, ("signal", KILLED), ("n1", 1), (1, 5.3)),
        (node_killed, ("node-lost", "node n2 was lost"), ("n2", None), (2, 5.5)),
        (agent_killed, ("node-lost", "node n2 was lost"), ("n2", None), (0, 5.4)),
        (node_killed_and_wiped, ("node-lost", "node n2 was lost"), ("n2", None), (2, 5.5)),
        (exception, ("exception", f"{NAN_2}: ValueError: loss is nan"), ("n2", 2), (1, 5.6)),
        (node_returns, ("joined", "node n2 joined"), ("", None), (0, 2.35)),
        (job_killed, ("job", "whole job killed"), ("", None), (3, 3600.5)),
        (newcomers_left_again, ("joined", "nodes joined and left again"), ("", None), (0, 2.4)),
        (job_lost_its_power, ("job", "whole job killed"), ("", None), (4, 3600.5)),
        (job_stopped, ("stopped", "stopped by SIGTERM"), ("", None), (0, 3599.5)),
        (node_told_to_leave, ("preempted", "node n1 left: stopped by SIGTERM"), ("n1", None), (0, 5.1)),
        (rank0_node_wiped, ("signal", KILLED), ("n1", 1), (0, 5.3)),
        (without_agents, ("unknown", "ended for an unknown reason"), ("", None), (5, 20.5)),
        (finished_and_run_again, ("finished", "finished"), ("", None), (0, None)),
    ],
)
def test_end_of_generation_has_cause_and_cost(
    story: Callable[[], Job],
    expected: tuple[str, str],
    first: tuple[str, int | None],
    price: tuple[int, float | None],
) -> None:
    """Each way in which a generation can end has its cause, recomputed steps and recovery time."""
    item = build(story().events).generations[0]
    assert (item.end.kind, item.end.text) == expected
    assert (item.end.node, item.end.rank) == first
    assert item.recomputed_steps == price[0]
    assert item.recovery_s == pytest.approx(price[1])


@pytest.mark.parametrize(
    "make", [worker_killed, node_killed, agent_killed, exception, node_returns, job_killed, job_stopped]
)
def test_live_tracker_agrees_with_report(make: Callable[[], Job]) -> None:
    """It records the same events one by one."""
    events = sorted(make().events, key=lambda item: item["t"])
    live = IncidentTracker()
    for event in events:
        live.record(event)
    rows = build(events).generations
    assert [
        (item.generation, item.kind, item.cause, item.recomputed_steps, item.recovery_s)
        for item in live.incidents()
    ] == [
        (row.number, row.end.kind, row.end.text, row.recomputed_steps, row.recovery_s)
        for row in rows
        if row.end.is_failure
    ]


def first_end(job: Job) -> GenerationEnd:
    """Return the end of the job's first generation."""
    return build(job.events).generations[0].end


def test_broken_connection_is_secondary_failure() -> None:
    """Clocks do not matter; a stopped worker is no failure."""
    end = first_end(exception())
    assert end.secondary_failures == (
        "rank 0 on node n0 ended with exit code 1: DistBackendError: NCCL error: remote process exited",
    )
    assert end.other_failures == ()


def test_wiped_log_ends_only_the_newest_generation() -> None:
    """Earlier generations do not blame the wiped node."""
    job = worker_killed()
    job.events = [item for item in job.events if item["node"] != "n2"]
    job.agents(121, "n2")
    job.begin(125, 10, "n0", "n1", "n2")
    first, second, _ = build(job.events).generations
    assert (first.end.text, first.end.other_failures) == (KILLED, ())
    assert second.end.text == "node n2 was lost"


def cause(kind: str, node: str, rank: int | None, text: str, **more: str) -> dict[str, Any]:
    """Return a failure in the form of a verdict event."""
    return {"kind": kind, "node": node, "rank": rank, "text": text, "type": "", "message": "", **more}


def test_verdict_overrides_clocks() -> None:
    """The leader received rank 0's exception first; the clock of n1 is behind."""
    job = worker_killed()
    job.fail(110.4, 0, "ValueError", "loss is nan")
    first = cause("exception", "n0", 0, "ended with exit code 1", type="ValueError", message="loss is nan")
    then = cause("exception", "n1", 1, "was killed by SIGKILL")
    job.add(113, "verdict", "n2", generation=1, root_causes=[first], secondary_failures=[then])
    end = first_end(job)
    assert (end.kind, end.node, end.rank) == ("exception", "n0", 0)
    assert KILLED in end.secondary_failures


@pytest.mark.parametrize("kind", ["oom", "hang", "disk", "stuck"])
def test_verdict_overrides_kind_of_exit(kind: str) -> None:
    """An OOM kill looks like any SIGKILL."""
    job = worker_killed()
    told = cause(kind, "n1", 1, "was killed by SIGKILL, out of memory", message="m")
    job.add(113, "verdict", "n0", generation=1, root_causes=[told], secondary_failures=[])
    end = first_end(job)
    assert (end.kind, end.text) == (kind, f"{KILLED}, out of memory: m")
    assert end.t == 110.2


def test_verdict_names_cause_whose_log_is_lost() -> None:
    """The failed node's disk is gone."""
    job = worker_killed()
    told = [cause("signal", "n1", 1, "was killed by SIGBUS"), cause("node-lost", "n2", None, "died")]
    job.events = [item for item in job.events if item["node"] != "n1"]
    job.add(113, "verdict", "n0", generation=1, root_causes=told, secondary_failures=[])
    end = first_end(job)
    assert (end.kind, end.text) == ("signal", "rank 1 on node n1 was killed by SIGBUS")
    assert "node n2 died" in end.other_failures


def test_silent_node_is_the_cause_although_its_worker_raised() -> None:
    """Its peers were stopped first, and its agent came back later."""
    job = Job().begun()
    job.fail(110.3, 0, "RuntimeError", GLOO)
    job.stop(110.4, 0, 1, 2)
    job.add(
        111,
        "verdict",
        "n1",
        generation=1,
        root_causes=[cause("node-lost", "n0", None, "is silent")],
        secondary_failures=[],
    )
    job.begin(113, 11, "n1", "n2")
    job.add(115, "round", "n0", round=9, generation=3)
    end = first_end(job)
    assert (end.kind, end.node, end.text) == ("node-lost", "n0", "node n0 is silent")
    assert "RuntimeError" in end.secondary_failures[0]


def test_preempted_node_with_lost_log_is_no_lost_node() -> None:
    """Its disk was wiped later; the other nodes have its message."""
    job = Job().begun()
    job.stop(110.4, 1, 2)
    job.events = [item for item in job.events if item["node"] != "n0"]
    told = cause("preempted", "n0", None, "left (SIGUSR1)")
    job.add(111, "verdict", "n1", generation=1, root_causes=[told], secondary_failures=[])
    job.begin(113, 11, "n1", "n2")
    end = first_end(job)
    assert (end.kind, end.text, end.other_failures) == ("preempted", "node n0 left (SIGUSR1)", ())


def test_excluded_node_is_no_lost_node() -> None:
    """Its agent-end event has the reason."""
    job = Job().begun()
    job.exit(110.2, 1, signal="SIGSEGV")
    job.stop(110.5, 0, 2)
    told = "node n1 leaves the job: the last 3 failures were of node n1 alone."
    job.add(111, "agent-end", "n1", outcome="left", exit_code=75, message=told)
    job.begin(115, 10, "n0", "n2", recomputed_steps=0)
    end = first_end(job)
    assert end.text == "rank 1 on node n1 was killed by SIGSEGV"
    assert end.other_failures == ("node n1 left: the last 3 failures were of node n1 alone",)


def test_first_broken_connection_is_named_without_another_cause() -> None:
    """No process died, and the first rank to notice is named."""
    job = Job().begun()
    job.fail(110.3, 1, "RuntimeError", GLOO)
    job.fail(110.4, 0, "RuntimeError", GLOO)
    message = "generation 1 is over: node n1 failed"
    job.add(110.5, "rendezvous", "n0", what="restart", message=message)
    job.begin(115, 10, "n0", "n1", "n2")
    end = first_end(job)
    assert (end.kind, end.node, end.rank) == ("exception", "n1", 1)
    assert len(end.secondary_failures) == 1


def test_last_step_comes_from_the_next_resume() -> None:
    """The first step is the first one it ran."""
    first, second = build(worker_killed().events).generations
    assert (first.start_step, first.first_step, first.last_step) == (0, 1, 11)
    assert (second.start_step, second.first_step, second.last_step) == (10, 11, 11)
    assert second.end.kind == "open"
    assert (second.recomputed_steps, second.recovery_s) == (None, None)


def test_generation_without_step_has_no_first_step() -> None:
    """The previous generation has no recovery time either."""
    job = worker_killed()
    job.events = [item for item in job.events if item["event"] != "step" or item["generation"] == 1]
    second = build(job.events).generations[1]
    assert (second.start_step, second.first_step, second.last_step) == (10, None, 10)
    assert build(job.events).generations[0].recovery_s is None


def test_run_history_sums_over_generations() -> None:
    """Incidents, recomputed and discarded steps are added up."""
    job = worker_killed()
    job.steps(120, 30)
    job.exit(121, 2, code=3)
    job.begin(125, 25, "n0", "n1", "n2", recomputed_steps=7)
    job.finish(130, 40)
    report = build(job.events)
    assert [item.end.kind for item in report.generations] == ["signal", "exit", "finished"]
    assert report.generations[1].end.text == "rank 2 on node n2 ended with exit code 3"
    assert (report.num_incidents, report.recomputed_steps, report.last_step) == (2, 8, 40)
    assert report.discarded_steps == 11 + 22 + 15 - 40
    assert report.outcome == "finished"


def test_report_lists_source_and_rejected_states() -> None:
    """It says what a generation started from, what was sent, and what was rejected and why."""
    job = Job().begun()
    job.exit(110.2, 1, signal="SIGSEGV")
    bad = {"node": "n1", "generation": 1, "step": 10, "reason": "manifest: its digest does not match."}
    job.begin(
        115,
        5,
        "n0",
        "n1",
        "n2",
        rejected=[bad, 7],
        receiving_nodes=["n1"],
        source_node="n0",
        source_generation=1,
    )
    cold, second = build(job.events).generations
    assert (cold.resume_kind, cold.rejected) == ("cold", ())
    assert second.rejected == (
        run_history.RejectedStateRecord("n1", 1, 10, "manifest: its digest does not match."),
    )
    assert (second.source_node, second.source_generation, second.receiving_nodes) == ("n0", 1, ("n1",))
    text = summary.format_text(summary.build_run_report(job.events))
    assert "generation 2: rejected n1's state of generation 1, step 10: manifest: its digest" in text
    assert "generation 2: n0 sent its state to n1" in text


def test_failed_starts_belong_to_no_generation() -> None:
    """The first failure that is not secondary is named."""
    job = Job()
    job.agents(90, "n0", "n1")
    job.nodes = ("n0", "n1")
    job.fail(99, 0, "DistNetworkError", "connection refused")
    job.fail(100, 1, "ModuleNotFoundError", "No module named 'torchh'")
    for item in job.events[-2:]:
        item["generation"] = None
    job.exit(100.1, 0, code=1)
    job.exit(100.2, 1, code=1)
    message = "node n1 gave up: 3 starts in a row failed."
    job.add(101, "agent-end", "n1", outcome="failed", exit_code=1, message=message)
    report = build(job.events)
    assert not report.generations
    assert (report.outcome, report.message) == ("failed", message)
    text = " ".join(summary.format_text(summary.build_run_report(job.events)).split())
    assert (
        "2 workers ended before training; first: rank 1 on node n1 ended with exit code 1: ModuleNotFound"
        in text
    )


def test_node_without_agent_end_is_lost_if_the_others_gave_up() -> None:
    """There is no next generation to compare with."""
    job = Job().begun()
    job.fail(110.3, 0, "RuntimeError", GLOO)
    for node in ("n0", "n1"):
        job.add(140, "agent-end", node, outcome="failed", exit_code=75, message="no world formed.")
    report = build(job.events)
    assert report.generations[0].end.text == "node n2 was lost"
    assert (report.outcome, report.message) == ("failed", "no world formed.")


def test_exit_belongs_to_the_newest_worker_of_its_pid() -> None:
    """The kernel reuses process ids."""
    job = worker_killed()
    again = [item for item in job.events if item.get("generation") == 2 and item.get("rank") == 1]
    for item in again:
        item["pid"] = 101
    job.add(120, "worker-exit", "n1", rank=1, worker_pid=101, signal="SIGSEGV", exit_code=None, stopped=False)
    first, second = build(job.events).generations
    assert first.end.text == KILLED
    assert second.end.text == "rank 1 on node n1 was killed by SIGSEGV"


# ---- any input -----------------------------------------------------------------------------------------

_KINDS = (
    *("agent-start", "round", "worker-exit", "agent-end", "resume", "worker-start"),
    *("step", "commit", "failure", "run-end", "busy", "verdict"),
)
_ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 4),
    st.integers(),
    st.sampled_from([10**400, -(10**400), 10**30]),  # JSON has integers of any size
    st.floats(),
    st.text(max_size=8),
    st.lists(
        st.one_of(st.integers(0, 2), st.sampled_from(["n0", "n1"]), st.dictionaries(st.text(), st.none()))
    ),
)
_FIELDS = {
    "node": st.one_of(st.sampled_from(["n0", "n1", "n2"]), _ODD),
    "generation": st.one_of(st.integers(1, 3), _ODD),
    "step": st.one_of(st.integers(0, 9), _ODD),
    "rank": st.one_of(st.integers(0, 2), _ODD),
    "pid": st.one_of(st.integers(1, 3), _ODD),
    "worker_pid": st.one_of(st.integers(1, 3), _ODD),
    "world_size": _ODD,
    "nodes": st.one_of(st.lists(st.sampled_from(["n0", "n1", "n2"])), _ODD),
    "receiving_nodes": _ODD,
    "rejected": st.one_of(st.lists(st.dictionaries(st.sampled_from(["node", "reason", "step"]), _ODD)), _ODD),
    "recomputed_steps": _ODD,
    "outcome": st.one_of(st.sampled_from(["done", "failed", "signalled"]), _ODD),
    "message": st.one_of(st.just(GLOO), _ODD),
    "signal": st.one_of(st.just("SIGKILL"), _ODD),
    "exit_code": _ODD,
    "stopped": st.booleans(),
    "type": _ODD,
    "root_causes": st.one_of(st.lists(st.fixed_dictionaries({"node": st.just("n1"), "text": _ODD})), _ODD),
    "secondary_failures": st.one_of(
        st.lists(st.fixed_dictionaries({"node": st.just("n0"), "rank": _ODD})), _ODD
    ),
}
_EVENTS = st.fixed_dictionaries(
    {"t": st.one_of(st.floats(0, 100), _ODD), "event": st.one_of(st.sampled_from(_KINDS), _ODD)},
    optional=_FIELDS,
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(_EVENTS, max_size=25))
def test_any_list_of_events_gives_a_report(events: list[Event]) -> None:
    """Nothing raises, no number is negative, no line is too wide, and the JSON is valid."""
    told = summary.build_run_report(events)
    assert told.history.discarded_steps >= 0
    assert all(item.recovery_s is None or item.recovery_s >= 0 for item in told.history.generations)
    assert all(len(line) <= WIDTH and line.isprintable() for line in summary.format_text(told).splitlines())
    assert told.goodput.total_s == pytest.approx(sum(spent for _, spent in told.goodput.parts))
    json.loads(summary.format_json(told))
    assert html.render_page(told).endswith("</html>\n")


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([worker_killed, node_killed, exception, node_returns]), st.randoms())
def test_order_of_lines_does_not_matter(story: Callable[[], Job], random: Any) -> None:
    """Logs of several nodes are merged by time."""
    events = story().events
    history = build(events)
    shuffled = list(events)
    random.shuffle(shuffled)
    assert [item.end.text for item in build(shuffled).generations] == [
        item.end.text for item in history.generations
    ]


# ---- how it looks --------------------------------------------------------------------------------------


def test_table_is_aligned() -> None:
    """There is one row for each generation, and one line for the run."""
    job = worker_killed()
    job.finish(130, 40)
    assert summary.format_text(summary.build_run_report(job.events)).splitlines()[:5] == [
        "Finished at step 40 after 40 s. 1 failure, 5.0 s downtime, 1 step recomputed; goodput 62 %.",
        "",
        "gen  nodes     world  steps  ended because                            recomputed  recovery",
        "  1  n0 n1 n2      3   1-11  rank 1 on node n1 was killed by SIGKILL           1     5.3 s",
        "  2  n0 n1 n2      3  11-40  finished                                          -         -",
    ]


def test_long_reason_is_cut_in_table_and_complete_below() -> None:
    """Control characters do not reach the terminal."""
    job = Job().begun()
    job.fail(110.2, 1, "ValueError", "\x1b[2J" + "far too long " * 12 + "THE END")
    job.begin(115, 10, "n0", "n1", "n2")
    text = summary.format_text(summary.build_run_report(job.events))
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "..." in text
    assert "THE END" in text
    assert "\x1b" not in text


def test_many_nodes_take_one_line() -> None:
    """A thousand names are folded as Slurm does."""
    nodes = tuple(f"gpu{number:04}" for number in range(1000) if number != 500)
    job = Job()
    job.begin(100, 0, *nodes, kind="cold")
    assert "gpu[0000-0499,0501-0999]" in summary.format_text(summary.build_run_report(job.events))


def test_job_that_lost_all_disks_continues_the_numbers() -> None:
    """It starts again at generation 1; every step of its first start counts as recomputed."""
    job = Job().begun()
    nodes = job.nodes
    job.agents(200, *nodes)
    job.generation = 0
    job.begin(210, 0, *nodes, kind="cold")
    job.exit(220, 1, signal="SIGKILL")
    job.begin(230, 1, *nodes, source_node="n0", source_generation=1)
    history = build(job.events)
    assert [row.number for row in history.generations] == [1, 2, 3]
    assert [row.recomputed_steps for row in history.generations] == [10, 0, None]
    assert (history.generations[0].end.kind, history.generations[2].source_generation) == ("job", 2)
    entry = CheckpointEntry(Path("/d"), "r", "n0", "valid", generation=2, step=1)
    (record,) = summary.build_run_report(job.events, checkpoint_entries=[entry]).saved_states
    assert (record.generation, record.state) == (3, "valid")


def test_job_whose_agents_restart_keeps_its_numbers() -> None:
    """Only a generation that a node enters twice shows that the disks were lost."""
    numbers = [row.number for row in build(job_killed().events).generations]
    assert numbers == [1, 2]


@pytest.mark.parametrize("node", ["n0", "n1"])
def test_tracker_counts_from_the_last_fresh_start(node: str) -> None:
    """A start with --resume never begins a new run, also for a node that lacks the resume events."""
    tracker = IncidentTracker()
    for event in finished_and_begun_anew().events:
        if node == "n0" or event["node"] == node:
            tracker.record(event)
    assert [incident.generation for incident in tracker.incidents()] == [3]
    assert tracker.totals().incidents == {"signal": 1}
    assert tracker.totals().recomputed_steps == 4
