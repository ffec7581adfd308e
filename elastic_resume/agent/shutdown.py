"""Drain a node that is about to be stopped, and decide with which exit code its agent ends.

Three causes start a drain: a signal, a mechanism, and a time limit of Slurm that is near. The effect is
always the same: workers end at a step boundary, the newest step is committed, the node leaves::

    signal --------------------------> torchelastic's handler --> StoppedError --> begin_shutdown
    mechanism, time limit -----------> drain request --> we send ourselves a drain signal --^
    signal before a handler is set --> pending --> sent again once there is a handler ------^

The first cause decides the exit code (`policy.restart`). Nothing here waits for another node.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

from elastic_resume.agent.workers.supervisor import read_drain_signals, read_grace_s
from elastic_resume.background import BackgroundThread
from elastic_resume.events import EventLog
from elastic_resume.policy import restart
from elastic_resume.policy.restart import AgentEnd
from elastic_resume.schedulers import slurm
from elastic_resume.schedulers.environment import SchedulerContext

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.25
# An administrator may change the limit; the controller of a large cluster must not be asked often.
END_TIME_QUERY_INTERVAL_S = 300.0
END_TIME_RECHECK_S = 10.0
MAX_QUERY_DELAY_S = 20.0
DEADLINE = "deadline"
STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}


class ShutdownController:
    """The end of one agent: its first cause, and the exit code that follows."""

    def __init__(self, scheduler_context: SchedulerContext, event_log: EventLog) -> None:
        """Handle nothing before `handle_signals`."""
        self._scheduler_context = scheduler_context
        self._event_log = event_log
        self._drain_signal = (read_drain_signals() or [signal.SIGTERM])[0]
        self._drain_request = ""  # the cause of a drain that this agent started itself
        self._node_only = False  # the cause concerns this node only; the job continues
        self._pending_signal: int | None = None  # a signal that arrived before its handler was set
        self._first_signal: int | None = None  # the signal that began the end
        self._lock = threading.Lock()
        self._thread = BackgroundThread("elastic-resume-shutdown", self._poll)
        self._started_at = time.time()
        self._end_time: float | None = None  # end of the Slurm job, in seconds since the epoch
        # Nodes query one after the other: a controller must not get all queries in one moment.
        self._query_delay_s = min(MAX_QUERY_DELAY_S, scheduler_context.node_order / 50)
        self._queried_at = time.monotonic() - END_TIME_QUERY_INTERVAL_S + self._query_delay_s
        self.last_commit_s: Callable[[], float] = lambda: 0.0  # returns the duration of the last commit

    # ---- causes ----------------------------------------------------------------------------------------

    def request_drain(self, cause: str, *, node_only: bool = True) -> None:
        """Drain this node; without ``node_only`` the cause holds for the whole job. Safe in any thread."""
        with self._lock:
            if not self._drain_request and self._first_signal is None:
                self._drain_request, self._node_only = cause, node_only
                self._pending_signal = self._drain_signal

    def on_signal(self, signal_number: int) -> None:
        """Begin the shutdown for a signal that the process got, unless it is only recorded so far."""
        if signal.getsignal(signal_number) != self._record_signal:
            self.begin_shutdown(signal_number)

    def begin_shutdown(self, signal_number: int) -> None:
        """Record the signal as the cause of the agent's end, if it is the first."""
        with self._lock:
            if self._first_signal is not None:
                return
            self._first_signal = int(signal_number)
        cause = self.find_cause(signal_number)
        self._event_log.emit("drain", cause=cause, others_continue=self._node_only)

    def find_cause(self, signal_number: int) -> str:
        """Return why this agent got a signal, which may be its own; else the signal's name."""
        return self.drain_cause() or signal.Signals(signal_number).name

    @contextlib.contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Keep drain signals from killing the agent, and watch its time limit, within the context.

        They are torchelastic's while workers run. After that the newest step is still committed.
        """
        numbers = (signal.SIGTERM, *read_drain_signals())
        previous = {number: signal.signal(number, self._record_signal) for number in numbers}
        self._thread.start()
        try:
            yield
        finally:
            self._thread.request_close()
            for number, action in previous.items():
                if signal.getsignal(number) == self._record_signal:
                    signal.signal(number, action)

    def _record_signal(self, signal_number: int, frame: object) -> None:
        """Record a signal that comes while torchelastic does not handle it."""
        del frame
        self._pending_signal = signal_number

    def _poll(self) -> float:
        """Send a pending signal again, and drain ahead of Slurm's time limit; return the seconds to wait."""
        self._resend_pending_signal()
        is_ending = bool(self._drain_request) or self._first_signal is not None
        if self._scheduler_context.scheduler != "slurm" or is_ending:
            return POLL_INTERVAL_S
        remaining_s = self._remaining_s()
        recheck_s = END_TIME_RECHECK_S + self._query_delay_s
        max_age_s = recheck_s if remaining_s < recheck_s else END_TIME_QUERY_INTERVAL_S
        if time.monotonic() - self._queried_at > max_age_s:
            self._end_time, self._queried_at = self._query_end_time(), time.monotonic()
            remaining_s = self._remaining_s()
        if remaining_s <= 0:
            logger.info("the time limit is near: this node drains.")
            self.request_drain(DEADLINE, node_only=False)
        return min(POLL_INTERVAL_S, max(0.01, remaining_s))

    def _remaining_s(self) -> float:
        """Return how many seconds are left until this node must drain."""
        if self._end_time is None:
            return math.inf
        job_s = self._end_time - self._started_at
        margin_s = restart.drain_margin_s(read_grace_s(), self.last_commit_s(), job_s)
        return self._end_time - time.time() - margin_s

    def _query_end_time(self) -> float | None:
        """Ask Slurm when the job ends (seconds since the epoch); keep the last answer if it gives none."""
        end_time = slurm.query_end_time(self._scheduler_context.slurm_job)
        if end_time is None:
            return self._end_time if self._end_time is not None else self._scheduler_context.deadline
        return end_time if math.isfinite(end_time) else None

    def _resend_pending_signal(self) -> None:
        """Send ourselves the pending signal once it has a handler; its default action would kill us."""
        number = self._pending_signal
        if number is None or self._first_signal is not None:
            return
        action = signal.getsignal(number)
        if callable(action) and action != self._record_signal:
            os.kill(os.getpid(), number)

    # ---- consequences ----------------------------------------------------------------------------------

    def decide_exit_code(
        self, outcome: str, exit_code: int, *, node_rank: int | None, is_spare: bool = False
    ) -> int:
        """Return the agent's exit code, which further signals do not change.

        Args:
            outcome: the agent's outcome: done, failed, left or signalled.
            exit_code: the exit code of that outcome.
            node_rank: this node's rank in the newest view; None if it was in none.
            is_spare: whether a view runs without this node.

        """
        context = self._scheduler_context
        is_single_node = os.environ.get("SLURM_JOB_NUM_NODES", str(context.max_nodes)) == "1"
        is_first_node = (context.node_order if node_rank is None else node_rank) == 0 and not is_spare
        return restart.decide_exit_code(
            self._classify_end(outcome),
            exit_code,
            speaks_for_job=context.scheduler != "slurm" or is_single_node or is_first_node,
        )

    @staticmethod
    def ignore_signals() -> None:
        """Ignore all further drain signals: the newest step is on disk. Main thread only."""
        for number in (signal.SIGTERM, *read_drain_signals()):
            signal.signal(number, signal.SIG_IGN)

    def describe(self) -> str:
        """Describe in one sentence what stopped this agent."""
        cause = self.find_cause(self._first_signal or signal.SIGTERM)
        return "stopped ahead of its time limit." if cause == DEADLINE else f"stopped by {cause}."

    def drain_cause(self) -> str:
        """Return the cause of the drain request, if the signal that began the end was our own."""
        return self._drain_request if self._first_signal == self._drain_signal else ""

    def _classify_end(self, outcome: str) -> AgentEnd:
        if outcome == "left":
            return AgentEnd.NODE_LEFT
        if outcome != "signalled":
            return AgentEnd.OTHER
        cause = self.drain_cause()
        if cause == DEADLINE:
            return AgentEnd.JOB_DRAINED
        # SIGTERM, and SIGINT of a person: the sender decides about a restart.
        return AgentEnd.NODE_LEFT if cause or self._first_signal in read_drain_signals() else AgentEnd.OTHER


@contextlib.contextmanager
def watch_stop_signals(
    on_second_interrupt: Callable[[], None],
    on_stop: Callable[[int], object],
) -> Iterator[None]:
    """Observe stop and drain signals in a thread, beside torchelastic's handlers. Main thread only.

    While torchelastic handles a signal it waits for workers, so a handler of ours would not run. The
    interpreter also writes each signal's number into a pipe, and the thread reads that.

    Args:
        on_second_interrupt: called when SIGINT has come twice: the user does not want to wait.
        on_stop: called with the number of each signal; workers may be slow from then on.

    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    previous = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    watched = {int(number) for number in (*STOP_SIGNALS, *read_drain_signals())}

    def read_signals() -> None:
        interrupts = 0
        while numbers := os.read(read_end, 4096):
            for number in filter(watched.__contains__, numbers):
                on_stop(number)
            interrupts += numbers.count(signal.SIGINT)
            if interrupts > 1:
                on_second_interrupt()
        os.close(read_end)

    thread = threading.Thread(target=read_signals, name="elastic-resume-signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        os.close(write_end)
        thread.join()
