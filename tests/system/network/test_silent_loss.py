"""Nodes whose link is cut without a packet: real agents on simulated hosts, workers that only beat."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic_resume import cli
from elastic_resume.testing import Cluster
from elastic_resume.testing.virtual_network import VirtualNetwork
from tests.support.heartbeat_job import HeartbeatJob

pytestmark = pytest.mark.cluster

Make = Callable[[int], HeartbeatJob]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Make clusters of nodes with a network each, and stop them in the end."""
    made: list[tuple[Cluster, VirtualNetwork]] = []

    def build(nodes: int) -> HeartbeatJob:
        hosts = VirtualNetwork(nodes)
        cluster = Cluster(
            tmp_path,
            nodes=nodes,
            min_nodes=1,
            max_nodes=nodes,
            hosts=hosts,
            flags=["--node-timeout", "1", "--no-warm"],
        )
        made.append((cluster, hosts))
        return HeartbeatJob(cluster)

    yield build
    for cluster, hosts in made:
        cluster.stop()
        hosts.close()


def end(hearts: HeartbeatJob) -> None:
    """Let the job finish: all agents end well, at no moment there were two worlds, who went on was first.

    A busy machine makes a node silent too, for longer than this timeout: then there are worlds in between.
    """
    hearts.stop()
    assert set(hearts.cluster.wait_exit(60)) == {0}, hearts.cluster.output(0)
    hearts.check_generations_do_not_overlap()
    hearts.check_survivors_keep_first_ranks()


@pytest.mark.parametrize("cut", [2, 0])
def test_a_node_that_falls_silent_is_lost_and_comes_back(make: Make, cut: int) -> None:
    """The survivors go on, its own workers end by themselves first; with the link back it is the last."""
    hearts = make(3)
    hearts.start()
    now = hearts.wait_for_world([0, 1, 2])
    hearts.cluster.cut(cut)
    others = [index for index in range(3) if index != cut]
    now = hearts.wait_for_world(others, now)
    hearts.wait_idle(cut)
    hearts.cluster.restore_link(cut)
    hearts.wait_for_world([0, 1, 2], now)
    end(hearts)


def test_of_a_job_cut_two_to_three_only_the_three_go_on(make: Make) -> None:
    """The two say for whom they wait; healed, all five go on, the three first."""
    hearts = make(5)
    hearts.start()
    now = hearts.wait_for_world([0, 1, 2, 3, 4])
    hearts.cluster.partition({0, 1}, {2, 3, 4})
    now = hearts.wait_for_world([2, 3, 4], now)
    hearts.wait_for_output(0, "waiting for n2, n3, n4")
    hearts.wait_for_output(1, "waiting for n2, n3, n4")
    hearts.wait_idle(0)
    hearts.wait_idle(1)
    hearts.cluster.heal()
    hearts.wait_for_world([0, 1, 2, 3, 4], now)
    end(hearts)


def test_of_a_job_cut_in_three_nobody_goes_on_until_it_heals(make: Make) -> None:
    """2|2|1: no side has a quorum. Nothing is lost."""
    hearts = make(5)
    hearts.start()
    now = hearts.wait_for_world([0, 1, 2, 3, 4])
    hearts.cluster.partition({0, 1}, {2, 3}, {4})
    for index, missing in ((0, "n2, n3, n4"), (2, "n0, n1, n4"), (4, "n0, n1, n2, n3")):
        hearts.wait_for_output(index, f"waiting for {missing}")
    for index in range(5):
        hearts.wait_idle(index)
    hearts.check_no_minority_world(now, {"n0", "n1"}, {"n2", "n3"}, {"n4"})
    hearts.cluster.heal()
    hearts.wait_for_world([0, 1, 2, 3, 4], now)
    end(hearts)


def test_the_last_one_that_is_not_silent_waits_until_its_quorum_is_forced(make: Make) -> None:
    """Three of four are cut off, then killed: they might live. An operator has to say that they do not."""
    hearts = make(4)
    hearts.start()
    now = hearts.wait_for_world([0, 1, 2, 3])
    hearts.cluster.partition({0}, {1}, {2}, {3})
    hearts.wait_for_output(3, "waiting for n0, n1, n2")
    hearts.check_no_minority_world(now, {"n0"}, {"n1"}, {"n2"}, {"n3"})
    hearts.cluster.kill_nodes([0, 1, 2])
    assert cli.main(["force-quorum", str(hearts.cluster.run_dir / "n3"), "--yes"]) == 0
    now = hearts.wait_for_world([3], now)
    hearts.cluster.heal()
    for index in range(3):
        hearts.cluster.start_node(index)
    hearts.wait_for_world([0, 1, 2, 3], now)
    end(hearts)


def test_a_one_way_cut_is_silence_too(make: Make) -> None:
    """n2 hears nobody and is heard: its lease ends; nobody trains with it until the link is whole."""
    hearts = make(3)
    hearts.start()
    now = hearts.wait_for_world([0, 1, 2])
    for other in (0, 1):
        hearts.cluster.network.cut_link(other, 2, one_way=True)
    now = hearts.wait_for_world([0, 1], now)
    hearts.cluster.heal()
    hearts.wait_for_world([0, 1, 2], now)
    end(hearts)
