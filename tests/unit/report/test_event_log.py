"""Test that wall clocks that jump or differ change no duration: these come from CLOCK_BOOTTIME."""

from __future__ import annotations

import pytest

from elastic_resume.events import Event
from elastic_resume.report import summary
from tests.support.report_runs import Job, killed

NODES = ("n0", "n1", "n2")


def steady(nodes: int) -> list[Event]:
    """Return sixty steps of a second each; each node's lines are in the order of writing."""
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
    for item in events:
        since, by = jumps.get(item["node"], (0.0, 0.0))
        boot = boots[item["node"]]
        b = round(item["t"] - 50 - len(boot), 3)
        made.append({**item, "t": item["t"] + (by if item["t"] >= since else 0), "b": b, "boot": boot})
    return made


@pytest.mark.parametrize("by", [-3600.0, 3600.0])
@pytest.mark.parametrize("nodes", [1, 2, 3])
@pytest.mark.parametrize("machines", [1, 3])
def test_jumping_wall_clock_changes_no_duration(nodes: int, by: float, machines: int) -> None:
    """Each node's clock jumps at another moment, and lines come in any order."""
    boots = {name: f"boot-{'x' * (place % machines)}" for place, name in enumerate(NODES)}
    jumps = {name: (110.0 + 9 * place, by * (place + 1)) for place, name in enumerate(NODES)}
    good = summary.build_run_report(steady(nodes))
    events = stamped(steady(nodes), boots, jumps)
    report = summary.build_run_report(events)
    assert report.goodput == good.goodput
    assert (report.end_t or 0) - (report.start_t or 0) == pytest.approx(
        (good.end_t or 0) - (good.start_t or 0)
    )
    assert summary.build_run_report(sorted(events, key=lambda item: item["t"])).goodput == good.goodput
    assert {clock.node for clock in report.clocks} >= {*NODES[:nodes]} - {"n0"}
    assert all(abs(clock.ahead_s) >= 3600 for clock in report.clocks)


@pytest.mark.parametrize("by", [-3600.0, -2.5, 4.0, 86400.0])
def test_wrong_wall_clock_changes_nothing_and_is_reported(by: float) -> None:
    """Machines are aligned by shared generations; most wall clocks are right."""
    boots = {name: f"boot of {name}" for name in NODES}
    good = summary.build_run_report(stamped(killed().events, boots, {}))
    report = summary.build_run_report(stamped(killed().events, boots, {"n2": (0.0, by)}))
    assert [(clock.node, clock.ahead_s) for clock in report.clocks] == [("n2", by)]
    assert (report.goodput, report.history) == (good.goodput, good.history)
    assert any("the clock of n2 was" in look for look in report.verdict.hints)
    assert good.clocks == ()


def test_rebooted_machine_is_aligned_by_its_next_generation() -> None:
    """Its boot time restarts at 0, and its wall clock is an hour ahead."""
    boots = {name: f"boot of {name}" for name in NODES}
    good = summary.build_run_report(killed().events)
    again = [
        {**item, "t": item["t"] + 3600, "b": item["t"] - 110.9, "boot": "new"}
        if item["node"] == "n2" and item["t"] >= 111
        else item
        for item in stamped(killed().events, boots, {})
    ]
    report = summary.build_run_report(again)
    assert (report.goodput, report.recoveries) == (good.goodput, good.recoveries)
    assert [clock.node for clock in report.clocks] == ["n2"]


def test_machines_without_shared_generation_keep_wall_clocks() -> None:
    """Events without a boot keep their times too."""
    events = [item for item in steady(2) if item["event"] != "round"]
    plain = summary.build_run_report(events)
    booted = summary.build_run_report(stamped(events, {"n0": "one", "n1": "two"}, {}))
    assert (booted.goodput, booted.clocks) == (plain.goodput, ())


def test_silence_on_this_machine_counts_from_boot_time() -> None:
    """The wall clock may jump after the last event."""
    events = stamped(steady(1), {"n0": "boot"}, {})
    stamp = {"boot": "boot", "b": events[-1]["b"] + 5.0}
    assert summary.build_run_report(
        events, now=events[-1]["t"] + 3605, boot_stamp=stamp
    ).silent_s == pytest.approx(5)
    assert summary.build_run_report(
        events, now=events[-1]["t"] + 7, boot_stamp={**stamp, "boot": "x"}
    ).silent_s == pytest.approx(7)
