"""Simulated nodes as tests use them: machines, what befalls them, and what is planned for a step."""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from elastic_resume import constants, events
from elastic_resume.errors import ConfigError, UsageError
from elastic_resume.events import EventLog
from elastic_resume.report.loader import load_run
from elastic_resume.snapshot.progress_page import ProgressRecord, WorkerProcess
from elastic_resume.testing import Cluster, TriggerError
from elastic_resume.testing.cluster import Recovery
from elastic_resume.testing.triggers import RankProgress, StepCondition, TriggerWatcher
from tests.support.machine_cluster import MachineCluster
from tests.support.paths import SCRIPTS

SCRIPT = SCRIPTS / "train.py"
MB = 1 << 20


def line(step: int, *, rank: int = 0, generation: int = 1) -> ProgressRecord:
    """What a rank has noted."""
    worker = WorkerProcess(
        rank=rank, agent_pid=1, round=1, pid=2, start_ticks=3, stack_output_fd=4, stack_request_fd=5
    )
    return ProgressRecord(0, generation, step, 2, False, worker, 0, 0, 0, 0, 0)


def test_what_is_planned_comes_once_for_whom_it_is_meant_and_its_errors_come_up() -> None:
    """Of two lines of one rank the newer counts; what cannot be done yet is tried again."""
    lines = [(0, line(9, rank=1)), (1, line(4, rank=1, generation=2)), (2, line(30))]
    moments, done = TriggerWatcher(lambda: list(lines)), Counter[tuple[str, int, int]]()

    def plan(what: str, step: int, rank: int | None = None, node: int | None = None) -> None:
        def act(match: RankProgress) -> bool:
            index, found = match
            done[what, index, found.step] += 1
            if what == "breaks":
                raise UsageError("there is none")
            return done[what, index, found.step] == 2  # not yet, the first time

        moments.schedule(what, StepCondition(step, rank, node), act)

    plan("any", 20)
    plan("rank", 4, rank=1)
    plan("node", 9, node=0)
    plan("never", 31)
    plan("breaks", 30, node=2)
    with pytest.raises(TriggerError, match="breaks at step 30 on n2: there is none"):
        while True:
            moments.raise_error()
            time.sleep(0.001)
    while done["any", 2, 30] < 2:
        time.sleep(0.001)
    lines.append((3, line(40, generation=3)))
    plan("last", 40)
    while done["last", 3, 40] < 2:
        time.sleep(0.001)
    assert done == {
        ("any", 2, 30): 2,
        ("rank", 1, 4): 2,
        ("node", 0, 9): 2,
        ("breaks", 2, 30): 1,
        ("never", 3, 40): 2,
        ("last", 3, 40): 2,
    }
    moments.raise_error()
    plan("late", 41)
    with pytest.raises(TriggerError, match="late at step 41: never came"):
        moments.require_all_done()
    moments.close()


def test_what_a_wiped_node_has_told_is_not_forgotten(tmp_path: Path) -> None:
    """Else steps that its job had to run again would count as never run, and a test of that would pass."""
    with Cluster(tmp_path, nodes=2) as cluster:
        for index, node in enumerate(cluster.nodes):
            for life, last in ((1, 30), (2, 5)):
                node.directory.mkdir(parents=True)
                log = EventLog(node.directory / constants.EVENTS_FILE, node=node.name, rank=index)
                about = {"generation": 1, "world_size": 2}  # in both: nothing tells that there was one
                log.emit("agent-start", run_id=cluster.run_id)
                log.emit("round", round=1, **about)
                log.emit("worker-start", step=0, **about)
                if index == 0:
                    log.emit("resume", step=0, kind="cold", nodes=["n0", "n1"], recomputed_steps=0, **about)
                log.emit("step", step=last, **about)
                log.close()
                time.sleep(0.002)  # times are of a thousandth of a second
                if life == 1:
                    cluster.wipe(index)
        assert cluster.lost_steps == 30
        assert sorted(event["step"] for event in cluster.events("step")) == [5, 5, 30, 30]
        assert [one.generation for one in cluster.recoveries] == [2]
        assert len(load_run([cluster.run_dir]).events) == len(cluster.events()) == 18


def test_a_moment_needs_whom_it_befalls(tmp_path: Path) -> None:
    """And a plan whose moment never came is an error where the cluster ends."""
    with pytest.raises(TriggerError, match="cut at step 5 on n1: never came"), Cluster(tmp_path) as cluster:
        with pytest.raises(UsageError, match=r"node= \(the whole node"):
            cluster.at(step=3, node=1).kill(signal.SIGSTOP)
        with pytest.raises(ConfigError, match="cannot read 'commit"):
            cluster.arm(0, "commit.after-data=kil")
        with pytest.raises(UsageError, match="wait for step="):
            cluster.wait(step=1, commit=2)
        cluster.at(step=5, node=1).do(cluster.cut, 1)


