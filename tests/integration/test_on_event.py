"""The command of ``--on-event`` in real jobs: each event of the job reaches the user once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastic_resume import constants
from elastic_resume.testing import Cluster
from tests.support.paths import SCRIPTS

pytestmark = pytest.mark.cluster

TRAIN = SCRIPTS / "train.py"
# It reports all the same that the command fails, and floods.
FAILING = 'cat >> "$NOTICES"; head -c 1000000 /dev/zero | tr "\\0" x; echo; echo no route; exit 3'


def make_flags(directory: Path, command: str) -> dict[str, Any]:
    """Return the arguments of a `Cluster` whose nodes run a command of a shell."""
    return {
        "flags": ["--snapshot-every", "1", "--on-event", f"sh -c '{command}'"],
        "env": {"NOTICES": str(directory / "told")},
    }


def read_notices(directory: Path) -> list[dict[str, Any]]:
    """Return what the commands of all nodes have got."""
    path = directory / "told"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_each_event_is_reported_once_though_the_reporting_node_dies(tmp_path: Path) -> None:
    """A worker is killed, then the first node, which has reported that; another node is preempted."""
    options = make_flags(tmp_path, 'cat >> "$NOTICES"')
    with Cluster(tmp_path, nodes=3, min_nodes=1, **options) as cluster:
        fast = tmp_path / "fast"
        arguments = f"--step-log={tmp_path / 'log'}", "--epochs=8", "--slow-from=10", f"--slow-until={fast}"

        def wait_for_notices(count: int) -> None:
            cluster.wait(lambda: len(read_notices(tmp_path)) >= count, f"{count} notices")

        cluster.start(TRAIN, *arguments)
        wait_for_notices(1)
        cluster.wait(step=3)
        cluster.kill_worker(1)
        wait_for_notices(3)
        cluster.kill_node(0)
        wait_for_notices(5)
        cluster.give_notice(2)
        wait_for_notices(8)
        fast.touch()
        assert cluster.wait_exit() == [0, 75]
    notices = read_notices(tmp_path)
    alert, *others = sorted(notices, key=lambda notice: notice["kind"] != "alert")
    assert [(notice["kind"], notice["node"], notice["restarts"]) for notice in others] == [
        ("start", "n0", 0),
        ("failure", "n0", 1),
        ("recovery", "n0", 1),
        ("failure", "n1", 2),
        ("recovery", "n1", 2),
        ("failure", "n1", 3),
        ("recovery", "n1", 3),
        ("end", "n1", 3),
    ]
    assert (alert["event"], alert["node"]) == ("preemption-notice", "n2")
    root_causes = [notice["root_cause"] for notice in others if notice["kind"] == "failure"]
    assert [cause["node"] for cause in root_causes] == ["n1", "n0", "n2"]
    assert (root_causes[0]["rank"], root_causes[0]["signal"]) == (1, "SIGKILL")
    assert others[1]["text"] == "rank 1 on node n1 was killed by SIGKILL"
    assert all(notice["step"] >= 3 for notice in others[1:])
    assert {(notice["run_id"], notice["version"], notice["dropped"]) for notice in notices} == {("job", 1, 0)}


def test_give_up_is_reported_by_one_node_and_a_failing_command_costs_one_warning(tmp_path: Path) -> None:
    """All nodes fail alike, before any step."""
    script = tmp_path / "script.py"
    script.write_text("import no_such_module")
    with Cluster(tmp_path, nodes=2, **make_flags(tmp_path, FAILING.replace("'", ""))) as cluster:
        cluster.start(script)
        assert cluster.wait_exit() == [1, 1]
        (notice,) = read_notices(tmp_path)
        settings = (cluster.nodes[0].directory / constants.SETTINGS_FILE).read_text()
        events = (cluster.nodes[0].directory / constants.EVENTS_FILE).read_text()
        owner = (cluster.nodes[0].directory / constants.LOCK_OWNER_FILE).read_text()
        output = cluster.output(int(notice["node"][1:]))
    assert (notice["kind"], notice["severity"]) == ("give-up", "bad")
    assert notice["root_cause"]["type"] == "ModuleNotFoundError"
    assert "no_such_module" in notice["text"]
    assert output.count("on-event: the command for the event 'give-up' ended with exit code 3") == 1
    assert "xxx no route. The job does not depend on it" in output
    assert len(output) < 20_000
    assert "on-event: " in settings
    assert "--on-event sh ***" in owner
    assert "no route" not in settings + events + owner  # a webhook's address would be there


@pytest.mark.soak
def test_job_ends_though_its_command_hangs(tmp_path: Path) -> None:
    """It ignores SIGTERM, and leaves a process. Training waits for no command, and the agent's end 10 s."""
    options = make_flags(tmp_path, 'trap "" TERM; cat >> "$NOTICES"; sleep 600; sleep 600')
    with Cluster(tmp_path, nodes=1, **options) as cluster:
        cluster.start(TRAIN, f"--step-log={tmp_path / 'log'}", "--epochs=2", "--step-delay=0")
        assert cluster.wait_exit() == [0]
        assert cluster.processes(0) == []
        output = cluster.output(0)
    assert [notice["kind"] for notice in read_notices(tmp_path)] == ["start", "end"]
    assert output.count("was killed after its time limit") == 1
    assert output.index("done: every node has finished") < output.index("was killed after its time limit")
