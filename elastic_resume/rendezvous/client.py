"""Join a view, finish, fail or leave the job: the agent's blocking calls to the rendezvous.

Three threads take part. The torchelastic thread calls the methods and may block. The rendezvous thread runs
the state machine and moves the workers' lease. A callback thread writes the log, which may wait for a slow
disk.

Every blocking call ends: with the view, with the end of the job, or when this node cannot take part any more.
"""

from __future__ import annotations

import functools
import math
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Protocol

from elastic_resume.errors import ConfigError, JobFailedError, RendezvousLostError
from elastic_resume.policy.failure_classification import Failure
from elastic_resume.policy.reasons import DepartureReason, JobFinished, NodeRefused, OwnObstacle
from elastic_resume.policy.restart import JobFailure
from elastic_resume.policy.wording import describe
from elastic_resume.rendezvous.core import interface, messages
from elastic_resume.rendezvous.core.node import LEAVE_TIMEOUT_S, RendezvousNode
from elastic_resume.rendezvous.core.world import Incarnation, PersistentState
from elastic_resume.rendezvous.endpoint import ListenEndpoint
from elastic_resume.rendezvous.facts import MAX_BODY_CHARS, Fact, FactBody, Topic
from elastic_resume.rendezvous.net.durable_state import DurableStateFile
from elastic_resume.rendezvous.net.server import RendezvousServer, RendezvousThread
from elastic_resume.rendezvous.net.status_server import RendezvousStatus
from elastic_resume.rendezvous.rendezvous_config import RendezvousConfig

SHUTDOWN_TIMEOUT_S = 2.0
"""Minimum time that a node which ends the job waits for its leader's confirmation."""
MAX_BOOT_STEP = 1 << 20
"""The number of a new process grows by a random step up to this. So processes of two copies of a directory
get the same number once in a million times."""
LEAVE_WAIT_S = LEAVE_TIMEOUT_S + 1
"""How long a leaving node waits until it has left."""
LIVENESS_CHECK_S = 1.0
"""Between two checks that the rendezvous thread is alive, while nothing happens."""


class WorkerLease(Protocol):
    """The shared word with the time until which workers may run."""

    def set(self, until: float) -> None:
        """Set CLOCK_BOOTTIME seconds; infinity means forever, minus infinity not at all."""


class JobCompleted(Exception):  # noqa: N818 - not an error
    """The job has succeeded on every node; this one took no part in its end."""


def make_incarnation(
    node: str, state: PersistentState | None, listen_endpoint: ListenEndpoint
) -> Incarnation:
    """Number this process of a node's directory, whose state on disk is ``state``.

    If another machine has the name or a copy of the directory, the node becomes a voter of its own.
    """
    former = state.incarnation if state and not state.is_twin else None
    return Incarnation(
        node,
        former.disk_id if former else secrets.token_hex(8),
        (former.boot if former else 0) + 1 + secrets.randbelow(MAX_BOOT_STEP),
        listen_endpoint.address,
        listen_endpoint.candidate_index,
    )


