"""How an agent's life ends ahead of the job's, and whether the job is then run again.

A drain is asked for by a signal, by a notice, or by ourselves when the time limit is near; what follows is
one thing: workers end at a step boundary, the newest step goes to disk, the node leaves. This module sees
to it that a request is heard in whatever phase the agent is, remembers what came first, and after the
commit has the job run again where `policy.requeue` says so.

Promise: the scheduler is asked only when this node's newest step is on disk. Nothing here waits for another
node. Does not know how workers are ended (`elastic`, `guard`), nor how Slurm is asked (`slurm_job`).

Notices that somebody asks for the end a second time, and does not want to wait for the grace.

torchelastic takes the signals, and waits for workers that it has asked to end. The interpreter writes each
signal's number into a pipe, whoever handles it: a thread reads them there.

Drains this node when it is told that it will be taken away (``--preemption-notice``).

A thread for each source looks until one of them has a notice. Then: an event, a line for people, and a drain
of this node alone (`ending`): it commits the newest step and leaves, the others go on.

Promise: at most one drain. A source that cannot be asked is told of once, and asked on.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from elastic_resume import constants
from elastic_resume.agent.workers.supervisor import read_drain_signals, restore_default_handlers
from elastic_resume.policy import requeue
from elastic_resume.policy.requeue import (
    AgentEnd,
    RequeueAction,
    RequeueDecision,
    RequeueFacts,
    TerminationReason,
)
from elastic_resume.schedulers import slurm
from elastic_resume.schedulers.environment import SchedulerContext
from elastic_resume.schedulers.preemption import NoticeQueryError, NoticeSource, PreemptionNotice

POLL_INTERVAL_S = 0.25
END_TIME_QUERY_INTERVAL_S = (
    300.0  # somebody may have changed the limit; a controller of a large cluster has enough to do
)
END_TIME_RECHECK_S = 10.0
MAX_QUERY_DELAY_S = 20.0
DEFAULT_GRACE_S = 5.0  # guard.py's
DEADLINE = "deadline"
# Who sets this in a batch script requeues its jobs by itself. Lightning does by a handler that it sets only
# where the signal has its default action, and workers ignore those of ours.
ENV_SUBMITIT_EXECUTOR = "SUBMITIT_EXECUTOR"


class ShutdownController:
    """The end of one agent."""

    def __init__(
        self,
        scheduler_context: SchedulerContext,
        *,
        requeue_mode: str,
        log: Callable[[str], None],
        emit: Callable[..., Any],
    ) -> None:
        """Describe it; nothing is heeded before `heeded`.

        Args:
            here: what the scheduler tells of this node.
            mode: ``auto``, or ``off``: never ask the scheduler for anything.
            say: gets lines for people.
            tell: gets events, by kind and fields.

        """
        self._scheduler_context = scheduler_context
        self._requeue_disabled = requeue_mode == "off"
        self._log = log
        self._emit = emit
        self._drain_signal = (read_drain_signals() or [signal.SIGTERM])[0]
        self._drain_request = ""  # what asked for a drain in words, if it was not a signal of others
        self._node_only = False
        self._pending_signal: int | None = None  # a signal that came while nobody heeded it
        self._first_signal: int | None = None  # the signal that began the end
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._known_commit_s = 0.0
        self.last_commit_s: Callable[[], float] = lambda: 0.0  # what a commit has taken

    # ---- what asks for the end -------------------------------------------------------------------------

    def drain_node(self) -> None:
        """Drain this node, which is told that it, and not the job, will be taken away. From any thread."""
        self._request_drain("a preemption notice", node_only=True)

    def _request_drain(self, cause: str, *, node_only: bool) -> None:
        with self._lock:
            if not self._drain_request and self._first_signal is None:
                self._drain_request, self._node_only, self._pending_signal = (
                    cause,
                    node_only,
                    self._drain_signal,
                )

    def on_signal(self, signal_number: int) -> None:
        """Note that the process got a signal that asks for the end."""
        if (
            signal.getsignal(signal_number) != self._record_signal
        ):  # else nobody heeds it yet, and it is sent again
            self.begin_shutdown(signal_number)

    def begin_shutdown(self, signal_number: int) -> None:
        """Note that the agent heeds this signal: the first is why it ends."""
        with self._lock:
            if self._first_signal is not None:
                return
            self._first_signal = int(signal_number)
        cause = self._drain_cause() or signal.Signals(signal_number).name
        self._emit("drain", cause=cause, alone=self._node_only)

    @contextlib.contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Within the context no signal ahead of the end kills this agent, and its time limit is watched."""
        before = {number: signal.signal(number, self._record_signal) for number in read_drain_signals()}
        self._pending_signal = restore_default_handlers(before)
        thread = threading.Thread(target=self._run, name="ending", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._closed.set()
            for number, action in before.items():
                if signal.getsignal(number) == self._record_signal:
                    signal.signal(number, action)

    def _record_signal(self, signal_number: int, frame: object) -> None:
        """Remember a signal that came between two who heed it."""
        del frame
        self._pending_signal = signal_number

    def _run(self) -> None:
        """Send on what nobody has heeded, and drain ahead of the time limit; all nodes in the same moment."""
        spread_s = min(
            MAX_QUERY_DELAY_S, self._scheduler_context.node_index / 50
        )  # or all nodes would ask in the same moment
        began, asked_at, pause_s = (
            time.time(),
            time.monotonic() - END_TIME_QUERY_INTERVAL_S + spread_s,
            POLL_INTERVAL_S,
        )
        end: float | None = None
        while not self._closed.wait(pause_s):
            self._resend_pending_signal()
            if (
                self._scheduler_context.scheduler != "slurm"
                or self._drain_request
                or self._first_signal is not None
            ):
                pause_s = POLL_INTERVAL_S
                continue
            left_s, age_s = self._remaining_s(began, end), time.monotonic() - asked_at
            if age_s > END_TIME_QUERY_INTERVAL_S or (left_s < END_TIME_RECHECK_S + spread_s < age_s):
                end, asked_at = self._query_end_time(end), time.monotonic()
                left_s = self._remaining_s(began, end)
            if left_s <= 0:
                self._log("the time limit is near: this node drains.")
                self._request_drain(DEADLINE, node_only=False)
            pause_s = min(POLL_INTERVAL_S, max(0.01, left_s))

    def _remaining_s(self, started_at: float, end_time: float | None) -> float:
        """How long until this node has to drain."""
        if end_time is None:
            return math.inf
        with contextlib.suppress(AttributeError):  # its memory has been given back: the agent is at its end
            self._known_commit_s = self.last_commit_s()
        return (
            end_time
            - time.time()
            - requeue.drain_margin_s(_read_grace_s(), self._known_commit_s, end_time - started_at)
        )

    def _query_end_time(self, previous: float | None) -> float | None:
        """Ask until when the job may run; who does not answer has changed nothing."""
        asked = slurm.query_end_time(self._scheduler_context.requeue_id)
        if asked is None:
            return previous if previous is not None else self._scheduler_context.deadline
        return asked if math.isfinite(asked) else None

    def _resend_pending_signal(self) -> None:
        """Send ourselves a signal that nobody has heeded, once somebody does: by default it would kill."""
        number = self._pending_signal
        if number is None or self._first_signal is not None:
            return
        action = signal.getsignal(number)
        if callable(action) and action != self._record_signal:
            os.kill(os.getpid(), number)

    # ---- what follows ----------------------------------------------------------------------------------

    def decide(
        self,
        outcome: str,
        exit_code: int,
        *,
        node_rank: int | None,
        starts_without_progress: int,
        is_spare: bool = False,
    ) -> tuple[RequeueDecision | None, int]:
        """Decide whether the job is run again, and give the agent's exit code. For the main thread.

        Args:
            outcome: of the agent: done, failed, left or signalled.
            code: what it would exit with.
            rank: of this node in the last world; None where there was none.
            idle: how many lives in a row have brought no new step, this one included.
            stands_by: a world runs without this node.

        """
        end = self._classify_end(outcome, exit_code)
        for number in (signal.SIGTERM, *read_drain_signals()):
            # What a requeue sends finds the newest step on disk; and a job that is done is not run again.
            signal.signal(number, signal.SIG_IGN)
        if end in {AgentEnd.DONE, AgentEnd.DETERMINISTIC_FAILURE, AgentEnd.INTERRUPTED}:
            return None, exit_code
        here = self._scheduler_context
        only_here = os.environ.get("SLURM_JOB_NUM_NODES", str(here.max_nodes)) == "1"
        mine = (here.node_index if node_rank is None else node_rank) == 0 and not is_spare
        ask = here.scheduler == "slurm" and end is AgentEnd.TERMINATED and (only_here or mine)
        facts = RequeueFacts(
            end,
            termination_reason=slurm.query_termination_reason(here.requeue_id)
            if ask
            else TerminationReason.UNKNOWN,
            scheduler=here.scheduler,
            starts_without_progress=starts_without_progress,
            is_single_node=only_here,
            is_requester=mine,
            only_this_node_ends=self._node_only,
            other_requeuer="submitit" if os.environ.get(ENV_SUBMITIT_EXECUTOR) == "slurm" else "",
            has_scontrol=shutil.which("scontrol") is not None,
            is_disabled=self._requeue_disabled,
        )
        otherwise = exit_code if end is AgentEnd.TERMINATED else constants.EXIT_JOB_ERROR
        decision = requeue.decide_requeue(facts)
        return decision, decision.exit_code(otherwise)

    def requeue_if_decided(self, decision: RequeueDecision | None, exit_code: int) -> int:
        """Do it, and tell it. Gives the exit code, which is another where the job is cancelled meanwhile."""
        if decision is None or self._scheduler_context.scheduler != "slurm":
            return exit_code
        fields: dict[str, object] = {"action": decision.action.value, "why": decision.reason}
        if decision.action is not RequeueAction.REQUEUE:
            self._emit("requeue", **fields)
            self._log(f"not requeued by this node: {decision.reason}.")
            return exit_code
        job = self._scheduler_context.requeue_id
        self._log(f"{decision.reason}: asking Slurm to run job {job} again.")
        ended = slurm.request_requeue(job)
        self._emit(
            "requeue", **fields, job=job, done=ended.succeeded, tries=ended.attempts, message=ended.message
        )
        if ended.succeeded:
            self._log(f"job {job} is requeued.")
        elif ended.job_is_ending:
            self._log(f"not requeued: {ended.message}.")
            return constants.EXIT_SIGNAL_BASE + signal.SIGTERM
        else:
            self._log(
                f"job {job} could not be requeued ({ended.message}): exit code {constants.EXIT_REQUEUE} tells "
                "the batch script to."
            )
        return exit_code

    def describe(self) -> str:
        """Say in a sentence what ended this agent."""
        cause = self._drain_cause() or signal.Signals(self._first_signal or signal.SIGTERM).name
        return "stopped ahead of its time limit." if cause == DEADLINE else f"stopped by {cause}."

    def _drain_cause(self) -> str:
        """What asked for a drain, where the signal that began it is our own."""
        return self._drain_request if self._first_signal == self._drain_signal else ""

    def _classify_end(self, outcome: str, exit_code: int) -> AgentEnd:
        plain = {"done": AgentEnd.DONE, "left": AgentEnd.NODE_UNFIT}
        if outcome in plain:
            return plain[outcome]
        if outcome == "failed":
            return (
                AgentEnd.NO_QUORUM if exit_code == constants.EXIT_REQUEUE else AgentEnd.DETERMINISTIC_FAILURE
            )
        cause = self._drain_cause()
        if cause:
            return AgentEnd.DEADLINE if cause == DEADLINE else AgentEnd.PREEMPTION_NOTICE
        if self._first_signal == signal.SIGTERM:
            return AgentEnd.TERMINATED
        return (
            AgentEnd.PREEMPTION_NOTICE if self._first_signal in read_drain_signals() else AgentEnd.INTERRUPTED
        )


def _read_grace_s() -> float:
    """What workers have to end, as their guards read it."""
    try:
        return max(0.0, float(os.environ[constants.ENV_GRACE_S]))
    except (KeyError, ValueError):
        return DEFAULT_GRACE_S


STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}


