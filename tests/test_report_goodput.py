"""Where the time of made-up runs went, and how long each phase of their recoveries took."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_resume.events import Event
from elastic_resume.report import clocks, goodput, incidents, story
from tests.test_report_incidents import Job, job_killed, node_killed, node_returns, worker_killed


def run(*steps: Any) -> Job:
    """Three nodes that were ready after 8 s; world at 98, state at 100, a step each second from 101 on."""
    job = Job()
    job.agents(90, "n0", "n1", "n2")
    for node in ("n0", "n1", "n2"):
        job.add(95, "zygote-ready", node, seconds=5.0)
    begin(job, 98, 100, 0, kind="cold", seconds=0.5)
    march(job, 101, *steps)
    return job


def begin(job: Job, formed: float, restored: float, step: int, **resume: Any) -> None:
    """A generation whose workers know of it at ``formed`` and have their state at ``restored``."""
    job.generation += 1
    job.nodes = ("n0", "n1", "n2")
    about = {"generation": job.generation, "step": step, "world_size": 3}
    told = {"kind": "checkpoint", "nodes": list(job.nodes), "lost_steps": 0, "lacking": [], "rejected": []}
    for rank, node in enumerate(job.nodes):
        job.add(formed, "round", node, round=1, generation=job.generation)
        job.add(restored, "worker-start", node, **about, rank=rank, **job.pid(rank))
    job.add(restored, "resume", "n0", **{**told, **about, "rank": 0, **resume})


def march(job: Job, t: float, *steps: int) -> None:
    """One step after the other, a second each, marked by all ranks."""
    for index, step in enumerate(steps):
        job.steps(t + index, step)


def killed() -> Job:
    """Rank 1 is killed half a second after step 10; step 9 and 10 are run again from 115 on."""
    job = run(*range(1, 11))
    job.exit(110.5, 1, signal="SIGKILL")
    job.add(110.6, "rendezvous", "n0", what="restart", message="")
    job.stop(110.8, 0, 2)
    begin(job, 111, 114, 8, seconds=1.0, lost_steps=2)
    march(job, 115, *range(9, 21))
    job.finish(127, 20)
    return job


def test_the_parts_of_a_run() -> None:
    """Each second is where one would look for it."""
    told = story.tell(killed().events)
    assert told.goodput == goodput.Goodput(
        total_s=37.0,
        productive_s=8.0 + 12.0 + 1.0,  # steps 1 to 8 and 9 to 20, and what came before the end
        starting_s=5.0 + 1.5 + 2.0,  # imports; then from the world to the state, in both generations
        restoring_s=0.5 + 1.0,
        stalled_s=0.0,
        repeated_s=2.0 + 0.5,  # and the half of a step that was cut off
        waiting_s=3.0 + 0.5,  # for others at first; from the kill to the next world
    )


def test_the_phases_of_a_recovery() -> None:
    """From the last step before to the first one after, without a gap."""
    told = story.tell(killed().events)
    (phases,) = told.recoveries.values()
    assert phases.known == [
        ("noticed", 0.5),
        ("stopped", pytest.approx(0.3)),
        ("formed", pytest.approx(0.2)),
        ("started", 2.0),
        ("restored", 1.0),
        ("step", 1.0),
    ]
    assert phases.total_s == pytest.approx(5.0)
    # What that cost is another thing: two steps and a half were lost too, and a step is no loss.
    assert told.costs == {1: pytest.approx(5.0 + 2.0 + 0.5 - 0.5 - 1.0)}


def test_failures_without_a_step_between_them_cost_until_the_next_step() -> None:
    """The first of them is charged with it all."""
    job = run(*range(1, 11))
    job.exit(110, 1, signal="SIGKILL")
    job.stop(110.2, 0, 2)
    begin(job, 111, 114, 10, seconds=1.0)
    job.exit(115, 1, signal="SIGKILL")
    job.stop(115.2, 0, 2)
    begin(job, 116, 119, 10, seconds=1.0)
    march(job, 120, *range(11, 21))
    job.finish(130, 20)
    told = story.tell(job.events)
    assert told.costs == {1: pytest.approx(119.0 - 110.0)}
    assert "2 failures cost 9.0 s" in told.verdict.text


def test_generations_that_end_before_a_second_mark_have_trained() -> None:
    """Ranks mark the first step and then one in five seconds; each next generation tells the last step."""
    job = run(1)
    for began in (104, 112, 120):
        job.exit(began, 1, signal="SIGKILL")
        job.stop(began + 0.2, 0, 2)
        step = (began - 104) // 8 * 3 + 3
        begin(job, began + 1, began + 4, step, seconds=1.0)
        job.steps(began + 5, step + 1)
    job.exit(127, 1, signal="SIGKILL")
    job.stop(127.2, 0, 2)
    # Three steps each, of 1.5 s at the most: what lies between the first mark and the end.
    assert story.tell(job.events).goodput.productive_s > 3 * 3.0


def test_a_failure_after_which_nobody_trained_costs_until_the_end() -> None:
    """A job that gives up, or is drained while it is down."""
    job = run(*range(1, 11))
    job.exit(110, 1, signal="SIGKILL")
    job.stop(130.0, 0, 2)
    assert story.tell(job.events).costs == {1: pytest.approx(130.0 - 110.0)}


def test_waiting_for_copies_is_no_training() -> None:
    """Workers say how long they waited; the one that waited longest kept the others."""
    job = killed()
    for one in job.events:
        if one["event"] == "step":
            one["stalled_s"] = 0.1 * one["step"] * (1 + one["rank"]) if one["generation"] == 1 else 0.0
    spent = story.tell(job.events).goodput
    assert (spent.stalled_s, spent.productive_s, spent.total_s) == (3.0, 18.0, 37.0)


def test_a_step_that_hangs_is_not_training() -> None:
    """Nothing was done from the last step until the watch killed."""
    job = run(*range(1, 11))
    job.exit(150, 1, signal="SIGKILL")
    job.stop(150.2, 0, 2)
    begin(job, 151, 152, 10, seconds=0.5)
    march(job, 153, 11, 12, 13)
    job.finish(155, 13)
    spent = story.tell(job.events).goodput
    assert spent.productive_s == 13.0
    assert spent.repeated_s == 1.0  # as much as a step may have taken
    assert spent.waiting_s == 3.0 + 39.0 + 1.0


def test_a_lineage_that_was_left_counts_for_nothing() -> None:
    """The third generation begins before the second one's first step: all that one did is repeated."""
    job = run(*range(1, 11))
    job.exit(110, 1, signal="SIGKILL")
    begin(job, 111, 112, 10, seconds=0.5)
    march(job, 113, 11, 12)
    job.exit(114, 1, signal="SIGKILL")
    begin(job, 115, 116, 4, seconds=0.5, lost_steps=8)
    march(job, 117, *range(5, 16))
    job.finish(127, 15)
    told = story.tell(job.events)
    assert told.goodput.productive_s == 4.0 + 11.0
    assert told.goodput.repeated_s == 6.0 + 2.0
    assert [one.what for one in told.slices if one.generation == 2 and one.what == "productive"] == []


