"""The state of a node that outlives its role: what it knows, its links, its workers and its lease.

The roles `candidate`, `follower` and `leader` read and change it, and it collects their effects. Whenever its
knowledge changes it asks for one `Persist`; `durable_version` is the newest change on disk.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from elastic_resume.policy.divergence import choose_common_step
from elastic_resume.policy.failure_classification import Failure, make_node_failure, truncate_failure
from elastic_resume.rendezvous.core import events, messages
from elastic_resume.rendezvous.core.peers import NEVER, Link
from elastic_resume.rendezvous.core.quorum import Incarnation, QuorumState, View
from elastic_resume.rendezvous.core.status import StatusOutbox

MAX_CANDIDATES_NAMED = 5
"""Candidates named in one message."""
FORCED_GENERATION_GAP = 1000
"""Generations skipped by a forced quorum, since the dead may have used some of them."""
MAX_FAILURES = 8
"""Different failures kept of one generation."""


def bound_failures(failures: tuple[Failure, ...]) -> tuple[Failure, ...]:
    """Limit the number and the length of failures received from a leader."""
    return tuple(truncate_failure(failure) for failure in failures[:MAX_FAILURES])


class FailureLog:
    """The first failures of the newest generation, in order of arrival.

    It keeps one failure of each node and counts equal failures as one. So if a thousand workers meet the same
    error, every node receives it once. `policy.failure_classification.separate_root_causes` decides what they
    mean.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._reported_nodes: set[str] = set()
        self._failures: list[Failure] = []

    def record(self, generation: int, failure: Failure) -> None:
        """Keep a failure of that generation, unless its node has reported another."""
        if generation < self.generation:
            return
        if generation > self.generation:
            self.generation, self._reported_nodes, self._failures = generation, set(), []
        if failure.node in self._reported_nodes:
            return
        self._reported_nodes.add(failure.node)
        for place, kept in enumerate(self._failures):
            # The failure of a whole node has no rank; it is named and never counted as "one more".
            if kept.rank is not None and kept.signature == failure.signature:
                self._failures[place] = replace(kept, nodes=kept.nodes + 1)
                return
        if len(self._failures) == MAX_FAILURES:
            # Secondary failures may arrive before their root cause, and from every node.
            secondary = next((kept for kept in reversed(self._failures) if kept.is_secondary), None)
            if secondary is None or failure.is_secondary:
                return
            self._failures.remove(secondary)
        self._failures.append(replace(truncate_failure(failure), nodes=1))

    def get_failures(self, generation: int) -> tuple[Failure, ...]:
        """Return the failures that ended that generation, as far as known."""
        return tuple(self._failures) if generation == self.generation else ()


