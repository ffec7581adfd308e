"""Simulated nodes as tests use them: planned actions, wiped disks, and machines that lose their power."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from elastic_resume import constants, events
from elastic_resume.errors import ConfigError, UsageError
from elastic_resume.events import EventLog
from elastic_resume.report.loader import load_run
from elastic_resume.slots.progress_page import ProgressRecord, WorkerProcess
from elastic_resume.testing import Cluster, TriggerError
from elastic_resume.testing.cluster import PlannedActions, RankProgress, StepCondition
from tests.support.machine_cluster import MachineCluster
from tests.support.paths import SCRIPTS

SCRIPT = SCRIPTS / "train.py"
MB = 1 << 20


def make_record(step: int, *, rank: int = 0, generation: int = 1) -> ProgressRecord:
    """Make the progress record of a rank."""
    worker = WorkerProcess(
        rank=rank,
        agent_pid=1,
        assigned_generation=1,
        pid=2,
        start_ticks=3,
        stack_output_fd=4,
        stack_request_fd=5,
    )
    return ProgressRecord(0, generation, step, 2, False, worker, 0, 0, 0, 0)


def test_planned_actions_run_once_and_their_errors_are_raised() -> None:
    """The newer of two records of a rank counts; an action that returns False runs again."""
    records = [(0, make_record(9, rank=1)), (1, make_record(4, rank=1, generation=2)), (2, make_record(30))]
    planned, done = PlannedActions(), Counter[tuple[str, int, int]]()

    def plan(what: str, step: int, rank: int | None = None, node: int | None = None) -> None:
        def act(match: RankProgress) -> bool:
            index, found = match
            done[what, index, found.step] += 1
            if what == "breaks":
                raise UsageError("there is none")
            return done[what, index, found.step] == 2  # not yet, the first time

        planned.schedule(what, StepCondition(step, rank, node), act)

    plan("any", 20)
    plan("breaks", 30, node=2)
    plan("rank", 4, rank=1)
    plan("node", 9, node=0)
    plan("late", 31)
    with pytest.raises(TriggerError, match="breaks at step 30 on n2: there is none"):
        planned.run_due(records)
    for _ in range(3):
        planned.run_due(records)
    assert done == {("any", 2, 30): 2, ("breaks", 2, 30): 1, ("rank", 1, 4): 2, ("node", 0, 9): 2}
    with pytest.raises(TriggerError, match="late at step 31: never came"):
        planned.require_all_done()
    planned.require_all_done()


def test_cluster_keeps_events_of_wiped_node(tmp_path: Path) -> None:
    """Otherwise recomputed steps would count as steps that never ran, and `lost_steps` would be too low."""
    with Cluster(tmp_path, nodes=2) as cluster:
        for index, node in enumerate(cluster.nodes):
            for life, last in ((1, 30), (2, 5)):
                node.directory.mkdir(parents=True)
                log = EventLog(node.directory / constants.EVENTS_FILE, node=node.name, rank=index)
                about = {"generation": life, "world_size": 2}
                log.emit("agent-start", run_id=cluster.run_id)
                log.emit("generation-start", **about)
                log.emit("worker-start", step=0, **about)
                if index == 0:
                    log.emit("resume", step=0, kind="cold", nodes=["n0", "n1"], recomputed_steps=0, **about)
                log.emit("step", step=last, **about)
                log.close()
                time.sleep(0.002)  # events have times in milliseconds
                if life == 1:
                    cluster.wipe(index)
        assert cluster.lost_steps == 30
        assert sorted(event["step"] for event in cluster.events("step")) == [5, 5, 30, 30]
        assert [one.generation for one in cluster.recoveries] == [2]
        assert len(load_run([cluster.run_dir]).events) == len(cluster.events()) == 18


def test_cluster_refuses_wrong_use(tmp_path: Path) -> None:
    """A planned action that never ran is an error when the cluster ends."""
    with (
        pytest.raises(TriggerError, match="poweroff at step 5 on n1: never came"),
        Cluster(tmp_path) as cluster,
    ):
        with pytest.raises(UsageError, match=r"node= \(the whole node"):
            cluster.at(step=3, node=1).kill(signal.SIGSTOP)
        with pytest.raises(ConfigError, match="cannot read 'commit"):
            cluster.arm(0, "commit.after-data=kil")
        with pytest.raises(UsageError, match="wait for step="):
            cluster.wait(step=1, commit=2)
        cluster.at(step=5, node=1).do(cluster.poweroff, 1)


@pytest.mark.cluster
@pytest.mark.slow
def test_simulated_machine_loses_unsynced_events_but_report_counts_all(tmp_path: Path) -> None:
    """The machine finds what was synced; tests and the report count every event once."""
    with MachineCluster(tmp_path, nodes=1, disk_bytes=32 * MB, shm_bytes=8 * MB) as cluster:
        log = cluster.nodes[0].directory / constants.EVENTS_FILE
        log.parent.mkdir(parents=True)
        cluster.backend.boot([0])
        for number in (1, 2):  # the second time it loses what it has written since the first
            event_log = EventLog(log, node="n0")
            event_log.emit("step", step=2 * number - 1)
            with open(log, "rb") as file:
                os.fsync(file.fileno())
            event_log.emit("step", step=2 * number)
            event_log.close()
            cluster.poweroff(0)
            cluster.backend.boot([0])
            assert [event["step"] for event in events.read(log)] == [1, 3][:number], "what the node reads"
            written = list(range(1, 2 * number + 1))
            for found in (cluster.events(), cluster.node_events(0), load_run([cluster.run_dir]).events):
                assert sorted(event["step"] for event in found) == written
        cluster.poweroff(0)
        cluster.wipe(0)
        assert not cluster.node_events(0)
        assert sorted(event["step"] for event in cluster.events("step")) == [1, 2, 3, 4]
