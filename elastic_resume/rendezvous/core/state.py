"""Hold the state of a node that outlives its role, and what the roles share.

`NodeState` has the node's promises, links, workers and leases. The roles read and change it, and it collects
their effects. `Role` dispatches messages. `Left` is the role of a node that has left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from elastic_resume.policy.failure_classification import FailureLog, bound_failures, make_node_failure
from elastic_resume.policy.reasons import (
    AbsentCandidates,
    DepartureReason,
    JoinObstacle,
    NodeLost,
    ViewEnd,
    ViewEndOf,
)
from elastic_resume.policy.restart import JobFailure
from elastic_resume.rendezvous.core import interface, messages
from elastic_resume.rendezvous.core.backoff import Backoff
from elastic_resume.rendezvous.core.dead_leader import Contacts
from elastic_resume.rendezvous.core.messages import Workers
from elastic_resume.rendezvous.core.peers import NEVER, Link
from elastic_resume.rendezvous.core.sequence import Acceptor
from elastic_resume.rendezvous.core.world import NO_VIEW, Ballot, Incarnation, JobEnd, PersistentState, View
from elastic_resume.rendezvous.facts import Fact, FactOutbox

MAX_CANDIDATES_NAMED = 5
"""Candidates named in one message."""


@dataclass(frozen=True, slots=True)
class Search:
    """Look for a leader, at this address first."""

    first_address: str = ""


@dataclass(frozen=True, slots=True)
class Follow:
    """Follow the leader that has sent this welcome."""

    link: Link
    welcome: messages.Welcome
    waiting_peers: dict[int, messages.Hello]
    """The nodes that asked this one and wait for the result, by connection."""


@dataclass(frozen=True, slots=True)
class Lead:
    """Lead, because no node before this one answers."""

    waiting_peers: dict[int, messages.Hello]


NextRole = Search | Follow | Lead | JobEnd | interface.EndMembership
"""What comes after a role."""


class NodeState:
    """The part of a node's state that outlives a role."""

    def __init__(
        self,
        settings: interface.RendezvousSettings,
        incarnation: Incarnation,
        persistent_state: PersistentState | None,
        now: float,
        max_generation: int = 0,
    ) -> None:
        self.settings = settings
        self.incarnation = incarnation
        known = persistent_state or PersistentState(incarnation, NO_VIEW, Ballot(), None, max_generation=0)
        generation = max(max_generation, known.max_generation)
        if settings.single_node:
            # No other node exists, so nobody of an earlier view can vote.
            known = known.with_view(View(generation, (), history=known.view.history))
        known = replace(known, incarnation=incarnation, max_generation=generation)
        self.acceptor = Acceptor(known, len(settings.candidates))
        self.contacts = Contacts(settings, self.acceptor, now)
        self._writing_version = 0
        self._writing_since = now
        self.next_role: NextRole | None = None
        """What the role has to make place for: see `end_role`."""
        self.hand_over_at = float("inf")
        """When it hands its vote over, unless a view without it is decided before."""
        self.is_vote_held = False
        """The leader holds the vote that this node has handed over."""
        self.now = now
        self.links: dict[int, Link] = {}
        self.effects: list[interface.Effect] = []
        self.status = messages.NO_STATUS
        self.join_since = now
        self.script = ""
        """`JoinSpec.script` of this node's newest join."""
        self.last_view: View | None = None
        """The newest view whose workers ran here."""
        self.started_generation = 0
        """The newest generation whose workers were started anywhere, as far as known."""
        self.connection_errors: dict[str, str] = {}
        """Why the last connection to a candidate failed, by address."""
        self.job_failure: JobFailure | None = None
        """Why this node demands the end of the job."""
        self.backoff = Backoff(settings.node_timeout_s)
        self.failure_log = FailureLog()
        self.failure_report: messages.FailureReport | None = None
        """The failure of a worker of this node, to be reported."""
        self.outbox = FactOutbox(settings.topics)
        self.verdicts: dict[str, Fact] = {}
        """The leader's newest verdict of each topic. Replaced by another dictionary when one changes."""
        self.lease_until = NEVER
        self.unreachable: set[Incarnation] = set()
        self.terms_without_quorum = 0
        """How often this node has led without a quorum since the newest view was decided."""
        self._last_conn_id = 0

    @property
    def running_view(self) -> View | None:
        """The view whose workers run on this node."""
        return self.last_view if self.status.workers is Workers.RUNNING else None

    @property
    def is_leaving(self) -> bool:
        """Whether this node only votes any more, for a view without it."""
        return self.status.workers is Workers.LEAVING

    def set_workers(self, workers: Workers, **fields: Any) -> None:
        """Note what this node's workers do now, once they do not run any more."""
        self.status = messages.WorkersStatus(workers, self.started_generation, **fields)

    @property
    def view(self) -> View:
        """The newest view that is known to be decided."""
        return self.acceptor.view

    def adopt_view(self, view: View, source: Incarnation | None = None) -> None:
        """Learn that a view is decided, from `source` if that is the leader that this node follows."""
        own, is_newer = self.view, view.generation > self.view.generation
        if own.is_of_other_job(view) and (own.members or view.members):
            # An earlier job of this node's directory has ended, and this one runs; or the other way round.
            is_newer = bool(view.members) and self.may_change_job()
        if is_newer:
            if self.running_view:
                self.stop_workers(ViewEndOf(ViewEnd.LATER_VIEW_DECIDED, (str(view.generation),)))
            self.contacts.adopt_view(view, source)
            self.unreachable = {member for member in self.unreachable if view.rank(member) is not None}
            self.terms_without_quorum = 0

    def may_change_job(self) -> bool:
        """Return whether the job of this node's directory has ended, and no other was begun there."""
        return not self.view.members and self.acceptor.known.accepted is None

    def learn_end(self, end: JobEnd) -> None:
        """Learn that the end of the job is decided, unless it is that of an earlier run."""
        if end.generation > self.view.generation:
            self.end_role(end)

    def end_role(self, next_role: NextRole) -> None:
        """Let another role follow, unless the job has ended."""
        if not isinstance(self.next_role, JobEnd):
            self.next_role = next_role

    # The disk.

    def request_write(self) -> interface.Persist | None:
        """Return the write that is due; None while all is on disk, or one is in progress."""
        acceptor = self.acceptor
        if not self._writing_version <= acceptor.durable_version < acceptor.version:
            return None
        self._writing_version, self._writing_since = acceptor.version, self.now
        return interface.Persist(acceptor.version, acceptor.known)

    @property
    def is_disk_stalled(self) -> bool:
        """Whether the write in progress takes so long that other nodes should not wait for this node."""
        return self.settings.max_nodes > 1 and self.now >= self.disk_stalls_at

    @property
    def disk_stalls_at(self) -> float:
        """When the write in progress will have taken too long; infinity without one."""
        if self._writing_version <= self.acceptor.durable_version:
            return float("inf")
        return self._writing_since + self.settings.node_timeout_s

    # Links.

    def dial(self, address: str, ip_address: str = "") -> Link:
        """Request a connection to `address`; `ip_address` spares the name lookup."""
        self._last_conn_id += 1
        link = Link(self._last_conn_id, address, view_at_dial=self.view, dialled_at=self.now)
        self.links[link.conn_id] = link
        self.effects.append(interface.Connect(link.conn_id, address, ip_address))
        return link

    def send(self, link: Link, message: messages.Message, generation: int = 0) -> None:
        """Queue a message on an open link."""
        self.effects.append(interface.Send(link.conn_id, link.next_header(self.now, generation), message))

    def disconnect(self, link: Link) -> None:
        """Close a link."""
        link.is_open = False
        if self.links.pop(link.conn_id, None):
            self.effects.append(interface.Disconnect(link.conn_id))

    def has_recent_ack(self, link: Link) -> bool:
        """Return whether the peer surely follows this node still, by its newest acknowledgement."""
        return self.now < link.acked_sent_at + self.settings.lease_s

    def make_hello(self) -> messages.Hello:
        """Describe this node to a possible leader."""
        settings = self.settings
        return messages.Hello(
            self.incarnation,
            self.view,
            self.acceptor.known.promised,
            self.acceptor.known.max_generation,
            self.status,
            settings.node_timeout_s,
            settings.min_nodes,
            settings.max_nodes,
            settings.candidates,
            settings.is_strict,
            self.acceptor.known.is_twin,
            self.failure_report,
        )

    # Workers.

    def start_workers(self, view: View, message: messages.StartView, lease_until: float) -> None:
        """Start workers if this node is a member of the view."""
        rank = view.rank(self.incarnation)
        if rank is None:
            return
        self.status = messages.WorkersStatus(Workers.RUNNING, view.generation)
        self.last_view, self.lease_until = view, lease_until
        self.failure_report = None
        self.effects.append(
            interface.StartWorkers(
                view.generation,
                rank,
                view.members,
                message.store_address,
                message.workers_per_node,
                message.newest_step,
                bound_failures(message.failures),
                message.arguments,
                message.finished_nodes,
                message.preparing_nodes,
            )
        )

    def stop_workers(self, reason: interface.StopReason, *, immediately: bool = False) -> None:
        """End the running view on this node, if there is one."""
        if self.running_view is None:
            return
        self.effects.append(interface.StopWorkers(self.running_view.generation, reason, immediately))
        self.set_workers(Workers.STOPPED)
        self.lease_until = NEVER

    def record_failure_report(self, incarnation: Incarnation, report: messages.FailureReport) -> None:
        """Keep a node's failure if it ended the newest view that was started."""
        if report.generation == self.failed_generation and self.view.rank(incarnation) is not None:
            self.failure_log.record(report.generation, replace(report.failure, node=incarnation.node))

    def record_lost_member(self, incarnation: Incarnation, lost: NodeLost) -> None:
        """Record the loss of a member of the newest view as a failure."""
        if self.view.rank(incarnation) is not None:
            self.failure_log.record(self.failed_generation, make_node_failure(lost))

    @property
    def failed_generation(self) -> int:
        """The generation whose end the failures explain; later views were decided and not started."""
        return self.started_generation or self.view.generation

    # Identity and reports.

    def find_absent_candidates(self, present: Iterable[Incarnation]) -> AbsentCandidates:
        """Return the candidates that are not present, with the errors of the last calls."""
        indices = {member.candidate_index for member in present}
        candidates = enumerate(self.settings.candidates)
        absent = [address for index, address in candidates if index not in indices]
        named = absent[:MAX_CANDIDATES_NAMED]
        errors = tuple(self.connection_errors.get(address, "") for address in named)
        return AbsentCandidates(tuple(named), errors, len(absent))

    def emit_event(self, kind: str, reason: interface.EventReason | None = None, generation: int = 0) -> None:
        """Add an event to the event log."""
        self.effects.append(interface.EmitEvent(kind, reason, generation))


