"""Nodes that die, come back, wait as spares or are many: real agents, real kills, workers that only beat."""

from __future__ import annotations

import itertools
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_resume.testing import Cluster
from tests.support.heartbeat_job import HeartbeatJob

pytestmark = pytest.mark.cluster

Make = Callable[..., HeartbeatJob]
FAILS_ON_N1 = """
import os, sys, time
if os.environ["ELASTIC_RESUME_NODE_NAME"] == "n1":
    sys.exit(9)
time.sleep(600)
"""


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Make clusters, and stop them in the end."""
    made: list[Cluster] = []

    def build(nodes: int, min_nodes: int = 1, max_nodes: int | None = None, **more: object) -> HeartbeatJob:
        shape: dict[str, Any] = {"min_nodes": min_nodes, "max_nodes": max_nodes or nodes, **more}
        # A heart needs no torch: a zygote that imports it would only take seconds from the two cores. And the
        # first world does not begin without one that is slow to start. The node timeout is the users' own.
        own = ["--no-warm", "--settle", "60", "--node-timeout", "3"]
        shape["flags"] = [*own, *shape.get("flags", [])]
        cluster = Cluster(tmp_path, nodes=nodes, **shape)
        made.append(cluster)
        return HeartbeatJob(cluster)

    yield build
    for cluster in made:
        cluster.stop()


def leader(hearts: HeartbeatJob) -> str:
    """The node that said last that it leads."""
    told = [e for e in hearts.cluster.events("rendezvous") if e["what"] == "leading"]
    return str(told[-1]["node"])


def end(hearts: HeartbeatJob, nodes: list[int]) -> None:
    """Let the job finish; all agents that run end well, and at no moment there were two worlds."""
    hearts.stop()
    assert hearts.cluster.wait_exit(60) == [0] * len(nodes), hearts.cluster.output(nodes[0])
    hearts.check_generations_do_not_overlap()


def test_job_survives_loss_of_leader_successor_and_all_candidates(make: Make) -> None:
    """A node that returns joins and does not lead; newcomers find the job through it."""
    hearts = make(5)
    hearts.start()
    now = hearts.wait_for_world([0, 1, 2, 3, 4])
    assert hearts.nodes_in_generation(now) == ["n0", "n1", "n2", "n3", "n4"]
    assert leader(hearts) == "n0"
    hearts.cluster.kill_node(0)
    now = hearts.wait_for_world([1, 2, 3, 4], now)
    assert leader(hearts) == "n1"
    hearts.cluster.kill_node(1)
    now = hearts.wait_for_world([2, 3, 4], now)
    hearts.cluster.kill_node(2)  # the last candidate
    now = hearts.wait_for_world([3, 4], now)
    assert leader(hearts) == "n3"
    hearts.cluster.start_node(0)
    now = hearts.wait_for_world([3, 4, 0], now)
    assert hearts.nodes_in_generation(now) == ["n3", "n4", "n0"], (
        "survivors keep their order, who returns comes last"
    )
    hearts.cluster.start_node(1)
    hearts.cluster.start_node(2)
    now = hearts.wait_for_world([3, 4, 0, 1, 2], now)
    assert leader(hearts) == "n3"
    end(hearts, [0, 1, 2, 3, 4])


def test_one_node_continues_after_others_die_one_by_one(make: Make) -> None:
    """--nnodes 1:4 shrinks to a node that is no candidate."""
    hearts = make(4, candidates=1)
    hearts.start()
    now = hearts.wait_for_world([0, 1, 2, 3])
    for left in ([1, 2, 3], [1, 3], [3]):
        dead = ({0, 1, 2, 3} - set(left)) & {i for i in range(4) if hearts.cluster.nodes[i].alive}
        for index in dead:
            hearts.cluster.kill_node(index)
        now = hearts.wait_for_world(left, now)
    end(hearts, [3])


@pytest.mark.parametrize("dead", [(1, 2, 3), (0, 1, 2), (0, 1)])
def test_survivors_continue_after_simultaneous_deaths(make: Make, dead: tuple[int, ...]) -> None:
    """Two or three of four die at once, with or without the leader."""
    hearts = make(4)
    hearts.start()
    now = hearts.wait_for_world([0, 1, 2, 3])
    hearts.cluster.kill_nodes(dead)
    left = [index for index in range(4) if index not in dead]
    hearts.wait_for_world(left, now)
    end(hearts, left)


def test_spares_replace_lost_nodes(make: Make) -> None:
    """Each of two spares takes a lost node's place in the same restart."""
    hearts = make(5, min_nodes=2, max_nodes=3)
    hearts.start([0, 1, 2])
    now = hearts.wait_for_world([0, 1, 2])
    for index in (3, 4):
        hearts.cluster.start_node(index)
        hearts.wait_for_rendezvous_event(index, "spare")
    hearts.cluster.kill_node(1)
    now = hearts.wait_for_world([0, 2, 3], now)
    assert hearts.nodes_in_generation(now) == ["n0", "n2", "n3"]
    hearts.cluster.kill_node(0)
    now = hearts.wait_for_world([2, 3, 4], now)
    assert hearts.nodes_in_generation(now) == ["n2", "n3", "n4"]
    end(hearts, [2, 3, 4])


