"""Real agents classify the failures of workers that run stub scripts."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastic_resume import constants
from elastic_resume.testing import Cluster
from tests.support import gpus
from tests.support.gpus import FakeGpus
from tests.support.machine_cluster import MachineCluster
from tests.support.paths import SCRIPTS

pytestmark = pytest.mark.cluster

SCRIPT = SCRIPTS / "failing_worker.py"
Make = Callable[..., Cluster]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Return a function that starts a cluster whose node n1 has one kind of failure."""
    made: list[Cluster] = []

    def build(failure: str, nodes: int = 3, env: Mapping[str, str] | None = None) -> Cluster:
        # These workers need no torch, so a fork server would only take processor time. With a long last-call
        # timeout all nodes are in the first world.
        flags = ("--rdzv-conf", "last_call_timeout=60")
        env = {"ELASTIC_RESUME_NO_WARM": "1", **(env or {})}
        cluster = Cluster(tmp_path, nodes=nodes, min_nodes=2, flags=flags, env=env)
        made.append(cluster)
        (tmp_path / "job").mkdir()
        cluster.start(SCRIPT, str(tmp_path / "job"), failure, "n1")
        return cluster

    yield build
    for cluster in made:
        cluster.stop()


def finish(cluster: Cluster) -> None:
    """Let the workers finish, and wait for nodes n0 and n2."""
    (cluster.directory / "job" / "stop").touch()
    assert cluster.wait_exit(60) == [0, 0]


def verdicts(cluster: Cluster, index: int) -> list[dict[str, Any]]:
    """Return a node's verdict events."""
    return cluster.node_events(index, "verdict")


def wait_for_three(cluster: Cluster) -> None:
    """Wait until every node has begun a round of three nodes, which it can judge."""
    cluster.wait(lambda: all(sizes(cluster, index)[-1:] == [3] for index in range(3)), "a world of three")


def wait_for_two(cluster: Cluster) -> None:
    """Wait until nodes n0 and n2 continue without n1."""
    cluster.wait(lambda: sizes(cluster, 0)[-1:] == sizes(cluster, 2)[-1:] == [2], "a world of two")


def is_stopped(cluster: Cluster, index: int) -> bool:
    """Return whether a node's agent is stopped."""
    agent = cluster.nodes[index].agent
    return agent is not None and psutil.Process(agent.pid).status() == psutil.STATUS_STOPPED


def sizes(cluster: Cluster, index: int) -> list[int]:
    """Return the number of nodes in each of a node's generations."""
    return [event["num_nodes"] for event in cluster.node_events(index, "generation-start")]


def last_line(cluster: Cluster, index: int) -> str:
    """Return the last line of a node's output."""
    return cluster.output(index).strip().splitlines()[-1]


def test_import_error_fails_job_at_once_with_one_traceback(tmp_path: Path) -> None:
    """There is one round on each node, and exit code 1. The node without a failure points to the other."""
    script = tmp_path / "train.py"
    wait = 'import os, time\nos.environ["GROUP_RANK"] == "1" and time.sleep(600)\n'
    script.write_text(f"{wait}import nothing_of_that_name\n")
    with Cluster(tmp_path, nodes=2, workers_per_node=2) as cluster:
        cluster.start(script)
        assert cluster.wait_exit(60) == [1, 1]
        output = [cluster.output(0), cluster.output(1)]
        for index in range(2):
            assert len(sizes(cluster, index)) == 1
            assert "ModuleNotFoundError: No module named 'nothing_of_that_name'" in last_line(cluster, index)
            assert "Starting again would meet the same error." in last_line(cluster, index)
            assert "first: rank " in output[index]
            assert "more: events in " in output[index]
        assert [text.count("Traceback (most recent call last)") for text in output] == [1, 0]
        assert "the traceback is in the output" in output[1]


