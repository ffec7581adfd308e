"""Scripts that hold what public scripts hold, with real workers, a killed one among them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from elastic_resume.testing import Cluster
from tests.support.paths import SCRIPTS

pytestmark = pytest.mark.cluster
FLAGS = ["--snapshot-every", "1", "--save-every", "1000", "--prove", "always"]


def run_idioms(directory: Path, nodes: int, **env: str) -> tuple[list[str], list[str]]:
    """Return how each of two ranks ends, and the verdict of each proof."""
    directory.mkdir()
    workers = 2 // nodes
    with Cluster(directory, nodes=nodes, workers_per_node=workers, flags=FLAGS, env=env) as cluster:
        cluster.start(SCRIPTS / "idioms.py", str(directory))
        assert cluster.wait_exit() == [0] * nodes, cluster.output(0)
        assert cluster.lost_steps == 0
        ends = [json.loads(path.read_text()) for path in sorted(directory.glob("end-*.json"))]
        return ends, [event["verdict"] for event in cluster.events("proof")]


def test_killed_script_of_one_changed_line_ends_as_undisturbed(tmp_path: Path) -> None:
    """Bit for bit, twice within an epoch, the second time in what follows an early stop."""
    whole, _ = run_idioms(tmp_path / "whole", 1)
    assert len(whole) == 2
    for nodes in (1, 2) if "ELASTIC_RESUME_SOAK_KILLS" in os.environ else (2,):
        killed, verdicts = run_idioms(
            tmp_path / str(nodes), nodes, KILLS=f"1:13:{nodes - 1}", FAIL_EXPORT="1"
        )
        assert killed == whole
        assert verdicts == ["proved", "proved"]


NAMED = {
    "loss weights": "trains a parameter of shape [2] in its group 0 (weight), and no object",
    "scheduler not given": "StepLR works on 'optimizer'",
    "average not given": "AveragedModel averages the weights of 'model'",
    "sampler not given": "ElasticSampler: one was made, and er.resume",
    "other loader": "the first step has read no batch of data=",
    "step first": "run.step() was called before optimizer.step()",
    "rate by an index": "set between",
    "scheduler last": "scheduler/last_epoch from 0 to 1: changed between",
    "index": "enumerate(loader) starts at 0 again",
    "own loader": "er.per_rank(",
    "compression": "communication hook powerSGD_hook keeps a PowerSGDState",
    "join": "within torch's Join",
    "buffers of each rank": "broadcast_buffers=False, and the buffer",
    "weighted sampler": "data= is a DataLoader whose position in an epoch cannot be restored",
}


@pytest.mark.soak
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("kind", NAMED)
def test_script_that_a_resume_would_change_is_named_before_its_first_failure(
    tmp_path: Path, kind: str, nodes: int
) -> None:
    """Rank 1 is killed after step 5. What the script does wrong was logged before, or its start is refused.

    An index that starts at 0 again is named at the first resume within an epoch.
    """
    with Cluster(
        tmp_path, nodes=nodes, workers_per_node=2 // nodes, flags=FLAGS, env={"KIND": kind, "KILLS": "1:5:1"}
    ) as cluster:
        cluster.start(SCRIPTS / "named.py")
        cluster.wait_exit()
        text, output = NAMED[kind], cluster.output(0)
        assert text in (output if kind == "index" else output.partition("was killed by")[0]), output
