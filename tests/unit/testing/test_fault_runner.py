"""The course of faults, on processes that this one stands for: whom they hit, how often and for how long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elastic_resume import constants, failpoints
from elastic_resume.errors import UsageError
from elastic_resume.testing.cluster import Cluster
from elastic_resume.testing.fault_runner import DONE, FaultInjector
from elastic_resume.testing.faults import Fault
from elastic_resume.testing.triggers import FailpointController
from elastic_resume.testing.virtual_network import NodePair, SilencedLinks


class Nodes:
    """Three nodes with a rank each, at step 9; the middle one has no checkpoint, and n0 leads."""

    def __init__(self, directory: Path) -> None:
        self.run_dir = directory
        self.nodes = [SimpleNamespace(name=f"n{index}", alive=True, agent=None) for index in range(3)]
        self.workers_per_node = 1
        self.failpoints = FailpointController(directory / "armed")
        self.done: list[tuple[object, ...]] = []
        self.silence = SilencedLinks([0] * 3)
        self.network = SimpleNamespace(silence_links=self.hold)

    def rank_progress(self) -> list[tuple[int, Any]]:
        """Tell that each rank has finished step 9."""
        worker = [SimpleNamespace(rank=index, pid=index) for index in range(3)]
        return [
            (index, SimpleNamespace(generation=1, step=9, worker=worker[index], local_rank=0))
            for index in range(3)
        ]

    def events(self, _: str) -> list[dict[str, str]]:
        """Tell who leads."""
        return [{"what": "leading", "node": "n0"}]

    def corrupt(self, index: int, fraction: float) -> None:
        """Note it."""
        if index == 1:
            raise UsageError("n1 has no checkpoint.")
        self.done.append(("flip", index, fraction))

    def kill_agent(self, index: int) -> None:
        """Note it."""
        self.done.append(("kill", index))

    def hold(self, pairs: set[NodePair]) -> Callable[[], None]:
        """Silence links as `Namespaces` does."""
        held = frozenset(pairs)
        self.silence.temporary_cuts.append(held)
        return lambda: self.silence.temporary_cuts.remove(held)

    def limit_rate(self, index: int, bytes_per_s: float) -> None:
        """Note it."""
        self.done.append(("rate", index, bytes_per_s))

    def start_node(self, index: int) -> None:
        """Let it be up again."""
        self.nodes[index].agent = None
        self.done.append(("start", index))

    def wipe(self, index: int) -> None:
        """Fail as a disk that is gone does."""
        raise FileNotFoundError(f"no disk {index}")

    def kill_node(self, index: int) -> None:
        """Note it."""
        self.done.append(("kill", index))


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    """Nodes, of which this process is rank 1 on n1."""
    made = Nodes(tmp_path)
    known = {"RANK": "1", constants.ENV_LOCAL_RANK: "0", constants.ENV_NODE_NAME: "n1"}
    for name, value in {**made.failpoints.env, **known}.items():
        monkeypatch.setenv(name, value)
    failpoints.arm()
    yield made
    monkeypatch.undo()
    failpoints.arm()


class Clock:
    """The time of a course, which stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        """Tell it."""
        return self.now

    def time(self) -> float:
        """Tell that of the world."""
        return time.time()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Let no fault end because this process had to wait for a processor."""
    made = Clock()
    monkeypatch.setattr("elastic_resume.testing.fault_runner.time", made)
    return made


def course_of(nodes: Nodes, *faults: Fault) -> FaultInjector:
    """Begin a course of ``faults``."""
    course = FaultInjector(cast("Cluster", nodes), faults)
    course.poll()
    return course


def test_a_slow_rank_is_slow_for_its_time(nodes: Nodes, clock: Clock) -> None:
    """At each step, also when it has been seen that it is."""
    course = course_of(nodes, Fault("slow-rank", rank=1, step=5, delay_s=0.02, for_s=60))
    slow = []
    for step in range(5, 9):
        began = time.monotonic()
        failpoints.hit("step", step)
        slow.append(time.monotonic() - began >= 0.02)
        course.poll()
    assert slow == [True] * 4
    assert not course.is_idle
    clock.now += 60
    course.poll()
    assert course.is_idle


@pytest.mark.parametrize(
    ("fault", "point"),
    [
        (Fault("corrupt-message", node=1, sender="peer", step=5), "rendezvous.line"),
        (Fault("raise", node=1, phase="in copy", step=5), "snapshot.copying"),
    ],
)
def test_what_has_a_step_comes_at_points_that_know_of_none(nodes: Nodes, fault: Fault, point: str) -> None:
    """As soon as the job has come so far."""
    course = course_of(nodes, fault)
    try:
        spoilt = failpoints.mutate(point, b"abc") != b"abc"
    except RuntimeError:
        spoilt = True
    course.poll()
    assert spoilt
    assert (course.outcomes[0].state, course.outcomes[0].rank) == (DONE, 1)  # whomever the plan names


def test_all_are_hit_once_but_those_that_are_not_there(nodes: Nodes) -> None:
    """Else the first would be hit again in each look, until the last one is there."""
    course = course_of(nodes, Fault("bit-flip", role="all", step=3))
    for _ in range(5):
        course.poll()
    assert [done[:2] for done in nodes.done] == [("flip", 0), ("flip", 2)]
    assert (course.outcomes[0].state, course.outcomes[0].nodes) == (DONE, ("n0", "n2"))


def test_a_fault_that_fails_ends_nothing(nodes: Nodes) -> None:
    """It is told, and the next one comes."""
    course = course_of(nodes, Fault("wipe-disk", node=0, step=1), Fault("kill-agent", node=2, step=1))
    assert "no disk 0" in course.outcomes[0].reason
    assert course.outcomes[1].state == DONE


def at(point: str, meanwhile: Callable[[], object]) -> None:
    """Pass a point, in a thread, while something else is done again and again."""
    thread = threading.Thread(target=failpoints.hit, args=(point,))
    thread.start()
    while thread.is_alive():
        meanwhile()
        time.sleep(0.001)


def test_who_is_not_meant_is_not_held_at_the_point_of_a_phase(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader in a commit is not somebody else in one; and nobody waits ten seconds for another to be."""
    monkeypatch.setattr(failpoints, "MAX_WAIT_S", 60.0)  # longer than this process may stand still
    course = course_of(nodes, Fault("kill-agent", role="leader", phase="in commit"))
    began = time.monotonic()
    at("commit.after-data", course.poll)
    assert time.monotonic() - began < failpoints.MAX_WAIT_S
    assert (course.pending, nodes.done) == (course.outcomes, [])  # armed again, where another look came first
    course.close()
    course = course_of(nodes, Fault("bit-flip", node=1, phase="in commit"))
    at("commit.after-data", course.poll)
    assert (course.pending, course.outcomes[0].reason) == (course.outcomes, "n1 has no checkpoint.")