def test_the_hour_in_which_nobody_ran_is_waiting() -> None:
    """A job that was killed as a whole and started again."""
    spent = story.tell(job_killed().events).goodput
    assert spent.waiting_s > 3500
    assert spent.total_s == pytest.approx(3620.5)


@pytest.mark.parametrize("make", [worker_killed, node_killed, node_returns, job_killed, killed])
def test_split_alone_says_the_same(make: Callable[[], Job]) -> None:
    """For those who have a report and its events."""
    events = make().events
    assert goodput.split(incidents.tell(events), events) == story.tell(events).goodput


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([killed, worker_killed, node_returns, job_killed]), st.randoms(), st.floats(0, 1))
def test_slices_have_no_gap_whatever_is_missing(make: Callable[[], Job], random: Any, share: float) -> None:
    """Events that are lost move time from one part to another, and never out of the whole."""
    events = [one for one in make().events if random.random() > share]
    told = story.tell(events)
    for one, following in zip(told.slices, told.slices[1:], strict=False):
        assert one.began < one.until == following.began
    assert told.goodput.total_s == pytest.approx(sum(spent for _, spent in told.goodput.parts))
    assert all(spent >= 0 for _, spent in told.goodput.parts)
    assert all(value >= 0 for phases in told.recoveries.values() for _, value in phases.known)


