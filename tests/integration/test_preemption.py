"""All ranks get the notice of a node's end at the same step: real agents, workers and signals."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_resume.testing import Cluster
from tests.support.paths import SCRIPTS

pytestmark = pytest.mark.cluster

SCRIPT = SCRIPTS / "noticed.py"
FLAGS = ["--snapshot-every", "1", "--save-every", "100000", "--grace", "60", "--hang-timeout", "0"]


def read(directory: Path, prefix: str = "") -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Return the lines of each rank by (generation, rank)."""
    found = {}
    for path in directory.glob(f"{prefix}g*.jsonl"):
        generation, rank = map(int, re.findall(r"\d+", path.stem))
        found[generation, rank] = [json.loads(line) for line in path.read_text().splitlines()]
    return found


def find_first(directory: Path, generation: int = 1) -> dict[int, tuple[int, dict[str, Any]]]:
    """Return for each rank the step at which it first had a notice, and the notice."""
    found = {}
    for (number, rank), lines in read(directory).items():
        noticed = [line for line in lines if line["preemption"]]
        if number == generation and noticed:
            found[rank] = noticed[0]["step"], noticed[0]["preemption"]
    return found


def send_sigterm(cluster: Cluster, index: int) -> None:
    """Stop a node as Slurm or a pod's deletion does."""
    cluster.kill_agent(index, signal.SIGTERM)


STOPS = [send_sigterm, Cluster.give_notice]
TESTED = {
    ("step", send_sigterm),
    ("sharded", Cluster.give_notice),
}  # in `make test`; the others in `make soak`
CASES = [
    pytest.param(kind, stop, marks=() if (kind, stop) in TESTED else pytest.mark.soak)
    for kind in ("step", "epochs", "restartable", "sharded")
    for stop in STOPS
]


@pytest.mark.parametrize(("kind", "stop"), CASES)
def test_all_ranks_get_the_notice_at_one_step_and_the_node_leaves_after_the_next(
    tmp_path: Path, kind: str, stop: Callable[[Cluster, int], None]
) -> None:
    """By attribute and by hook; the hook saves. The others train on, with no notice."""
    log = tmp_path / "log"
    log.mkdir()
    with Cluster(tmp_path, nodes=2, min_nodes=1, workers_per_node=2, flags=FLAGS) as cluster:
        cluster.start(SCRIPT, str(log), "--kind", kind)
        cluster.wait(step=30)
        stop(cluster, 1)
        cluster.wait_exit(only=[1])
        cluster.wait(lambda: len(read(log).get((2, 1), [])) > 5, "the next generation")
        first = find_first(log)
        assert first.keys() == {0, 1, 2, 3}
        assert len({json.dumps(each) for each in first.values()}) == 1, first
        step, notice = first[0]
        assert notice["node"] == "n1"
        assert notice["reason"] == ("SIGTERM" if stop is send_sigterm else str(notice["reason"]))
        hooks = read(log, "hook-")
        assert {key: [line["step"] for line in lines] for key, lines in hooks.items()} == {
            (1, rank): [step] for rank in range(4)
        }
        assert {key[1] for key, (line,) in hooks.items() if line["saved"]} == {0, 2}
        ended = read(log)[1, 2][-1]["step"]
        assert step <= ended <= step + 60
        assert not find_first(log, 2)
        assert cluster.lost_steps == 0
