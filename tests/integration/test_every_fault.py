"""Each kind of fault that a plan may name, done for real to one job after the other.

What the job does then is what the design says: it goes on without having lost a step, or ends with the error
that is promised; and the report, which knows only what the nodes saw, names the cause.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from elastic_resume.report import summary
from elastic_resume.report.loader import load_run
from elastic_resume.report.summary import RunReport
from elastic_resume.snapshot.progress_page import ProgressRecord
from elastic_resume.testing import Cluster
from elastic_resume.testing.fault_runner import DONE, FaultInjector
from elastic_resume.testing.faults import KINDS, Fault
from tests.support.training_job import SCRIPT

pytestmark = pytest.mark.cluster

STEADY = 4  # steps of a whole world after a fault: then it is over
PATIENCE_S = 120.0
UNTIL_SEEN_S = PATIENCE_S  # that a fault would last, and does not: it ends when what it is to cause is seen
EPOCHS = 10_000  # nobody waits for them: the job is drained
# Longer than one that is well stands still: a fault that costs no generation is not to cost one by that.
FLAGS = ["--snapshot-every", "1", "--save-every", "25", "--node-timeout", "5", "--hang-timeout", "6"]


@dataclass(frozen=True)
class Case:
    """A fault, and what the report says of it: why a generation ended, or what went wrong besides.

    One that lasts goes on until a generation has ended, its node has told people of the trouble, or, where it
    causes neither, all nodes have taken steps.
    """

    fault: Fault
    ended: str = ""
    trouble: str = ""


def case(what: str, ended: str = "", trouble: str = "", **more: object) -> Case:
    """Make a case of a fault that comes at once."""
    return Case(Fault(what, at_s=0.0, **more), ended, trouble)  # type: ignore[arg-type]


LOST = "(was lost|died|is unreachable|is back as a new process)"
OF_PROCESSES = [
    case("kill-worker", r"rank 1 on node n1 was killed by SIGKILL", rank=1),
    case("raise", r"rank 2 on node n2.*RuntimeError: failpoint step", rank=2),
    case("exit", r"rank 0 on node n0 ended with exit code 9", rank=0),
    case("stop-worker", r"rank 0 on node n\d .*(hung|no step)", rank=0),
    case("hold-gil", r"rank 1 on node n\d .*(hung|no step)", rank=1),
    case("slow-rank", rank=2, delay_s=0.1, for_s=UNTIL_SEEN_S),
    case(
        "corrupt-message",
        trouble=r"n0: a connection was dropped: .*wrong digest",
        node=1,
        sender="peer",
    ),
    case(
        "corrupt-message",
        trouble=r"n2: a connection was dropped: .*not JSON",
        node=2,
        sender="unauthenticated",
    ),
    case("kill-agent", rf"node n\d {LOST}", role="leader", phase="in commit", back_after_s=0.2),
    case("kill-node", rf"node n2 {LOST}", node=2, back_after_s=0.2),
    case("preemption", r"node n1 left: stopped by a preemption notice", node=1, back_after_s=0.2),
    case("stop-agent", r"node n0 is unreachable", node=0, for_s=UNTIL_SEEN_S),
]


OF_MACHINES = [
    case("out-of-memory", r"rank 1 on node n1.*SIGKILL", rank=1),
    case("packet-loss", node=2, percent=15.0, for_s=UNTIL_SEEN_S),
    case("slow-link", node=1, bytes_per_s=1e4, for_s=UNTIL_SEEN_S),
    case(
        "disk-full",
        trouble=r"n0: the checkpoint could not be written: .*No space left",
        node=0,
        for_s=UNTIL_SEEN_S,
    ),
    case(
        "disk-error",
        trouble=r"n2: the checkpoint .*Input/output error",
        node=2,
        for_s=UNTIL_SEEN_S,
    ),
    case("slow-disk", trouble=r"n1: a commit took", node=1, delay_s=0.3, for_s=UNTIL_SEEN_S),
    case("wipe-disk", rf"node n2 {LOST}", node=2, back_after_s=0.2),
    case("poweroff", rf"node n1 {LOST}", node=1, back_after_s=1.5),
    case("cut", rf"node n2 {LOST}", node=2, for_s=UNTIL_SEEN_S),
    case("cut-out", rf"node n1 {LOST}", node=1, for_s=UNTIL_SEEN_S),
    case("cut-in", rf"node n2 {LOST}", node=2, for_s=UNTIL_SEEN_S),
    case("partition", rf"node n0 {LOST}", groups=((0,), (1, 2)), for_s=UNTIL_SEEN_S),
]


AT_LAST = {"torn-write", "bit-flip", "skip-collective"}  # of which two end what the others need


def test_no_kind_of_fault_is_left_out() -> None:
    """What a plan may name is done here."""
    assert {one.fault.what for one in (*OF_PROCESSES, *OF_MACHINES)} | AT_LAST == set(KINDS)


def start(cluster: Cluster) -> None:
    """Start a job without an end."""
    words = ["--diary", str(cluster.directory / "diary"), "--epochs", str(EPOCHS), "--step-delay", "0.01"]
    cluster.start(SCRIPT, *words)


def told_of(cluster: Cluster) -> RunReport:
    """What a report tells; the logs of disks that were wiped were handed to others in time."""
    return summary.build_run_report(load_run([cluster.run_dir]).events)


def disturb(cluster: Cluster, cases: Sequence[Case]) -> dict[Case, tuple[int, int]]:
    """Do one after the other, each to a whole world; give the generations before and after each."""
    return {one: (settle(cluster), bear(cluster, one)) for one in cases}


def bear(cluster: Cluster, one: Case) -> int:
    """Do it until it is seen, and let the job recover; give the generation then."""
    generation, told = newest(cluster), troubles(cluster)
    course = FaultInjector(cluster, [one.fault])
    follow(cluster, course, lambda: not course.pending)
    assert course.outcomes[0].state == DONE, course.outcomes[0]
    if one.ended:
        follow(cluster, course, lambda: newest(cluster) > generation)
    elif one.trouble:
        follow(cluster, course, lambda: troubles(cluster) > told or knows(told_of(cluster), one.trouble))
    else:
        settle(cluster)
    course.undo_lasting_faults()
    follow(cluster, course, lambda: course.is_idle and all(node.alive for node in cluster.nodes))
    # A node tells the others once a second what befell it: afterwards the report may lose its disk.
    follow(cluster, course, lambda: not one.trouble or knows(told_of(cluster), one.trouble))
    course.close()
    return settle(cluster)


def knows(told: RunReport, trouble: str) -> bool:
    """Whether the report tells of it."""
    return any(re.search(trouble, f"{found.node}: {found.text}") for found in told.alerts)


def follow(cluster: Cluster, course: FaultInjector, seen: Callable[[], bool]) -> None:
    """Let faults come, and who died of them come back, until that is ``seen``."""
    until = time.monotonic() + PATIENCE_S
    while not seen():
        course.poll()
        assert time.monotonic() < until, f"{course.outcomes[0]}\n{cluster.output_tails()}"
        time.sleep(0.01)


def newest(cluster: Cluster) -> int:
    """The newest generation in which somebody has begun."""
    return max((line.generation for _, line in cluster.rank_progress()), default=0)


def troubles(cluster: Cluster) -> int:
    """How often nodes have told people of a disk that refuses, or of words that nobody understands."""
    said = "".join(cluster.output(index) for index in range(len(cluster.nodes)))
    return len(re.findall("was not saved|a connection was dropped", said))


def settle(cluster: Cluster) -> int:
    """Wait until all nodes have taken steps in one world, and give its generation."""
    at_first = {line.worker.pid: line.step for _, line in cluster.rank_progress()}

    def look() -> int | None:
        # Ranks of a world take each step together: one of them will do, where the page of another is lost.
        lines = [line for _, line in cluster.rank_progress() if line.world_size == len(cluster.nodes)]
        newest = max((line.generation for line in lines), default=0)
        return newest if any(is_steady(line) for line in lines if line.generation == newest) else None

    def is_steady(line: ProgressRecord) -> bool:
        return line.step >= at_first.get(line.worker.pid, line.first_step) + STEADY

    return cluster.wait(look, "a steady world of all nodes", PATIENCE_S)


def wrong(told: RunReport, spans: dict[Case, tuple[int, int]]) -> list[str]:
    """What the report does not say of these cases."""
    found = []
    rows = {row.number: row for row in told.history.generations}
    for one, (before, after) in spans.items():
        ends = [row.end.text for number, row in rows.items() if before <= number < after]
        if one.ended and not any(re.search(one.ended, text) for text in ends):
            found.append(f"{one.fault}: ended because {one.ended!r}, not {ends}")
        if not one.ended and after != before:
            found.append(f"{one.fault}: cost generations {before} to {after}: {ends}")
        if one.trouble and not knows(told, one.trouble):
            found.append(f"{one.fault}: {one.trouble!r} is not among {told.alerts}")
    return found


def test_every_fault_is_survived_and_named(tmp_path: Path) -> None:
    """Two jobs at the same time, since each waits most of the time."""
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(job, tmp_path / job.__name__) for job in (of_processes, of_machines)]
    for job in jobs:
        job.result()


def of_processes(tmp_path: Path) -> None:
    """Killed, stopped, wedged, spoilt: three nodes, two of which suffice. At last replicas differ."""
    flags = [*FLAGS, "--check-replicas", "1"]
    with Cluster(tmp_path, nodes=3, min_nodes=2, flags=flags) as cluster:
        start(cluster)
        spans = disturb(cluster, OF_PROCESSES)
        recoveries = cluster.recoveries
        before = settle(cluster)
        ruin(cluster)
        ruined = settle(cluster)
        course = FaultInjector(cluster, [Fault("skip-collective", rank=1, at_s=0.0)])
        follow(cluster, course, lambda: course.is_over)
        assert cluster.wait_exit(only=range(3)) == [1, 1, 1]
        told = told_of(cluster)
    found = wrong(told, spans)
    assert not found, "\n".join(found)
    assert not [recovery for recovery in recoveries if recovery.lost_steps != 0]
    rows = {row.number: row for row in told.history.generations}
    assert rows[before].end.text == "whole job killed"
    reasons = {copy.node: copy.reason for copy in rows[ruined].rejected}
    assert re.search(r"has \d+ bytes of \d+", reasons["n1"])
    assert "digest" in reasons["n0"]
    assert told.history.outcome == "failed"
    assert re.search(r"replicas differ|DivergenceError", told.history.message)


def ruin(cluster: Cluster) -> None:
    """Damage the newest copies of two nodes in two ways, all being equally new, and let all nodes die."""

    def agree() -> bool:
        # Nobody writes while they are looked at and damaged: agents stand still, and hold no lease for long.
        for index in range(3):
            cluster.kill_agent(index, signal.SIGSTOP)
        for index in range(3):
            cluster.wait(lambda of=index: is_stopped(cluster, of), "a stopped agent")  # type: ignore[misc]
        if len({cluster.checkpoints(index)[0].path.name for index in range(3)}) == 1:
            return True
        for index in range(3):
            cluster.kill_agent(index, signal.SIGCONT)
        time.sleep(0.2)
        return False

    cluster.wait(agree, "equal copies")
    faults = [Fault("torn-write", node=1, at_s=0.0), Fault("bit-flip", node=0, at_s=0.0)]
    course = FaultInjector(cluster, [*faults, Fault("kill-node", role="all", at_s=0.0)])
    follow(cluster, course, lambda: not course.pending)
    follow(cluster, course, lambda: all(node.alive for node in cluster.nodes))


def is_stopped(cluster: Cluster, index: int) -> bool:
    """Whether a node's agent stands still."""
    agent = cluster.nodes[index].agent
    return agent is not None and psutil.Process(agent.pid).status() == psutil.STATUS_STOPPED


def of_machines(tmp_path: Path) -> None:
    """Links, disks, memory and power: three nodes with a network and a disk each."""
    # Nothing hangs, and it takes a while to use memory up; a disk that fails is to be written to meanwhile;
    # and nobody is to be taken for dead whose link is bad.
    flags = [*FLAGS, "--hang-timeout", "20", "--save-every", "8", "--node-timeout", "4"]
    with Cluster(tmp_path, nodes=3, min_nodes=2, flags=flags, hosts="namespaces") as cluster:
        start(cluster)
        spans = disturb(cluster, OF_MACHINES)
        told = told_of(cluster)
    found = wrong(told, spans)
    assert not found, "\n".join(found)
    assert told.history.recomputed_steps == 0