class NodeState:
    """The part of a node's state that outlives a role."""

    def __init__(
        self,
        settings: events.Settings,
        incarnation: Incarnation,
        persistent_state: events.PersistentState | None,
        now: float,
        max_generation: int = 0,
    ) -> None:
        self.settings = settings
        self.incarnation = incarnation
        self.hello_sent = False
        """Other nodes may know this incarnation."""
        self.quorum_state = QuorumState(len(settings.candidates))
        self.max_generation = max_generation
        self.now = now
        self.links: dict[int, Link] = {}
        self.effects: list[events.Effect] = []
        self.join: messages.JoinSpec | None = None
        self.join_since = now
        self.running_view: View | None = None
        self.last_view: View | None = None
        """The newest view whose workers ran here."""
        self.finished_generation = 0
        self.unreachable_reasons: dict[str, str] = {}
        """Why the last connection to a candidate failed, by address."""
        self.job_failure = ""
        """Why this node demands the end of the job."""
        self.job_end: messages.JobEnd | None = None
        self.failure_log = FailureLog()
        self.status_outbox = StatusOutbox()
        self.failure_report: messages.FailureReport | None = None
        """The failure of a worker of this node, to be reported."""
        self._unsent_digest: messages.StateDigest | None = None
        self.lease_until = NEVER
        # The former process may have granted leases that have not expired.
        self.grace_until = now + settings.node_timeout_s if persistent_state else NEVER
        self.view_current_until = NEVER
        """Until when no view can have been installed without this node: see `mark_dead_at`."""
        self.unreachable: set[Incarnation] = set()
        self.pending_closes: dict[int, float] = {}
        """Links that the other side shall close, and until when to wait for that: see `redirect`."""
        self.version = 0
        self.durable_version = 0
        self._persisting_version = 0
        self._persist_since = now
        self._last_conn_id = 0
        if persistent_state:
            self._restore(persistent_state)
        if settings.single_node:
            self.quorum_state = replace(
                self.quorum_state, forced_generation=self.quorum_state.newest_generation
            )

    def _restore(self, persistent_state: events.PersistentState) -> None:
        self.quorum_state = self.quorum_state.merge(persistent_state.quorum_state)
        self.max_generation = max(self.max_generation, persistent_state.max_generation)
        self.mark_former_dead([persistent_state.incarnation])
        self.version += 1

    # Knowledge.

    def merge_quorum_state(self, quorum_state: QuorumState, max_generation: int = 0) -> None:
        """Merge what another node knows, always as a whole (rule 4)."""
        before = self.quorum_state
        self.set_quorum_state(before.merge(quorum_state))
        if self.quorum_state is not before:
            # A process that died before its first write left no trace on this disk, but maybe in a proposal.
            views = self.quorum_state.voting_views
            own = {member for view in views for member in view.find_incarnations(self.incarnation.node)}
            self.mark_former_dead(own - {self.incarnation})
        self.record_generation(max(max_generation, quorum_state.newest_generation))

    def set_quorum_state(self, quorum_state: QuorumState) -> None:
        """Replace the quorum state by one derived from it."""
        if quorum_state != self.quorum_state:
            if quorum_state.dead - self.quorum_state.dead:
                self.extend_grace(self.settings.node_timeout_s)
            self.quorum_state = quorum_state
            self.max_generation = max(self.max_generation, quorum_state.newest_generation)
            self.version += 1

    def mark_former_dead(self, former: Iterable[Incarnation]) -> None:
        """Mark former processes of a node dead, so that its new process does not vote for them (rule 1)."""
        self.set_quorum_state(self.quorum_state.with_dead(former))

    def drop_all_views(self) -> None:
        """Forget all views, because the job has ended in each. Their generations stay used."""
        self.quorum_state = QuorumState(
            self.quorum_state.candidate_count, closed_generation=self.max_generation
        )
        self.version += 1

    def record_announced_generation(self, announcement: messages.LeaderAnnouncement) -> None:
        """Note the generations that a leader knows, so that this node never reuses them."""
        self.record_generation(max(announcement.active_generation, announcement.known_generation))

    def record_generation(self, generation: int) -> None:
        """Note that a generation is in use."""
        if generation > self.max_generation:
            self.max_generation = generation
            self.version += 1

    def mark_dead_at(self, address: str, state_at_dial: QuorumState) -> None:
        """Mark the member at `address` dead after a refused connection, unless a view may be unknown here.

        An agent listens at one address all its life, so the process has ended. The answer may come late:
        only members known when we dialled count. Until `view_current_until` no view can have been
        installed without this node, so the dead member knew of none. That holds for no spare, for which
        nobody waits.
        """
        if self.is_spare or self.now >= self.view_current_until:
            return
        members_at_dial = {
            member
            for view in state_at_dial.voting_views
            for member in state_at_dial.live_members(view)
            if member.address == address
        }
        dead = members_at_dial & self.find_absent_members([self.incarnation])
        if dead:
            self.set_quorum_state(self.quorum_state.with_dead(dead))
            self.emit_event("lost", f"{', '.join(map(str, dead))} died: {address} refuses connections")

    def force_quorum(self, generation: int, *, running: bool) -> None:
        """Waive the votes of the views up to `generation`, as an operator requested.

        The missing members may have installed later views before they died. `FORCED_GENERATION_GAP` skips the
        generations of those views.
        """
        if running or generation != self.quorum_state.newest_generation:
            reason = (
                "workers are running"
                if running
                else f"the newest generation is {self.quorum_state.newest_generation}"
            )
            self.emit_event("quorum-forced", f"force-quorum for generation {generation} is ignored: {reason}")
        elif self.quorum_state.forced_generation < generation:
            self.set_quorum_state(replace(self.quorum_state, forced_generation=generation))
            self.max_generation += FORCED_GENERATION_GAP
            self.emit_event(
                "quorum-forced", f"an operator declared the missing members of generation {generation} dead"
            )

    def extend_grace(self, seconds: float) -> None:
        """Expect that leases unknown to this node run for so many seconds more."""
        self.grace_until = max(self.grace_until, self.now + seconds)

    def remaining_grace_s(self) -> float:
        """Return for how many seconds views with this node may still run elsewhere."""
        until = max([self.grace_until, *self.pending_closes.values()])
        return max(0.0, until - self.now)

    def find_absent_members(self, present: Iterable[Incarnation]) -> set[Incarnation]:
        """Return the live members of voting views that are not present; a view of them may run elsewhere."""
        members = {
            member
            for view in self.quorum_state.voting_views
            for member in self.quorum_state.live_members(view)
        }
        return members - set(present)

    def request_persist(self) -> None:
        """Ask for a write of what is known, unless one is in progress."""
        if self.version > self.durable_version and self._persisting_version <= self.durable_version:
            self._persisting_version, self._persist_since = self.version, self.now
            self.effects.append(
                events.Persist(
                    self.version,
                    events.PersistentState(self.incarnation, self.quorum_state, self.max_generation),
                )
            )

    @property
    def installed_generation(self) -> int:
        """The generation of the newest view known to be installed; 0 for none."""
        return self.quorum_state.installed.generation if self.quorum_state.installed else 0

    @property
    def is_spare(self) -> bool:
        """Whether a view that may run is known to have no place for this node."""
        return any(view.rank(self.incarnation) is None for view in self.quorum_state.voting_views)

    @property
    def is_disk_stalled(self) -> bool:
        """Whether the write in progress takes so long that other nodes should not wait for this node."""
        return self.settings.max_nodes > 1 and self.now >= self.disk_stalls_at

    @property
    def disk_stalls_at(self) -> float:
        """When the write in progress will have taken too long; infinity without one."""
        if self._persisting_version <= self.durable_version:
            return float("inf")
        return self._persist_since + self.settings.node_timeout_s

    # Links.

    def dial(self, address: str, ip_address: str = "") -> Link:
        """Request a connection to `address`; `ip_address` spares the name lookup."""
        self._last_conn_id += 1
        link = Link(self._last_conn_id, address, state_at_dial=self.quorum_state, dialled_at=self.now)
        self.links[link.conn_id] = link
        self.effects.append(events.Connect(link.conn_id, address, ip_address))
        return link

    def send(self, link: Link, message: messages.Message, generation: int = 0, lease_s: float = 0.0) -> None:
        """Queue a message on an open link."""
        self.effects.append(
            events.Send(link.conn_id, link.next_header(self.now, generation, lease_s), message)
        )

    def disconnect(self, link: Link) -> None:
        """Close a link."""
        if self.links.pop(link.conn_id, None):
            self.effects.append(events.Disconnect(link.conn_id))

    def redirect(self, link: Link, address: str) -> None:
        """Redirect a follower to another address.

        Until it disconnects, or for a node timeout, it may treat a refused connection as proof that this node
        died knowing no further view. So meanwhile this node neither acknowledges nor installs a view.
        """
        self.send(link, messages.Redirect(address))
        self.defer_close(link)

    def defer_close(self, link: Link) -> None:
        """Leave the closing of a link to the other side for as long as `redirect` requires."""
        self.pending_closes[link.conn_id] = link.last_received_at + self.settings.node_timeout_s

    def expire_pending_closes(self) -> None:
        """Close the links whose other side did not close them in time."""
        for conn_id in [conn_id for conn_id, until in self.pending_closes.items() if until <= self.now]:
            del self.pending_closes[conn_id]
            if conn_id in self.links:
                self.disconnect(self.links[conn_id])

    def has_recent_ack(self, link: Link) -> bool:
        """Return whether the peer surely follows this node still, by its newest acknowledgement."""
        return self.now < link.acked_sent_at + self.settings.lease_s

    def proves_death(self, link: Link, *, refused: bool) -> bool:
        """Return whether the peer on `link` died without a view unknown to this node.

        Only a refused connection proves a death. After a reset or a timeout the peer may still run.
        """
        return refused and self.has_recent_ack(link)

    def make_hello(self) -> messages.Hello:
        """Describe this node to a possible leader."""
        self.hello_sent = True
        running = self.running_view.generation if self.running_view else 0
        settings = self.settings
        return messages.Hello(
            self.incarnation,
            self.quorum_state,
            self.max_generation,
            self.join,
            running,
            self.finished_generation,
            self.remaining_grace_s(),
            settings.node_timeout_s,
            settings.min_nodes,
            settings.max_nodes,
        )

    # Workers.

    def start_workers(self, view: View, message: messages.InstallView, lease_until: float) -> None:
        """Start workers if this node is a member of the view."""
        rank = view.rank(self.incarnation)
        if rank is None:
            return
        self.running_view, self.join, self.finished_generation, self.lease_until = view, None, 0, lease_until
        self.last_view = view
        self.failure_report = None
        self.effects.append(
            events.StartWorkers(
                view.generation,
                rank,
                view.members,
                message.store_address,
                message.workers_per_node,
                message.newest_step,
                bound_failures(message.failures),
            )
        )

    def stop_workers(self, reason: str, *, immediately: bool = False) -> None:
        """End the running view on this node, if there is one."""
        if self.running_view is None:
            return
        self.effects.append(events.StopWorkers(self.running_view.generation, reason, immediately))
        self.running_view = None
        self.lease_until = NEVER

    def record_failure_report(self, incarnation: Incarnation, report: messages.FailureReport) -> None:
        """Keep a node's failure if it ended the newest view."""
        view = self.quorum_state.installed
        if view and report.generation == view.generation and incarnation in view.members:
            self.failure_log.record(report.generation, replace(report.failure, node=incarnation.node))

    def record_lost_member(self, incarnation: Incarnation, reason: str) -> None:
        """Record the loss of a member of the newest view as a failure."""
        view = self.quorum_state.installed
        if view and incarnation in view.members:
            announced = reason.startswith("left (SIG")
            failure = make_node_failure(incarnation.node, reason, announced=announced)
            self.failure_log.record(view.generation, failure)

    def queue_digest(self, state_digest: messages.StateDigest) -> None:
        """Keep a digest for the next heartbeat; of two steps keep the one that more nodes digest.

        Digests are computed in the background, so one of an earlier view may arrive now. It is dropped.
        """
        view, kept = self.running_view or self.last_view, self._unsent_digest
        if view is None or state_digest.generation != view.generation:
            return
        if (
            kept is None
            or kept.generation != state_digest.generation
            or choose_common_step(state_digest.step, kept.step) == state_digest.step
        ):
            self._unsent_digest = state_digest

    def take_digest(self) -> messages.StateDigest | None:
        """Return the digest for the next heartbeat, once."""
        digest, self._unsent_digest = self._unsent_digest, None
        return digest

    # Identity and reports.

    def start_new_incarnation(self) -> None:
        """Continue as a new incarnation, after other nodes have counted this one as dead."""
        old = self.incarnation
        self.stop_workers(f"another node declared {old.node} dead while it was alive")
        self.incarnation = old.next_incarnation()
        self.hello_sent = False
        self.set_quorum_state(self.quorum_state.with_dead([old]))
        self.version += 1

    def format_absent_candidates(self, present: Iterable[Incarnation]) -> str:
        """Name the candidates that are not present, with the reason why a connection failed."""
        indices = {member.candidate_index for member in present}
        absent = [
            address
            + (f" ({self.unreachable_reasons[address]})" if address in self.unreachable_reasons else "")
            for index, address in enumerate(self.settings.candidates)
            if index not in indices
        ]
        more = len(absent) - MAX_CANDIDATES_NAMED
        return ", ".join(absent[:MAX_CANDIDATES_NAMED]) + (f" and {more} more" if more > 0 else "")

    def emit_event(self, kind: str, text: str) -> None:
        """Add an event to the event log."""
        self.effects.append(events.EmitEvent(kind, text))