def test_a_world_grows_by_newcomers_and_shrinks_by_those_that_are_drained(make: Make) -> None:
    """Scale up and down: one restart each, ranks of survivors in order, the drained agent ends at once."""
    hearts = make(4, flags=["--settle", "3"])
    hearts.start([0, 1])
    now = hearts.wait_for_world([0, 1])
    hearts.cluster.start_node(3)
    now = hearts.wait_for_world([0, 1, 3], now)
    hearts.cluster.start_node(2)
    now = hearts.wait_for_world([0, 1, 3, 2], now)
    assert hearts.nodes_in_generation(now) == ["n0", "n1", "n3", "n2"]
    hearts.cluster.kill_agent(1, signal.SIGTERM)
    assert hearts.cluster.wait_exit(60, only=[1]) == [143]
    now = hearts.wait_for_world([0, 3, 2], now)
    assert hearts.nodes_in_generation(now) == ["n0", "n3", "n2"]
    hearts.cluster.kill_agent(0, signal.SIGTERM)  # it leads
    assert hearts.cluster.wait_exit(60, only=[0]) == [143]
    now = hearts.wait_for_world([3, 2], now)
    assert hearts.nodes_in_generation(now) == ["n3", "n2"]
    end(hearts, [2, 3])


def test_simultaneous_drain_of_two_nodes_does_not_block_third(make: Make) -> None:
    """SIGTERM to the leader and another node at once."""
    hearts = make(3)
    hearts.start()
    now = hearts.wait_for_world([0, 1, 2])
    for index in (0, 1):
        hearts.cluster.kill_agent(index, signal.SIGTERM)
    hearts.wait_for_world([2], now)
    assert hearts.cluster.wait_exit(60, only=[0, 1]) == [143, 143]
    end(hearts, [2])


def test_a_stopped_agent_does_not_hold_the_others_and_its_worker_ends_by_itself(make: Make) -> None:
    """SIGSTOP: nothing is closed. Its worker is fenced by its stub; when it goes on it joins again."""
    hearts = make(3, flags=["--node-timeout", "1"])
    hearts.start()
    now = hearts.wait_for_world([0, 1, 2])
    for frozen, others in ((2, [0, 1]), (0, [1, 2])):
        hearts.cluster.kill_agent(frozen, signal.SIGSTOP)
        now = hearts.wait_for_world(others, now)
        hearts.cluster.kill_agent(frozen, signal.SIGCONT)
        now = hearts.wait_for_world([0, 1, 2], now)
    end(hearts, [0, 1, 2])


@pytest.mark.parametrize("seed", range(3))
def test_kills_at_random_moments_of_a_restart(make: Make, seed: int) -> None:
    """A restart is caused, and somebody dies some moments later: each time those alive form a world."""
    rng = random.Random(seed)
    hearts = make(4)
    hearts.start()
    now = hearts.wait_for_world([0, 1, 2, 3])
    for _ in range(3):
        first, second = rng.sample(range(4), 2)
        hearts.cluster.kill_node(first)
        # Between nothing and a whole restart later, counted in looks at the clock of a real machine.
        for _ in itertools.takewhile(lambda _: rng.random() > 0.1, itertools.count()):
            hearts.worker_lifetimes()
        hearts.cluster.kill_node(second)
        left = [index for index in range(4) if index not in {first, second}]
        now = hearts.wait_for_world(left, now)
        hearts.cluster.start_node(first)
        hearts.cluster.start_node(second)
        now = hearts.wait_for_world([0, 1, 2, 3], now)
    end(hearts, [0, 1, 2, 3])


def test_a_worker_that_dies_is_started_again_on_the_same_nodes(make: Make) -> None:
    """SIGKILL of a worker: a new generation, same nodes, same ranks."""
    hearts = make(3)
    hearts.start()
    now = hearts.wait_for_world([0, 1, 2])
    hearts.worker(1).kill()
    now = hearts.wait_for_world([0, 1, 2], now)
    assert hearts.nodes_in_generation(now) == ["n0", "n1", "n2"]
    end(hearts, [0, 1, 2])


def test_nodes_may_have_different_numbers_of_workers(make: Make) -> None:
    """Torchelastic learns every rank without asking a store."""
    hearts = make(3)
    hearts.start([])
    for index, workers in enumerate([1, 3, 2]):
        hearts.cluster.start_node(index, flags=["--nproc-per-node", str(workers)])
    hearts.cluster.wait(lambda: len(hearts.worker_lifetimes()) == 6, "six workers")
    lives = hearts.worker_lifetimes()
    assert [(life.node, life.rank) for life in lives] == list(
        zip(["n0", "n1", "n1", "n1", "n2", "n2"], range(6), strict=True)
    )
    assert {life.world_size for life in lives} == {6}
    end(hearts, [0, 1, 2])


def test_job_given_up_by_one_node_ends_on_all(make: Make) -> None:
    """All three are needed and n1's worker fails at each start; each node names that worker."""
    hearts = make(3, min_nodes=3)
    script = hearts.directory / "fails.py"
    script.write_text(FAILS_ON_N1)
    hearts.cluster.start(script)
    assert hearts.cluster.wait_exit(60) == [1, 1, 1]
    assert {event["num_nodes"] for event in hearts.cluster.events("round")} == {3}, "worlds were formed"
    said = "3 starts in a row failed without progress, before the first step. Last: rank 1"
    for index in range(3):
        (ended,) = hearts.cluster.node_events(index, "agent-end")
        assert said in ended["message"], f"n{index}: {ended}"
        assert "exit code 9" in ended["message"]


def test_a_job_that_has_ended_starts_again_with_fewer_nodes(make: Make) -> None:
    """All were told of its end, so the one that is started again asks nobody, and counts generations on."""
    hearts = make(3, candidates=1)
    hearts.start()
    now = hearts.wait_for_world([0, 1, 2])
    end(hearts, [0, 1, 2])
    (hearts.directory / "stop").unlink()
    hearts.cluster.start_node(0, flags=["--settle", "1"])
    hearts.wait_for_world([0], now)
    end(hearts, [0])
