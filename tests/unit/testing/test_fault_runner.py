"""The fault injector on fake nodes: targets, repetitions and durations of faults."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elastic_resume import constants, failpoints
from elastic_resume.errors import UsageError
from elastic_resume.failpoints import FailpointController
from elastic_resume.testing import fault_runner
from elastic_resume.testing.cluster import Cluster
from elastic_resume.testing.fault_runner import ARMED, DONE, WAITING, FaultInjector
from elastic_resume.testing.faults import KINDS, NODE, Fault
from elastic_resume.testing.virtual_network import NodePair


class Nodes:
    """Three nodes with a rank each, at step 9; n1 has no checkpoint, and n0 is the leader."""

    def __init__(self, directory: Path) -> None:
        self.run_dir = directory
        self.nodes = [SimpleNamespace(name=f"n{index}", alive=True, agent=None) for index in range(3)]
        self.workers_per_node = 1
        self.failpoints = FailpointController(directory / "armed")
        self.done: list[tuple[object, ...]] = []
        self.silences: list[frozenset[NodePair]] = []
        self.network = SimpleNamespace(silence_links=self.hold)

    def rank_progress(self) -> list[tuple[int, Any]]:
        """Report that each rank has finished step 9."""
        worker = [SimpleNamespace(rank=index, pid=index) for index in range(3)]
        return [
            (index, SimpleNamespace(generation=1, step=9, worker=worker[index], local_rank=0))
            for index in range(3)
        ]

    def events(self, _: str) -> list[dict[str, str]]:
        """Report the leader."""
        return [{"what": "leading", "node": "n0"}]

    def corrupt(self, index: int) -> None:
        """Record the call."""
        if index == 1:
            raise UsageError("n1 has no checkpoint.")
        self.done.append(("flip", index))

    def kill_agent(self, index: int) -> None:
        """Record the call."""
        self.done.append(("kill", index))

    def hold(self, pairs: set[NodePair]) -> Callable[[], None]:
        """Silence links as `VirtualNetwork` does."""
        held = frozenset(pairs)
        self.silences.append(held)
        return lambda: self.silences.remove(held)

    def silent_pairs(self) -> set[NodePair]:
        """Return the pairs between which a fault silences the link."""
        return set().union(*self.silences)

    def start_node(self, index: int) -> None:
        """Record the call; the node is up again."""
        self.nodes[index].agent = None
        self.done.append(("start", index))

    def wipe(self, index: int) -> None:
        """Fail like a missing disk."""
        raise FileNotFoundError(f"no disk {index}")

    def kill_node(self, index: int) -> None:
        """Record the call."""
        self.done.append(("kill", index))


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    """Yield nodes; this process acts as rank 1 on n1."""
    made = Nodes(tmp_path)
    known = {"RANK": "1", constants.ENV_LOCAL_RANK: "0", constants.ENV_NODE_NAME: "n1"}
    for name, value in {**made.failpoints.env, **known}.items():
        monkeypatch.setenv(name, value)
    failpoints.arm()
    yield made
    monkeypatch.undo()
    failpoints.arm()


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        """Return the time of the test."""
        return self.now

    def time(self) -> float:
        """Return the wall clock."""
        return time.time()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Replace the clock of the injector, so that a busy machine ends no fault early."""
    made = Clock()
    monkeypatch.setattr("elastic_resume.testing.fault_runner.time", made)
    return made


def start_injector(nodes: Nodes, *faults: Fault) -> FaultInjector:
    """Make an injector and poll it once."""
    injector = FaultInjector(cast("Cluster", nodes), faults)
    injector.poll()
    return injector


@pytest.mark.parametrize("what", KINDS)
def test_kind_has_one_way_to_happen(what: str) -> None:
    """A process does it to itself, one call does it to a node, or the runner has functions for it."""
    kind = KINDS[what]
    by_runner = [what in fault_runner._INJECT_FUNCTIONS, what in fault_runner._LASTING_FAULTS]
    assert sum([kind.in_process, kind.method != "", *by_runner]) == 1
    if kind.method:
        assert kind.target == NODE
        assert callable(getattr(Cluster, kind.method))


def test_slow_rank_delays_each_step_until_its_end(nodes: Nodes, clock: Clock) -> None:
    """Also after the injector has seen that the failpoint fired."""
    injector = start_injector(nodes, Fault("slow-rank", rank=1, step=5, delay_s=0.02, for_s=60))
    slow = []
    for step in range(5, 9):
        began = time.monotonic()
        failpoints.hit("between-steps", step)
        slow.append(time.monotonic() - began >= 0.02)
        injector.poll()
    assert slow == [True] * 4
    assert not injector.is_idle
    clock.now += 60
    injector.poll()
    assert injector.is_idle


def test_corrupt_message_waits_for_its_step(nodes: Nodes) -> None:
    """The failpoint, which has no steps, is armed when the job has finished the step."""
    injector = start_injector(nodes, Fault("corrupt-message", node=1, step=5))
    assert failpoints.mutate("rendezvous.line", b"abc") != b"abc"
    injector.poll()
    # The rank is known, though the fault names a node.
    assert (injector.outcomes[0].state, injector.outcomes[0].rank) == (DONE, 1)


@pytest.mark.parametrize("what", ["raise", "exit", "slow-rank"])
def test_fault_with_time_at_failpoint_of_steps_waits_for_time(nodes: Nodes, clock: Clock, what: str) -> None:
    """Else all faults that processes inject into themselves come with the first step."""
    injector = start_injector(nodes, Fault(what, rank=1, at_s=60.0))
    assert injector.outcomes[0].state == WAITING
    clock.now += 60
    injector.poll()
    assert injector.outcomes[0].state == ARMED


def test_fault_of_all_nodes_hits_each_available_node_once(nodes: Nodes) -> None:
    """Later polls must not hit the first node again because another is unavailable."""
    injector = start_injector(nodes, Fault("bit-flip", role="all", step=3))
    for _ in range(5):
        injector.poll()
    assert nodes.done == [("flip", 0), ("flip", 2)]
    assert (injector.outcomes[0].state, injector.outcomes[0].nodes) == (DONE, ("n0", "n2"))


def test_failed_injection_is_recorded_and_others_continue(nodes: Nodes) -> None:
    """The outcome has the reason."""
    injector = start_injector(nodes, Fault("wipe-disk", node=0, step=1), Fault("kill-agent", node=2, step=1))
    assert "no disk 0" in injector.outcomes[0].reason
    assert injector.outcomes[1].state == DONE


def test_link_stays_silent_until_last_fault_ends(nodes: Nodes, clock: Clock) -> None:
    """Cuts of both ends and a partition overlap."""
    injector = start_injector(
        nodes,
        Fault("cut-out", node=1, at_s=0, for_s=2),
        Fault("partition", groups=((0, 1), (2,)), at_s=0, for_s=4),
        Fault("cut", node=0, at_s=0, for_s=10),
    )
    cut = {(0, 1), (1, 0), (0, 2), (2, 0)}
    assert nodes.silent_pairs() == cut | {(1, 2), (2, 1)}
    clock.now = 4
    injector.poll()
    assert nodes.silent_pairs() == cut
    injector.close()
    assert nodes.silent_pairs() == set()
