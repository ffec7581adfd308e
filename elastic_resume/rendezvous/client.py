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

from elastic_resume.errors import ConfigError, JobFailedError, RendezvousLostError
from elastic_resume.policy.divergence import Digest, is_digest
from elastic_resume.policy.failure_classification import Failure
from elastic_resume.rendezvous.config import RendezvousConfig
from elastic_resume.rendezvous.core.events import (
    DeliverPeerStatus,
    Effect,
    EmitEvent,
    EndJob,
    GiveUp,
    JobFailed,
    JoinRequested,
    KillWorkers,
    Leave,
    ReportDivergence,
    RestartWorkers,
    StartWorkers,
    StateDigested,
    StatusPublished,
    WorkerFailed,
    WorkersFinished,
)
from elastic_resume.rendezvous.core.messages import JoinSpec, ReplicasDiverged, StateDigest
from elastic_resume.rendezvous.core.node import RendezvousNode
from elastic_resume.rendezvous.core.quorum import Incarnation
from elastic_resume.rendezvous.core.status import NodeStatus
from elastic_resume.rendezvous.endpoint import ListenEndpoint
from elastic_resume.rendezvous.net.durable_state import DurableStateFile
from elastic_resume.rendezvous.net.server import RendezvousThread
from elastic_resume.rendezvous.status_view import RendezvousStatus

SHUTDOWN_TIMEOUT_S = 2.0
"""How long a node that ends the job for all waits at least for its leader's word that all have been told."""
LEAVE_TIMEOUT_S = 3.0
"""How long a node that leaves looks for somebody to say goodbye to."""
LIVENESS_CHECK_S = 1.0
"""Between two looks whether the shell still lives, while nothing happens."""


class WorkerLease(Protocol):
    """Until when workers may run, for those who watch them."""

    def set(self, until: float) -> None:
        """Set CLOCK_BOOTTIME seconds; infinite: without end; minus infinite: not at all."""


class JobCompleted(Exception):  # noqa: N818 - not an error
    """The job is done on every node; this one had no part in its end."""


