"""What the restart controller decides from events in memory and from the progress page."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from elastic_resume import constants
from elastic_resume.agent import restart_log
from elastic_resume.agent.failure_evidence import FailureEvents, MemoryMonitor
from elastic_resume.agent.restart_controller import RestartController
from elastic_resume.agent.restart_log import WaitLog
from elastic_resume.agent.workers.lease_page import LeasePage
from elastic_resume.errors import JobFailedError, NodeExcludedError
from elastic_resume.events import EventLog, parse_line
from elastic_resume.policy.failure_classification import (
    EXIT,
    Failure,
    WorkerEnd,
    make_network_failure,
    make_node_failure,
)
from elastic_resume.policy.gpu_faults import GpuFault
from elastic_resume.policy.reasons import (
    ErrorRaised,
    JobFinished,
    Loss,
    NodeLost,
    ViewEnd,
    Wait,
    WorkersStopped,
)
from elastic_resume.policy.restart import GaveUp, RestartLimits, RestartsExhausted, is_worth_requeue
from elastic_resume.rendezvous.core.interface import EmitEvent, EndJob, StartWorkers, StopReason
from elastic_resume.rendezvous.core.world import Incarnation
from elastic_resume.slots.progress_page import ProgressPage, WorkerProcess
from tests.support.disks import SimulatedDisk
from tests.support.processes import wait_for


@contextlib.contextmanager
def open_controller(
    directory: Path, limits: RestartLimits | None = None
) -> Iterator[tuple[RestartController, EventLog]]:
    """Open a controller of node a and its event log."""
    path = directory / constants.EVENTS_FILE
    with (
        contextlib.closing(LeasePage()) as lease_page,
        contextlib.closing(FailureEvents()) as evidence,
        contextlib.closing(EventLog(path, memory_path=evidence.path, node="a")) as log,
    ):
        monitor, given = MemoryMonitor(proc=directory), limits or RestartLimits()
        controller = RestartController(log, lease_page, evidence, monitor, node="a", limits=given)
        yield controller, log
        controller.log.end_wait()


def world(generation: int, *failures: Failure, nodes: str = "a") -> StartWorkers:
    """Return a view, by default of node a alone."""
    members = tuple(Incarnation(node, "1", 1, f"{node}:1") for node in nodes)
    return StartWorkers(generation, 0, members, "a:2", (1,) * len(nodes), failures=failures)


def this_process(start_ticks: int = 0) -> WorkerProcess:
    """Return this process as a worker of generation 1."""
    return WorkerProcess(0, os.getpid(), 1, os.getpid(), start_ticks, 0, 0)


def test_controller_is_spare_after_spare_event(tmp_path: Path) -> None:
    """The rendezvous emits the event."""
    with open_controller(tmp_path) as (controller, _):
        controller.on_rendezvous_event(EmitEvent("waiting", Wait.NOTHING_JOINED))
        assert not controller.is_spare
        controller.on_rendezvous_event(EmitEvent("spare", generation=1))
        assert controller.is_spare


def read_events(directory: Path, kind: str) -> list[dict[str, Any]]:
    """Return the events of that kind, without the fields that all events have."""
    found = [parse_line(line) for line in (directory / constants.EVENTS_FILE).read_text().splitlines()]
    common = {"t", "b", "boot", "pid", "node", "event"}
    return [
        {name: value for name, value in event.items() if name not in common}
        for event in found
        if event and event["event"] == kind
    ]


def test_each_end_of_a_generation_has_a_verdict(tmp_path: Path) -> None:
    """Also if nodes only joined; the last one has no next generation."""
    error = {"type": "MismatchError", "message": "no", "deterministic": True}
    with open_controller(tmp_path) as (controller, log):
        controller.start_generation(world(1, nodes="ab"))
        controller.end_generation(ViewEnd.NEWCOMERS)
        controller.start_generation(world(2, nodes="abc"), membership_changed=True)
        controller.end_generation(NodeLost("b", Loss.DIED))
        controller.start_generation(world(4, B_DIED, nodes="ac"), membership_changed=True)
        log.emit("failure", rank=0, **error)
        log.emit("worker-exit", rank=0, signal=None, exit_code=1, stopped=False)
        with pytest.raises(JobFailedError):
            controller.end_generation(None)
    joined, lost, failed = read_events(tmp_path, "verdict")
    go_on = {"decision": {"kind": "continue"}, "root_causes": [], "secondary_failures": []}
    assert joined == go_on | {
        "generation": 1,
        "next_generation": 2,
        "reason": {"kind": "newcomers"},
        "joined": ["c"],
        "lost": [],
        "speaks_for_job": True,
    }
    assert (lost["generation"], lost["next_generation"], lost["lost"]) == (2, 4, ["b"])
    assert lost["reason"] == lost["root_causes"][0]["cause"]
    assert (failed["generation"], failed["next_generation"], failed["reason"]) == (4, None, None)
    assert failed["decision"]["reason"]["kind"] == "same-error-again"
    starts = read_events(tmp_path, "generation-start")
    assert starts[1] == {"generation": 2, "node_rank": 0, "num_nodes": 3, "begins_job": False}
    assert starts[0]["begins_job"]


def test_spare_speaks_for_no_restart_and_begins_no_job(tmp_path: Path) -> None:
    """Others that were in the view before do; a node that comes back as the first knows nothing of it."""
    with open_controller(tmp_path) as (controller, _):
        controller.start_generation(world(1, nodes="ab"))
        controller.end_generation(NodeLost("b", Loss.DIED))
        controller.on_rendezvous_event(EmitEvent("spare", generation=2))
        controller.start_generation(world(3, nodes="ab"), membership_changed=True)
    (back,) = read_events(tmp_path, "verdict")
    assert not back["speaks_for_job"]
    (tmp_path / "new").mkdir()
    with open_controller(tmp_path / "new") as (controller, _):
        controller.on_rendezvous_event(EmitEvent("spare", generation=2))
        controller.start_generation(world(3, nodes="ab"))
    assert not read_events(tmp_path / "new", "generation-start")[0]["begins_job"]


def test_end_is_reported_by_one_node(tmp_path: Path) -> None:
    """The job's end by the one that gave up; its own by a node that is stopped, if it is the first."""
    gave_up = GaveUp("b", RestartsExhausted(Failure(EXIT, "b", 1)))
    for nodes, reports in (("ab", True), ("ba", False)):
        (tmp_path / nodes).mkdir()
        with open_controller(tmp_path / nodes) as (controller, _):
            controller.start_generation(world(1, nodes=nodes))
            assert controller.speaks_for_job("signalled") is reports
            controller.record_end(EndJob(JobFinished()))
            assert controller.speaks_for_job("done") is reports
            controller.record_end(EndJob(gave_up))
            assert not controller.speaks_for_job("failed")


