"""An agent's place in the job, for a caller that blocks, as torchelastic's thread does.

It promises that whoever waits here hears of the end: of the world waited for, of the job, or of this place
(no world in time, settings that the others refuse, an error of our own). `restart_wanted` costs nothing to
poll. What the core has to tell people is handed on in a third thread, since a log may lie on a slow disk
and neither torchelastic's nor the shell's may wait for it. So is what follows when replicas differ
(`compare`): no world is entered before that is done. Decides nothing.
"""

from __future__ import annotations

import math
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from elastic_resume.errors import ConfigError, GaveUpError, RendezvousLostError
from elastic_resume.policy.divergence import Digest, is_digest
from elastic_resume.policy.failure_classification import Failure
from elastic_resume.rendezvous.config import Terms
from elastic_resume.rendezvous.core.events import (
    BeginWorld,
    Digested,
    Effect,
    EndJob,
    GiveUp,
    Heard,
    JobFailed,
    JoinRequested,
    Leave,
    Log,
    ReplicasDiffer,
    RestartWorkers,
    StopWorkers,
    Telling,
    WorkerFailed,
    WorkersFinished,
)
from elastic_resume.rendezvous.core.messages import Diverged, Join, Print
from elastic_resume.rendezvous.core.node import Agent
from elastic_resume.rendezvous.core.quorum import Incarnation
from elastic_resume.rendezvous.core.status import Pulse
from elastic_resume.rendezvous.endpoint import Seat
from elastic_resume.rendezvous.net.durable_state import Record
from elastic_resume.rendezvous.net.server import Shell
from elastic_resume.rendezvous.status_view import View

LINGER_S = 2.0
"""How long a node that ends the job for all waits at least for its leader's word that all have been told."""
GOODBYE_S = 3.0
"""How long a node that leaves looks for somebody to say goodbye to."""
LOOK_S = 1.0
"""Between two looks whether the shell still lives, while nothing happens."""


class Fence(Protocol):
    """Until when workers may run, for those who watch them."""

    def set(self, until: float) -> None:
        """Set CLOCK_BOOTTIME seconds; infinite: without end; minus infinite: not at all."""


class JobOver(Exception):  # noqa: N818 - not an error
    """The job is done on every node; this one had no part in its end."""


