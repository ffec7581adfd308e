"""Test processes with a GPU: whole jobs that are killed and resume to the bit, NCCL, and CUDA graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from elastic_resume import events
from elastic_resume.testing import Cluster
from tests.gpu.test_branches import Begin
from tests.support.launch_ranks import run_ranks
from tests.support.training_job import SCRIPT, check_end
from tests.unit.capture.test_snapshotter import assert_held, expected, failures, is_complete

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

EPOCHS = 6
KILLS_AT = (7, 20, 21, 44)


def train(directory: Path, nodes: int, workers: int = 1, kills_at: tuple[int, ...] = (), **env: str) -> str:
    """Train on a GPU that all ranks share, killing a worker at each of the steps; return the end's digest."""
    ranks = nodes * workers
    # NCCL wants a GPU for each rank. From 32 MiB on every local rank copies a shard.
    words = ["--device", "cuda", "--epochs", str(EPOCHS), "--width", "512" if workers == 1 else "200000"]
    words += ["--backend", "gloo"] if ranks > 1 else []
    flags = ["--snapshot-every", "1"]
    with Cluster(directory, nodes=nodes, workers_per_node=workers, flags=flags, env=env) as cluster:
        step_log = directory / "step_log"
        cluster.start(SCRIPT, "--step-log", str(step_log), *words)
        for count, step in enumerate(kills_at):
            cluster.wait(generation=count + 1, step=step)
            cluster.kill_worker(count % nodes, count % workers)
        assert cluster.wait_exit() == [0] * nodes, cluster.output_tails()
        resumes = [event for event in cluster.events("resume") if event["generation"] > 1]
        assert len(kills_at) <= len(resumes)
        assert cluster.lost_steps <= len(kills_at)
    return check_end(step_log, world_size=ranks, epochs=EPOCHS)


@pytest.mark.parametrize(("nodes", "workers"), [(1, 1), (2, 1), (1, 2)])
def test_killed_job_on_gpu_ends_with_undisturbed_weights(tmp_path: Path, nodes: int, workers: int) -> None:
    """The weights are bit-identical; each kill costs one step at most."""
    undisturbed = train(tmp_path / "undisturbed", nodes, workers)
    assert train(tmp_path / "killed", nodes, workers, kills_at=KILLS_AT) == undisturbed


def test_replicas_on_gpu_are_compared(tmp_path: Path) -> None:
    """Digests are computed of snapshots, so a GPU costs nothing there; equal replicas are no divergence."""
    train(tmp_path / "checked", 2, ELASTIC_RESUME_CHECK_REPLICAS="5")


@pytest.mark.parametrize("nodes", [1, 2])
def test_checks_of_gradients_leave_no_trace_on_gpu(tmp_path: Path, nodes: int) -> None:
    """CUDA's generators too; every check finds equal gradients."""
    undisturbed = train(tmp_path / "undisturbed", nodes)
    assert train(tmp_path / "checked", nodes, ELASTIC_RESUME_CHECK_COMPUTE_EVERY="5") == undisturbed
    found = [event for path in tmp_path.glob("checked/**/events.jsonl") for event in events.read(path)]
    checks = [event["is_equal"] for event in found if event["event"] == "compute-check"]
    assert checks == [True] * nodes * (EPOCHS * 10 // 5)
    assert not any(event["event"] == "compute-check-off" for event in found)


JOIN = """
import sys, torch, torch.distributed as dist
from elastic_resume.ranks.collectives import Collectives

collectives = Collectives.join()
tensors = [torch.full((3,), float(collectives.rank)).to(device) for device in sys.argv[1:]]
collectives.broadcast_tensors(tensors, 0)
for tensor in tensors:
    dist.all_reduce(tensor)
assert not any(map(torch.any, tensors)), tensors
bound = dist.group.WORLD.bound_device_id
assert bound in {None, torch.device("cuda", 0)}, bound
print(dist.get_backend(), torch.cuda.current_device(), collectives.gather("a"))
"""


@pytest.mark.parametrize(
    "devices", [["cuda:0", "cpu"], ["cpu", "cpu"]], ids=["NCCL", "two ranks share a GPU"]
)
def test_launcher_shows_rank_its_own_gpu(tmp_path: Path, devices: list[str]) -> None:
    """LOCAL_RANK is no index then. Ranks whose tensors are on CPUs may share a GPU."""
    script = tmp_path / "join.py"
    script.write_text(JOIN)
    size = 1 if "cuda:0" in devices else 2
    env = [{"LOCAL_RANK": str(3 + rank), "CUDA_VISIBLE_DEVICES": "0"} for rank in range(size)]
    for done in run_ranks(size, script, *devices, env=env):
        assert done.returncode == 0, done.stderr
        assert f"0 {['a'] * size}" in done.stdout


@pytest.mark.parametrize("holds_step", [False, True], ids=["forward and backward", "optimizer.step() too"])
def test_state_that_a_graph_changes_is_copied(begin: Begin, *, holds_step: bool) -> None:
    """A graph that was captured before er.resume() may hold the step: no hook runs, and training waits."""
    model = nn.Linear(64, 64, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, capturable=True)
    inputs = torch.randn(8, 64, device="cuda")

    def work() -> None:
        model.zero_grad()
        model(inputs).pow(2).sum().backward()
        if holds_step:
            optimizer.step()

    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        work()
    run = begin(model=model, optimizer=optimizer)
    for number in range(1, 5):
        graph.replay()
        if not holds_step:
            optimizer.step()
        run.step()
        state = expected(run)
        graph.replay()
        assert is_complete(run)
        assert_held(run, number, state)
    assert failures(run) == []
