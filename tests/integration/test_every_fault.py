"""Inject every kind of fault into two jobs; `make test` leaves out `ONLY_IN_SOAK`.

The job either continues without a lost step or ends with the documented error. The report, which knows only
what the nodes saw, names the cause.
"""

from __future__ import annotations

import os
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
from elastic_resume.slots.progress_page import ProgressRecord
from elastic_resume.testing import Cluster
from elastic_resume.testing.fault_runner import DONE, FaultInjector
from elastic_resume.testing.faults import KINDS, Fault
from tests.support.training_job import SCRIPT

pytestmark = pytest.mark.cluster

STEADY_STEPS = 4  # steps of the whole world after a fault, until the next fault comes
TIMEOUT_S = 120.0
UNTIL_SEEN_S = TIMEOUT_S  # a lasting fault is undone as soon as its effect is seen
EPOCHS = 10_000  # more than any of these jobs trains
STEP_DELAY_S = "0.08"  # the jobs mostly wait for timeouts; more steps would only cost processor time
# Longer than a healthy but busy node takes: a fault without consequences must not cost a generation.
FLAGS = ["--snapshot-every", "1", "--save-every", "25", "--node-timeout", "5", "--hang-timeout", "6"]


@dataclass(frozen=True)
class Case:
    """A fault, and patterns of what the report says: why a generation ended, or which alert it shows.

    A lasting fault goes on until a generation has ended or its node has logged the trouble. If it causes
    neither, it goes on until all nodes have taken steps.
    """

    fault: Fault
    ended: str = ""
    alert: str = ""


def case(what: str, ended: str = "", alert: str = "", **settings: object) -> Case:
    """Make a case whose fault is due at once."""
    return Case(Fault(what, at_s=0.0, **settings), ended, alert)  # type: ignore[arg-type]


LOST = "(was lost|died|is unreachable|is back as a new process)"
OF_PROCESSES = [
    case("kill-worker", r"rank 1 on node n1 was killed by SIGKILL", rank=1),
    case("raise", r"rank 2 on node n2.*RuntimeError: failpoint step", rank=2),
    case("exit", r"rank 0 on node n0 ended with exit code 9", rank=0),
    case("stop-worker", r"rank 0 on node n\d .*(hung|no step)", rank=0),
    case("hold-gil", r"rank 1 on node n\d .*(hung|no step)", rank=1),
    case("slow-rank", rank=2, delay_s=0.1, for_s=UNTIL_SEEN_S),
    # n1 sends to the leader most often, and its events to another node.
    case("corrupt-message", alert=r"n[02]: a connection was dropped: .*wrong digest", node=1),
    case("kill-agent", rf"node n\d {LOST}", role="leader", back_after_s=0.2),
    case("kill-node", rf"node n2 {LOST}", node=2, back_after_s=0.2),
    case("preemption", r"node n1 left \(a preemption notice\)", node=1, back_after_s=0.2),
    case("stop-agent", r"node n0 is unreachable", node=0, for_s=UNTIL_SEEN_S),
]


OF_MACHINES = [
    case("out-of-memory", r"rank 1 on node n1.*SIGKILL", rank=1),
    case("packet-loss", node=2, percent=15.0, for_s=UNTIL_SEEN_S),
    case("slow-link", node=1, bytes_per_s=1e4, for_s=UNTIL_SEEN_S),
    case(
        "disk-full",
        alert=r"n0: the checkpoint could not be written: .*No space left",
        node=0,
        for_s=UNTIL_SEEN_S,
    ),
    case(
        "disk-error",
        alert=r"n2: the checkpoint .*Input/output error",
        node=2,
        for_s=UNTIL_SEEN_S,
    ),
    case("slow-disk", node=1, delay_s=0.3, for_s=UNTIL_SEEN_S),
    case("wipe-disk", rf"node n2 {LOST}", node=2, back_after_s=0.2),
    case("poweroff", rf"node n1 {LOST}", node=1, back_after_s=1.5),
    case("cut", rf"node n2 {LOST}", node=2, for_s=UNTIL_SEEN_S),
    case("cut-out", rf"node n1 {LOST}", node=1, for_s=UNTIL_SEEN_S),
    case("cut-in", rf"node n2 {LOST}|cannot reach n2", node=2, for_s=UNTIL_SEEN_S),
    case("partition", rf"node n0 {LOST}", groups=((0,), (1, 2)), for_s=UNTIL_SEEN_S),
]


