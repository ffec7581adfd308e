"""Nodes that die, return or wait as spares: real agents and kills, workers that only write heartbeats."""

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

MakeJob = Callable[..., HeartbeatJob]


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[MakeJob]:
    """Make clusters, and stop them after the test."""
    clusters: list[Cluster] = []

    def build(nodes: int, min_nodes: int = 1, max_nodes: int | None = None, **more: object) -> HeartbeatJob:
        options: dict[str, Any] = {"min_nodes": min_nodes, "max_nodes": max_nodes or nodes, **more}
        # The workers need no torch, so a fork server would only cost seconds. The first view waits for a node
        # that is slow to start. The node timeout is the default.
        flags = ["--rdzv-conf", "last_call_timeout=60", "--node-timeout", "3"]
        options["flags"] = [*flags, *options.get("flags", [])]
        options["env"] = {"ELASTIC_RESUME_NO_WARM": "1", **options.get("env", {})}
        cluster = Cluster(tmp_path, nodes=nodes, **options)
        clusters.append(cluster)
        return HeartbeatJob(cluster)

    yield build
    for cluster in clusters:
        cluster.stop()


def wait_for_leader(job: HeartbeatJob, node: str) -> None:
    """Wait until this node is the last one that reported that it leads, and it has not stepped down."""

    def is_leader() -> bool:
        leaders: list[str] = []
        for event in job.cluster.events("rendezvous"):
            if event["what"] == "leading":
                leaders.append(event["node"])
            elif event["what"] == "step-down":
                leaders.remove(event["node"])
        return leaders[-1:] == [node]

    job.cluster.wait(is_leader, f"{node} to lead")


def finish(job: HeartbeatJob, nodes: list[int]) -> None:
    """Let the job finish; check that the agents of `nodes` succeed and that views never overlapped."""
    job.stop()
    assert job.cluster.wait_exit(60) == [0] * len(nodes), job.cluster.output(nodes[0])
    job.check_generations_do_not_overlap()


def test_job_survives_loss_of_leader_successor_and_all_candidates(make_job: MakeJob) -> None:
    """A node that returns joins and does not lead; newcomers find the job through it."""
    job = make_job(5)
    job.start([0])
    wait_for_leader(job, "n0")  # n1 leads if it is ready before n0
    for index in (1, 2, 3, 4):
        job.cluster.start_node(index)
    generation = job.wait_for_world([0, 1, 2, 3, 4])
    assert job.nodes_in_generation(generation) == ["n0", "n1", "n2", "n3", "n4"]
    job.cluster.kill_node(0)
    generation = job.wait_for_world([1, 2, 3, 4], generation)
    wait_for_leader(job, "n1")
    job.cluster.kill_node(1)
    generation = job.wait_for_world([2, 3, 4], generation)
    job.cluster.kill_node(2)  # the last candidate
    generation = job.wait_for_world([3, 4], generation)
    wait_for_leader(job, "n3")
    job.cluster.start_node(0)
    generation = job.wait_for_world([3, 4, 0], generation)
    assert job.nodes_in_generation(generation) == ["n3", "n4", "n0"], "survivors first, returning nodes last"
    job.cluster.start_node(1)
    job.cluster.start_node(2)
    generation = job.wait_for_world([3, 4, 0, 1, 2], generation)
    wait_for_leader(job, "n3")
    finish(job, [0, 1, 2, 3, 4])


def test_spares_replace_lost_nodes(make_job: MakeJob) -> None:
    """Each of two spares takes a lost node's place in the same restart."""
    job = make_job(5, min_nodes=2, max_nodes=3)
    job.start([0, 1, 2])
    generation = job.wait_for_world([0, 1, 2])
    for index in (3, 4):
        job.cluster.start_node(index)
        job.wait_for_rendezvous_event(index, "spare")
    job.cluster.kill_node(1)
    generation = job.wait_for_world([0, 2, 3], generation)
    assert job.nodes_in_generation(generation) == ["n0", "n2", "n3"]
    job.cluster.kill_node(0)
    generation = job.wait_for_world([2, 3, 4], generation)
    assert job.nodes_in_generation(generation) == ["n2", "n3", "n4"]
    finish(job, [2, 3, 4])


def test_paused_agent_does_not_delay_the_others_and_rejoins(make_job: MakeJob) -> None:
    """SIGSTOP closes no connection. The supervisor kills the worker when its lease expires."""
    job = make_job(3, flags=["--node-timeout", "1"])
    job.start()
    generation = job.wait_for_world([0, 1, 2])
    job.cluster.kill_agent(0, signal.SIGSTOP)  # it leads
    generation = job.wait_for_world([1, 2], generation)
    job.cluster.kill_agent(0, signal.SIGCONT)
    job.wait_for_world([0, 1, 2], generation)
    finish(job, [0, 1, 2])


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 9))])
def test_kill_during_a_restart_leaves_a_view_of_the_survivors(make_job: MakeJob, seed: int) -> None:
    """One node dies, and another one some moments later."""
    rng = random.Random(seed)
    job = make_job(4)
    job.start()
    generation = job.wait_for_world([0, 1, 2, 3])
    for _ in range(3 if seed else 1):  # `make soak` has the other seeds
        first, second = rng.sample(range(4), 2)
        job.cluster.kill_node(first)
        # The time between the kills is random, from nothing to a whole restart.
        for _ in itertools.takewhile(lambda _: rng.random() > 0.1, itertools.count()):
            job.worker_lifetimes()
        job.cluster.kill_node(second)
        left = [index for index in range(4) if index not in {first, second}]
        generation = job.wait_for_world(left, generation)
        job.cluster.start_node(first)
        job.cluster.start_node(second)
        generation = job.wait_for_world([0, 1, 2, 3], generation)
    finish(job, [0, 1, 2, 3])


def test_nodes_with_different_numbers_of_workers_get_consecutive_ranks(make_job: MakeJob) -> None:
    """Torchelastic computes every rank without the store. Then the finished job starts again on one node."""
    job = make_job(3, candidates=1)
    job.start([])
    for index, workers in enumerate([1, 3, 2]):
        job.cluster.start_node(index, flags=["--nproc-per-node", str(workers)])
    job.cluster.wait(lambda: len(job.worker_lifetimes()) == 6, "six workers")
    lifetimes = job.worker_lifetimes()
    assert [(lifetime.node, lifetime.rank) for lifetime in lifetimes] == list(
        zip(["n0", "n1", "n1", "n1", "n2", "n2"], range(6), strict=True)
    )
    assert {lifetime.world_size for lifetime in lifetimes} == {6}
    finish(job, [0, 1, 2])
    (job.directory / "stop").unlink()
    job.cluster.start_node(0, flags=["--rdzv-conf", "last_call_timeout=1"])  # it knows that the others ended
    job.wait_for_world([0], lifetimes[-1].generation)
    finish(job, [0])
