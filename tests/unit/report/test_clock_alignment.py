"""A wall clock that jumps by hours costs a report nothing: durations come from CLOCK_BOOTTIME."""

from __future__ import annotations

import pytest

from elastic_resume.events import Event
from elastic_resume.report import summary
from tests.support.report_runs import Job, killed

NODES = ("n0", "n1", "n2")


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
    """Not where each node's clock jumps at another moment, nor in whatever order the lines are read."""
    boots = {name: f"boot-{'x' * (place % machines)}" for place, name in enumerate(NODES)}
    jumps = {name: (110.0 + 9 * place, by * (place + 1)) for place, name in enumerate(NODES)}
    good = summary.build_run_report(steady(nodes))
    events = stamped(steady(nodes), boots, jumps)
    told = summary.build_run_report(events)
    assert told.goodput == good.goodput
    assert (told.end_t or 0) - (told.start_t or 0) == pytest.approx((good.end_t or 0) - (good.start_t or 0))
    assert summary.build_run_report(sorted(events, key=lambda one: one["t"])).goodput == good.goodput
    assert {clock.node for clock in told.clocks} >= {*NODES[:nodes]} - {"n0"}
    assert all(abs(clock.ahead_s) >= 3600 for clock in told.clocks)


@pytest.mark.parametrize("by", [-3600.0, -2.5, 4.0, 86400.0])
def test_a_clock_that_is_off_moves_nothing_and_is_told(by: float) -> None:
    """Machines are laid side by side by the generations they share; most of their wall clocks are right."""
    boots = {name: f"boot of {name}" for name in NODES}
    good = summary.build_run_report(stamped(killed().events, boots, {}))
    told = summary.build_run_report(stamped(killed().events, boots, {"n2": (0.0, by)}))
    assert [(clock.node, clock.ahead_s) for clock in told.clocks] == [("n2", by)]
    assert (told.goodput, told.history) == (good.goodput, good.history)
    assert any("the clock of n2 was" in look for look in told.verdict.hints)
    assert good.clocks == ()


def test_a_machine_that_booted_again_is_placed_by_its_next_generation() -> None:
    """It counts from nothing, with a wall clock that is an hour ahead until somebody sets it."""
    boots = {name: f"boot of {name}" for name in NODES}
    good = summary.build_run_report(killed().events)
    again = [
        {**one, "t": one["t"] + 3600, "b": one["t"] - 110.9, "boot": "new"}
        if one["node"] == "n2" and one["t"] >= 111
        else one
        for one in stamped(killed().events, boots, {})
    ]
    told = summary.build_run_report(again)
    assert (told.goodput, told.recoveries) == (good.goodput, good.recoveries)
    assert [clock.node for clock in told.clocks] == ["n2"]


def test_machines_that_share_no_generation_keep_their_wall_clocks() -> None:
    """As do events that say of no boot."""
    events = [one for one in steady(2) if one["event"] != "round"]
    plain = summary.build_run_report(events)
    booted = summary.build_run_report(stamped(events, {"n0": "one", "n1": "two"}, {}))
    assert (booted.goodput, booted.clocks) == (plain.goodput, ())


def test_a_run_on_this_machine_is_silent_for_as_long_as_its_boot_says() -> None:
    """Though the wall clock jumps after its last event."""
    events = stamped(steady(1), {"n0": "boot"}, {})
    stamp = {"boot": "boot", "b": events[-1]["b"] + 5.0}
    assert summary.build_run_report(
        events, now=events[-1]["t"] + 3605, boot_stamp=stamp
    ).silent_s == pytest.approx(5)
    assert summary.build_run_report(
        events, now=events[-1]["t"] + 7, boot_stamp={**stamp, "boot": "x"}
    ).silent_s == pytest.approx(7)