# Kind of fault -> the test file that has it in `make test`.
ONLY_IN_SOAK = {
    "kill-worker": "integration/test_run_command.py",
    "stop-worker": "integration/test_hang_detector.py",
    "out-of-memory": "integration/test_failures.py",
    "disk-full": "integration/test_disk_faults.py",
    "disk-error": "integration/test_disk_faults.py",
    "slow-disk": "integration/test_disk_faults.py",
    "partition": "system/network/test_silent_loss.py",
    "exit": "integration/test_run_command.py",
    "hold-gil": "integration/test_hang_detector.py",
    "kill-agent": "integration/test_chaos.py",
    "kill-node": "integration/test_lost_nodes.py",
    "stop-agent": "integration/test_lost_nodes.py",
    "poweroff": "integration/test_disk_faults.py",
    "cut": "system/network/test_silent_loss.py",
    "cut-out": "unit/testing/test_fault_runner.py",  # on fake links; "cut-in" has real ones here
}
# Rank 0 waits for nobody when it sends its buffers. Behind a cut it may finish a step that the others cannot.
CUTS = {"cut", "cut-out", "cut-in", "partition", "poweroff"}
AT_THE_END = {"torn-write", "bit-flip", "skip-collective"}  # see `run_process_faults`
ELSEWHERE = {"wrong-gradients"}  # no report shows it without a check: test_compute_check.py


def test_every_fault_cases_cover_all_kinds() -> None:
    """Every kind that a plan may name has a case here, and `make soak` injects them all."""
    assert {each.fault.what for each in (*OF_PROCESSES, *OF_MACHINES)} | AT_THE_END == set(KINDS) - ELSEWHERE


def start(cluster: Cluster) -> None:
    """Start a job that never ends by itself."""
    step_log = str(cluster.directory / "step_log")
    cluster.start(SCRIPT, "--step-log", step_log, "--epochs", str(EPOCHS), "--step-delay", STEP_DELAY_S)


def read_report(cluster: Cluster) -> RunReport:
    """Build the report of all events; those of a wiped disk were forwarded to other nodes in time."""
    return summary.build_run_report(load_run([cluster.run_dir]).events)


def inject_all(cluster: Cluster, cases: Sequence[Case]) -> dict[Case, tuple[int, int]]:
    """Inject one fault after the other; return the generations before and after each."""
    spans, before = {}, wait_until_steady(cluster)
    if "ELASTIC_RESUME_SOAK_KILLS" not in os.environ:
        cases = [each for each in cases if each.fault.what not in ONLY_IN_SOAK]
    for each in cases:
        after = inject(cluster, each)
        spans[each], before = (before, after), after
    return spans


def inject(cluster: Cluster, each: Case) -> int:
    """Inject a fault until its effect is seen, and let the job recover; return the generation then."""
    generation, alerts = newest_generation(cluster), count_logged_alerts(cluster)
    injector = FaultInjector(cluster, [each.fault])
    poll_until(cluster, injector, lambda: not injector.pending)
    assert injector.outcomes[0].state == DONE, injector.outcomes[0]
    if each.ended:
        poll_until(cluster, injector, lambda: newest_generation(cluster) > generation)
    elif each.alert:
        poll_until(
            cluster,
            injector,
            lambda: count_logged_alerts(cluster) > alerts or has_alert(read_report(cluster), each.alert),
        )
    else:
        wait_until_steady(cluster)
    injector.undo_lasting_faults()
    poll_until(cluster, injector, lambda: injector.is_idle and all(node.alive for node in cluster.nodes))
    # A node forwards its events once a second; afterwards the report may lose the node's disk.
    if each.alert:
        poll_until(cluster, injector, lambda: has_alert(read_report(cluster), each.alert))
    injector.close()
    return wait_until_steady(cluster)


def has_alert(report: RunReport, pattern: str) -> bool:
    """Return whether an alert of the report matches."""
    return any(re.search(pattern, f"{alert.node}: {alert.text}") for alert in report.alerts)


