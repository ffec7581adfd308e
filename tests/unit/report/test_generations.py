"""Test which generations a report finds in hand-made logs, why each ended, and what its end cost."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_resume.events import Event
from elastic_resume.policy.reasons import ViewEnd
from elastic_resume.report import html, summary
from elastic_resume.report.formatting import WIDTH
from elastic_resume.report.generations import (
    MAX_GENERATIONS,
    RECOVERY_BUCKETS_S,
    GenerationRow,
    GenerationTracker,
)
from elastic_resume.report.generations import build_history_from_events as build
from tests.support.report_runs import (
    GLOO,
    KILLED,
    NAN_2,
    Job,
    exception,
    failed,
    failed_starts,
    finished_and_run_again,
    half_lost,
    job_killed,
    job_lost_its_power,
    job_stopped,
    killed,
    lease_expired,
    newcomers_left_again,
    node_killed,
    node_killed_and_wiped,
    node_returns,
    node_told_to_leave,
    rank0_node_wiped,
    unfinished,
    without_agents,
    worker_killed,
)

NO_LEASE = "on node n1 the lease expired: no message from the leader n0"


@pytest.mark.parametrize(
    ("story", "expected", "first", "price"),
    [
        (worker_killed, ("signal", KILLED), ("n1", 1), (1, 5.3)),
        (node_killed, ("node-lost", "node n2 died"), ("n2", None), (2, 4.9)),
        (node_killed_and_wiped, ("node-lost", "node n2 died"), ("n2", None), (2, 4.9)),
        (exception, ("exception", f"{NAN_2}: ValueError: loss is nan"), ("n2", 2), (1, 4.6)),
        (node_returns, ("joined", "node n2 joined"), ("", None), (1, 2.5)),
        (lease_expired, ("unknown", NO_LEASE), ("n1", None), (1, 2.2)),
        (newcomers_left_again, ("joined", "nodes joined and left again"), ("", None), (0, 2.4)),
        (job_killed, ("job", "whole job killed"), ("", None), (3, 3600.5)),
        (job_lost_its_power, ("job", "whole job killed"), ("", None), (4, 3600.5)),
        (job_stopped, ("stopped", "stopped by SIGTERM"), ("", None), (0, 3600.3)),
        (node_told_to_leave, ("preempted", "node n1 left (SIGTERM)"), ("n1", None), (1, 5.1)),
        (rank0_node_wiped, ("signal", KILLED), ("n1", 1), (0, 5.3)),
        (without_agents, ("exception", "rank 2 on node n2 failed: ValueError: x"), ("n2", 2), (6, 20.0)),
        (half_lost, ("node-lost", "n2 is unreachable"), ("n2", None), (None, None)),
        (unfinished, ("signal", KILLED), ("n1", 1), (None, None)),
        (finished_and_run_again, ("finished", "finished"), ("", None), (0, None)),
    ],
)
def test_end_of_generation_has_cause_and_cost(
    story: Callable[[], Job],
    expected: tuple[str, str],
    first: tuple[str, int | None],
    price: tuple[int | None, float | None],
) -> None:
    """Each way in which a generation can end has its cause, recomputed steps and recovery time."""
    item = build(story().events).generations[0]
    assert (item.end.kind, item.end.text) == expected
    assert (item.end.node, item.end.rank) == first
    assert item.recomputed_steps == price[0]
    assert item.recovery_s == pytest.approx(price[1])


def test_verdict_is_shown_as_written() -> None:
    """Root causes come in the leader's order; neither clocks nor the kind of an exit change it."""
    job = exception()
    (verdict, *_) = [event for event in job.events if event["event"] == "verdict"]
    connection = (
        "rank 0 on node n0 ended with exit code 1: DistBackendError: NCCL error: remote process exited"
    )
    assert build(job.events).generations[0].end.secondary_failures == (connection,)
    for event in job.events:
        if event["event"] == "verdict":
            event["root_causes"] = [*verdict["secondary_failures"], *verdict["root_causes"]]
            event["root_causes"][0]["kind"] = "oom"
            event["secondary_failures"] = []
    end = build(job.events).generations[0].end
    assert (end.kind, end.text, end.node, end.rank) == ("oom", connection, "n0", 0)
    assert end.other_failures == (f"{NAN_2}: ValueError: loss is nan",)
    assert end.secondary_failures == ()


