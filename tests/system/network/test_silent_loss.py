"""Nodes whose links drop all packets: real agents in network namespaces, workers without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic_resume.testing import Cluster
from elastic_resume.testing.virtual_network import VirtualNetwork
from tests.support.heartbeat_job import HeartbeatJob

pytestmark = pytest.mark.cluster

Make = Callable[[int], HeartbeatJob]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Yield a function that makes a cluster with a network per node; the clusters end with the test."""
    made: list[tuple[Cluster, VirtualNetwork]] = []

    def build(nodes: int) -> HeartbeatJob:
        hosts = VirtualNetwork(nodes)
        cluster = Cluster(
            tmp_path,
            nodes=nodes,
            min_nodes=1,
            max_nodes=nodes,
            hosts=hosts,
            flags=["--node-timeout", "1"],
            env={"ELASTIC_RESUME_NO_WARM": "1"},
        )
        made.append((cluster, hosts))
        return HeartbeatJob(cluster)

    yield build
    for cluster, hosts in made:
        cluster.stop()
        hosts.close()


def end(job: HeartbeatJob) -> None:
    """Let the job finish; check exit codes, that no worlds overlapped, and the ranks of survivors.

    On a busy machine a node may exceed this node timeout, so there may be worlds in between.
    """
    job.stop()
    assert set(job.cluster.wait_exit(60)) == {0}, job.cluster.output(0)
    job.check_generations_do_not_overlap()
    job.check_survivors_keep_first_ranks()


def test_node_with_cut_link_is_lost_and_rejoins_last(make: Make) -> None:
    """First the leader loses its links, then n2 receives nothing.

    The lost node's own workers end first; the survivors continue.
    """
    job = make(3)
    job.start()
    now = job.wait_for_world([0, 1, 2])
    job.cluster.network.cut(0)
    now = job.wait_for_world([1, 2], now)
    job.wait_idle(0)
    job.cluster.network.restore_link(0)
    now = job.wait_for_world([0, 1, 2], now)
    for other in (0, 1):
        job.cluster.network.cut_link(other, 2, one_way=True)
    now = job.wait_for_world([0, 1], now)
    job.cluster.network.heal()
    job.wait_for_world([0, 1, 2], now)
    end(job)


def test_side_without_majority_waits_until_network_heals(make: Make) -> None:
    """Two of five nodes log the nodes that they wait for.

    Then five nodes split 2, 2 and 1: no side has a quorum.
    """
    job = make(5)
    job.start()
    now = job.wait_for_world([0, 1, 2, 3, 4])
    job.cluster.network.partition([{0, 1}, {2, 3, 4}])
    now = job.wait_for_world([2, 3, 4], now)
    job.wait_for_output(0, "waiting for n2, n3, n4")
    job.wait_for_output(1, "waiting for n2, n3, n4")
    job.wait_idle(0)
    job.wait_idle(1)
    job.cluster.network.heal()
    now = job.wait_for_world([0, 1, 2, 3, 4], now)
    job.cluster.network.partition([{0, 3}, {1, 2}, {4}])
    for index, missing in ((0, "n1, n2, n4"), (1, "n0, n3, n4"), (4, "n0, n1, n2, n3")):
        job.wait_for_output(index, f"waiting for {missing}")
    for index in range(5):
        job.wait_idle(index)
    job.check_no_minority_world(now, {"n0", "n3"}, {"n1", "n2"}, {"n4"})
    job.cluster.network.heal()
    job.wait_for_world([0, 1, 2, 3, 4], now)
    end(job)


@pytest.mark.soak
def test_last_reachable_node_waits_until_enough_others_are_back(make: Make) -> None:
    """Three of four are cut off, then killed. Two that are back with their disks make a majority with it."""
    job = make(4)
    job.start()
    now = job.wait_for_world([0, 1, 2, 3])
    job.cluster.network.partition([{0}, {1}, {2}, {3}])
    job.wait_for_output(3, "waiting for n0, n1, n2")
    job.check_no_minority_world(now, {"n0"}, {"n1"}, {"n2"}, {"n3"})
    job.cluster.kill_nodes([0, 1, 2])
    job.cluster.network.heal()
    job.wait_idle(3)
    for index in (0, 1):
        job.cluster.start_node(index)
    now = job.wait_for_world([0, 1, 3], now)
    job.cluster.start_node(2)
    job.wait_for_world([0, 1, 2, 3], now)
    end(job)
