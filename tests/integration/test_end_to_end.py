"""Whole jobs on simulated nodes: real agents, real workers, real kills."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest

from elastic_resume.rendezvous.net.durable_state import RENDEZVOUS_STATE_FILE
from elastic_resume.testing import Cluster
from tests.support import launch_ranks
from tests.support.processes import wait_for
from tests.support.scripts.train import SAMPLES
from tests.support.training_job import SCRIPT, check_end, left_behind, repeated_steps

pytestmark = pytest.mark.cluster

EPOCHS = 6
SAVE_EVERY = 5
# --node-timeout as users have it, and not the patient one of other tests.
FLAGS = ["--save-every", str(SAVE_EVERY), "--node-timeout", "3"]


def start(cluster: Cluster, *, waits_at: int = 0, **options: object) -> Path:
    """Start the job; give the directory of its step logs.

    ``waits_at``: from this step on each takes a second until `go_on`, so that the job cannot end before the
    test's faults, however slow this process is.
    """
    kept = cluster.directory / "step_log"
    waits = {"slow_from": waits_at, "slow_until": cluster.directory / "go-on"}
    flags = {"step-log": kept, "epochs": EPOCHS, **waits, **options}
    pairs = ((f"--{key.replace('_', '-')}", str(value)) for key, value in flags.items())
    cluster.start(SCRIPT, *itertools.chain.from_iterable(pairs))
    return kept


def go_on(cluster: Cluster) -> None:
    """Let the job run at full speed: the failures of the test have happened."""
    (cluster.directory / "go-on").touch()


def train_undisturbed(directory: Path) -> str:
    """Train on three ranks without an agent; return the digest of the end state."""
    env = [{"ELASTIC_RESUME_CKPT_DIR": str(directory), "ELASTIC_RESUME_SAVE_EVERY": "1000"}] * 3
    words = ["--step-log", str(directory / "step_log"), "--epochs", str(EPOCHS), "--step-delay", "0"]
    ranks = launch_ranks.run_ranks(3, SCRIPT, *words, env=env)
    assert [rank.returncode for rank in ranks] == [0] * 3, ranks[0].stderr
    return check_end(directory / "step_log", world_size=3, epochs=EPOCHS)


def newest(cluster: Cluster) -> int:
    """Return the newest generation that has started."""
    return max((int(event["generation"]) for event in cluster.events("resume")), default=0)


def wait_for_resume(cluster: Cluster, after: int, size: int = 3) -> dict[str, Any]:
    """Wait for a generation of ``size`` ranks that is newer than ``after``; return its event."""

    def find() -> list[dict[str, Any]]:
        events = cluster.events("resume")
        return [dict(e) for e in events if e["world_size"] == size and e["generation"] > after]

    return cluster.wait(find, f"a world of {size} after generation {after}")[0]


@pytest.mark.soak  # test_every_fault.py has each of the failures, test_no_step_lost.py compares weights
def test_job_with_five_failures_ends_with_undisturbed_weights(tmp_path: Path) -> None:
    """The weights are bit-identical, and no process stays.

    When all copies are damaged, the job ends with an error and does not start over.
    """
    with Cluster(tmp_path, nodes=3, flags=FLAGS) as cluster:
        kept = start(cluster, waits_at=12, raise_at="1:12:1")

        # 1. A rank raises.
        resumed = wait_for_resume(cluster, after=1)
        failure = cluster.node_events(1, "failure")[0]
        assert (failure["type"], failure["message"]) == ("RuntimeError", "told to fail at step 12")
        assert "train.py" in failure["frame"]

        # 2. A worker is killed after a checkpoint.
        for index in range(3):
            cluster.wait(commit=10, node=index)
        cluster.wait(step=1, generation=resumed["generation"], node=1)
        cluster.kill_worker(1)
        resumed = wait_for_resume(cluster, after=resumed["generation"])
        assert resumed["kind"] == "resumed"
        assert resumed["step"] >= 10
        assert "SIGKILL" in [event["signal"] for event in cluster.node_events(1, "worker-exit")]

        # 3. A node is killed and loses its disk.
        cluster.kill_node(2)
        cluster.wipe(2)
        cluster.start_node(2)
        resumed = wait_for_resume(cluster, after=resumed["generation"])
        assert "n2" in resumed["receiving_nodes"]
        assert resumed["source_node"] == "n0"
        start_of_n2 = cluster.wait(lambda: cluster.node_events(2, "worker-start"), "the worker of n2")[0]
        assert (start_of_n2["generation"], start_of_n2["step"]) == (resumed["generation"], resumed["step"])

        # 4. A node is killed in a resume, while the others load.
        planned = cluster.arm(2, "resume.planned=wait")
        cluster.wait(step=1, generation=resumed["generation"], node=1)
        cluster.kill_worker(1)
        cluster.wait(lambda: cluster.failpoints.is_waiting(planned), "n2 to plan its resume")
        cluster.kill_node(2)
        cluster.start_node(2)
        resumed = wait_for_resume(cluster, after=resumed["generation"])

        # 5. The whole job is stopped, and two copies are damaged.
        for index in range(3):
            cluster.wait(commit=resumed["step"] + 1, node=index)
        cluster.stop()
        go_on(cluster)
        damage_two_copies_and_finish(cluster)
        assert check_end(kept, world_size=3, epochs=EPOCHS) == train_undisturbed(tmp_path / "undisturbed")
        assert repeated_steps(kept) <= 5 * (SAVE_EVERY + 1)
        assert max(entry.step for entry in cluster.checkpoints(2)) == EPOCHS * SAMPLES // 24
        cluster.stop()
        wait_for(lambda: not list(left_behind(tmp_path)), "all processes to end")
        assert not [path for path in tmp_path.rglob("*") if path.is_socket()]
        damage_all_copies_and_expect_error(cluster)


def damage_two_copies_and_finish(cluster: Cluster) -> None:
    """Tear one copy and flip a bit of another; the same command continues with the third node's copy."""
    step = max(set.intersection(*({entry.step for entry in cluster.checkpoints(i)} for i in range(3))))
    for index in range(3):
        for entry in cluster.checkpoints(index):
            if entry.step > step:
                shutil.rmtree(entry.path)
    cluster.truncate_newest(0)
    cluster.corrupt(1)
    before = newest(cluster)
    start(cluster)
    resumed = wait_for_resume(cluster, after=before)
    assert resumed["step"] == step
    assert resumed["source_node"] == "n2"
    assert resumed["receiving_nodes"] == ["n0", "n1"]
    reasons = {rejected["node"]: rejected["reason"] for rejected in resumed["rejected"]}
    assert "bytes of" in reasons["n0"]["detail"]
    assert "digest" in reasons["n1"]["detail"]
    assert cluster.wait_exit() == [0, 0, 0], cluster.output(0)
    assert "rejected n1/" in cluster.output(0)