def test_verdict_of_any_node_suffices() -> None:
    """The others' logs are lost, or their agents left without a verdict on others."""
    job = worker_killed()
    job.events = [item for item in job.events if item["event"] != "verdict" or item["node"] == "n2"]
    empty: dict[str, Any] = {"root_causes": [], "secondary_failures": [], "joined": [], "lost": []}
    job.add(113, "verdict", "n0", generation=1, next_generation=None, reason=None, **empty)
    assert build(job.events).generations[0].end.text == KILLED


def test_end_without_failure_shows_the_leaders_reason() -> None:
    """A leader that was paused ended the generation."""
    job = Job().begun()
    job.end_view(110.1, "n0", ViewEnd.PAUSED)
    job.begin(115, 10, "n0", "n1", "n2")
    end = build(job.events).generations[0].end
    assert (end.kind, end.text) == ("unknown", "the leader was paused for longer than its lease")


def test_steps_come_from_the_events_and_the_next_resume() -> None:
    """A generation without a step has no first step, and the one before has no recovery."""
    first, second = build(worker_killed().events).generations
    assert (first.start_step, first.first_step, first.last_step) == (0, 1, 11)
    assert (second.start_step, second.first_step, second.last_step) == (10, 11, 11)
    assert second.end.kind == "open"
    assert (second.recomputed_steps, second.recovery_s) == (None, None)
    job = worker_killed()
    job.events = [item for item in job.events if item["event"] != "step" or item["generation"] == 1]
    first, second = build(job.events).generations
    assert (second.start_step, second.first_step, second.last_step) == (10, None, 10)
    assert first.recovery_s is None


def test_history_sums_over_generations() -> None:
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
    assert report.outcome == "finished"


def test_commit_of_a_restored_state_makes_no_generation() -> None:
    """An empty node commits what it has got from the archive, with the generation that had saved it."""
    job = Job(generation=3)
    job.agents(98, "n0")
    job.begin(100, 12, "n0")
    job.add(101, "commit", "n0", generation=2, step=12)
    job.finish(110, 20)
    report = build(job.events)
    assert [row.number for row in report.generations] == [4]
    assert (report.num_incidents, report.outcome) == (0, "finished")


def test_report_lists_source_and_rejected_states() -> None:
    """It says what a generation started from, what was sent, and what was rejected and why."""
    job = Job().begun()
    job.exit(110.2, 1, signal="SIGSEGV")
    reason = {"kind": "corrupt", "detail": "its digest does not match"}
    source = {"receiving_nodes": ["n1"], "source_node": "n0", "source_generation": 1}
    bad = {"node": "n1", "generation": 1, "step": 10, "reason": reason}
    job.begin(115, 5, "n0", "n1", "n2", rejected=[bad, 7], **source)
    cold, second = build(job.events).generations
    assert (cold.resume_kind, cold.rejected) == ("cold", ())
    assert [(item.node, item.generation, item.step, item.kind) for item in second.rejected] == [
        ("n1", 1, 10, "corrupt")
    ]
    assert (second.source_node, second.source_generation, second.receiving_nodes) == ("n0", 1, ("n1",))
    text = summary.format_text(summary.build_run_report(job.events))
    assert "generation 2: rejected n1's state of generation 1, step 10: its digest" in text
    assert "generation 2: n0 sent its state to n1" in text