@pytest.mark.parametrize(("step", "fails"), [(7, False), (5, True)])
def test_controller_decides_with_unreadable_event_log(tmp_path: Path, step: int, *, fails: bool) -> None:
    """Exits are in memory, and steps are on the progress page."""
    with (
        SimulatedDisk(tmp_path) as disk,
        open_controller(disk.path, RestartLimits(max_no_progress=1)) as (controller, log),
    ):
        path = disk.path / constants.EVENTS_FILE
        log.emit("agent-start")
        page = ProgressPage(disk.path / constants.PROGRESS_FILE)
        controller.start_generation(world(1))
        with path.open("rb") as file:
            os.fsync(file.fileno())  # the failing disk then forgets what the page cache has of it
        log.close()
        disk.fail()
        with pytest.raises(OSError, match="Input/output error"):
            path.read_bytes()
        page.start_generation(0, generation=1, step=5, world_size=1, worker=this_process())
        page.finish_step(0, step)
        log.emit("worker-start", step=5, rank=0)
        log.emit("worker-exit", rank=0, signal="SIGSEGV", exit_code=None, stopped=False)
        controller.end_generation(None)
        if fails:
            with pytest.raises(JobFailedError, match="rank 0 was killed by SIGSEGV"):
                controller.start_generation(world(2))
        failure = controller.report_generation().failure
        assert failure is not None
        assert failure.cause == WorkerEnd(signal="SIGSEGV")


def test_controller_ignores_progress_of_earlier_start(tmp_path: Path) -> None:
    """In a container the earlier agent had the same pid; a volume keeps the page, and generations grow."""
    ProgressPage(tmp_path / constants.PROGRESS_FILE).start_generation(
        0, generation=1, step=5000, world_size=1, worker=this_process(start_ticks=7)
    )
    with open_controller(tmp_path) as (controller, log):
        controller.start_generation(world(2))
        log.emit("failure", rank=0, type="ImportError", message="no module named x", deterministic=False)
        log.emit("worker-exit", rank=0, signal=None, exit_code=1, stopped=False)
        assert controller.report_generation().newest_step == 0
        controller.end_generation(None)
        with pytest.raises(JobFailedError, match="no module named x"):
            controller.start_generation(world(2))


