"""How an agent handles stop signals, and which exit code follows."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_resume import constants
from elastic_resume.agent.shutdown import ShutdownController
from elastic_resume.events import Event, EventLog
from elastic_resume.schedulers.environment import SchedulerContext

USR1, USR2 = signal.SIGUSR1, signal.SIGUSR2


@pytest.fixture(autouse=True)
def drain_signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Drain at SIGTERM and SIGUSR1; restore signal handlers afterwards."""
    monkeypatch.setenv(constants.ENV_DRAIN_SIGNALS, "SIGTERM,SIGUSR1")
    previous = {number: signal.getsignal(number) for number in (USR1, USR2, signal.SIGTERM)}
    yield
    for number, action in previous.items():
        signal.signal(number, action)


class RecordingLog(EventLog):
    """An event log that keeps events in a list, without a file."""

    def __init__(self) -> None:
        super().__init__(Path("/dev/null"))
        self.emitted: list[dict[str, Any]] = []

    def emit(self, event: str, /, **fields: Any) -> Event:
        """Keep the event's kind and fields."""
        self.emitted.append({event: fields})
        return {}


def make_controller(
    context: SchedulerContext | None = None, log: RecordingLog | None = None
) -> ShutdownController:
    """Build a shutdown controller, by default on a plain host."""
    return ShutdownController(context or SchedulerContext("host", "a"), log or RecordingLog())


@pytest.mark.parametrize(("number", "code"), [(USR1, 75), (signal.SIGTERM, 143)])
def test_signal_without_handler_is_sent_again_later(number: signal.Signals, code: int) -> None:
    """Its default action would kill the agent before torchelastic has started, or while it commits."""
    log = RecordingLog()
    controller, handled = make_controller(log=log), threading.Event()
    with controller.handle_signals():
        assert signal.getsignal(USR2) is signal.SIG_DFL  # it is no drain signal
        os.kill(os.getpid(), number)
        controller.on_signal(number)
        assert not log.emitted
        signal.signal(number, lambda *_: handled.set())
        assert handled.wait(20)
        controller.on_signal(number)
    assert log.emitted == [{"drain": {"cause": number.name, "others_continue": False}}]
    assert controller.decide_exit_code("signalled", 128 + number, node_rank=0) == code


def test_requested_drain_sends_drain_signal() -> None:
    """The signal is sent once it has a handler."""
    log = RecordingLog()
    controller, handled = make_controller(log=log), threading.Event()
    with controller.handle_signals():
        controller.request_drain("a preemption notice")
        signal.signal(USR1, lambda *_: handled.set())
        assert handled.wait(20)
        controller.on_signal(USR1)
    assert log.emitted == [{"drain": {"cause": "a preemption notice", "others_continue": True}}]
    assert controller.describe() == "stopped by a preemption notice."


@pytest.mark.parametrize(("outcome", "code"), [("done", 0), ("failed", constants.EXIT_JOB_ERROR)])
def test_decide_keeps_outcome_despite_later_signal(outcome: str, code: int) -> None:
    """With 143 a scheduler would run a finished job again."""
    controller = make_controller()
    assert controller.decide_exit_code(outcome, code, node_rank=0) == code
    controller.ignore_signals()
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), USR1)


def test_first_signal_decides_exit_code() -> None:
    """A scheduler may send more while a node drains."""
    controller = make_controller()
    controller.on_signal(USR1)
    controller.begin_shutdown(signal.SIGTERM)
    assert controller.describe() == "stopped by SIGUSR1."
    assert controller.decide_exit_code("signalled", 143, node_rank=0) == 75
    controller.ignore_signals()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


@pytest.mark.parametrize(
    ("number", "outcome", "code"),
    [
        (signal.SIGTERM, "signalled", 143),  # the sender knows whether the job is to run again
        (signal.SIGINT, "signalled", 130),
        (None, "done", 0),
        (None, "failed", 1),
        (None, "failed", 75),
        (None, "left", 75),
    ],
)
def test_decide_keeps_exit_code_on_plain_host(number: int | None, outcome: str, code: int) -> None:
    """No other node's exit code is merged with it."""
    controller = make_controller()
    if number is not None:
        controller.begin_shutdown(number)
    assert controller.decide_exit_code(outcome, code, node_rank=1) == code


@pytest.mark.parametrize(
    ("node_order", "node_rank", "is_spare", "code"),
    [
        (0, None, False, 75),
        (0, None, True, 0),
        (0, 0, True, 0),
        (1, None, False, 0),
        (1, 0, False, 75),
        (0, 1, False, 0),
    ],
)
def test_only_node_of_rank_0_ends_with_75(
    monkeypatch: pytest.MonkeyPatch, *, node_order: int, node_rank: int | None, is_spare: bool, code: int
) -> None:
    """The exit code of srun is the highest, also of a spare or of a node that left others behind."""
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "3")
    controller = make_controller(SchedulerContext("slurm", "a", node_order=node_order, max_nodes=3))
    controller.begin_shutdown(USR1)
    assert controller.decide_exit_code("signalled", 138, node_rank=node_rank, is_spare=is_spare) == code
    assert controller.decide_exit_code("left", 75, node_rank=node_rank, is_spare=is_spare) == code