# ---- clocks --------------------------------------------------------------------------------------------


def moved(events: list[Event], node: str, by: float, since: float = 0.0) -> list[Event]:
    """The same, with a node's clock ``by`` seconds ahead from ``since`` on."""
    return [
        {**one, "t": round(one["t"] + by, 3)} if one["node"] == node and one["t"] >= since else one
        for one in events
    ]


@pytest.mark.parametrize("by", [-3600.0, -2.5, 4.0, 86400.0])
def test_a_clock_that_is_off_is_set_right_and_told(by: float) -> None:
    """Where the nodes' marks of the same steps lie apart; the report is that of good clocks."""
    good = story.tell(killed().events)
    told = story.tell(moved(killed().events, "n2", by))
    assert [(clock.node, clock.ahead_s, clock.jumped) for clock in told.clocks] == [("n2", by, False)]
    assert told.goodput == good.goodput
    assert told.report == good.report
    assert any("the clock of n2 was" in look for look in told.verdict.look)


def test_a_clock_that_jumps_is_followed() -> None:
    """From the first mark on that shows it."""
    good = story.tell(killed().events)
    told = story.tell(moved(killed().events, "n0", -600.0, since=104.0))
    assert [(clock.node, clock.ahead_s, clock.jumped) for clock in told.clocks] == [("n0", -600.0, True)]
    assert told.goodput == good.goodput


def steady(nodes: int) -> list[Event]:
    """Sixty steps of a second each; every node's lines in the order in which it wrote them."""
    job = Job()
    job.nodes, job.generation = tuple(f"n{rank}" for rank in range(nodes)), 1
    about = {"generation": 1, "step": 0, "world_size": nodes}
    for rank, node in enumerate(job.nodes):
        job.agents(100, node)
        job.add(101, "round", node, round=1, generation=1)
        job.add(102, "worker-start", node, **about, rank=rank, **job.pid(rank))
    for step in range(1, 61):
        job.steps(102 + step, step)
    job.finish(162, 60)
    return job.events


def set_at(events: list[Event], place: int, by: float, before: bool) -> list[Event]:
    """The same, where the clock of the last node is off from its line ``place`` on, or before that."""
    node = max(one["node"] for one in events)
    places = [index for index, one in enumerate(events) if one["node"] == node]
    chosen = set(places[:place] if before else places[place:])
    return [{**one, "t": one["t"] + by} if index in chosen else one for index, one in enumerate(events)]


@pytest.mark.parametrize("nodes", [1, 2, 3])
@pytest.mark.parametrize(("place", "before"), [(1, True), (30, False), (30, True), (63, False)])
def test_a_clock_that_is_set_back_is_seen_in_its_own_log(nodes: int, place: int, before: bool) -> None:
    """Before, among and after the marks that nodes share; and the node that is blamed is the right one."""
    good = story.tell(steady(nodes)).goodput
    told = story.tell(set_at(steady(nodes), place, 3600.0 if before else -3600.0, before))
    assert [clock.node for clock in told.clocks] == [f"n{nodes - 1}"]
    assert told.goodput.total_s == pytest.approx(good.total_s, abs=3)
    assert told.goodput.productive_s == pytest.approx(good.productive_s, abs=3)


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_a_node_that_starts_in_1970_waits_for_no_half_a_century(nodes: int) -> None:
    """Its first line, before its clock was set; a node that comes back after a year was away that long."""
    events = [{**one, "t": one["t"] + 1.8e9} for one in steady(nodes)]
    good = story.tell(events).goodput
    first = max(place for place, one in enumerate(events) if one["event"] == "agent-start")
    told = story.tell([{**one, "t": 37.5} if place == first else one for place, one in enumerate(events)])
    assert told.goodput.total_s == pytest.approx(good.total_s, abs=2)
    assert told.clocks[0].text.endswith("days behind the rest of its own log")
    year = 365 * 86400.0
    left = [one for one in events if one["event"] not in {"run-end", "agent-end"}]
    again = [
        {**one, "t": one["t"] + year, **({"generation": 2} if "generation" in one else {})} for one in events
    ]
    assert story.tell([*left, *again]).goodput.total_s == pytest.approx(year + good.total_s)