def test_generation_that_never_trained_is_a_failure() -> None:
    """Its row has the exception; the steps before it are charged to the generation that ran them."""
    report = build(failed_starts().events)
    assert [(row.end.kind, row.first_step) for row in report.generations] == [("exception", None)] * 2
    text = summary.format_text(summary.build_run_report(failed_starts().events))
    assert "FAILED before its first step after 13 s: node n1 gave up" in text
    job = worker_killed()
    job.restore(130, 130, 0, "n0", "n1", "n2")
    job.events = [
        item for item in job.events if item["t"] < 130 or item["event"] not in {"worker-start", "resume"}
    ]
    job.exit(131, 1, code=1)
    job.begin(135, 10, "n0", "n1", "n2", recomputed_steps=4)
    rows = build(job.events).generations
    assert [row.recomputed_steps for row in rows] == [1, 4, None, None]
    assert rows[1].last_step == 14
    assert rows[2].end.text == "rank 1 on node n1 ended with exit code 1"


def test_reason_of_agents_that_gave_up_is_shown() -> None:
    """No world formed again, so there is no verdict."""
    job = Job().begun()
    for node in ("n0", "n1"):
        job.add(140, "agent-end", node, outcome="failed", exit_code=75, message="no world formed.")
    report = build(job.events)
    assert report.generations[0].end.text == "no world formed"
    assert (report.outcome, report.message) == ("failed", "no world formed.")
    report = build(failed().events)
    assert [row.end.text for row in report.generations] == [f"{NAN_2}: ValueError: loss is nan"] * 2


# ---- the live status -----------------------------------------------------------------------------------


def track(events: list[Event], **limits: int) -> GenerationTracker:
    """Record events one by one, as an agent does."""
    tracker = GenerationTracker(**limits)
    for event in sorted(events, key=lambda item: item["b"] if "b" in item else item["t"]):
        tracker.record_event(event)
    return tracker


@pytest.mark.parametrize(
    "make", [worker_killed, node_killed, exception, node_returns, job_killed, job_stopped]
)
def test_live_status_agrees_with_report(make: Callable[[], Job]) -> None:
    """It records the same events one by one."""
    rows = build(make().events).generations
    assert [
        (item.generation, item.kind, item.cause, item.recomputed_steps, item.recovery_s)
        for item in track(make().events).incidents()
    ] == [
        (row.number, row.end.kind, row.end.text, row.recomputed_steps, row.failure_recovery_s)
        for row in rows
        if row.end.is_failure
    ]


def kills(count: int) -> Job:
    """Kill a worker again and again, each time for two steps; every second recovery takes 1.7 s."""
    job = Job()
    job.begin(90, 0, "n0", "n1", kind="cold")
    for number in range(1, count + 1):
        job.exit(100.0 * number, 1, signal="SIGKILL")
        job.restore(100.0 * number, 100.0 * number, 8, "n0", "n1", recomputed_steps=2)
        job.steps(100.0 * number + 0.7 + number % 2, 9)
    return job


def test_totals_count_dropped_generations() -> None:
    """All incidents count; a bounded number is kept, and repeated lines of dropped ones are ignored."""
    count = 3 * MAX_GENERATIONS
    tracker = track(kills(count).events, max_generations=MAX_GENERATIONS)
    for event in kills(5).events:
        tracker.record_event(event)
    totals = tracker.totals()
    assert totals.incidents == {"signal": count}
    assert totals.recomputed_steps == 2 * count
    assert sum(totals.recovery_buckets) == count
    assert totals.recovery_buckets[RECOVERY_BUCKETS_S.index(1.0)] == count // 2
    assert len(tracker.incidents()) < MAX_GENERATIONS


def test_live_status_of_one_node_counts_its_own_loss() -> None:
    """Only its own log is known: the others' verdict is not in it."""
    events = [event for event in job_killed().events if event["node"] == "n1"]
    (incident,) = track(events).incidents()
    assert (incident.kind, incident.cause) == ("node-lost", "node n1 was lost")
    assert track([event for event in job_stopped().events if event["node"] == "n1"]).incidents() == []


def test_live_status_counts_steps_that_the_resume_did_not_find() -> None:
    """Only rank 0's node has the resume event."""
    events = [event for event in worker_killed().events if event["node"] == "n1"]
    (incident,) = track(events).incidents()
    assert (incident.cause, incident.recomputed_steps) == (KILLED, 0)
    for event in events:
        if event["event"] == "worker-start" and event["generation"] == 2:
            event["step"] = 4
    assert track(events).incidents()[0].recomputed_steps == 6