@pytest.mark.parametrize(
    ("is_worth", "text"),
    [
        (True, "run the same command again."),
        (False, "run the same command again. Starting again would meet the same error."),
    ],
)
def test_error_that_is_worth_a_requeue_is_not_tried_three_times(
    tmp_path: Path, text: str, *, is_worth: bool
) -> None:
    """As an outage of the archive. A script's own error of that name is not."""
    with open_controller(tmp_path) as (controller, log):
        controller.start_generation(world(1))
        message, kind = "run the same command again.", "ArchiveOutageError"
        log.emit("failure", rank=0, type=kind, message=message, deterministic=True, worth_requeue=is_worth)
        log.emit("worker-exit", rank=0, signal=None, exit_code=1, stopped=False)
        with pytest.raises(JobFailedError) as caught:
            controller.end_generation(None)
    assert str(caught.value).endswith(text)
    assert is_worth_requeue(caught.value.reason) is is_worth
    assert not is_worth_requeue(None)


SECONDARY = {"type": "RuntimeError", "message": "Connection closed by peer"}
KILLED = Failure("signal", "b", 1, WorkerEnd(signal="SIGKILL"))
ENDED = Failure("exit", "b", 1, WorkerEnd(exit_code=3))
B_DIED, C_DIED = (make_node_failure(NodeLost(node, Loss.DIED)) for node in "bc")


@pytest.mark.parametrize(
    ("own", "view_end", "reported", "nodes", "line"),
    [
        ("SIGKILL", None, (), "ab", "rank 0 was killed by SIGKILL; restarting."),
        (SECONDARY, None, (KILLED,), "ab", "rank 1 on node b was killed by SIGKILL; restarting."),
        (SECONDARY, None, (B_DIED,), "a", "node b died; restarting."),
        (
            None,
            WorkersStopped("b"),
            (KILLED,),
            "ab",
            "rank 1 on node b was killed by SIGKILL; restarting.",
        ),
        (None, ViewEnd.NEWCOMERS, (), "abc", "joined: c; restarting."),
        (None, ViewEnd.DISK_STUCK, (), "ab", "the leader's disk does not complete writes; restarting."),
    ],
)
def test_restart_logs_its_cause_in_one_line(  # noqa: PLR0917 - the cases and three fixtures
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    own: object,
    view_end: StopReason | None,
    reported: tuple[Failure, ...],
    nodes: str,
    line: str,
) -> None:
    """A secondary failure is not logged, and its traceback is not printed."""
    caplog.set_level("INFO", "elastic_resume")
    with open_controller(tmp_path) as (controller, log):
        controller.start_generation(world(1, nodes="ab"))
        log.emit("worker-start", step=0, rank=0)
        if isinstance(own, dict):
            log.emit("failure", rank=0, step=3, traceback="Traceback: connection closed", **own)
        if own is not None:
            signal = own if isinstance(own, str) else None
            log.emit("worker-exit", rank=0, signal=signal, exit_code=1, stopped=False)
        controller.end_generation(view_end)
        controller.start_generation(world(2, *reported, nodes=nodes), membership_changed=nodes != "ab")
    assert caplog.messages == [line]
    assert capsys.readouterr().err == ""


def test_traceback_of_excluded_node_is_printed_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is printed with the summary, not also with a restart that this node takes no part in."""
    with open_controller(tmp_path, RestartLimits(exclude_after=1)) as (controller, log):
        controller.start_generation(world(1, nodes="ab"))
        log.emit("failure", rank=0, step=3, type="ValueError", message="no", traceback="Traceback: no")
        log.emit("worker-exit", rank=0, signal=None, exit_code=1, stopped=False)
        failure = controller.report_generation().failure
        assert failure is not None
        controller.end_generation(None)
        with pytest.raises(NodeExcludedError):
            controller.start_generation(world(2, failure, nodes="ab"))
        controller.log_failure_summary("")
    assert capsys.readouterr().err.count("Traceback: no") == 1


def test_starts_of_nodes_that_cannot_reach_each_other_never_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor do they when the world is the same again, or when the other nodes' failures are unknown here."""
    with open_controller(tmp_path, RestartLimits(max_no_progress=2)) as (controller, log):
        controller.start_generation(world(1, nodes="ab"))
        for generation in range(2, 9):
            log.emit("failure", rank=0, type="RuntimeError", message="connect: No route to host")
            log.emit("worker-exit", rank=0, signal=None, exit_code=1, stopped=False)
            controller.parts = [
                Mock(find_failures=lambda: [make_network_failure("a", ["b"])], find_faults=list)
            ]
            failure = controller.report_generation().failure
            assert failure == make_network_failure("a", ["b"])
            controller.end_generation(None)
            controller.parts = ()
            controller.start_generation(world(generation, *[failure] * (generation % 2), nodes="ab"))
    assert set(caplog.messages) == {"node a cannot reach b; restarting."}