def stamped(events: list[Event], boots: dict[str, str], jumps: dict[str, tuple[float, float]]) -> list[Event]:
    """The same, with a clock that does not jump beside one that, from a moment on, is seconds ahead.

    ``boots``: each node's. ``jumps``: by node, when its wall clock jumps and by how much.
    """
    made = []
    for one in events:
        since, by = jumps.get(one["node"], (0.0, 0.0))
        boot = boots[one["node"]]
        b = round(one["t"] - 50 - len(boot), 3)
        made.append({**one, "t": one["t"] + (by if one["t"] >= since else 0), "b": b, "boot": boot})
    return made


@pytest.mark.parametrize("by", [-3600.0, 3600.0])
@pytest.mark.parametrize("nodes", [1, 2, 3])
@pytest.mark.parametrize("machines", [1, 3])
def test_a_clock_that_jumps_lengthens_nothing(nodes: int, by: float, machines: int) -> None:
    """Not where each node's clock jumps at another moment: durations come from the machines' boots."""
    names = ["n0", "n1", "n2"]
    boots = {name: f"boot-{'x' * (place % machines)}" for place, name in enumerate(names)}
    jumps = {name: (110.0 + 9 * place, by * (place + 1)) for place, name in enumerate(names)}
    good = story.tell(steady(nodes))
    told = story.tell(stamped(steady(nodes), boots, jumps))
    assert told.goodput == good.goodput
    assert (told.until or 0) - (told.began or 0) == pytest.approx((good.until or 0) - (good.began or 0))
    by_clock = sorted(stamped(steady(nodes), boots, jumps), key=lambda one: one["t"])
    assert story.tell(by_clock).goodput == good.goodput
    assert {clock.node for clock in told.clocks} >= {*names[:nodes]} - {"n0"}
    assert all(clock.jumped or abs(clock.ahead_s) >= 3600 for clock in told.clocks)


def test_two_boots_are_not_compared() -> None:
    """A machine that boots again counts from nothing; its nodes' steps say when that was."""
    events = steady(2)
    again = [one for one in events if one["node"] == "n1" and one["t"] > 130]
    plain = story.tell(events)
    both = stamped(events, {"n0": "one", "n1": "two"}, {})
    booted = [{**one, "b": one["t"] - 125.0, "boot": "new"} if old in again else one
              for one, old in zip(both, events, strict=True)]  # fmt: skip
    assert story.tell(booted).goodput == plain.goodput
    assert story.tell(booted).clocks == ()


def test_a_run_on_this_machine_is_silent_for_as_long_as_its_boot_says() -> None:
    """Though the wall clock jumps after its last event."""
    events = stamped(steady(1), {"n0": "boot"}, {})
    stamp = {"boot": "boot", "b": events[-1]["b"] + 5.0}
    assert story.tell(events, now=events[-1]["t"] + 3605, stamp=stamp).silent_s == pytest.approx(5)
    assert story.tell(
        events, now=events[-1]["t"] + 7, stamp={**stamp, "boot": "x"}
    ).silent_s == pytest.approx(7)


def test_clocks_that_differ_by_little_are_left_alone() -> None:
    """Steps are not exact either; nor does one late mark make a clock."""
    events = moved(killed().events, "n1", 0.6)
    late = next(one for one in events if one["node"] == "n2" and one["event"] == "step")
    late["t"] += 7.0
    assert clocks.straighten(events) == (events, ())
