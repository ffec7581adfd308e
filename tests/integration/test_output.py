"""The lines that a person sees of real jobs, and the progress of long operations."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from elastic_resume import constants
from elastic_resume.testing import Cluster
from tests.support import terminal
from tests.support.paths import SCRIPTS

pytestmark = pytest.mark.cluster

PREFIX = "elastic_resume"


class Output:
    """What the nodes of a cluster have printed."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._seen = [0] * len(cluster.nodes)

    def new_lines(self) -> list[list[str]]:
        """Return each node's lines of elastic_resume since the last call, without their prefix."""
        new = []
        for index, seen in enumerate(self._seen):
            lines = [line for line in self._cluster.output(index).splitlines() if line.startswith(PREFIX)]
            self._seen[index] = len(lines)
            new.append([re.sub(r"^elastic_resume(\[n\d\])?:? ", "", line) for line in lines[seen:]])
        return new


def test_start_and_recovery_print_few_lines(tmp_path: Path) -> None:
    """Rank 0's node prints at most three at a start and two at a restart, another node one.

    The script does not enumerate its loader, so no line says what that would mean.
    """
    env = {constants.ENV_TOKEN: "a secret of 16 bytes", "OMP_NUM_THREADS": "1"}
    flags = ["--snapshot-every", "1", "--save-every", "5"]
    fast = tmp_path / "fast"
    pace = ("--step-delay", "0", "--slow-from", "7", "--slow-until", str(fast))
    job = (SCRIPTS / "train.py", "--step-log", str(tmp_path), "--epochs", "4", *pace)
    with Cluster(tmp_path, nodes=2, min_nodes=1, workers_per_node=2, flags=flags, env=env) as cluster:
        cluster.start(*job)
        cluster.wait(step=5)
        output = Output(cluster)
        first, other = output.new_lines()
        assert [line.partition(":")[0] for line in first] == ["job job", "generation 1"]
        assert "starting fresh; 4 ranks on 2 nodes" in first[1]
        assert other == [f"job job: 2 workers on this node, checkpoints in {cluster.nodes[1].directory}"]

        cluster.kill_worker(1)
        cluster.wait(generation=2)
        (died, resumed), other = output.new_lines()
        assert re.fullmatch(r"rank [23] on node n1 was killed by SIGKILL; restarting\.", died)
        assert resumed.startswith("generation 2: resumed at step ")
        assert other == [died.replace(" on node n1", "")]

        cluster.kill_node(1)
        cluster.wait(generation=3)
        cluster.wipe(1)
        cluster.start_node(1, env={constants.ENV_FAILPOINTS: "transfer.receive=delay:2.5"})
        cluster.wait(generation=4)
        lines, other = output.new_lines()
        lines = [line for line in lines if "sending step" not in line]
        assert [line.partition(":")[0] for line in lines] == [
            "node n1 died; restarting.",
            "generation 3",
            "joined",
            "generation 4",
        ]
        begun, ended = other[1:]
        assert re.fullmatch(
            r"node n1: receiving step \d+ from node n0: \d+ k?B of [\d.]+ kB in 2\.\d s \(.*B/s\)", begun
        )
        assert re.fullmatch(r"node n1: receiving step .*: ended, ([\d.]+ kB) of \1 in .*", ended)

        fast.touch()
        assert cluster.wait_exit() == [0, 0]
        assert output.new_lines() == [["done: every node has finished."]] * 2

        cluster.start(*job)
        assert cluster.wait_exit() == [0, 0]
        first, other = output.new_lines()
        assert len(first) == 3 + 1
        assert "RESUMING AN EARLIER RUN" in first[2]
        assert len(other) == 1 + 1


# Saves and resumes in a terminal; its commit takes longer than 2 s.
# The script arms the failpoint itself: in the environment it would make the worker start cold.
SAVES = """
import os
import torch
import elastic_resume as er
from elastic_resume import failpoints

os.environ["ELASTIC_RESUME_FAILPOINTS"] = "committer.written=delay:2.5@1"
failpoints.arm()
model = torch.nn.Linear(1000, 1000)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = er.resume(model=model, optimizer=optimizer, save_every=1000)
for epoch in run.epochs(1):
    run.step()
    run.save()
    print("saved", flush=True)
"""


@pytest.mark.parametrize("quiet", ["0", pytest.param("1", marks=pytest.mark.soak)])
def test_long_commit_logs_its_progress(tmp_path: Path, quiet: str) -> None:
    """--quiet hides it."""
    (tmp_path / "train.py").write_text(SAVES)
    text = terminal.run("train.py", directory=tmp_path, env={constants.ENV_QUIET: quiet})
    assert ("writing the checkpoint of step 1: ended, 4.01 MB of 4.01 MB" in text) == (quiet == "0")
    assert text.count("saved") == 1
    assert ("generation 1: no checkpoint found" in text) == (quiet == "0")