@pytest.mark.parametrize("node", ["n0", "n1"])
def test_live_status_of_each_node_counts_no_steps_of_a_proof(node: str) -> None:
    """As the report: a resume at step 6 whose proof computes up to step 10 again has lost nothing."""
    job = Job()
    job.begin(90, 0, "n0", "n1", kind="cold")
    job.steps(99, 10)
    job.exit(100.0, 1, signal="SIGKILL")
    job.restore(100.5, 101.0, 6, "n0", "n1", recomputed_steps=0, proves_step=10)
    for event in job.events:
        if event["event"] == "worker-start" and event["generation"] == 2:
            event["kept_step"] = 10
    job.steps(102.0, 7)
    assert build(job.events).recomputed_steps == 0
    assert track([event for event in job.events if event["node"] == node]).totals().recomputed_steps == 0


# ---- clocks --------------------------------------------------------------------------------------------


def stamp(events: list[Event], jumps: dict[str, tuple[float, float]], machines: int = 3) -> list[Event]:
    """Give events CLOCK_BOOTTIME; ``jumps``: from when on the wall clock of a node is how far ahead."""
    stamped = []
    for item in events:
        since, by = jumps.get(item["node"], (0.0, 0.0))
        boot = int(item["node"][1:]) % machines
        b = round(item["t"] - 50 - boot, 3)
        stamped.append(
            {**item, "t": item["t"] + (by if item["t"] >= since else 0), "b": b, "boot": f"b{boot}"}
        )
    return stamped


@pytest.mark.parametrize("by", [-3600.0, 3600.0])
@pytest.mark.parametrize("machines", [1, 3])
def test_wall_clock_that_jumps_changes_no_duration(by: float, machines: int) -> None:
    """Durations come from CLOCK_BOOTTIME; machines are aligned by the generations that they share."""
    good = summary.build_run_report(killed().events)
    jumps = {"n1": (105.0, by), "n2": (112.0, 2 * by)}
    report = summary.build_run_report(stamp(killed().events, jumps, machines)[::-1])
    assert (report.goodput, report.recoveries_s) == (good.goodput, good.recoveries_s)
    assert track(stamp(killed().events, jumps, 1)).incidents()[0].recovery_s == pytest.approx(4.5)


def test_rebooted_machine_is_aligned_by_its_next_generation() -> None:
    """Its boot time restarts at 0, and its wall clock is an hour ahead."""
    good = summary.build_run_report(killed().events)
    again = [
        {**item, "t": item["t"] + 3600, "b": item["t"] - 110.9, "boot": "new"}
        if item["node"] == "n2" and item["t"] >= 111
        else item
        for item in stamp(killed().events, {})
    ]
    report = summary.build_run_report(again)
    assert (report.goodput, report.recoveries_s) == (good.goodput, good.recoveries_s)


def test_silence_on_this_machine_counts_from_boot_time() -> None:
    """The wall clock may jump after the last event."""
    events = stamp(killed().events, {}, 1)
    now = {"boot": "b0", "b": events[-1]["b"] + 5.0}
    for boot, silent_s in (("b0", 5), ("other", 3605)):
        report = summary.build_run_report(
            events, now=events[-1]["t"] + 3605, boot_stamp={**now, "boot": boot}
        )
        assert report.silent_s == pytest.approx(silent_s)


# ---- any input -----------------------------------------------------------------------------------------

