"""All ranks get the notice of a node's end at the same step: real agents, workers and signals."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_resume import constants
from elastic_resume.testing import Cluster
from tests.support import notices
from tests.support.paths import SCRIPTS

pytestmark = pytest.mark.cluster

SCRIPT = SCRIPTS / "noticed.py"
STEP_OF_STOP = 60
"""Three seconds after the start: the leader learns within two or three that the script asks for notices."""
FLAGS = ["--snapshot-every", "1", "--save-every", "100000", "--grace", "60", "--hang-timeout", "0"]


def send_sigterm(cluster: Cluster, index: int) -> None:
    """Stop a node as Slurm or a pod's deletion does."""
    cluster.kill_agent(index, signal.SIGTERM)


STOPS = [send_sigterm, Cluster.give_notice]
TESTED = {("step", send_sigterm)}  # in `make test`; the others in `make soak`
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
        cluster.wait(step=STEP_OF_STOP)
        stop(cluster, 1)
        cluster.wait_exit(only=[1])
        cluster.wait(lambda: len(notices.read_lines(log).get((2, 1), [])) > 5, "the next generation")
        reason = "SIGTERM" if stop is send_sigterm else None
        step, _ = notices.check_same(log, 1, ranks=4, nodes=["n1"], reason=reason)
        hooks = notices.read_lines(log, "hook-")
        assert {key: [line["step"] for line in lines] for key, lines in hooks.items()} == {
            (1, rank): [step] for rank in range(4)
        }
        assert {key[1] for key, (line,) in hooks.items() if line["saved"]} == {0, 2}
        ended = notices.read_lines(log)[1, 2][-1]["step"]
        assert step <= ended <= step + 60
        assert not notices.find_first(log, 2)
        assert cluster.lost_steps == 0


@pytest.mark.soak
def test_only_node_gets_its_notice_on_all_ranks_and_is_saved(tmp_path: Path) -> None:
    """It is its own leader."""
    log = tmp_path / "log"
    log.mkdir()
    with Cluster(tmp_path, nodes=1, workers_per_node=3, flags=FLAGS) as cluster:
        cluster.start(SCRIPT, str(log))
        cluster.wait(step=STEP_OF_STOP)
        send_sigterm(cluster, 0)
        assert cluster.wait_exit() == [constants.EXIT_SIGNAL_BASE + signal.SIGTERM]
        step, _ = notices.check_same(log, 1, ranks=3, nodes=["n0"], reason="SIGTERM")
        newest = max(copy.version[1] for copy in cluster.checkpoints(0))
        assert step <= newest <= step + 1


@pytest.mark.soak
@pytest.mark.parametrize("stopped", [0, 1])
def test_one_rank_that_asks_gets_the_notice_of_any_node(tmp_path: Path, stopped: int) -> None:
    """It is on the second node."""
    log = tmp_path / "log"
    log.mkdir()
    with Cluster(tmp_path, nodes=2, min_nodes=1, workers_per_node=2, flags=FLAGS) as cluster:
        cluster.start(SCRIPT, str(log), "--only-rank", "3")
        cluster.wait(step=STEP_OF_STOP)
        send_sigterm(cluster, stopped)
        cluster.wait_exit(only=[stopped])
        cluster.wait(lambda: len(notices.read_lines(log).get((2, 1), [])) > 5, "the next generation")
        assert notices.find_first(log).keys() == {3}
        ((step, notice),) = notices.find_first(log).values()
        assert notice["node"] == f"n{stopped}"
        last = {rank: notices.read_lines(log)[1, rank][-1]["step"] for rank in range(4)}
        assert all(step <= each for each in last.values()), last
        assert cluster.lost_steps == 0


@pytest.mark.soak
def test_node_without_time_leaves_at_once_and_no_rank_gets_the_notice(tmp_path: Path) -> None:
    """The grace is shorter than the agreement and a step."""
    log = tmp_path / "log"
    log.mkdir()
    flags = ["2" if flag == "60" else flag for flag in FLAGS]
    with Cluster(tmp_path, nodes=2, min_nodes=1, workers_per_node=2, flags=flags) as cluster:
        cluster.start(SCRIPT, str(log), "--step-s", "0.5")
        cluster.wait(step=10)
        send_sigterm(cluster, 1)
        cluster.wait_exit(only=[1])
        cluster.wait(lambda: len(notices.read_lines(log).get((2, 1), [])) > 2, "the next generation")
        assert not notices.find_first(log)
        assert not notices.find_first(log, 2)
        assert cluster.lost_steps == 0


@pytest.mark.soak
@pytest.mark.parametrize("steps", [0, 4, 12, None])
def test_leader_that_dies_after_a_notice_holds_nobody(tmp_path: Path, steps: int | None) -> None:
    """So many steps after the signal; None: when a rank has had the notice."""
    log = tmp_path / "log"
    log.mkdir()
    with Cluster(tmp_path, nodes=3, min_nodes=1, workers_per_node=1, flags=FLAGS) as cluster:
        cluster.start(SCRIPT, str(log))
        cluster.wait(step=STEP_OF_STOP)
        leader, _, stopped = (int(name.removeprefix("n")) for name in cluster.events("resume")[0]["nodes"])
        send_sigterm(cluster, stopped)
        cluster.wait(lambda: cluster.events("drain"), "the drain")
        if steps is None:
            cluster.wait(lambda: notices.find_first(log), "a rank with the notice")
        elif steps:
            cluster.wait(step=max(event["step"] for event in cluster.events("step")) + steps)
        cluster.kill_node(leader)
        cluster.wait_exit(only=[stopped])
        alone = cluster.wait(
            lambda: next((e for e in cluster.events("resume") if e["world_size"] == 1), None),
            "one node alone",
        )
        cluster.wait(step=alone["step"] + 5)
        first = notices.find_first(log)
        assert bool(first) >= (steps is None)
        assert len({json.dumps(each) for each in first.values()}) <= 1, first
        for agreed, _ in first.values():
            lines = {
                rank: each for (generation, rank), each in notices.read_lines(log).items() if generation == 1
            }
            assert {rank for rank, each in lines.items() if each[-1]["step"] >= agreed} == first.keys()
        assert not notices.find_first(log, alone["generation"])
        assert cluster.lost_steps == 0
