"""With a snapshot at every step, no single failure costs a finished step, at whichever moment it happens.

`make soak` plans a hundred kills, `make test` three. ELASTIC_RESUME_SOAK_SEED chooses others.
"""

from __future__ import annotations

import json
import os
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_resume.testing import Cluster
from tests.support import launch_ranks
from tests.support.paths import SCRIPTS
from tests.support.scripts.planned_kills import MOMENTS, SURVIVOR_MOMENTS

pytestmark = pytest.mark.cluster

SCRIPT = SCRIPTS / "planned_kills.py"
KILLS = int(os.environ.get("ELASTIC_RESUME_SOAK_KILLS", "3"))
SEED = int(os.environ.get("ELASTIC_RESUME_SOAK_SEED", "1"))
GAP = 4  # steps between two kills
STEPS = GAP * (KILLS + 2)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Three nodes, all required: other world sizes would give other weights."""
    flags = ["--snapshot-every", "1", "--save-every", "1000"]
    env = {"ELASTIC_RESUME_MAX_NO_PROGRESS": "1000"}
    with Cluster(tmp_path, nodes=3, min_nodes=3, flags=flags, env=env) as made:
        yield made


def plan_of(seed: int) -> list[dict[str, Any]]:
    """Plan a kill every few steps, each moment in turn. Most kill a worker, which restarts quickly."""
    rng = random.Random(seed)
    moments = [(moment, part) for part, found in enumerate(MOMENTS) for moment in found]
    rng.shuffle(moments)
    plan = []
    for number in range(KILLS):
        moment, part = moments[number % len(moments)]
        plan.append(
            {
                "step": GAP * (number + 1) + rng.randrange(2),
                "rank": rng.randrange(3),
                "moment": moment,
                "survivors": rng.choice([*SURVIVOR_MOMENTS[part], ""]),
                "who": rng.choice(["worker", "worker", "worker", "agent", "node"]),
            }
        )
    return plan


def run(cluster: Cluster, plan: list[dict[str, Any]], name: str, *words: str) -> Path:
    """Run the job to its end, and restart nodes that end; return its step log."""
    kept = cluster.directory / name
    kept.mkdir()
    (kept / "plan.json").write_text(json.dumps(plan))
    cluster.start(
        SCRIPT, "--step-log", str(kept), "--plan", str(kept / "plan.json"), "--steps", str(STEPS), *words
    )

    def ended() -> bool:
        for index, node in enumerate(cluster.nodes):
            code = node.agent.poll() if node.agent is not None else None
            if code is not None and code != 0:
                assert code == -9, cluster.output(index)
                cluster.kill_node(index)
                cluster.start_node(index)
        return all(node.agent is not None and node.agent.poll() == 0 for node in cluster.nodes)

    cluster.wait(ended, "the end of the job", 60 + 15 * len(plan))
    return kept


def train_undisturbed(kept: Path) -> Path:
    """Train on three ranks without an agent; return the step log."""
    kept.mkdir()
    (kept / "plan.json").write_text("[]")
    env = [{"ELASTIC_RESUME_CKPT_DIR": str(kept), "ELASTIC_RESUME_SAVE_EVERY": "1000"}] * 3
    words = ["--step-log", str(kept), "--plan", str(kept / "plan.json"), "--steps", str(STEPS)]
    ranks = launch_ranks.run_ranks(3, SCRIPT, *words, env=env)
    assert [rank.returncode for rank in ranks] == [0] * 3, ranks[0].stderr
    return kept


def digest(kept: Path) -> str:
    """Return the digest of the final state, equal on all ranks."""
    (found,) = {json.loads(path.read_text()) for path in kept.glob("end-*.json")}
    return str(found)


def finished_by_all(kept: Path) -> dict[int, list[int]]:
    """Return for each step the generations in which all three ranks finished it."""
    ranks = defaultdict(set)
    for path in kept.glob("g*-r*.jsonl"):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            ranks[entry["step"], entry["generation"]].add(path.stem.split("-")[1])
    steps = defaultdict(list)
    for (step, generation), who in sorted(ranks.items()):
        if len(who) == 3:
            steps[step].append(generation)
    return steps


@pytest.mark.parametrize(
    "words",
    [
        pytest.param((), id="restart"),
        pytest.param(("--restartable",), id="in-process", marks=pytest.mark.soak),
    ],
)
def test_no_finished_step_is_recomputed(cluster: Cluster, tmp_path: Path, words: tuple[str, ...]) -> None:
    """The end state is bit-identical to that of an undisturbed run.

    In a restartable function all processes but those that were killed stay.
    """
    plan = plan_of(SEED)
    kept = run(cluster, plan, "step_log", *words)
    assert len(list(kept.glob("done-*"))) == len(plan)
    repeated = {step: found for step, found in finished_by_all(kept).items() if len(found) > 1}
    assert not repeated, (repeated, plan)
    processes = len({path.stem.split("-")[2] for path in kept.glob("g*-r*.jsonl")})
    if words:
        assert processes == 3 + len(plan), (plan, cluster.output_tails())
    assert digest(train_undisturbed(tmp_path / "undisturbed")) == digest(kept)
