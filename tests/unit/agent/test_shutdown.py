"""What an agent does with signals ahead of the end, in whatever phase it is."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_resume import constants
from elastic_resume.agent.restart_controller import RestartController
from elastic_resume.agent.round_evidence import MemoryMonitor, RoundEvents
from elastic_resume.agent.shutdown import ShutdownController
from elastic_resume.agent.workers import supervisor
from elastic_resume.agent.workers.lease_page import LeasePage
from elastic_resume.errors import JobFailedError
from elastic_resume.events import Event, EventLog
from elastic_resume.policy.requeue import RequeueAction
from elastic_resume.policy.restart import RestartLimits
from elastic_resume.rendezvous.core.events import EmitEvent
from elastic_resume.schedulers.environment import SchedulerContext
from elastic_resume.snapshot.progress_page import ProgressPage, WorkerProcess
from tests.support.disks import SimulatedDisk

USR1, USR2 = signal.SIGUSR1, signal.SIGUSR2


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Return a list for events; restore signal handlers afterwards."""
    monkeypatch.setenv(constants.ENV_DRAIN_SIGNALS, "SIGTERM,SIGUSR1")
    before = {number: signal.getsignal(number) for number in (USR1, USR2, signal.SIGTERM)}
    yield []
    for number, action in before.items():
        signal.signal(number, action)
    supervisor._early_signals.clear()


class RecordingLog(EventLog):
    """An event log that keeps events in a list, without a file."""

    def __init__(self, emitted: list[dict[str, Any]]) -> None:
        super().__init__(Path("/dev/null"))
        self._emitted = emitted

    def emit(self, event: str, /, **fields: Any) -> Event:
        """Keep the event's kind and fields."""
        self._emitted.append({event: fields})
        return {}


def ending(told: list[dict[str, Any]], here: SchedulerContext | None = None) -> ShutdownController:
    """Build a shutdown controller, by default on a plain host."""
    return ShutdownController(
        here or SchedulerContext("host", "a"),
        RecordingLog(told),
        requeue_mode="auto",
    )


def test_signal_without_handler_is_sent_again_later(told: list[dict[str, Any]]) -> None:
    """Its default action would kill the agent while it imports torch or commits."""
    supervisor.record_early_signals()
    os.kill(os.getpid(), USR1)  # the agent imports
    this, heeded = ending(told), threading.Event()
    with this.handle_signals():
        assert signal.getsignal(USR2) is signal.SIG_DFL  # not one of ours, as it turns out
        this.on_signal(USR1)
        assert not told
        signal.signal(USR1, lambda *_: heeded.set())
        assert heeded.wait(20)
        this.on_signal(USR1)
    assert told == [{"drain": {"cause": "SIGUSR1", "alone": False}}]
    decision, code = this.decide("signalled", 138, node_rank=0, starts_without_progress=0)
    assert decision is not None
    assert (decision.action, code) == (RequeueAction.EXIT_CODE, 75)


@pytest.mark.parametrize(("outcome", "code"), [("done", 0), ("failed", constants.EXIT_JOB_ERROR)])
def test_decide_keeps_outcome_despite_later_signal(
    told: list[dict[str, Any]], outcome: str, code: int
) -> None:
    """With 143 a scheduler would run a finished job again."""
    assert ending(told).decide(outcome, code, node_rank=0, starts_without_progress=0) == (None, code)
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), USR1)


def test_first_signal_decides_exit_code(told: list[dict[str, Any]]) -> None:
    """A requeue sends SIGTERM to nodes that still drain."""
    this = ending(told)
    this.on_signal(USR1)
    this.begin_shutdown(signal.SIGTERM)
    assert this.describe() == "stopped by SIGUSR1."
    assert this.decide("signalled", 143, node_rank=0, starts_without_progress=0)[1] == 75
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN  # nothing may end the request any more


@pytest.mark.parametrize(
    ("outcome", "number", "code"), [("signalled", signal.SIGTERM, 143), ("signalled", signal.SIGINT, 130)]
)
def test_decide_keeps_exit_code_of_stop_signals(
    told: list[dict[str, Any]], outcome: str, number: signal.Signals, code: int
) -> None:
    """The sender of the signal knows whether the job is to run again."""
    this = ending(told)
    this.begin_shutdown(number)
    assert this.decide(outcome, code, node_rank=0, starts_without_progress=0)[1] == code


@pytest.mark.parametrize(("outcome", "code"), [("done", 0), ("failed", 1), ("failed", 75), ("left", 75)])
def test_decide_keeps_exit_code_without_signal(told: list[dict[str, Any]], outcome: str, code: int) -> None:
    """On a plain host nothing is requeued."""
    assert ending(told).decide(outcome, code, node_rank=0, starts_without_progress=0)[1] == code


@pytest.mark.parametrize(
    ("order", "rank", "stands_by", "code"),
    [
        (0, None, False, 75),
        (0, None, True, 0),
        (0, 0, True, 0),
        (1, None, False, 0),
        (1, 0, False, 75),
        (0, 1, False, 0),
    ],
)
def test_spare_never_requests_requeue(
    told: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    *,
    order: int,
    rank: int | None,
    stands_by: bool,
    code: int,
) -> None:
    """Its request would end nodes that still commit."""
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "3")
    this = ending(told, SchedulerContext("slurm", "a", node_index=order, max_nodes=3))
    this.begin_shutdown(USR1)
    assert (
        this.decide("signalled", 138, node_rank=rank, starts_without_progress=0, is_spare=stands_by)[1]
        == code
    )