class Member:
    """One agent's place in one job."""

    def __init__(
        self,
        terms: Terms,
        seat: Seat,
        *,
        node: str,
        record: Record,
        seen: int,
        fence: Fence,
        tell: Callable[[Log], None],
        hear: Callable[[Heard], None] = lambda _: None,
        show: Callable[[View], bytes] | None = None,
    ) -> None:
        """``seen`` is the greatest generation this node knows of; ``tell`` may block.

        ``hear`` gets what other nodes tell people, and must not block; ``show`` answers those who look how
        the job stands (`Shell`).
        """
        self.run_id = terms.run_id
        self.node = node
        self._fence = fence
        self._hear = hear
        self._lone = terms.alone
        # A leader that has fallen silent is noticed after a node timeout; the next may have to be found.
        self._linger_s = max(LINGER_S, 2 * terms.node_timeout_s + 1)
        self._is_heard = True  # of the shell's thread
        self._change = threading.Condition()
        self._world: BeginWorld | None = None
        self._restart = ""
        self._over: EndJob | GiveUp | None = None
        self._news: queue.SimpleQueue[Log | ReplicasDiffer | None] = queue.SimpleQueue()
        self._differ: Callable[[Diverged], None] = lambda _: None
        self._undone = 0
        """So many times replicas were found to differ, and what follows here is not done."""
        self._teller = threading.Thread(
            target=self._hand_on, args=(tell,), name="elastic-resume-news", daemon=True
        )
        me = Incarnation(node, secrets.token_hex(8), seat.address, seat.candidate)
        settings = terms.settings(seat.address)
        self.address = seat.address
        self.candidates = settings.candidates
        self._shell = Shell(
            settings,
            me,
            listener=seat.listener,
            run_id=terms.run_id,
            token=terms.token,
            record=record,
            carry_out=self._carry_out,
            watch=self._watch,
            seen=seen,
            show=show,
        )

    def start(self) -> None:
        """Take the place: listen, and look for the others."""
        self._teller.start()
        self._shell.start()

    # ---- torchelastic's thread -----------------------------------------------------------------------

    def join(self, join: Join) -> BeginWorld:
        """Wait for a world with this node in it. Its workers must be dead.

        Raises:
            GaveUpError: some node ended the job for all.
            JobOver: the job is done.
            ConfigError: the others refuse this node's settings.
            RendezvousLostError: no world formed in time.

        """
        with self._change:
            while True:
                self._world, self._restart = None, ""
                self._wait_until_done()
                self._shell.submit(JoinRequested(join))
                world = self._next_world()
                self._wait_until_done()
                if not self.restart_wanted:
                    return world

    def check(self) -> None:
        """Raise what `join` would, if the job or this place is over."""
        self._raise_if_over()

    def _next_world(self) -> BeginWorld:
        while True:
            self._raise_if_over()
            if self._world is not None:
                return self._world
            self._wait()

    def _wait_until_done(self) -> None:
        """Wait until nothing is to be done any more about replicas that differ."""
        while self._undone and self._teller.is_alive():
            self._raise_if_over()
            self._wait()

    @property
    def restart_wanted(self) -> bool:
        """Whether the running world is over: stop the workers, and `join` again."""
        return bool(self._restart) or self._over is not None or not self._shell.alive

    @property
    def why_restart(self) -> str:
        """Why the last world ended, as far as others caused it; empty when own workers did."""
        return self._restart

    def finish(self) -> None:
        """Say that this node's workers have succeeded; return when the job is over."""
        self._shell.submit(WorkersFinished())
        with self._change:
            if self._over is None:
                self._wait()
            if self._over is None:
                self._news.put(Log("through", "this node's workers have finished; waiting for the others'"))
            while self._over is None:
                self._wait()

    def report(self, generation: int, failure: Failure) -> None:
        """Tell how a worker of this node failed; to be called before `join`, which others wait for."""
        self._shell.submit(WorkerFailed(generation, failure))

    def pause(self, seconds: float) -> None:
        """Wait so long, or until the job is over."""
        if seconds > 0:
            with self._change:
                self._change.wait_for(lambda: self._over is not None, seconds)

    def fail(self, reason: str) -> None:
        """End the job for all nodes; return when they have been told, or could not be."""
        self._shell.submit(JobFailed(reason))
        with self._change:
            self._change.wait_for(lambda: self._over is not None, self._linger_s)

    @property
    def failure(self) -> str:
        """Why the job was ended for all; empty while it is not, and when it is done."""
        over = self._over
        return over.reason if isinstance(over, EndJob) and over.failed else ""

    @property
    def failures(self) -> tuple[Failure, ...]:
        """What the leader heard of failures in the last world, told with the job's end."""
        over = self._over
        return over.failures if isinstance(over, EndJob) else ()

    @property
    def end(self) -> str:
        """How the job ended, in words; empty while it has not."""
        over = self._over
        return over.reason if isinstance(over, EndJob) else ""

    def tell_people(self, pulse: Pulse | None, lines: Sequence[str]) -> None:
        """Hand on what this node has to tell, with the next heartbeats; from any thread."""
        self._shell.submit(Telling(pulse, tuple(lines)))

    def leave(self, reason: str) -> None:
        """Say goodbye, and end.

        Where the leader has just gone the next one is waited for, or is this agent, whom the others look for:
        without a word they would have to take it for one that may live on behind a cut link.
        """
        limit = time.monotonic() + GOODBYE_S
        while self._over is None and not self._is_heard and time.monotonic() < limit and self._shell.alive:
            time.sleep(0.01)
        if self._over is None:
            self._shell.submit(Leave(reason))
        self.close()

    def close(self) -> None:
        """Give the place up."""
        self._shell.stop()
        self._fence.set(-math.inf)
        self._news.put(None)
        if self._teller.is_alive():
            self._teller.join(LINGER_S)

    def _wait(self) -> None:
        # A signal's handler runs in between and may raise.
        self._change.wait(LOOK_S)
        if self._over is None and not self._shell.alive:
            self._over = GiveUp("its own thread ended, which is an error of elastic_resume")

    def _raise_if_over(self) -> None:
        over = self._over
        if isinstance(over, EndJob):
            raise GaveUpError(over.reason) if over.failed else JobOver(over.reason)
        if isinstance(over, GiveUp):
            raise ConfigError(over.reason) if over.final else RendezvousLostError(over.reason)

    # ---- replicas: any thread --------------------------------------------------------------------------

    def compare(self, differ: Callable[[Diverged], None]) -> None:
        """Have ``differ`` called in the third thread when replicas differ; `join` waits until it is done."""
        self._differ = differ

    def tell_print(self, generation: int, step: int, digest: str) -> None:
        """Tell how this node's state looked after that step; from any thread.

        A heartbeat carries one: of those since the last the one that is `rounder`.

        Raises:
            ValueError: ``digest`` is not 32 hexadecimal digits.

        """
        if not is_digest(digest):
            raise ValueError(f"not a digest of 32 hexadecimal digits: {digest!r}")
        self._shell.submit(Digested(Print(generation, step, Digest(digest))))

    # ---- the shell's thread --------------------------------------------------------------------------

    def _watch(self, agent: Agent) -> None:
        """Move the fence before anything else is done about an event."""
        self._is_heard = agent.is_heard
        if agent.running is None:
            self._fence.set(-math.inf)
        else:
            self._fence.set(math.inf if self._lone and agent.leads else agent.fence_at)

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Log):
            self._news.put(effect)
            return
        if isinstance(effect, Heard):
            self._hear(effect)
            return
        with self._change:
            if isinstance(effect, ReplicasDiffer):
                self._undone += 1
                self._news.put(effect)
            elif isinstance(effect, BeginWorld):
                self._world = effect
            elif isinstance(effect, (RestartWorkers, StopWorkers)):
                if self._world is not None and self._world.generation == effect.generation:
                    self._restart = effect.reason
            elif isinstance(effect, (EndJob, GiveUp)):
                self._over = effect
            self._change.notify_all()

    # ---- the third -----------------------------------------------------------------------------------

    def _hand_on(self, tell: Callable[[Log], None]) -> None:
        while (news := self._news.get()) is not None:
            if isinstance(news, Log):
                tell(news)
                continue
            try:
                self._differ(news.told)
            finally:
                with self._change:
                    self._undone -= 1
                    self._change.notify_all()