Handlers = Mapping[type[Any], Callable[[Any, Any, Any], object]]
"""By the class of a message: a function of the role, the sender and the message."""


class Role:
    """One part in the rendezvous; it ends when it has set `NodeState.next_role`."""

    _OWN_HANDLERS: ClassVar[Handlers] = {}
    """For events of this node's agent; the sender is None."""

    def __init__(self, state: NodeState) -> None:
        self.state = state

    def dispatch(self, handlers: Handlers, sender: object, message: object) -> bool:
        """Handle a message if the table has its class; return whether it has."""
        handler = handlers.get(type(message))
        if handler:
            handler(self, sender, message)
        return handler is not None

    def handle_message(self, link: Link, message: messages.Message) -> None:
        """Handle one message."""

    def is_routine(self, link: Link, message: messages.Message) -> bool:
        """Return whether `advance` can wait for the next deadline after a message, as after a heartbeat."""
        del link, message
        return False

    def handle_connected(self, link: Link) -> None:
        """Handle a call that was answered."""

    def handle_disconnected(self, link: Link) -> None:
        """Handle a broken link or a failed call."""

    def handle_own(self, event: interface.Event) -> None:
        """Handle an event of this node's agent."""
        self.dispatch(self._OWN_HANDLERS, None, event)

    def advance(self) -> None:
        """Do what is due."""

    def next_deadline(self) -> float:
        """Return when to advance next."""
        return float("inf")

    def explain_wait(self) -> JoinObstacle | None:
        """Return what this node waits for."""
        return None

    def hand_over(self, departure: DepartureReason) -> bool:
        """Prepare to leave; return whether others may decide a view without this node."""
        del departure
        return True

    def leave(self, departure: DepartureReason) -> None:
        """Send the nodes that follow, or the leader, a leave notice."""

    def close(self) -> None:
        """End the calls that the next role does not need."""


class Left(Role):
    """The role of a node that has left; it answers each searcher and each leader with the end of the job."""

    def __init__(self, state: NodeState, reason: interface.StopReason, end: JobEnd | None) -> None:
        super().__init__(state)
        self.reason = reason
        self.end = end

    def handle_message(self, link: Link, message: messages.Message) -> None:
        """Answer, and close the connection."""
        if self.end and isinstance(message, (messages.Hello, messages.LeaderAnnouncement)):
            self.state.send(link, self.end)
        self.state.disconnect(link)
