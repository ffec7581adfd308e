"""The Job of deploy/kubernetes with real agents in its pods: what clusters do to these costs no step."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_resume import constants
from elastic_resume.testing import virtual_network
from elastic_resume.testing.fork_server import AgentForkServer
from tests.support import pod_fork_server_main
from tests.support.manifests import render_manifest
from tests.support.paths import ROOT
from tests.support.pod_agents import PodAgentServer
from tests.support.pods import Pod, SimulatedPods

LIMIT_S = 100.0  # of one wait: a pod starts in a second, or in twenty where all cores are busy
TOKEN = {"train-token": {"token": "a secret that all pods share, and nobody else"}}
Line = dict[str, int]

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def _root() -> None:
    why = virtual_network.unavailable_reason()
    if why and "CI" not in os.environ:
        pytest.skip(why)


@pytest.fixture(scope="module")
def nursery() -> Iterator[AgentForkServer]:
    """What agents are forked from."""
    one = AgentForkServer({**os.environ, "OMP_NUM_THREADS": "1"}, Path(pod_fork_server_main.__file__))
    yield one
    one.close()


def started(
    tmp_path: Path, nursery: AgentForkServer, nodes: str, *, steps: int, shm: str, claim: str = ""
) -> SimulatedPods:
    """The pods of a job that trains so many steps; what they look for in /control is in ``tmp_path``."""
    args = ("tests/support/scripts/pod.py", str(steps), "/control")
    text = render_manifest(nodes, args=args, memory="2Gi", shm=shm, disk="100Mi", grace_s=30, claim=claim)
    for name in ("control", "claim"):
        (tmp_path / name).mkdir()
    agents = PodAgentServer(nursery, tmp_path / "control")
    pods = SimulatedPods(
        text,
        tmp_path / "logs",
        secrets=TOKEN,
        claims={"shared": tmp_path / "claim"},
        bind={"/control": tmp_path / "control"},
        image={**agents.image_environment, constants.ENV_SNAPSHOT_EVERY: "1", "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
    )
    pods.dns_paused = True
    pods.start()
    return pods


def steps_of(pods: SimulatedPods, pod: Pod) -> list[Line]:
    """What a pod's worker printed after each step."""
    return [json.loads(found) for found in re.findall(r"^STEP (\{.*\})$", pods.read_log(pod), re.MULTILINE)]


def newest(pods: SimulatedPods) -> Line:
    """The last step of all."""
    lines = [line for pod in pods.pods for line in steps_of(pods, pod)[-1:]]
    return max(lines, key=lambda line: (line["generation"], line["step"]), default={"step": 0, "world": 0})


def world(pods: SimulatedPods, size: int, after: int = 0) -> Line:
    """Wait until a world of that size has taken a step beyond ``after``."""

    def look() -> Line | None:
        line = newest(pods)
        return line if line["world"] == size and line["step"] > after else None

    return pods.wait(look, f"a step beyond {after} in a world of {size}", LIMIT_S)


def replaced(pods: SimulatedPods, old: Pod) -> Pod:
    """Wait for another pod of its index."""
    pods.wait(lambda: pods.newest_pod(old.index) is not old, f"another pod of {old.name}")
    return pods.newest_pod(old.index)


def assert_no_step_lost(pods: SimulatedPods) -> None:
    """Each generation goes on where the one before had got to, as all of them say and as their steps show."""
    told = [line for pod in pods.pods for line in re.findall(r"resumed at step .*", pods.read_log(pod))]
    assert told
    assert [line for line in told if "no step lost" not in line] == []
    taken = defaultdict(set)
    for pod in pods.pods:
        for line in steps_of(pods, pod):
            taken[line["generation"]].add(line["step"])
    worlds = [taken[generation] for generation in sorted(taken)]
    for before, after in itertools.pairwise(worlds):
        # A worker that is killed between its last step and its line has not printed that.
        assert max(before) < min(after) <= max(before) + 2