def test_import_error_ends_job_when_disk_loses_events(tmp_path: Path) -> None:
    """The worker's exit is in the agent's memory too."""
    (tmp_path / "train.py").write_text(
        f"import pathlib, time\nwhile not pathlib.Path({str(tmp_path / 'go')!r}).exists(): time.sleep(0.02)\n"
        "import nothing_of_that_name\n"
    )
    with MachineCluster(tmp_path, nodes=1) as cluster:
        cluster.start(tmp_path / "train.py")
        cluster.wait(lambda: sizes(cluster, 0), "the first world")
        with (cluster.nodes[0].directory / constants.EVENTS_FILE).open("rb") as log:
            os.fsync(log.fileno())  # the broken disk then forgets what the page cache has
        cluster.break_disk(0)
        (tmp_path / "go").touch()
        cluster.wait(lambda: "trying again" in cluster.output(0), "the disk to delay the next world")
        cluster.mend_disk(0)
        assert cluster.wait_exit(60) == [1]
        output = cluster.output(0)
    assert "No module named 'nothing_of_that_name'" in output
    assert "Starting again would meet the same error." in output
    assert "generation 2" not in output
    assert "elastic_resume/agent" not in output, "a traceback of the agent"


@pytest.mark.soak  # unit/policy/test_restart.py decides it, the first test ends a job at once
def test_same_error_on_all_nodes_before_first_step_fails_job(make: Make) -> None:
    """No single machine is the cause."""
    cluster = make("raises", nodes=2)
    script = cluster.directory / "all.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(SCRIPT.parents[3])!r})\n"
        "from tests.support.scripts import failing_worker\n"
        "failing_worker.main(failing_worker.Path(sys.argv[1]), 'raises', failing_worker.NODE)\n"
    )
    cluster.stop()
    cluster.start(script, str(cluster.directory / "job"))
    assert cluster.wait_exit(60) == [1, 1]
    assert "the same error on all 2 nodes before the first step" in last_line(cluster, 0)


def test_deterministic_failure_of_one_step_is_named(make: Make) -> None:
    """The same exception at the same step three times ends the job, whatever the budget."""
    cluster = make("poison", nodes=2, env={"ELASTIC_RESUME_MAX_NO_PROGRESS": "9"})
    assert cluster.wait_exit(90) == [1, 1]
    for index in range(2):
        assert (
            "what follows step 5 fails deterministically: 3 times in a row with the same exception."
            in last_line(cluster, index)
        )
        assert sizes(cluster, index) == [2, 2, 2]
    (root,) = verdicts(cluster, 0)[-1]["root_causes"]
    assert (root["node"], root["rank"], root["kind"], root["step"]) == ("n1", 1, "exception", 5)


def test_node_that_fails_alone_is_excluded(make: Make) -> None:
    """Two nodes are enough, so the third leaves with exit code 75. The user allowed two failures."""
    cluster = make("segfault", env={"ELASTIC_RESUME_EXCLUDE_AFTER": "2"})
    assert cluster.wait_exit(90, only=[1]) == [75]
    assert "node n1 leaves the job: the last 2 failures were caused by node n1 alone." in last_line(
        cluster, 1
    )
    wait_for_two(cluster)
    assert "node n1 is excluded" in cluster.output(0)
    assert [cause["kind"] for cause in verdicts(cluster, 2)[-1]["root_causes"]] == ["node-lost"]
    finish(cluster)
    (end,) = cluster.node_events(1, "agent-end")
    assert (end["outcome"], end["exit_code"]) == ("left", 75)


@pytest.mark.soak  # unit/policy/test_restart.py decides it
def test_needed_node_is_not_excluded(make: Make) -> None:
    """The job fails and names the node."""
    cluster = make("segfault", nodes=2)
    assert cluster.wait_exit(90) == [1, 1]
    assert "restarting in 1 s, because training made no progress" in cluster.output(1)
    for index in range(2):
        assert "3 starts in a row failed without progress" in last_line(cluster, index)
        assert "first: rank 1 on node n1 was killed by SIGSEGV." in cluster.output(index)


def test_node_with_unkillable_worker_leaves(make: Make) -> None:
    """No worker can be started beside it; the other nodes continue."""
    cluster = make("stuck")
    assert cluster.wait_exit(60, only=[1]) == [75]
    assert "does not die of SIGKILL" in last_line(cluster, 1)
    wait_for_two(cluster)
    assert [cause["kind"] for cause in verdicts(cluster, 0)[-1]["root_causes"]] == ["stuck"]
    finish(cluster)


