"""Nodes that all reach the leader, but not each other: real agents and real workers in network namespaces."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_resume.testing import Cluster
from elastic_resume.testing.virtual_network import VirtualNetwork
from tests.support import training_job

pytestmark = pytest.mark.cluster

EPOCHS = 4


@pytest.fixture
def network() -> Iterator[VirtualNetwork]:
    """Yield a network of four nodes."""
    with VirtualNetwork(4) as made:
        yield made


@pytest.fixture
def cluster(tmp_path: Path, network: VirtualNetwork) -> Iterator[Cluster]:
    """Yield four nodes; a single failed start that counts would end the job."""
    flags = ["--node-timeout", "1", "--save-every", "1"]
    env = {"ELASTIC_RESUME_MAX_NO_PROGRESS": "1"}
    with Cluster(tmp_path, nodes=4, min_nodes=3, max_nodes=4, hosts=network, flags=flags, env=env) as made:
        yield made


def start(cluster: Cluster, *words: str) -> Path:
    """Start the training job; return its step log."""
    step_log = cluster.directory / "step_log"
    cluster.start(training_job.SCRIPT, "--step-log", str(step_log), "--epochs", str(EPOCHS), *words)
    return step_log


def wait_for_events(cluster: Cluster, what: str, message: str) -> None:
    """Wait until the rendezvous of a node has emitted this event."""
    cluster.wait(
        lambda: [
            event
            for event in cluster.events("rendezvous")
            if event["what"] == what and event["message"] == message
        ],
        f"the event {message!r}",
    )


def check_causes(cluster: Cluster) -> None:
    """Check that only the network was the root cause of a restart."""
    causes = [cause for event in cluster.events("verdict") for cause in event["root_causes"]]
    assert causes
    assert {(cause["kind"], cause["node"]) for cause in causes} <= {("network", "n2"), ("network", "n3")}


def test_silent_link_between_two_nodes_leaves_one_out_until_it_heals(
    cluster: Cluster, network: VirtualNetwork
) -> None:
    """The kernel would repeat the worker's call for minutes. No worker fails before that."""
    network.cut_link(2, 3)
    go = cluster.directory / "go"
    step_log = start(cluster, "--slow-until", str(go))
    wait_for_events(cluster, "left-out", "n3 cannot reach n2, and is left out until it can")
    cluster.wait(generation=2, step=1)
    assert "n3 cannot reach n2" in cluster.output(3)
    network.heal()
    cluster.wait(generation=3)
    go.touch()
    assert cluster.wait_exit() == [0, 0, 0, 0]
    check_causes(cluster)
    training_job.check_end(step_log, world_size=4)


@pytest.mark.soak
def test_link_that_refuses_packets_for_good_leaves_one_out(cluster: Cluster, network: VirtualNetwork) -> None:
    """Workers fail at once, with "No route to host". The job ends with three nodes and exit code 0."""
    for sender, receiver in ((2, 3), (3, 2)):
        route = ["ip", "route", "add", "unreachable", network.address(receiver)]
        subprocess.run(network.wrap_command(sender, route), check=True)
    step_log = start(cluster)
    assert cluster.wait_exit() == [0, 0, 0, 0]
    check_causes(cluster)
    assert "n3 cannot reach n2, and is left out until it can" in cluster.report_text()
    training_job.check_end(step_log, world_size=3)


@pytest.mark.soak
def test_link_that_breaks_while_training_leaves_one_out(cluster: Cluster, network: VirtualNetwork) -> None:
    """No rank of the two nodes is at fault, and no hang timeout has to pass."""
    start(cluster, "--slow-until", str(cluster.directory / "never"))
    cluster.wait(generation=1, step=1)
    network.cut_link(2, 3)
    wait_for_events(cluster, "left-out", "n3 cannot reach n2, and is left out until it can")
    cluster.wait(generation=2, step=2)
    assert not cluster.events("hang")
    check_causes(cluster)
