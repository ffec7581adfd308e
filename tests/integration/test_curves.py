"""A tracker gets each step once, with the undisturbed run's values, whatever dies and whenever.

`make soak` kills twenty times, `make test` three. ELASTIC_RESUME_SOAK_SEED chooses other moments.
"""

from __future__ import annotations

import csv
import os
import random
import time
from pathlib import Path

import pytest

from elastic_resume.testing import Cluster
from tests.support.paths import SCRIPTS

pytestmark = pytest.mark.cluster

SCRIPT = SCRIPTS / "curves.py"
KILLS = int(os.environ.get("ELASTIC_RESUME_SOAK_KILLS", "3"))
SEED = int(os.environ.get("ELASTIC_RESUME_SOAK_SEED", "1"))
STEPS_PER_EPOCH, GAP = 20, 8
EPOCHS = 2 + KILLS * GAP // STEPS_PER_EPOCH
COLUMNS = ("loss", "lr", "eval/loss")


def read_csv(path: Path) -> dict[int, tuple[str, ...]]:
    """Return each step's values; a step that is there twice fails."""
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    steps = [int(row["step"]) for row in rows]
    assert steps == list(range(1, len(steps) + 1))
    return {int(row["step"]): tuple(row[name] for name in COLUMNS) for row in rows}


def train(directory: Path, *words: str, flags: tuple[str, ...] = (), nodes: int = 2) -> Cluster:
    """Start a job that logs to a file of its directory."""
    directory.mkdir()
    cluster = Cluster(
        directory,
        nodes=nodes,
        flags=["--log-metrics", f"csv:{directory / 'values.csv'}", *flags],
        env={"ELASTIC_RESUME_MAX_NO_PROGRESS": "1000"},
    )
    cluster.start(SCRIPT, *words)
    return cluster


def find_rank_0(cluster: Cluster) -> tuple[int, int] | None:
    """Return the node of rank 0 in the newest generation, and its step."""
    found = [
        (record.generation, index, record.step)
        for index, record in cluster.rank_progress()
        if record.worker.rank == 0 and record.step
    ]
    return max(found)[1:] if found else None


def wait_for_step(cluster: Cluster, step: int) -> int:
    """Wait until rank 0 has finished a step; return its node."""

    def found() -> tuple[int, int] | None:
        place = find_rank_0(cluster)
        return place if place is not None and place[1] >= step else None

    # As a tuple, because node 0 is no true value.
    return cluster.wait(found, f"step {step} of rank 0", 180)[0]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[str, ...]]:
    """Train without a failure; return the values of each step."""
    directory = tmp_path_factory.mktemp("undisturbed") / "job"
    with train(directory, "--epochs", str(EPOCHS), "--step-delay", "0") as cluster:
        assert cluster.wait_exit() == [0, 0]
    found = read_csv(directory / "values.csv")
    assert len(found) == EPOCHS * STEPS_PER_EPOCH
    assert all(values[0] and values[1] for values in found.values())
    assert [step for step, values in found.items() if values[2]] == list(
        range(STEPS_PER_EPOCH, len(found) + 1, STEPS_PER_EPOCH)
    )
    return found


@pytest.mark.parametrize(
    ("victim", "flags"),
    [
        pytest.param("worker", ("--snapshot-every", "1"), id="worker-each-step", marks=pytest.mark.soak),
        pytest.param("worker", (), id="worker", marks=pytest.mark.soak),
        pytest.param("node", (), id="node", marks=pytest.mark.soak),
        pytest.param("node", ("--snapshot-every", "1"), id="node-each-step", marks=pytest.mark.soak),
        pytest.param("any", ("--snapshot-every", "1"), id="any-each-step"),
    ],
)
def test_kills_of_rank_0_leave_each_step_once(
    tmp_path: Path, undisturbed: dict[int, tuple[str, ...]], victim: str, flags: tuple[str, ...]
) -> None:
    """Its worker, or its node with the agent that writes; the next kill follows a few steps later."""
    rng = random.Random(SEED)
    directory = tmp_path / "job"
    flags = (*flags, "--save-every", "1000")
    with train(directory, "--epochs", str(EPOCHS), flags=flags) as cluster:
        for number in range(KILLS):
            node = wait_for_step(cluster, GAP * number + rng.randrange(1, GAP))
            time.sleep(rng.uniform(0, 0.03))  # a moment within a step
            kind = rng.choice(["worker", "node"]) if victim == "any" else victim
            if kind == "worker":
                cluster.kill_worker(node)
            else:
                cluster.kill_node(node)
                cluster.start_node(node)
        assert cluster.wait_exit() == [0, 0]
        assert cluster.events("curves-lost") == []
        assert len(cluster.events("resume")) > KILLS
    assert read_csv(directory / "values.csv") == undisturbed