def damage_all_copies_and_expect_error(cluster: Cluster) -> None:
    """Empty every checkpoint. Each start ends with an error and trains no step."""
    before = newest(cluster)
    for index in range(3):
        for entry in cluster.checkpoints(index):
            (entry.path / "state.safetensors").write_bytes(b"")
    for _ in range(2):
        start(cluster)
        assert cluster.wait_exit() == [1, 1, 1]
        assert "none can be loaded" in cluster.output(0)
        assert newest(cluster) == before


def test_two_nodes_continue_without_third_which_may_return(tmp_path: Path) -> None:
    """With --nnodes 2:3 the view shrinks and grows again. A later start has two nodes for good."""
    with Cluster(tmp_path, nodes=3, min_nodes=2, max_nodes=3, flags=FLAGS) as cluster:
        kept = start(cluster)
        resumed = wait_for_resume(cluster, after=0)
        cluster.wait(commit=5, node=0)
        cluster.kill_node(2)
        shrunk = wait_for_resume(cluster, size=2, after=resumed["generation"])
        assert shrunk["kind"] == "resumed"
        assert shrunk["nodes"] == ["n0", "n1"]
        cluster.wipe(2)
        cluster.start_node(2)
        grown = wait_for_resume(cluster, after=shrunk["generation"])
        assert "n2" in grown["receiving_nodes"]
        cluster.stop()
        # As the documentation says when a node is gone for good: the earlier views have no vote.
        for name in ("n0", "n1"):
            (cluster.run_dir / name / RENDEZVOUS_STATE_FILE).unlink()
    with Cluster(tmp_path, nodes=2, flags=FLAGS) as pair:
        go_on(pair)
        start(pair)
        resumed = wait_for_resume(pair, size=2, after=grown["generation"])
        assert resumed["previous_world_size"] == 3
        assert pair.wait_exit() == [0, 0], pair.output(0)
        check_end(kept, world_size=2, epochs=EPOCHS)