@pytest.mark.parametrize(
    ("cause", "nodes", "line"),
    [
        (C_DIED, "abd", "node c died; restarting."),
        (C_DIED, "ab", "node c died; also lost: d; restarting."),
        (
            make_node_failure(NodeLost("f", Loss.UNREACHABLE)),
            "a",
            "node f is unreachable; also lost: b, c and 2 more; restarting.",
        ),
        (KILLED, "ad", "rank 1 on node b was killed by SIGKILL; also lost: b, c; restarting."),
        (
            replace(KILLED, node="p"),
            "abcd",
            "rank 1 on node p was killed by SIGKILL; restarting without p, whose workers start first.",
        ),
    ],
)
def test_restart_names_all_lost_nodes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cause: Failure, nodes: str, line: str
) -> None:
    """The root cause is one of them; the others are missing in the new view too, but one that prepares."""
    caplog.set_level("INFO", "elastic_resume")
    preparing = ("p",) if cause.node == "p" else ()
    with open_controller(tmp_path) as (controller, log):
        controller.start_generation(
            world(1, nodes="abcdef" if cause.node == "f" else "".join(["abcd", *preparing]))
        )
        log.emit("worker-start", step=0, rank=0)
        controller.end_generation(ViewEnd.PAUSED)
        view = replace(world(2, cause, nodes=nodes), preparing_nodes=preparing)
        controller.start_generation(view, membership_changed=True)
    assert caplog.messages == [line]