def test_eviction_node_loss_want_of_memory_and_two_pods_of_one_index(
    tmp_path: Path, nursery: AgentForkServer
) -> None:
    """One job of three pods, with checkpoints in emptyDirs: each new pod is empty, and fed by its peers."""
    with started(tmp_path, nursery, "2:3", steps=100_000, shm="256Mi") as pods:
        # DNS comes late: each agent is up, knows itself alone, and waits.
        pods.wait(lambda: all("checkpoints in" in pods.read_log(pod) for pod in pods.pods), "agents", LIMIT_S)
        assert newest(pods)["step"] == 0
        pods.update_dns()
        at = world(pods, 3)["step"]

        # Eviction: SIGTERM to process 1, a drain within the grace, an exit code that costs nothing.
        evicted = pods.evict(1)
        assert pods.wait_for_exit(evicted, LIMIT_S) == constants.EXIT_SIGNAL_BASE + 15
        fresh = replaced(pods, evicted)
        assert fresh.address != evicted.address
        # The last step of the old world may be beyond ``at`` too.
        pods.wait(lambda: steps_of(pods, fresh), "a step of the new pod", LIMIT_S)
        at = world(pods, 3, at)["step"]
        # Another pod may lack the newest step too, if it was stopped while it copied that.
        assert re.search(r"sent to (train-\d, )*train-1", "".join(map(pods.read_log, pods.pods)))
        assert pods.job.failures_by_index.total() == 0

        # Node loss: nothing but silence, then the cluster gives the node up.
        lost = pods.lose_node(2)
        at = world(pods, 2, at)["step"]
        pods.give_up_node(2)
        assert replaced(pods, lost).machine_index != lost.machine_index
        at = world(pods, 3, at)["step"]
        assert pods.job.failures_by_index.total() == 0

        # Want of memory: the kernel kills the container, and that is counted.
        greedy = pods.newest_pod(0)
        (tmp_path / "control" / "hog-train-0").touch()
        assert pods.wait_for_exit(greedy, LIMIT_S) == 137
        assert (greedy.reason, pods.job.failures_by_index) == ("OOMKilled", {0: 1})
        fresh = replaced(pods, greedy)
        pods.wait(lambda: steps_of(pods, fresh), "a step of the new pod", LIMIT_S)
        at = world(pods, 3, at)["step"]

        # Two pods of one index: the second is told so, and waits; where the first is cut off it steps in.
        first = pods.force_delete(2)
        second = replaced(pods, first)
        pods.wait(
            lambda: "another live agent is called train-2" in pods.read_log(second), "a refusal", LIMIT_S
        )
        at = world(pods, 3, at)["step"]
        pods.cut(first)
        pods.wait(lambda: steps_of(pods, second), "a step of the second", LIMIT_S)
        at = world(pods, 3, at)["step"]
        assert max(line["step"] for line in steps_of(pods, first)) < steps_of(pods, second)[0]["step"]
        assert_no_step_lost(pods)


def test_all_pods_deleted_at_once_go_on_from_a_claim_and_finish(
    tmp_path: Path, nursery: AgentForkServer
) -> None:
    """Each commits in its grace. The first that ends well ends the Job, by its successPolicy."""
    with started(tmp_path, nursery, "1:2", steps=300, shm="64Mi", claim="shared") as pods:
        pods.update_dns()
        world(pods, 2, after=5)
        assert "shm has 64 MiB" in pods.read_log(pods.newest_pod(0))  # and what to do
        old = [pods.delete(index) for index in range(2)]
        assert [pods.wait_for_exit(pod, LIMIT_S) for pod in old] == [143, 143]
        at = newest(pods)["step"]
        world(pods, 2, at)
        (tmp_path / "control" / "go").touch()
        assert pods.wait(lambda: pods.job.outcome, "the end", LIMIT_S) == "job done"
        assert newest(pods)["step"] == 300
        assert pods.job.failures_by_index.total() == 0
        assert_no_step_lost(pods)