BEFALLEN = [
    *(r"rank 1 on node n\d was killed by SIGKILL", r"rank \d on node n0 was killed by SIGKILL"),
    r"node n2 (was lost|died|is unreachable).*",
]


def recovered(cluster: Cluster, cause: str) -> None:
    """Wait until n0 trains on after that."""

    def found() -> Recovery | None:
        return next((one for one in cluster.recoveries if re.fullmatch(cause, one.cause)), None)

    cluster.wait(step=1, generation=cluster.wait(found, f"the end by {cause}").generation, node=0)


@pytest.mark.cluster
@pytest.mark.slow
def test_nodes_that_are_machines_lose_what_a_machine_loses(tmp_path: Path) -> None:
    """A worker, the power, a disk; what they told is there in the end, and the newest checkpoints."""
    flags = ["--snapshot-every", "1", "--save-every", "5", "--node-timeout", "1"]
    with MachineCluster(tmp_path, min_nodes=2, flags=flags, disk_bytes=32 * MB, shm_bytes=8 * MB) as cluster:
        words = ["--diary", str(tmp_path / "diary"), "--epochs", "100000", "--step-delay", "0.02"]
        cluster.start(SCRIPT, *words)
        cluster.at(step=10, rank=1).kill()
        recovered(cluster, BEFALLEN[0])
        agent = cluster.nodes[0].agent
        assert agent is not None
        own = Path(f"/proc/{agent.pid}/root")
        assert os.statvfs(own / "dev/shm").f_blocks * 4096 == 8 * MB
        disk = os.statvfs(own / str(cluster.nodes[0].ckpt_dir).lstrip("/"))
        assert 24 * MB < disk.f_blocks * disk.f_frsize < 32 * MB
        cluster.kill_worker(0)
        recovered(cluster, BEFALLEN[1])
        cluster.at(step=cluster.events("step")[-1]["step"] + 5, node=2).do(cluster.poweroff, 2)
        cluster.wait(
            lambda: not cluster.nodes[2].alive and cluster.node_events(2, "step"),
            "what n2 told before its end",
        )
        recovered(cluster, BEFALLEN[2])
        assert [entry.error for entry in cluster.checkpoints(2)][:1] == [None]
        cluster.break_disk(0)
        cluster.wait(step=cluster.node_events(1, "step")[-1]["step"] + 20, node=1)
        cluster.mend_disk(0)
        step = cluster.node_events(1, "step")[-1]["step"]
        cluster.wait(commit=step, node=0)
        cluster.kill_nodes([0, 1])
        recoveries = cluster.recoveries
    causes = [one.cause for one in recoveries]
    told = iter(causes)  # and between them, perhaps, of a node that a busy machine kept silent for a second
    assert all(any(re.fullmatch(cause, one) for one in told) for cause in BEFALLEN), causes
    lost = {one.lost_steps for one in recoveries if any(re.fullmatch(cause, one.cause) for cause in BEFALLEN)}
    assert lost == {0}
    assert all(isinstance(one, Recovery) for one in recoveries)
    assert [one.cause for one in cluster.recoveries][: len(causes)] == causes
    assert max(entry.manifest.step for entry in cluster.checkpoints(0) if entry.manifest) >= step
    assert not (tmp_path / "checkpoints" / "job" / "n0").is_symlink()


@pytest.mark.cluster
@pytest.mark.slow
def test_a_node_does_not_get_back_what_it_lost_with_its_power(tmp_path: Path) -> None:
    """It finds what was synced, as on a real machine; tests and the report still count all, each once."""
    with MachineCluster(tmp_path, nodes=1, disk_bytes=32 * MB, shm_bytes=8 * MB) as cluster:
        log = cluster.nodes[0].directory / constants.EVENTS_FILE
        log.parent.mkdir(parents=True)
        cluster.backend.boot([0])
        for number in (1, 2):  # another time it loses what it has told since
            own = EventLog(log, node="n0")
            own.emit("step", step=2 * number - 1)
            with open(log, "rb") as file:
                os.fsync(file.fileno())
            own.emit("step", step=2 * number)
            own.close()
            cluster.poweroff(0)
            cluster.backend.boot([0])
            assert [event["step"] for event in events.read(log)] == [1, 3][:number], "what the node reads"
            told = list(range(1, 2 * number + 1))
            for found in (cluster.events(), cluster.node_events(0), load_run([cluster.run_dir]).events):
                assert sorted(event["step"] for event in found) == told
        cluster.poweroff(0)
        cluster.wipe(0)
        assert not cluster.node_events(0)
        assert sorted(event["step"] for event in cluster.events("step")) == [1, 2, 3, 4]
