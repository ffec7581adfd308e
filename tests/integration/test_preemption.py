"""All ranks get the notice of a node's end at the same step: real agents, workers and signals."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_resume.testing import Cluster
from tests.support import notices
from tests.support.paths import SCRIPTS

pytestmark = pytest.mark.cluster

SCRIPT = SCRIPTS / "noticed.py"
FLAGS = ["--snapshot-every", "1", "--save-every", "100000", "--grace", "60", "--hang-timeout", "0"]


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