def test_node_with_broken_gpu_leaves(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names NCCL, as that of a lost peer does; still it is the root cause, at the first time."""
    fake = FakeGpus(tmp_path)
    # Agents look for modules where they start. With a PYTHONPATH they would need a fork server of their own.
    monkeypatch.chdir(gpus.DIRECTORY)
    cluster = make("broken-gpu", env={"FAKE_NVML": fake.env["FAKE_NVML"]})
    wait_for_three(cluster)
    fake.wait_watched("n1")
    fake.report_xid(0, 48, node="n1")
    cluster.wait(lambda: cluster.node_events(1, "gpu-fault"), "the driver's report")
    (tmp_path / "job" / "break").touch()
    assert cluster.wait_exit(60, only=[1]) == [75]
    assert sizes(cluster, 1) == [3]
    gpu = "local rank 0; index 0; GPU-0000; Xid 48: double-bit memory error"
    cause = "RuntimeError: Cuda failure 'uncorrectable ECC error encountered' (NCCL error in: "
    broken = f"failed: its GPU is broken ({gpu}): {cause}"
    assert f"node n1 leaves the job: rank 1 {broken}" in last_line(cluster, 1)
    wait_for_two(cluster)
    for index in (0, 2):
        assert f"rank 1 on node n1 {broken}" in cluster.output(index)
        assert [cause["kind"] for cause in verdicts(cluster, index)[-1]["root_causes"]] == ["gpu"]
    finish(cluster)
    report = " ".join(cluster.report_text().split())
    assert f"generation 1 ended: rank 1 on node n1 failed: its GPU is broken ({gpu})" in report


@pytest.mark.soak
def test_node_whose_gpu_needs_a_recovery_starts_no_worker(make: Make, tmp_path: Path) -> None:
    """Each of its workers would fail on that GPU. The other nodes train without it."""
    fake = FakeGpus(tmp_path)
    fake.change_gpu(0, node="n1", recovery_action=2)
    cluster = make("nothing", env=fake.env)
    assert cluster.wait_exit(60, only=[1]) == [75]
    asks = "a GPU is broken (local rank 0; index 0; GPU-0000; the driver asks for: reboot)"
    assert f"node n1 leaves the job: {asks}. The machine is at fault" in last_line(cluster, 1)
    assert not cluster.node_events(1, "worker-start")
    wait_for_two(cluster)
    finish(cluster)
    assert {event["node"] for event in cluster.events("gpu-fault")} == {"n1"}


def test_verdict_separates_secondary_failures(make: Make) -> None:
    """The killed worker is the root cause; broken connections are secondary."""
    cluster = make("late-killed")
    cluster.wait(lambda: all(len(verdicts(cluster, index)) >= 2 for index in range(3)), "two verdicts each")
    for index in range(3):
        for verdict in verdicts(cluster, index):
            (root,) = verdict["root_causes"]
            assert (root["kind"], root["node"], root["rank"]) == ("signal", "n1", 1)
            assert {failure["node"] for failure in verdict["secondary_failures"]} <= {"n0", "n2"}
    followed = [failure for verdict in verdicts(cluster, 0) for failure in verdict["secondary_failures"]]
    assert followed, "no secondary failure: a connection must break before the agent learns of the death"
    assert "rank 1 on node n1 was killed by SIGKILL; restarting." in cluster.output(0)


def test_secondary_failures_of_lost_node_do_not_count(make: Make) -> None:
    """Peers' errors are no failures of the job."""
    cluster = make("none", env={"ELASTIC_RESUME_MAX_NO_PROGRESS": "1"})
    wait_for_three(cluster)
    for index in range(3):
        cluster.wait(step=1, node=index)  # its worker is there
    # The others lose their connections first, and no agent acts on that before the node is dead.
    for index in range(3):
        cluster.kill_agent(index, signal.SIGSTOP)
    for index in range(3):
        cluster.wait(lambda node=index: is_stopped(cluster, node), "a stopped agent")  # type: ignore[misc]
    (cluster.directory / "job" / "dead-1").touch()
    for index in (0, 2):
        cluster.wait(lambda node=index: cluster.node_events(node, "failure"), "its error")  # type: ignore[misc]
    cluster.kill_node(1)
    for index in (0, 2):
        cluster.kill_agent(index, signal.SIGCONT)
    wait_for_two(cluster)
    finish(cluster)
    (verdict,) = verdicts(cluster, 0)
    assert [(failure["kind"], failure["node"]) for failure in verdict["root_causes"]] == [("node-lost", "n1")]
    assert {failure["type"] for failure in verdict["secondary_failures"]} == {"RuntimeError"}


def test_drain_is_no_failure_and_crash_prints_stacks(make: Make) -> None:
    """SIGTERM to an agent preempts its node. After SIGSEGV the agent prints the stacks of its threads."""
    cluster = make("none", env={"ELASTIC_RESUME_MAX_NO_PROGRESS": "1"})
    wait_for_three(cluster)
    cluster.kill_agent(1, signal.SIGTERM)
    assert cluster.wait_exit(60, only=[1]) == [143]
    wait_for_two(cluster)
    (verdict,) = verdicts(cluster, 2)
    assert [(failure["kind"], failure["node"]) for failure in verdict["root_causes"]] == [("preempted", "n1")]
    cluster.kill_agent(2, signal.SIGSEGV)
    assert cluster.wait_exit(60, only=[2]) == [-signal.SIGSEGV]
    assert "Fatal Python error: Segmentation fault" in cluster.output(2)
    # The signal may meet the main thread between two frames, which it then misnames. The other threads wait.
    assert "elastic_resume/background.py" in cluster.output(2)


def test_max_restarts_3_allows_four_starts(tmp_path: Path) -> None:
    """The flag replaces the default limit of two restarts without progress."""
    script = tmp_path / "train.py"
    script.write_text("import sys; sys.exit(9)\n")
    env = {"ELASTIC_RESUME_NO_WARM": "1"}
    with Cluster(tmp_path, nodes=1, flags=["--max-restarts", "3"], env=env) as cluster:
        cluster.start(script)
        assert cluster.wait_exit(60) == [1]
        assert len(sizes(cluster, 0)) == 4
        assert "rank 0 ended with exit code 9" in last_line(cluster, 0)


def test_rank_that_outlasts_its_peers_without_a_step_is_ended(tmp_path: Path) -> None:
    """Rank 0 ends. Rank 1 sleeps, and knows nothing of elastic_resume."""
    script = tmp_path / "train.py"
    script.write_text("import os, time\nif os.environ['RANK'] == '1':\n    time.sleep(600)\n")
    env = {"ELASTIC_RESUME_NO_WARM": "1", "ELASTIC_RESUME_MAX_NO_PROGRESS": "1"}
    flags = ["--hang-timeout", "0.5"]
    with Cluster(tmp_path, nodes=1, workers_per_node=2, flags=flags, env=env) as cluster:
        cluster.start(script)
        assert cluster.wait_exit(60) == [1]
        reason = "did not end after the other ranks of its node had ended"
        assert f"hang: rank 1 {reason}" in cluster.output(0)
        assert f"rank 1 hung: it {reason}" in last_line(cluster, 0)
        (verdict,) = verdicts(cluster, 0)
    assert [(cause["kind"], cause["rank"]) for cause in verdict["root_causes"]] == [("hang", 1)]


def test_oom_kill_is_reported_as_out_of_memory(tmp_path: Path) -> None:
    """The worker got SIGKILL, and the counter of its control group rose."""
    (tmp_path / "train.py").write_text("held = []\nwhile True:\n    held.append(bytearray(16 << 20))\n")
    env = {"ELASTIC_RESUME_NO_WARM": "1", "ELASTIC_RESUME_MAX_NO_PROGRESS": "1"}
    with MachineCluster(tmp_path, nodes=1, memory_bytes=700 << 20, env=env) as cluster:
        cluster.start(tmp_path / "train.py")
        assert cluster.wait_exit(60) == [1]
        assert "rank 0 was killed by SIGKILL, out of memory: the kernel killed a process" in cluster.output(0)
        (verdict,) = verdicts(cluster, 0)
    assert verdict["root_causes"][0]["kind"] == "oom"