def poll_until(cluster: Cluster, injector: FaultInjector, condition: Callable[[], bool]) -> None:
    """Inject faults and restart nodes until ``condition`` is true."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        injector.poll()
        assert time.monotonic() < deadline, f"{injector.outcomes[0]}\n{cluster.output_tails()}"
        time.sleep(0.1)  # a condition may read the whole report


def newest_generation(cluster: Cluster) -> int:
    """Return the newest generation that a rank has started."""
    return max((record.generation for _, record in cluster.rank_progress()), default=0)


def count_logged_alerts(cluster: Cluster) -> int:
    """Count the lines of all nodes about failed commits and dropped connections."""
    output = "".join(cluster.output(index) for index in range(len(cluster.nodes)))
    return len(re.findall("was not saved|a connection was dropped", output))


def wait_until_steady(cluster: Cluster) -> int:
    """Wait until all nodes have taken steps in one world, and return its generation."""
    first_steps = {record.worker.pid: record.step for _, record in cluster.rank_progress()}

    def steady_generation() -> int | None:
        # All ranks take each step together, so one rank is enough if another's progress page is lost.
        records = [record for _, record in cluster.rank_progress() if record.world_size == len(cluster.nodes)]
        newest = max((record.generation for record in records), default=0)
        steady = any(is_steady(record) for record in records if record.generation == newest)
        return newest if steady else None

    def is_steady(record: ProgressRecord) -> bool:
        return record.step >= first_steps.get(record.worker.pid, record.first_step) + STEADY_STEPS

    return cluster.wait(steady_generation, "a steady world of all nodes", TIMEOUT_S)


def find_mismatches(report: RunReport, spans: dict[Case, tuple[int, int]]) -> list[str]:
    """List what the report should say of these cases and does not."""
    mismatches = []
    rows = {row.number: row for row in report.history.generations}
    for each, (before, after) in spans.items():
        ended_rows = [row for number, row in rows.items() if before <= number < after]
        ends = [row.end.text for row in ended_rows]
        if each.ended and not any(re.search(each.ended, text) for text in ends):
            mismatches.append(f"{each.fault}: ended because {each.ended!r}, not {ends}")
        lost_steps = sum(row.recomputed_steps or 0 for row in ended_rows)
        if lost_steps > (1 if each.fault.what in CUTS else 0):
            mismatches.append(f"{each.fault}: {lost_steps} steps were recomputed")
        if not each.ended and after != before:
            mismatches.append(f"{each.fault}: cost generations {before} to {after}: {ends}")
        if each.alert and not has_alert(report, each.alert):
            mismatches.append(f"{each.fault}: {each.alert!r} is not among {report.alerts}")
    return mismatches


def test_every_fault_is_survived_and_named(tmp_path: Path) -> None:
    """The two jobs run side by side, because each mostly waits."""
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(job, tmp_path / job.__name__) for job in (run_process_faults, run_machine_faults)]
    for job in jobs:
        job.result()


def run_process_faults(tmp_path: Path) -> None:
    """Inject the faults of processes into three nodes, two of which suffice; last, skip a collective."""
    env = {"ELASTIC_RESUME_CHECK_REPLICAS": "1"}
    with Cluster(tmp_path, nodes=3, min_nodes=2, flags=FLAGS, env=env) as cluster:
        start(cluster)
        spans = inject_all(cluster, OF_PROCESSES)
        before = newest_generation(cluster)
        damage_and_kill_all(cluster)
        damaged = wait_until_steady(cluster)
        injector = FaultInjector(cluster, [Fault("skip-collective", rank=1, at_s=0.0)])
        # The model has buffers: that rank waits for rank 0's, and the others for its gradients.
        poll_until(cluster, injector, lambda: not injector.pending and newest_generation(cluster) > damaged)
        report = read_report(cluster)
    mismatches = find_mismatches(report, spans)
    assert not mismatches, "\n".join(mismatches)
    rows = {row.number: row for row in report.history.generations}
    assert rows[before].end.text == "whole job killed"
    reasons = {rejected.node: rejected.text for rejected in rows[damaged].rejected}
    assert re.search(r"has \d+ bytes of \d+", reasons["n1"])
    assert "digest" in reasons["n0"]
    assert "hung" in rows[damaged].end.text


def damage_and_kill_all(cluster: Cluster) -> None:
    """Damage the newest checkpoints of two nodes, all equally new, and kill all nodes."""

    def stop_at_equal_checkpoints() -> bool:
        # Stopped agents commit nothing while the checkpoints are compared and damaged.
        for index in range(3):
            cluster.kill_agent(index, signal.SIGSTOP)
        cluster.wait(lambda: all(is_stopped(cluster, index) for index in range(3)), "stopped agents")
        if len({cluster.checkpoints(index)[0].path.name for index in range(3)}) == 1:
            return True
        for index in range(3):
            cluster.kill_agent(index, signal.SIGCONT)
        time.sleep(0.2)
        return False

    cluster.wait(stop_at_equal_checkpoints, "equal checkpoints")
    faults = [Fault("torn-write", node=1, at_s=0.0), Fault("bit-flip", node=0, at_s=0.0)]
    injector = FaultInjector(cluster, [*faults, Fault("kill-node", role="all", at_s=0.0)])
    poll_until(cluster, injector, lambda: not injector.pending)
    poll_until(cluster, injector, lambda: all(node.alive for node in cluster.nodes))


def is_stopped(cluster: Cluster, index: int) -> bool:
    """Return whether a node's agent is stopped."""
    agent = cluster.nodes[index].agent
    return agent is not None and psutil.Process(agent.pid).status() == psutil.STATUS_STOPPED


def run_machine_faults(tmp_path: Path) -> None:
    """Inject the faults of links, disks, memory and power into nodes with a network and a disk each."""
    # No fault here hangs a rank, but using up memory takes long. Frequent saves meet the failing disks. A
    # node with a bad link must not be declared unreachable.
    flags = [*FLAGS, "--hang-timeout", "20", "--save-every", "8", "--node-timeout", "4"]
    with Cluster(tmp_path, nodes=3, min_nodes=2, flags=flags, hosts="namespaces") as cluster:
        start(cluster)
        spans = inject_all(cluster, OF_MACHINES)
        report = read_report(cluster)
    mismatches = find_mismatches(report, spans)
    assert not mismatches, "\n".join(mismatches)
