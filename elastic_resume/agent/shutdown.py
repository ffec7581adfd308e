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
from elastic_resume.agent.workers.supervisor import ahead, given_back
from elastic_resume.policy import requeue
from elastic_resume.policy.requeue import Action, Decision, End, Facts, Word
from elastic_resume.schedulers import slurm
from elastic_resume.schedulers.environment import Node
from elastic_resume.schedulers.preemption import AskError, Notice, Source

LOOK_S = 0.25
ASK_EVERY_S = 300.0  # somebody may have changed the limit; a controller of a large cluster has enough to do
FRESH_S = 10.0
SPREAD_S = 20.0
DEFAULT_GRACE_S = 5.0  # guard.py's
DEADLINE = "deadline"
# Who sets this in a batch script requeues its jobs by itself. Lightning does by a handler that it sets only
# where the signal has its default action, and workers ignore those of ours.
SUBMITIT = "SUBMITIT_EXECUTOR"


class Ending:
    """The end of one agent."""

    def __init__(
        self, here: Node, *, mode: str, say: Callable[[str], None], tell: Callable[..., Any]
    ) -> None:
        """Describe it; nothing is heeded before `heeded`.

        Args:
            here: what the scheduler tells of this node.
            mode: ``auto``, or ``off``: never ask the scheduler for anything.
            say: gets lines for people.
            tell: gets events, by kind and fields.

        """
        self._here = here
        self._off = mode == "off"
        self._say = say
        self._tell = tell
        self._signal = (ahead() or [signal.SIGTERM])[0]
        self._asked = ""  # what asked for a drain in words, if it was not a signal of others
        self._alone = False
        self._pending: int | None = None  # a signal that came while nobody heeded it
        self._first: int | None = None  # the signal that began the end
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._commit_s = 0.0
        self.commit_s: Callable[[], float] = lambda: 0.0  # what a commit has taken

    # ---- what asks for the end -------------------------------------------------------------------------

    def drain_alone(self) -> None:
        """Drain this node, which is told that it, and not the job, will be taken away. From any thread."""
        self._drain("a preemption notice", alone=True)

    def _drain(self, cause: str, *, alone: bool) -> None:
        with self._lock:
            if not self._asked and self._first is None:
                self._asked, self._alone, self._pending = cause, alone, self._signal

    def heard(self, number: int) -> None:
        """Note that the process got a signal that asks for the end."""
        if signal.getsignal(number) != self._note:  # else nobody heeds it yet, and it is sent again
            self.begun(number)

    def begun(self, number: int) -> None:
        """Note that the agent heeds this signal: the first is why it ends."""
        with self._lock:
            if self._first is not None:
                return
            self._first = int(number)
        cause = self._cause() or signal.Signals(number).name
        self._tell("drain", cause=cause, alone=self._alone)

    @contextlib.contextmanager
    def heeded(self) -> Iterator[None]:
        """Within the context no signal ahead of the end kills this agent, and its time limit is watched."""
        before = {number: signal.signal(number, self._note) for number in ahead()}
        self._pending = given_back(before)
        thread = threading.Thread(target=self._live, name="ending", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._closed.set()
            for number, action in before.items():
                if signal.getsignal(number) == self._note:
                    signal.signal(number, action)

    def _note(self, number: int, frame: object) -> None:
        """Remember a signal that came between two who heed it."""
        del frame
        self._pending = number

    def _live(self) -> None:
        """Send on what nobody has heeded, and drain ahead of the time limit; all nodes in the same moment."""
        spread_s = min(SPREAD_S, self._here.order / 50)  # or all nodes would ask in the same moment
        began, asked_at, pause_s = time.time(), time.monotonic() - ASK_EVERY_S + spread_s, LOOK_S
        end: float | None = None
        while not self._closed.wait(pause_s):
            self._send()
            if self._here.scheduler != "slurm" or self._asked or self._first is not None:
                pause_s = LOOK_S
                continue
            left_s, age_s = self._left_s(began, end), time.monotonic() - asked_at
            if age_s > ASK_EVERY_S or (left_s < FRESH_S + spread_s < age_s):
                end, asked_at = self._end_time(end), time.monotonic()
                left_s = self._left_s(began, end)
            if left_s <= 0:
                self._say("the time limit is near: this node drains.")
                self._drain(DEADLINE, alone=False)
            pause_s = min(LOOK_S, max(0.01, left_s))

    def _left_s(self, began: float, end: float | None) -> float:
        """How long until this node has to drain."""
        if end is None:
            return math.inf
        with contextlib.suppress(AttributeError):  # its memory has been given back: the agent is at its end
            self._commit_s = self.commit_s()
        return end - time.time() - requeue.margin_s(_grace_s(), self._commit_s, end - began)

    def _end_time(self, before: float | None) -> float | None:
        """Ask until when the job may run; who does not answer has changed nothing."""
        asked = slurm.end_time(self._here.requeue)
        if asked is None:
            return before if before is not None else self._here.deadline
        return asked if math.isfinite(asked) else None

    def _send(self) -> None:
        """Send ourselves a signal that nobody has heeded, once somebody does: by default it would kill."""
        number = self._pending
        if number is None or self._first is not None:
            return
        action = signal.getsignal(number)
        if callable(action) and action != self._note:
            os.kill(os.getpid(), number)

    # ---- what follows ----------------------------------------------------------------------------------

    def decide(
        self, outcome: str, code: int, *, rank: int | None, idle: int, stands_by: bool = False
    ) -> tuple[Decision | None, int]:
        """Decide whether the job is run again, and give the agent's exit code. For the main thread.

        Args:
            outcome: of the agent: done, failed, left or signalled.
            code: what it would exit with.
            rank: of this node in the last world; None where there was none.
            idle: how many lives in a row have brought no new step, this one included.
            stands_by: a world runs without this node.

        """
        end = self._end(outcome, code)
        for number in (signal.SIGTERM, *ahead()):
            # What a requeue sends finds the newest step on disk; and a job that is done is not run again.
            signal.signal(number, signal.SIG_IGN)
        if end in {End.DONE, End.AT_FAULT, End.INTERRUPTED}:
            return None, code
        here = self._here
        only_here = os.environ.get("SLURM_JOB_NUM_NODES", str(here.nodes)) == "1"
        mine = (here.order if rank is None else rank) == 0 and not stands_by
        ask = here.scheduler == "slurm" and end is End.TERMINATED and (only_here or mine)
        facts = Facts(
            end,
            word=slurm.word(here.requeue) if ask else Word.NONE,
            scheduler=here.scheduler,
            idle=idle,
            only_here=only_here,
            mine=mine,
            alone=self._alone,
            other="submitit" if os.environ.get(SUBMITIT) == "slurm" else "",
            scontrol=shutil.which("scontrol") is not None,
            off=self._off,
        )
        otherwise = code if end is End.TERMINATED else constants.EXIT_AT_FAULT
        decision = requeue.decide(facts)
        return decision, decision.exit_code(otherwise)

    def act(self, decision: Decision | None, code: int) -> int:
        """Do it, and tell it. Gives the exit code, which is another where the job is cancelled meanwhile."""
        if decision is None or self._here.scheduler != "slurm":
            return code
        fields: dict[str, object] = {"action": decision.action.value, "why": decision.why}
        if decision.action is not Action.REQUEUE:
            self._tell("requeue", **fields)
            self._say(f"not requeued by this node: {decision.why}.")
            return code
        job = self._here.requeue
        self._say(f"{decision.why}: asking Slurm to run job {job} again.")
        ended = slurm.requeue(job)
        self._tell("requeue", **fields, job=job, done=ended.done, tries=ended.tries, message=ended.text)
        if ended.done:
            self._say(f"job {job} is requeued.")
        elif ended.ending:
            self._say(f"not requeued: {ended.text}.")
            return constants.EXIT_SIGNALLED + signal.SIGTERM
        else:
            self._say(
                f"job {job} could not be requeued ({ended.text}): exit code {constants.EXIT_REQUEUE} tells "
                "the batch script to."
            )
        return code

    def words(self) -> str:
        """Say in a sentence what ended this agent."""
        cause = self._cause() or signal.Signals(self._first or signal.SIGTERM).name
        return "stopped ahead of its time limit." if cause == DEADLINE else f"stopped by {cause}."

    def _cause(self) -> str:
        """What asked for a drain, where the signal that began it is our own."""
        return self._asked if self._first == self._signal else ""

    def _end(self, outcome: str, code: int) -> End:
        plain = {"done": End.DONE, "left": End.LEFT}
        if outcome in plain:
            return plain[outcome]
        if outcome == "failed":
            return End.LOST if code == constants.EXIT_REQUEUE else End.AT_FAULT
        cause = self._cause()
        if cause:
            return End.DEADLINE if cause == DEADLINE else End.NOTICE
        if self._first == signal.SIGTERM:
            return End.TERMINATED
        return End.NOTICE if self._first in ahead() else End.INTERRUPTED


def _grace_s() -> float:
    """What workers have to end, as their guards read it."""
    try:
        return max(0.0, float(os.environ[constants.ENV_GRACE_S]))
    except (KeyError, ValueError):
        return DEFAULT_GRACE_S


ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}