def test_worker_that_did_not_park_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its process was killed, and the user can change the script."""
    with open_controller(tmp_path) as (controller, log):
        controller.start_generation(world(1))
        for rank, not_parked in ((0, True), (1, False), (2, True)):
            log.emit("worker-exit", rank=rank, signal="SIGKILL", stopped=True, not_parked=not_parked)
        controller.end_generation(ViewEnd.PAUSED)
    assert "ranks 0, 2 did not leave the restartable function within 2 s" in caplog.text


@pytest.mark.parametrize(
    ("generations", "count"),
    [
        ([(False, "ENDED"), (False, "ENDED")], 1),
        ([(True, "ENDED"), (False, "ENDED")], 0),
        ([(False, "joined"), (False, "joined")], 0),
        ([(False, "joined"), (False, "ENDED")], 1),
        ([(False, "KILLED"), (False, "KILLED")], 0),
    ],
)
def test_restart_of_script_without_resume_is_warned_about_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, generations: list[tuple[bool, str]], count: int
) -> None:
    """A node that joins, or a kill, may come before the workers have reached er.resume()."""
    with open_controller(tmp_path) as (controller, log):
        nodes = "ab"
        controller.start_generation(world(1, nodes=nodes))
        for generation, (resumed, end) in enumerate(generations, start=2):
            if resumed:
                log.emit("worker-start", step=0, rank=0)
            controller.end_generation(ViewEnd.NEWCOMERS)
            nodes += str(generation) if end == "joined" else ""
            failures = {"KILLED": (KILLED,), "ENDED": (ENDED,)}.get(end, ())
            controller.start_generation(world(generation, *failures, nodes=nodes))
    assert (
        "\n".join(caplog.messages).count("never calls it saves nothing and starts over at each restart")
        == count
    )


def test_wait_log_logs_newest_texts_only_if_wait_lasts(caplog: pytest.LogCaptureFixture) -> None:
    """After that, further texts of the same wait are logged at once."""
    caplog.set_level("INFO", "elastic_resume")
    wait_log = WaitLog(delay_s=600.0)
    before = threading.enumerate()
    wait_log.add("waiting", "for b")
    (timer,) = (thread for thread in threading.enumerate() if thread not in before)
    assert not wait_log.end()
    timer.join()
    assert caplog.messages == []

    wait_log = WaitLog(delay_s=0.1)
    wait_log.add("restart", "c died")
    wait_log.add("waiting", "for b and c")
    wait_log.add("waiting", "for c")
    wait_for(lambda: len(caplog.messages) == 2, "the timer")
    wait_log.add("waiting", "for c still")
    assert caplog.messages == ["c died", "for c", "for c still"]
    assert wait_log.end()
    assert not wait_log.end()


@pytest.mark.parametrize("kind", sorted(restart_log.WARNING_KINDS))
def test_problem_of_rendezvous_is_warned_about_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """A wait may be normal; these are not."""
    with open_controller(tmp_path) as (controller, _):
        controller.on_rendezvous_event(EmitEvent(kind, ErrorRaised("OSError", "why")))
    (record,) = caplog.records
    assert (record.levelname, "why" in record.getMessage()) == ("WARNING", True)


@pytest.mark.parametrize("has_resumed", [False, True])
def test_script_without_resume_is_named_after_a_minute(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, has_resumed: bool
) -> None:
    """Once for a job, by the node of rank 0, if none of its workers has come out of er.resume()."""
    timers: list[Any] = []

    class FakeTimer:
        def __init__(self, interval_s: float, function: Any) -> None:
            self.function, self.is_cancelled = function, False
            if interval_s == restart_log.NO_RESUME_S:  # waits have timers, too
                timers.append(self)

        def start(self) -> None:
            """Wait for the test."""

        def cancel(self) -> None:
            """Note it."""
            self.is_cancelled = True

    monkeypatch.setattr("elastic_resume.agent.restart_log.threading.Timer", FakeTimer)
    with open_controller(tmp_path) as (controller, log):
        controller.start_generation(world(1))
        if has_resumed:
            log.emit("worker-start", step=0, rank=0)
        assert len(timers) == 1
        timers[0].function()
        controller.end_generation(ViewEnd.NEWCOMERS)
        assert timers[0].is_cancelled, "it would judge the next generation's workers by this one's start"
        controller.start_generation(world(2))
        assert len(timers) == 2 - has_resumed, "a script that has resumed is known to call it"
        if not has_resumed:
            timers[-1].function()
        controller.log.end_wait()
    assert all(timer.is_cancelled for timer in timers)
    text = "\n".join(caplog.messages)
    assert text.count("no worker has come out of er.resume() for a minute. A script that never") == int(
        not has_resumed
    )


def test_script_that_waits_for_the_archive_is_known_to_call_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The wait has its own message."""
    checks: list[Any] = []

    def make_timer(interval_s: float, function: Any) -> Mock:
        checks.extend([function] if interval_s == restart_log.NO_RESUME_S else [])
        return Mock()

    monkeypatch.setattr("elastic_resume.agent.restart_log.threading.Timer", make_timer)
    with open_controller(tmp_path) as (controller, log):
        controller.start_generation(world(1))
        log.emit("archive-wait", seconds=0.0, error="gone")
        (check,) = checks
        check()
        controller.log.end_wait()
    assert "A script that never" not in caplog.text


def test_mechanisms_learn_that_the_agent_is_being_stopped(tmp_path: Path) -> None:
    """Workers may be slow from then on."""
    with open_controller(tmp_path) as (controller, _):
        controller.parts = parts = [Mock(), Mock()]
        controller.begin_stop("SIGTERM")
        assert [part.begin_stop.call_args.args for part in parts] == [("SIGTERM",)] * 2


def test_node_with_broken_gpu_starts_no_workers(tmp_path: Path) -> None:
    """It leaves before the first start, and before it joins again."""
    fault = GpuFault(2, 3, "GPU-a", 79)
    text = r"a GPU is broken \(local rank 2; index 3; GPU-a; Xid 79: fallen off the bus\)\. The machine is"
    with open_controller(tmp_path) as (controller, _):
        failure = Failure("gpu", "a", None, fault)
        controller.parts = [Mock(find_faults=lambda: [failure], find_failures=list)]
        with pytest.raises(NodeExcludedError, match=text):
            controller.start_generation(world(1))
        assert not (tmp_path / constants.EVENTS_FILE).exists()  # no generation has begun
        with pytest.raises(NodeExcludedError, match=text):
            controller.end_generation(None)