@contextlib.contextmanager
def watch_stop_signals(
    on_second_interrupt: Callable[[], None],
    on_stop: Callable[[], None],
    on_signal: Callable[[int], object] = int,
) -> Iterator[None]:
    """Call ``stop_at_once``, in a thread, when SIGINT has come twice. For the main thread.

    ``ending`` is called with each signal that asks for the end: workers may take their time from then on.
    ``heard`` gets its number.
    """
    bell, ringer = os.pipe()
    os.set_blocking(ringer, False)
    before = signal.set_wakeup_fd(ringer, warn_on_full_buffer=False)
    parts = (bell, on_second_interrupt, on_stop, on_signal)
    thread = threading.Thread(target=_read_signals, args=parts, name="impatience", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(ringer)
        thread.join()


def _read_signals(
    wakeup_read: int,
    on_second_interrupt: Callable[[], None],
    on_stop: Callable[[], None],
    on_signal: Callable[[int], object],
) -> None:
    interrupts = 0
    wanted = {int(number) for number in (*STOP_SIGNALS, *read_drain_signals())}
    while numbers := os.read(wakeup_read, 4096):
        for number in filter(wanted.__contains__, numbers):
            on_stop()
            on_signal(number)
        interrupts += numbers.count(signal.SIGINT)
        if interrupts > 1:
            on_second_interrupt()
    os.close(wakeup_read)


CLOSE_TIMEOUT_S = 0.5


@contextlib.contextmanager
def watch_preemption_notices(
    sources: Sequence[NoticeSource],
    *,
    log: Callable[[str], None],
    emit: Callable[..., Any],
    drain: Callable[[], None],
) -> Iterator[None]:
    """Look at the sources within the context.

    Args:
        sources: of `cluster.notices.sources`.
        say: gets a line for people.
        tell: gets events, by kind and fields.
        drain: called once, in a thread, when there is a notice.

    """
    watch = PreemptionWatcher(sources, log=log, emit=emit, drain=drain)
    watch.start()
    try:
        yield
    finally:
        watch.close()


class PreemptionWatcher:
    """The sources of one agent, from `start` to `close`."""

    def __init__(
        self,
        sources: Sequence[NoticeSource],
        *,
        log: Callable[[str], None],
        emit: Callable[..., Any],
        drain: Callable[[], None],
    ) -> None:
        """See `watched`."""
        self._log = log
        self._emit = emit
        self._drain = drain
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(
                target=self._poll_source, args=(one,), name=f"notice-{one.name[:20]}", daemon=True
            )
            for one in sources
        ]

    def start(self) -> None:
        """Begin to look."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Look no more. Who is being asked may take its time: that thread ends with the process."""
        self._closed.set()
        for thread in self._threads:
            thread.join(CLOSE_TIMEOUT_S)

    def _poll_source(self, source: NoticeSource) -> None:
        told = False
        while not self._closed.is_set():
            try:
                notice = source.poll()
            except Exception as error:  # noqa: BLE001 - a thread that ends would never see the notice
                notice = None
                why = str(error) if isinstance(error, NoticeQueryError) else repr(error)
                if not told:
                    told = True
                    self._log(f"--preemption-notice {source.name}: {why}. It is asked on; no more is said.")
            if notice is not None:
                self._handle_notice(source, notice)
                return
            self._closed.wait(source.poll_interval_s)

    def _handle_notice(self, source: NoticeSource, notice: PreemptionNotice) -> None:
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
        left_s = None if notice.deadline is None else notice.deadline - time.time()
        when = "" if left_s is None else f", in {left_s:.0f} s"
        self._emit(
            "preemption-notice",
            source=source.name,
            reason=notice.reason,
            deadline=notice.deadline,
        )
        self._log(
            f"preemption notice ({source.name}): {notice.reason}{when}: "
            "this node commits its newest step and leaves."
        )
        self._drain()