@contextlib.contextmanager
def heeded(
    stop_at_once: Callable[[], None], ending: Callable[[], None], heard: Callable[[int], object] = int
) -> Iterator[None]:
    """Call ``stop_at_once``, in a thread, when SIGINT has come twice. For the main thread.

    ``ending`` is called with each signal that asks for the end: workers may take their time from then on.
    ``heard`` gets its number.
    """
    bell, ringer = os.pipe()
    os.set_blocking(ringer, False)
    before = signal.set_wakeup_fd(ringer, warn_on_full_buffer=False)
    parts = (bell, stop_at_once, ending, heard)
    thread = threading.Thread(target=_listen, args=parts, name="impatience", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(ringer)
        thread.join()


def _listen(
    bell: int, stop_at_once: Callable[[], None], ending: Callable[[], None], heard: Callable[[int], object]
) -> None:
    interrupts = 0
    wanted = {int(number) for number in (*ENDING, *ahead())}
    while numbers := os.read(bell, 4096):
        for number in filter(wanted.__contains__, numbers):
            ending()
            heard(number)
        interrupts += numbers.count(signal.SIGINT)
        if interrupts > 1:
            stop_at_once()
    os.close(bell)


CLOSE_S = 0.5


@contextlib.contextmanager
def watched(
    sources: Sequence[Source],
    *,
    say: Callable[[str], None],
    tell: Callable[..., Any],
    drain: Callable[[], None],
) -> Iterator[None]:
    """Look at the sources within the context.

    Args:
        sources: of `cluster.notices.sources`.
        say: gets a line for people.
        tell: gets events, by kind and fields.
        drain: called once, in a thread, when there is a notice.

    """
    watch = Watch(sources, say=say, tell=tell, drain=drain)
    watch.start()
    try:
        yield
    finally:
        watch.close()


class Watch:
    """The sources of one agent, from `start` to `close`."""

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        say: Callable[[str], None],
        tell: Callable[..., Any],
        drain: Callable[[], None],
    ) -> None:
        """See `watched`."""
        self._say = say
        self._tell = tell
        self._drain = drain
        self._over = threading.Event()
        self._once = threading.Lock()
        self._threads = [
            threading.Thread(target=self._live, args=(one,), name=f"notice-{one.name[:20]}", daemon=True)
            for one in sources
        ]

    def start(self) -> None:
        """Begin to look."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Look no more. Who is being asked may take its time: that thread ends with the process."""
        self._over.set()
        for thread in self._threads:
            thread.join(CLOSE_S)

    def _live(self, source: Source) -> None:
        told = False
        while not self._over.is_set():
            try:
                notice = source.look()
            except Exception as error:  # noqa: BLE001 - a thread that ends would never see the notice
                notice = None
                why = str(error) if isinstance(error, AskError) else repr(error)
                if not told:
                    told = True
                    self._say(f"--preemption-notice {source.name}: {why}. It is asked on; no more is said.")
            if notice is not None:
                self._heed(source, notice)
                return
            self._over.wait(source.period_s)

    def _heed(self, source: Source, notice: Notice) -> None:
        with self._once:
            if self._over.is_set():
                return
            self._over.set()
        left_s = None if notice.deadline is None else notice.deadline - time.time()
        when = "" if left_s is None else f", in {left_s:.0f} s"
        self._tell(
            "preemption-notice",
            source=source.name,
            reason=notice.reason,
            deadline=notice.deadline,
        )
        self._say(
            f"preemption notice ({source.name}): {notice.reason}{when}: "
            "this node commits its newest step and leaves."
        )
        self._drain()