def test_a_rank_is_hit_in_its_own_phase(nodes: Nodes) -> None:
    """And not when any other comes by."""
    course = course_of(nodes, Fault("kill-worker", rank=2, phase="in copy"))
    failpoints.hit("snapshot.copying")
    course.poll()
    assert nodes.failpoints.read_fired("f1") is None
    assert course.outcomes[0].state != DONE


def test_a_link_works_when_all_that_silences_it_is_over(nodes: Nodes, clock: Clock) -> None:
    """Cuts of both of its ends, and a partition between them."""
    course = course_of(
        nodes,
        Fault("cut-out", node=1, at_s=0, for_s=2),
        Fault("partition", groups=((0, 1), (2,)), at_s=0, for_s=4),
        Fault("cut", node=0, at_s=0, for_s=10),
    )
    cut = {(0, 1), (1, 0), (0, 2), (2, 0)}
    assert nodes.silence.silent_pairs() == cut | {(1, 2), (2, 1)}
    clock.now = 4
    course.poll()
    assert nodes.silence.silent_pairs() == cut
    course.close()
    assert nodes.silence.silent_pairs() == set()


def test_a_link_stays_slow_for_as_long_as_any_says(nodes: Nodes, clock: Clock) -> None:
    """As slow as the newest of those that last says; also when its node has been started again."""
    course = course_of(
        nodes,
        Fault("slow-link", node=1, at_s=0, bytes_per_s=5, for_s=10),
        Fault("slow-link", node=1, at_s=0, bytes_per_s=7, for_s=2),
        Fault("kill-node", node=1, at_s=0, back_after_s=3),
    )
    nodes.nodes[1].agent = SimpleNamespace(poll=lambda: -9)
    for clock.now in (1, 2, 3, 4):  # since the look at 1 it is known that the node is down
        course.poll()
    course.close()
    rates = [("rate", 1, rate) for rate in (5, 7, 5, 5, 0)]
    assert nodes.done == [*rates[:2], ("kill", 1), rates[2], ("start", 1), *rates[3:]]
