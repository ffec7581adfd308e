"""Whole jobs on simulated nodes: real agents, real workers, real kills."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_resume import cli
from elastic_resume.testing import Cluster
from tests.support import training_log
from tests.support.scripts.train import SAMPLES
from tests.support.training_job import EPOCHS, SCRIPT, check_end

pytestmark = pytest.mark.cluster

SAVE_EVERY = 5
Make = Callable[..., Cluster]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Make clusters that save every few steps, and stop them in the end."""
    made: list[Cluster] = []

    # --node-timeout as users have it, and not the patient one of other tests.
    def build(nodes: int = 3, min_nodes: int | None = None, max_nodes: int | None = None) -> Cluster:
        flags = ["--save-every", str(SAVE_EVERY), "--node-timeout", "3"]
        cluster = Cluster(tmp_path, nodes=nodes, min_nodes=min_nodes, max_nodes=max_nodes, flags=flags)
        made.append(cluster)
        return cluster

    yield build
    for cluster in made:
        cluster.stop()


def start(cluster: Cluster, *, waits_at: int = 10**6, **options: object) -> Path:
    """Start the job; give the directory of its training_log.

    ``waits_at``: from this step on each takes a second until `go_on`, so that the job cannot end before the
    test's fault, however slow this process is.
    """
    kept = cluster.directory / "diary"
    waits = {"slow_from": waits_at, "slow_until": cluster.directory / "go-on"}
    flags = {"diary": kept, "epochs": EPOCHS, **waits, **options}
    pairs = ((f"--{key.replace('_', '-')}", str(value)) for key, value in flags.items())
    cluster.start(SCRIPT, *itertools.chain.from_iterable(pairs))
    return kept


def go_on(cluster: Cluster) -> None:
    """Let the job run at full speed: the failure of the test has happened."""
    (cluster.directory / "go-on").touch()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the digest of the end state of an undisturbed run on three nodes."""
    with Cluster(tmp_path_factory.mktemp("undisturbed"), nodes=3, flags=["--save-every", "5"]) as cluster:
        go_on(cluster)
        kept = start(cluster, step_delay=0.0)
        assert cluster.wait_exit() == [0, 0, 0], cluster.output(0)
        return check_end(kept, world_size=3)


def newest(cluster: Cluster) -> int:
    """Return the newest generation that has started."""
    return max((int(event["generation"]) for event in cluster.events("resume")), default=0)


def test_killed_worker_loses_only_steps_since_last_save(make: Make, undisturbed: str) -> None:
    """SIGKILL of one worker: the end state is bit-identical to an undisturbed run."""
    cluster = make()
    kept = start(cluster, waits_at=14)
    cluster.wait(commit=10, node=1)
    before = newest(cluster)
    cluster.kill_worker(1)
    go_on(cluster)
    resumed = cluster.wait(generation=before + 1)
    assert resumed["kind"] == "checkpoint"
    assert resumed["step"] >= 10
    assert cluster.wait_exit() == [0, 0, 0], cluster.output(0)
    assert check_end(kept, world_size=3) == undisturbed
    assert training_log.repeated_steps(kept) <= SAVE_EVERY + 1
    assert "SIGKILL" in [event["signal"] for event in cluster.node_events(1, "worker-exit")]


def test_killed_node_returns_with_empty_disk(make: Make, undisturbed: str) -> None:
    """The job waits for the node, sends it a checkpoint, and ends with the same state."""
    cluster = make()
    kept = start(cluster, waits_at=14)
    cluster.wait(commit=10, node=0)
    before = newest(cluster)
    cluster.kill_node(2)
    go_on(cluster)
    cluster.wipe(2)
    cluster.start_node(2)
    resumed = cluster.wait(generation=before + 1)
    assert "n2" in resumed["receiving_nodes"]
    assert resumed["source_node"] == "n0"
    assert cluster.wait_exit() == [0, 0, 0], cluster.output(0)
    assert check_end(kept, world_size=3) == undisturbed
    starts = [(event["generation"], event["step"]) for event in cluster.node_events(2, "worker-start")]
    assert starts == [(resumed["generation"], resumed["step"])], "not resumed from the sent checkpoint"
    assert max(entry.step for entry in cluster.checkpoints(2)) == EPOCHS * SAMPLES // 24


def test_node_that_dies_during_resume_does_not_block_others(make: Make, undisturbed: str) -> None:
    """It dies after planning and before loading, and returns."""
    cluster = make()
    kept = start(cluster, waits_at=14)
    cluster.wait(commit=10, node=2)
    planned = cluster.arm(2, "resume.planned=wait")
    cluster.kill_worker(1)
    go_on(cluster)
    cluster.wait(lambda: cluster.failpoints.is_waiting(planned), "n2 to plan its resume")
    cluster.kill_node(2)
    cluster.start_node(2)
    assert cluster.wait_exit() == [0, 0, 0], cluster.output(0)
    assert check_end(kept, world_size=3) == undisturbed


def test_two_nodes_continue_without_third_and_readmit_it(make: Make, tmp_path: Path) -> None:
    """With --nnodes 2:3 the view shrinks and grows again."""
    cluster = make(min_nodes=2, max_nodes=3)
    # The third node imports torch before it comes back, and the others must not have ended by then.
    third_is_back = tmp_path / "third-is-back"
    kept = start(cluster, waits_at=0, slow_until=third_is_back)

    def wait_for_world(size: int, after: int) -> dict[str, Any]:
        def find() -> list[dict[str, Any]]:
            events = cluster.events("resume")
            return [e for e in events if e["world_size"] == size and e["generation"] > after]

        return dict(cluster.wait(find, f"a world of {size}")[-1])

    wait_for_world(3, after=0)
    cluster.wait(commit=5, node=0)
    before = newest(cluster)
    cluster.kill_node(2)
    shrunk = wait_for_world(2, after=before)
    assert shrunk["kind"] == "checkpoint"
    assert shrunk["nodes"] == ["n0", "n1"]
    cluster.wipe(2)
    cluster.start_node(2)
    grown = wait_for_world(3, after=shrunk["generation"])
    third_is_back.touch()
    assert "n2" in grown["receiving_nodes"]
    assert cluster.wait_exit() == [0, 0, 0], cluster.output(0)
    check_end(kept, world_size=3)


def test_resume_names_damaged_checkpoints_and_uses_next_source(make: Make, undisturbed: str) -> None:
    """One copy is torn, one has a flipped bit; the third node's serves all."""
    cluster = make()
    kept = start(cluster, waits_at=12)  # so close to the commit that all nodes keep it
    for index in range(3):
        cluster.wait(commit=10, node=index)
    cluster.stop()
    go_on(cluster)
    before = newest(cluster)
    step = min(cluster.checkpoints(index)[0].step for index in range(3))
    for index in range(3):
        for entry in cluster.checkpoints(index):
            if entry.step > step:
                shutil.rmtree(entry.path)
    cluster.truncate_newest(0)
    cluster.corrupt(1)
    start(cluster)
    resumed = cluster.wait(generation=before + 1)
    assert resumed["step"] == step
    assert resumed["source_node"] == "n2"
    assert resumed["receiving_nodes"] == ["n0", "n1"]
    reasons = {rejected["node"]: rejected["reason"] for rejected in resumed["rejected"]}
    assert "bytes of" in reasons["n0"]
    assert "digest" in reasons["n1"]
    assert cluster.wait_exit() == [0, 0, 0], cluster.output(0)
    assert check_end(kept, world_size=3) == undisturbed
    assert "rejected n1/" in cluster.output(0)


