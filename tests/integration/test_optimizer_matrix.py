"""Optimizers with several ways to train, killed in mid-run: the resumed run equals the undisturbed run.

The ways are plain, dropout, BatchNorm, an average of the weights, a GradScaler and accumulated gradients.
Half of all pairs run.

For each cell (tests/support/scripts/matrix.py) these are compared bit for bit: weights and buffers,
optimizer, scheduler, scaler, average, the samples that each rank reads in each step, and every loss.

Torch itself refuses LBFGS with a GradScaler (no closure), and SyncBatchNorm on a CPU.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from elastic_resume.testing import Cluster
from tests.support import launch_ranks
from tests.support.paths import SCRIPTS
from tests.support.scripts.matrix import CELLS, SAMPLES, STEPS

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

SCRIPT = SCRIPTS / "matrix.py"
FLAGS = ["--snapshot-every", "1", "--save-every", "1000"]

# A node in the second epoch: two load what they have, the third what they send. `make soak` kills more.
KILLS = ["8:2:amid:node"]
if "ELASTIC_RESUME_SOAK_KILLS" in os.environ:
    KILLS += ["4:0:amid:worker", "6:1:told:worker", "11:0:stepped:worker", "7:1:stepped:node"]

StepLog = dict[tuple[int, int], list[dict[str, Any]]]  # (step, rank) -> what was written, by generation


def step_log_of(kept: Path) -> StepLog:
    """Read the records of all ranks."""
    found: StepLog = defaultdict(list)
    for path in sorted(kept.glob("g*-r*.jsonl")):
        rank = int(path.stem.rpartition("-r")[2])
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            found[entry["step"], rank].append(entry)
    return found


def ends_of(kept: Path) -> list[dict[str, Any]]:
    """Return the final state of each rank."""
    return [json.loads((kept / f"end-{rank}.json").read_text()) for rank in range(3)]


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The records of an undisturbed run."""
    kept = tmp_path_factory.mktemp("baseline")
    env = {"ELASTIC_RESUME_CKPT_DIR": str(kept / "ckpt"), "ELASTIC_RESUME_SAVE_EVERY": "1000"}
    each = [{**env, "ELASTIC_RESUME_NODE_NAME": f"n{rank}"} for rank in range(3)]
    for done in launch_ranks.run_ranks(3, SCRIPT, "--step-log", str(kept), env=each):
        assert done.returncode == 0, done.stderr
    return kept


@pytest.mark.parametrize("kill", KILLS)
def test_killed_run_equals_undisturbed_run(baseline: Path, tmp_path: Path, kill: str) -> None:
    """A kill between the optimizer steps of two cells; a node restarts with an empty directory."""
    kept = tmp_path / "step_log"
    kept.mkdir()
    step, victim = map(int, kill.split(":")[:2])
    with Cluster(tmp_path, nodes=3, min_nodes=3, flags=FLAGS) as cluster:
        cluster.start(SCRIPT, "--step-log", str(kept), "--kill", kill)
        if kill.endswith("node"):
            cluster.wait(lambda: not cluster.nodes[victim].alive, f"the death of n{victim}")
            cluster.kill_node(victim)
            cluster.wipe(victim)
            cluster.start_node(victim)
        assert cluster.wait_exit() == [0, 0, 0], cluster.output(0)
        resumed = cluster.events("resume")
    assert (kept / "killed").exists()
    assert [event["generation"] for event in resumed] == [1, 2]
    assert 0 < step - 1 <= resumed[1]["step"] <= step < STEPS, "not resumed in its middle"
    compare_diaries(step_log_of(kept), step_log_of(baseline))
    for rank, (end, whole) in enumerate(zip(ends_of(kept), ends_of(baseline), strict=True)):
        assert end["step"] == whole["step"] == STEPS
        other = [
            f"{cell}: {part}"
            for cell, parts in whole["holds"].items()
            for part, digest in parts.items()
            if end["holds"][cell][part] != digest
        ]
        assert not other, f"rank {rank} ends with another {other}"


def compare_diaries(killed: StepLog, whole: StepLog) -> None:
    """Check that each step reads the same samples and gives the same losses, also repeated steps."""
    assert killed.keys() == whole.keys() == {(s, r) for s in range(1, STEPS + 1) for r in range(3)}
    for (step, rank), entries in killed.items():
        (undisturbed,) = whole[step, rank]
        for entry in entries:
            assert entry["indices"] == undisturbed["indices"], f"other samples in step {step} on rank {rank}"
            other = [cell for cell, loss in undisturbed["losses"].items() if entry["losses"][cell] != loss]
            assert not other, f"other losses in step {step} on rank {rank}: {other}"


def test_undisturbed_run_learns_and_reads_every_sample(baseline: Path) -> None:
    """Otherwise equality would prove nothing."""
    step_log, ends = step_log_of(baseline), ends_of(baseline)
    per_epoch = STEPS // 2
    for epoch in range(2):
        steps = range(epoch * per_epoch + 1, (epoch + 1) * per_epoch + 1)
        read = [index for step in steps for rank in range(3) for index in step_log[step, rank][0]["indices"]]
        assert sorted(read) == list(range(SAMPLES))
    assert set(ends[0]["holds"]) == {f"{how}-{way}" for how, way in CELLS}
    digests = [parts["model"] for parts in ends[0]["holds"].values()]
    assert len(set(digests)) == len(CELLS), "two cells trained alike"
    for how, way in CELLS:
        first, last = (step_log[step, 0][0]["losses"][f"{how}-{way}"] for step in (1, STEPS))
        assert first != last