def test_controller_is_spare_after_spare_event(tmp_path: Path) -> None:
    """The rendezvous emits the event."""
    path = tmp_path / constants.EVENTS_FILE
    with (
        contextlib.closing(LeasePage()) as fence,
        contextlib.closing(MemoryMonitor()) as gauge,
        contextlib.closing(RoundEvents()) as told,
    ):
        log = EventLog(path, node="a")
        witness = RestartController("a", log, path, fence, told, limits=RestartLimits(), memory_monitor=gauge)
        witness.on_rendezvous_event(EmitEvent("waiting", "for others"))
        before = witness.is_spare
        witness.on_rendezvous_event(
            EmitEvent("spare", "generation 1 runs without this node, which stands by")
        )
        assert (before, witness.is_spare) == (False, True)
        log.close()


@pytest.mark.parametrize(("step", "stands_still"), [(7, False), (5, True)])
def test_controller_decides_with_unreadable_event_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, *, stands_still: bool
) -> None:
    """Exits are in memory, and steps are on the progress page."""
    for name in (constants.ENV_ROUND, constants.ENV_MTBF_S):  # which a round sets
        monkeypatch.setenv(name, "1")
    with (
        SimulatedDisk(tmp_path) as disk,
        contextlib.closing(LeasePage()) as fence,
        contextlib.closing(RoundEvents()) as told,
        contextlib.closing(
            EventLog(disk.path / constants.EVENTS_FILE, memory_path=told.path, node="a")
        ) as log,
    ):
        path = disk.path / constants.EVENTS_FILE
        log.emit("agent-start")
        board = ProgressPage(disk.path / constants.PROGRESS_FILE)
        witness = RestartController("a", log, path, fence, told, limits=RestartLimits(max_no_progress=1))
        witness.after_rendezvous(node_rank=0, num_nodes=1, generation=1)
        with path.open("rb") as file:
            os.fsync(file.fileno())  # so that failing forgets what memory holds of it
        log.close()
        disk.fail()
        with pytest.raises(OSError, match="Input/output error"):
            path.read_bytes()
        assert witness.starts_without_progress(3) == 0
        worker = WorkerProcess(0, os.getpid(), 1, os.getpid(), 0, 0, 0)
        board.start_generation(0, generation=1, step=5, world_size=1, worker=worker)
        board.finish_step(0, step)
        log.emit("worker-start", step=5, rank=0)
        log.emit("worker-exit", rank=0, signal="SIGSEGV", exit_code=None, stopped=False)
        witness.before_round(failed=True)
        if stands_still:
            with pytest.raises(JobFailedError, match="rank 0 was killed by SIGSEGV"):
                witness.after_rendezvous(node_rank=0, num_nodes=1, generation=2)
        assert [one.text for one in [witness.summarize_round().failure] if one] == ["was killed by SIGSEGV"]


def test_round_events_contain_event_after_torn_line() -> None:
    """A writer that is killed leaves the start of its line."""
    with contextlib.closing(RoundEvents()) as told:
        with open(told.path, "ab") as file:
            file.write(b'{"t":1.0,"event":"failure","mess')
        with contextlib.closing(EventLog(Path("/dev/full"), memory_path=told.path)) as log:
            log.emit("worker-exit", rank=0)
            log.emit("hang", rank=0)
        assert [event["event"] for event in told.read()] == ["worker-exit", "hang"]


def test_controller_ignores_progress_of_earlier_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container its agent had the same pid, and a volume keeps the page."""
    for name in (constants.ENV_ROUND, constants.ENV_MTBF_S):  # which a round sets
        monkeypatch.setenv(name, "1")
    path = tmp_path / constants.EVENTS_FILE
    worker = WorkerProcess(0, os.getpid(), 1, os.getpid(), 7, 0, 0)
    ProgressPage(tmp_path / constants.PROGRESS_FILE).start_generation(
        0, generation=1, step=5000, world_size=1, worker=worker
    )
    with (
        contextlib.closing(LeasePage()) as fence,
        contextlib.closing(RoundEvents()) as told,
        contextlib.closing(EventLog(path, memory_path=told.path, node="a")) as log,
    ):
        witness = RestartController("a", log, path, fence, told)
        witness.after_rendezvous(node_rank=0, num_nodes=1, generation=1)
        log.emit("failure", rank=0, type="ImportError", message="no module named x", deterministic=False)
        log.emit("worker-exit", rank=0, signal=None, exit_code=1, stopped=False)
        assert witness.summarize_round().newest_step == 0
        witness.before_round(failed=True)
        with pytest.raises(JobFailedError, match="no module named x"):
            witness.after_rendezvous(node_rank=0, num_nodes=1, generation=2)


def test_drain_node_sends_drain_signal(told: list[dict[str, Any]]) -> None:
    """The signal is sent once it has a handler."""
    this, heeded = ending(told), threading.Event()
    with this.handle_signals():
        this.drain_node()
        signal.signal(USR1, lambda *_: heeded.set())
        assert heeded.wait(20)
        this.on_signal(USR1)
    assert told == [{"drain": {"cause": "a preemption notice", "alone": True}}]
    assert this.describe() == "stopped by a preemption notice."