class RendezvousClient:
    """One agent's membership in one job."""

    def __init__(
        self,
        config: RendezvousConfig,
        listen_endpoint: ListenEndpoint,
        *,
        node: str,
        state_file: DurableStateFile,
        max_generation: int,
        lease: WorkerLease,
        on_log: Callable[[interface.EmitEvent], None],
        topics: Iterable[Topic] = (),
        render_status: Callable[[RendezvousStatus], bytes] | None = None,
    ) -> None:
        """Set up the membership; `start` begins it.

        ``max_generation`` is the greatest generation that this node knows of, ``lease`` that of its workers.
        ``on_log`` is called in the callback thread. ``topics`` are those of `send_fact`. ``render_status``
        renders the status for status clients, in a thread of its own.
        """
        self.run_id = config.run_id
        self.node = node
        self._lease = lease
        self._single_node = config.settings.single_node
        # An unreachable leader is noticed after a node timeout; then the next one must be found.
        self._end_timeout_s = max(SHUTDOWN_TIMEOUT_S, 2 * config.settings.node_timeout_s + 1)
        self._has_left = False  # written by the rendezvous thread
        self._condition = threading.Condition()
        self.verdicts: Mapping[str, Fact] = {}
        """The leader's newest verdict of each topic; replaced by the rendezvous thread."""
        self._preparations = 0  # how many have begun and not ended
        self._view: interface.StartWorkers | None = None
        self.view_end: interface.StopReason | None = None
        """Why other nodes ended the last view; None if this node's workers did."""
        self._outcome: interface.EndJob | interface.EndMembership | None = None
        self._callback_queue: queue.SimpleQueue[interface.EmitEvent | None] = queue.SimpleQueue()
        self._callback_thread = threading.Thread(
            target=self._run_callbacks, args=(on_log,), name="elastic-resume-callbacks", daemon=True
        )
        incarnation = make_incarnation(node, state_file.state, listen_endpoint)
        settings = replace(config.settings_at(listen_endpoint.address), topics=tuple(topics))
        self.address = listen_endpoint.address
        self.candidates = settings.candidates
        make_server = functools.partial(
            RendezvousServer,
            settings,
            incarnation,
            listener=listen_endpoint.listener,
            run_id=config.run_id,
            token=config.token,
            state_file=state_file,
            on_effect=self._handle_effect,
            on_core_change=self._update_lease,
            max_generation=max_generation,
            render_status=render_status,
        )
        self._server = RendezvousThread(make_server)

    def start(self) -> None:
        """Start to listen and to look for the other nodes."""
        self._callback_thread.start()
        self._server.start()

    # ---- the torchelastic thread ---------------------------------------------------------------------

    def join(
        self, request: messages.JoinSpec, on_verdict: Callable[[], None] = lambda: None
    ) -> interface.StartWorkers:
        """Wait for a view with this node in it. Its workers must be dead.

        The view may have ended already: see `restart_requested`. Its failures have to be judged all the same.
        While this node prepares, a view that runs without it does not end for it. ``on_verdict`` is called
        whenever one of `verdicts` has changed meanwhile.

        Raises:
            JobFailedError: a node ended the job for all.
            JobCompleted: the job has succeeded.
            ConfigError: the other nodes refuse this node's settings.
            RendezvousLostError: no view formed in time.

        """
        with self._condition:
            self._view, self.view_end = None, None
            request = replace(request, is_preparing=self._preparations > 0)
            self._server.submit(interface.JoinRequest(request))
            known = self.verdicts
        while (view := self._wait_for_view(known)) is None:
            known = self.verdicts
            on_verdict()
        return view

    def _wait_for_view(self, known: Mapping[str, Fact]) -> interface.StartWorkers | None:
        """Return the view, or None once `verdicts` are not the known ones any more."""
        with self._condition:
            while self._view is None and self._outcome is None and self.verdicts is known:
                self._wait_for_change()
            self.raise_if_over()
            return self._view

    def begin_preparation(self) -> None:
        """Note that this node's new workers would take long to start; from any thread."""
        self._count_preparation(1)

    def finish_preparation(self) -> None:
        """Note the end of one preparation. After the last one, the node may join a view at once."""
        self._count_preparation(-1)

    def _count_preparation(self, change: int) -> None:
        with self._condition:
            self._preparations += change
            self._server.submit(interface.Preparation(self._preparations > 0))

    @property
    def restart_requested(self) -> bool:
        """Return whether the running view has ended: stop the workers, and `join` again."""
        return self.view_end is not None or self._outcome is not None or not self._server.is_alive

    def finish_and_wait(self) -> None:
        """Report that this node's workers have succeeded; return when the job is over."""
        self._server.submit(interface.WorkersFinished())
        with self._condition:
            if self._outcome is None:
                self._wait_for_change()
            if self._outcome is None:
                self._callback_queue.put(interface.EmitEvent("workers-finished"))
            while self._outcome is None:
                self._wait_for_change()

    def report_failure(self, generation: int, failure: Failure) -> None:
        """Report how a worker of this node failed. Call it before `join`."""
        self._server.submit(messages.FailureReport(generation, failure))

    def sleep_unless_over(self, duration_s: float) -> None:
        """Sleep until the time has passed or the job is over."""
        if duration_s > 0:
            with self._condition:
                self._condition.wait_for(lambda: self._outcome is not None, duration_s)

    def fail_job(self, failure: JobFailure) -> None:
        """End the job on all nodes; return when the end is decided, or after a timeout.

        This node's workers must be dead.
        """
        self._server.submit(messages.FailJob(failure))
        with self._condition:
            self._condition.wait_for(lambda: self._outcome is not None, self._end_timeout_s)

    @property
    def job_end(self) -> interface.EndJob | None:
        """Return how the job ended, with the failures of the last view; None if it has not."""
        return self._outcome if isinstance(self._outcome, interface.EndJob) else None

    def leave(self, departure: DepartureReason) -> None:
        """Send a leave notice and close.

        Without a notice the other nodes could not tell this node from one behind a partition.
        """
        if self._outcome is None:
            deadline = time.monotonic() + LEAVE_WAIT_S
            self._server.submit(interface.Leave(departure))
            while not self._has_left and time.monotonic() < deadline and self._server.is_alive:
                time.sleep(0.005)
        self.close()

    def close(self) -> None:
        """End the membership without a notice."""
        self._server.stop()
        self._lease.set(-math.inf)
        self._callback_queue.put(None)
        if self._callback_thread.is_alive():
            self._callback_thread.join(SHUTDOWN_TIMEOUT_S)

    def _wait_for_change(self) -> None:
        # The timeout also lets signal handlers run, which may raise.
        self._condition.wait(LIVENESS_CHECK_S)
        if self._outcome is None and not self._server.is_alive:
            self._outcome = interface.EndMembership(OwnObstacle.THREAD_ENDED)

    def raise_if_over(self) -> None:
        """Raise what `join` would raise, if the job or this membership has ended."""
        if self._outcome is None:
            return
        reason = self._outcome.reason
        if isinstance(reason, JobFinished):
            raise JobCompleted(describe(reason))
        if isinstance(self._outcome, interface.EndJob):
            raise JobFailedError(describe(reason), reason=reason)
        error = ConfigError if isinstance(reason, NodeRefused) else RendezvousLostError
        raise error(describe(reason), reason=reason)

    def send_fact(self, topic: str, generation: int, body: FactBody) -> None:
        """Send the newest fact of a topic to the leader, for its judge; from any thread.

        Only the newest one before each heartbeat is sent. Generation 0: it belongs to the whole job.
        """
        if len(body) > MAX_BODY_CHARS:
            raise ValueError(f"a fact about {topic} has {len(body)} characters, more than {MAX_BODY_CHARS}")
        self._server.submit(Fact(topic, generation, body))

    def wait_for_verdicts(self, known: Mapping[str, Fact], timeout_s: float) -> Mapping[str, Fact]:
        """Return the verdicts once they are not the known ones any more, or after a time; from any thread."""
        with self._condition:
            self._condition.wait_for(lambda: self.verdicts is not known, timeout_s)
            return self.verdicts

    # ---- the rendezvous thread -----------------------------------------------------------------------

    def _update_lease(self, node: RendezvousNode) -> None:
        """Move the lease before the effects of an event are carried out."""
        self._has_left = bool(node.end_reason)
        if node.running_view is None:
            self._lease.set(-math.inf)
        else:
            self._lease.set(math.inf if self._single_node and node.is_leader else node.lease_until)
        if node.state.verdicts is not self.verdicts:
            with self._condition:
                self.verdicts = node.state.verdicts
                self._condition.notify_all()

    def _handle_effect(self, effect: interface.Effect) -> None:
        if isinstance(effect, interface.EmitEvent):
            self._callback_queue.put(effect)
            return
        with self._condition:
            if isinstance(effect, interface.StartWorkers):
                self._view = effect
            elif isinstance(effect, interface.StopWorkers):
                if self._view is not None and self._view.generation == effect.generation:
                    self.view_end = effect.reason
            elif isinstance(effect, (interface.EndJob, interface.EndMembership)):
                self._outcome = effect
            self._condition.notify_all()

    # ---- the callback thread -------------------------------------------------------------------------

    def _run_callbacks(self, on_log: Callable[[interface.EmitEvent], None]) -> None:
        while (effect := self._callback_queue.get()) is not None:
            on_log(effect)