_KINDS = (
    *("agent-start", "generation-start", "worker-exit", "agent-end", "resume", "worker-start"),
    *("step", "commit", "failure", "run-end", "busy", "verdict", "rendezvous", "hang"),
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
_REASON = st.fixed_dictionaries({"kind": st.sampled_from(["newcomers", "node-lost", "paused"])})
_FAILURE = st.fixed_dictionaries(
    {"kind": st.just("signal"), "node": st.just("n1"), "cause": _ODD, "rank": _ODD}
)
_FIELDS = {
    "node": st.one_of(st.sampled_from(["n0", "n1", "n2"]), _ODD),
    **dict.fromkeys(("generation", "next_generation", "step", "rank"), st.one_of(st.integers(1, 3), _ODD)),
    **dict.fromkeys(("world_size", "recomputed_steps", "exit_code", "type", "receiving_nodes"), _ODD),
    **dict.fromkeys(("nodes", "joined"), st.one_of(st.lists(st.sampled_from(["n0", "n1", "n2"])), _ODD)),
    "reason": st.one_of(_REASON, _ODD),
    "what": st.sampled_from(["view-ended", "waiting"]),
    "rejected": st.one_of(st.lists(st.dictionaries(st.sampled_from(["node", "reason", "step"]), _ODD)), _ODD),
    "outcome": st.one_of(st.sampled_from(["done", "failed", "signalled"]), _ODD),
    "message": st.one_of(st.just(GLOO), _ODD),
    "signal": st.one_of(st.just("SIGKILL"), _ODD),
    "stopped": st.booleans(),
    "root_causes": st.one_of(st.lists(_FAILURE), _ODD),
    "secondary_failures": st.one_of(st.lists(_FAILURE), _ODD),
}
_EVENTS = st.fixed_dictionaries(
    {"t": st.one_of(st.floats(0, 100), _ODD), "event": st.one_of(st.sampled_from(_KINDS), _ODD)},
    optional=_FIELDS,
)


@pytest.mark.slow
@settings(max_examples=int(os.environ.get("ELASTIC_RESUME_FUZZ_CASES", "60")), deadline=None)
@given(st.lists(_EVENTS, max_size=25))
def test_any_list_of_events_gives_a_report(events: list[Event]) -> None:
    """Nothing raises, no number is negative, no line is too wide, and the JSON is valid."""
    told = summary.build_run_report(events)
    assert all(item.recovery_s is None or item.recovery_s >= 0 for item in told.history.generations)
    assert all(len(line) <= WIDTH and line.isprintable() for line in summary.format_text(told).splitlines())
    assert told.goodput.total_s == pytest.approx(sum(spent for _, spent in told.goodput.parts))
    json.loads(summary.format_json(told))
    assert html.render_page(told).endswith("</html>\n")
    tracker = GenerationTracker(2, 2)
    for event in events:
        tracker.record_event(event)
    tracker.totals()


def test_malformed_fields_are_ignored() -> None:
    """A disk may return anything, in each field of each event."""
    malformed: list[Any] = [None, -1, "x", [], {}, 10**400, 1e300, float("nan"), [{"kind": "signal"}], [[]]]
    tracker = GenerationTracker()
    for event, value in itertools.product(worker_killed().events, malformed):
        for key in event:
            if key != "event":
                tracker.record_event({**event, key: value})
    assert tracker.totals()


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([worker_killed, node_killed, exception, node_returns]), st.randoms())
def test_order_of_lines_does_not_matter(story: Callable[[], Job], random: Any) -> None:
    """Logs of several nodes are merged by time."""
    events = story().events
    shuffled = list(events)
    random.shuffle(shuffled)

    def ends(rows: tuple[GenerationRow, ...]) -> list[str]:
        return [item.end.text for item in rows]

    assert ends(build(shuffled).generations) == ends(build(events).generations)


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


def test_long_texts_are_cut_in_the_table_and_complete_below() -> None:
    """Control characters do not reach the terminal; a thousand names are folded as Slurm does."""
    nodes = tuple(f"gpu{number:04}" for number in range(1000) if number != 500)
    job = Job()
    job.begin(100, 0, *nodes, kind="cold")
    job.fail(110.2, 1, "ValueError", "\x1b[2J" + "far too long " * 12 + "THE END")
    job.begin(115, 10, *nodes)
    text = summary.format_text(summary.build_run_report(job.events))
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "..." in text
    assert "THE END" in text
    assert "\x1b" not in text
    assert "gpu[0000-0499,0501-0999]" in text