def test_job_ends_when_every_checkpoint_is_damaged(make: Make) -> None:
    """An error names them; the job never starts from nothing."""
    cluster = make(nodes=2)
    start(cluster, waits_at=14)
    for index in range(2):
        cluster.wait(commit=5, node=index)
    cluster.stop()
    before = newest(cluster)
    for index in range(2):
        for entry in cluster.checkpoints(index):
            (entry.path / "state.safetensors").write_bytes(b"")
    for _ in range(2):
        start(cluster)
        assert cluster.wait_exit() == [1, 1]
        assert "none can be loaded" in cluster.output(0)
        assert newest(cluster) == before


def test_killed_job_continues_from_its_checkpoints(make: Make, undisturbed: str) -> None:
    """The same command again ends with the same state."""
    cluster = make()
    kept = start(cluster, waits_at=24)
    cluster.wait(commit=20, node=0)
    cluster.stop()
    go_on(cluster)
    before = newest(cluster)
    start(cluster)
    assert cluster.wait(generation=before + 1)["kind"] == "checkpoint"
    assert cluster.wait_exit() == [0, 0, 0], cluster.output(0)
    assert check_end(kept, world_size=3) == undisturbed


@pytest.mark.parametrize("second", [2, 4])
def test_job_continues_with_other_number_of_nodes(make: Make, second: int) -> None:
    """No sample is repeated or skipped. An operator has to confirm that the third node is dead."""
    first = make()
    kept = start(first, waits_at=19)
    first.wait(commit=15, node=0)
    first.stop()
    go_on(first)
    again = make(nodes=second)
    before = newest(first)
    if second < 3:
        assert cli.main(["force-quorum", str(first.run_dir / "n0"), "--yes"]) == 0
    start(again)
    resumed = again.wait(generation=before + 1)
    assert (resumed["previous_world_size"], resumed["world_size"]) == (3, second)
    # A node that was there may have died during its newest commit, and lack it too.
    assert {f"n{index}" for index in range(3, second)} <= set(resumed["receiving_nodes"])
    assert again.wait_exit() == [0] * second, again.output(0)
    check_end(kept, world_size=second)


def test_failure_event_names_exception_and_place(make: Make, undisturbed: str) -> None:
    """A rank that raises once costs one generation."""
    cluster = make()
    go_on(cluster)
    kept = start(cluster, raise_at="1:12:1")
    assert cluster.wait_exit() == [0, 0, 0], cluster.output(0)
    assert check_end(kept, world_size=3) == undisturbed
    failure = cluster.node_events(1, "failure")[0]
    assert (failure["type"], failure["message"]) == ("RuntimeError", "told to fail at step 12")
    assert "train.py" in failure["frame"]