class RendezvousClient:
    """One agent's place in one job."""

    def __init__(
        self,
        config: RendezvousConfig,
        listen_endpoint: ListenEndpoint,
        *,
        node: str,
        state_file: DurableStateFile,
        max_generation: int,
        lease: WorkerLease,
        on_log: Callable[[EmitEvent], None],
        on_peer_status: Callable[[DeliverPeerStatus], None] = lambda _: None,
        render_status: Callable[[RendezvousStatus], bytes] | None = None,
    ) -> None:
        """``seen`` is the greatest generation this node knows of; ``tell`` may block.

        ``hear`` gets what other nodes tell people, and must not block; ``show`` answers those who look how
        the job stands (`Shell`).
        """
        self.run_id = config.run_id
        self.node = node
        self._lease = lease
        self._on_peer_status = on_peer_status
        self._single_node = config.single_node
        # A leader that has fallen silent is noticed after a node timeout; the next may have to be found.
        self._end_timeout_s = max(SHUTDOWN_TIMEOUT_S, 2 * config.node_timeout_s + 1)
        self._can_announce_leave = True  # of the shell's thread
        self._condition = threading.Condition()
        self._world: StartWorkers | None = None
        self._restart_reason = ""
        self._outcome: EndJob | GiveUp | None = None
        self._callback_queue: queue.SimpleQueue[EmitEvent | ReportDivergence | None] = queue.SimpleQueue()
        self._on_divergence: Callable[[ReplicasDiverged], None] = lambda _: None
        self._unhandled_divergences = 0
        """So many times replicas were found to differ, and what follows here is not done."""
        self._callback_thread = threading.Thread(
            target=self._run_callbacks, args=(on_log,), name="elastic-resume-callbacks", daemon=True
        )
        me = Incarnation(node, secrets.token_hex(8), listen_endpoint.address, listen_endpoint.candidate_index)
        settings = config.settings(listen_endpoint.address)
        self.address = listen_endpoint.address
        self.candidates = settings.candidates
        self._server = RendezvousThread(
            settings,
            me,
            listener=listen_endpoint.listener,
            run_id=config.run_id,
            token=config.token,
            state_file=state_file,
            on_effect=self._handle_effect,
            on_core_change=self._update_lease,
            max_generation=max_generation,
            render_status=render_status,
        )

    def start(self) -> None:
        """Take the place: listen, and look for the others."""
        self._callback_thread.start()
        self._server.start()

    # ---- torchelastic's thread -----------------------------------------------------------------------

    def join(self, request: JoinSpec) -> StartWorkers:
        """Wait for a world with this node in it. Its workers must be dead.

        Raises:
            GaveUpError: some node ended the job for all.
            JobOver: the job is done.
            ConfigError: the others refuse this node's settings.
            RendezvousLostError: no world formed in time.

        """
        with self._condition:
            while True:
                self._world, self._restart_reason = None, ""
                self._wait_for_divergence_handling()
                self._server.submit(JoinRequested(request))
                world = self._wait_for_world()
                self._wait_for_divergence_handling()
                if not self.restart_requested:
                    return world

    def raise_if_over(self) -> None:
        """Raise what `join` would, if the job or this place is over."""
        self._raise_outcome()

    def _wait_for_world(self) -> StartWorkers:
        while True:
            self._raise_outcome()
            if self._world is not None:
                return self._world
            self._wait_for_change()

    def _wait_for_divergence_handling(self) -> None:
        """Wait until nothing is to be done any more about replicas that differ."""
        while self._unhandled_divergences and self._callback_thread.is_alive():
            self._raise_outcome()
            self._wait_for_change()

    @property
    def restart_requested(self) -> bool:
        """Whether the running world is over: stop the workers, and `join` again."""
        return bool(self._restart_reason) or self._outcome is not None or not self._server.is_alive

    @property
    def restart_reason(self) -> str:
        """Why the last world ended, as far as others caused it; empty when own workers did."""
        return self._restart_reason

    def finish_and_wait(self) -> None:
        """Say that this node's workers have succeeded; return when the job is over."""
        self._server.submit(WorkersFinished())
        with self._condition:
            if self._outcome is None:
                self._wait_for_change()
            if self._outcome is None:
                self._callback_queue.put(
                    EmitEvent(
                        "workers-finished", "this node's workers have finished; waiting for the others'"
                    )
                )
            while self._outcome is None:
                self._wait_for_change()

    def report_failure(self, generation: int, failure: Failure) -> None:
        """Tell how a worker of this node failed; to be called before `join`, which others wait for."""
        self._server.submit(WorkerFailed(generation, failure))

    def sleep_unless_over(self, duration_s: float) -> None:
        """Wait so long, or until the job is over."""
        if duration_s > 0:
            with self._condition:
                self._condition.wait_for(lambda: self._outcome is not None, duration_s)

    def fail_job(self, reason: str) -> None:
        """End the job for all nodes; return when they have been told, or could not be."""
        self._server.submit(JobFailed(reason))
        with self._condition:
            self._condition.wait_for(lambda: self._outcome is not None, self._end_timeout_s)

    @property
    def job_failure(self) -> str:
        """Why the job was ended for all; empty while it is not, and when it is done."""
        over = self._outcome
        return over.reason if isinstance(over, EndJob) and over.failed else ""

    @property
    def worker_failures(self) -> tuple[Failure, ...]:
        """What the leader heard of failures in the last world, told with the job's end."""
        over = self._outcome
        return over.failures if isinstance(over, EndJob) else ()

    @property
    def end_reason(self) -> str:
        """How the job ended, in words; empty while it has not."""
        over = self._outcome
        return over.reason if isinstance(over, EndJob) else ""

    def send_status(self, status: NodeStatus | None, event_lines: Sequence[str]) -> None:
        """Hand on what this node has to tell, with the next heartbeats; from any thread."""
        self._server.submit(StatusPublished(status, tuple(event_lines)))

    def leave(self, reason: str) -> None:
        """Say goodbye, and end.

        Where the leader has just gone the next one is waited for, or is this agent, whom the others look for:
        without a word they would have to take it for one that may live on behind a cut link.
        """
        limit = time.monotonic() + LEAVE_TIMEOUT_S
        while (
            self._outcome is None
            and not self._can_announce_leave
            and time.monotonic() < limit
            and self._server.is_alive
        ):
            time.sleep(0.01)
        if self._outcome is None:
            self._server.submit(Leave(reason))
        self.close()

    def close(self) -> None:
        """Give the place up."""
        self._server.stop()
        self._lease.set(-math.inf)
        self._callback_queue.put(None)
        if self._callback_thread.is_alive():
            self._callback_thread.join(SHUTDOWN_TIMEOUT_S)

    def _wait_for_change(self) -> None:
        # A signal's handler runs in between and may raise.
        self._condition.wait(LIVENESS_CHECK_S)
        if self._outcome is None and not self._server.is_alive:
            self._outcome = GiveUp("its own thread ended, which is an error of elastic_resume")

    def _raise_outcome(self) -> None:
        over = self._outcome
        if isinstance(over, EndJob):
            raise JobFailedError(over.reason) if over.failed else JobCompleted(over.reason)
        if isinstance(over, GiveUp):
            raise ConfigError(over.reason) if over.is_permanent else RendezvousLostError(over.reason)

    # ---- replicas: any thread --------------------------------------------------------------------------

    def set_divergence_handler(self, handler: Callable[[ReplicasDiverged], None]) -> None:
        """Have ``differ`` called in the third thread when replicas differ; `join` waits until it is done."""
        self._on_divergence = handler

    def send_digest(self, generation: int, step: int, digest: str) -> None:
        """Tell how this node's state looked after that step; from any thread.

        A heartbeat carries one: of those since the last the one that is `rounder`.

        Raises:
            ValueError: ``digest`` is not 32 hexadecimal digits.

        """
        if not is_digest(digest):
            raise ValueError(f"not a digest of 32 hexadecimal digits: {digest!r}")
        self._server.submit(StateDigested(StateDigest(generation, step, Digest(digest))))

    # ---- the shell's thread --------------------------------------------------------------------------

    def _update_lease(self, node: RendezvousNode) -> None:
        """Move the fence before anything else is done about an event."""
        self._can_announce_leave = node.can_announce_leave
        if node.running_view is None:
            self._lease.set(-math.inf)
        else:
            self._lease.set(math.inf if self._single_node and node.is_leader else node.lease_until)

    def _handle_effect(self, effect: Effect) -> None:
        if isinstance(effect, EmitEvent):
            self._callback_queue.put(effect)
            return
        if isinstance(effect, DeliverPeerStatus):
            self._on_peer_status(effect)
            return
        with self._condition:
            if isinstance(effect, ReportDivergence):
                self._unhandled_divergences += 1
                self._callback_queue.put(effect)
            elif isinstance(effect, StartWorkers):
                self._world = effect
            elif isinstance(effect, (RestartWorkers, KillWorkers)):
                if self._world is not None and self._world.generation == effect.generation:
                    self._restart_reason = effect.reason
            elif isinstance(effect, (EndJob, GiveUp)):
                self._outcome = effect
            self._condition.notify_all()

    # ---- the third -----------------------------------------------------------------------------------

    def _run_callbacks(self, on_log: Callable[[EmitEvent], None]) -> None:
        while (news := self._callback_queue.get()) is not None:
            if isinstance(news, EmitEvent):
                on_log(news)
                continue
            try:
                self._on_divergence(news.divergence)
            finally:
                with self._condition:
                    self._unhandled_divergences -= 1
                    self._condition.notify_all()
