"""What an agent knows and has, whichever role it plays: its knowledge, links, workers and lease.

Roles (`seeking`, `following`, `leading`) read and change it; it collects the effects. It promises that
`Persist` is asked for whenever knowledge changed, one at a time, and tells which change is durable.

One connection as the core sees it: which messages the other side has seen, and when they were sent.

Two clocks are never compared. A lease counts from when its holder sent the message that was acknowledged;
the one who waits for a lease to end counts from when it received. So the holder stops first, whatever the
delay, if the clocks run at the same rate up to `Settings.drift`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from elastic_resume.policy.divergence import choose_common_step
from elastic_resume.policy.failure_classification import make_node_failure
from elastic_resume.rendezvous.core.events import (
    Connect,
    Disconnect,
    Effect,
    EmitEvent,
    KillWorkers,
    Persist,
    PersistentState,
    RestartWorkers,
    Send,
    Settings,
    StartWorkers,
)
from elastic_resume.rendezvous.core.failure_log import FailureLog, bound_failures
from elastic_resume.rendezvous.core.messages import (
    FailureReport,
    Header,
    Heartbeat,
    Hello,
    InstallView,
    JobEnd,
    JoinSpec,
    LeaderAnnouncement,
    Message,
    Redirect,
    StateDigest,
)
from elastic_resume.rendezvous.core.quorum import Incarnation, QuorumState, View
from elastic_resume.rendezvous.core.status import StatusOutbox, find_deputy

NEVER = float("-inf")
MAX_UNACKED = 64
"""So many messages are remembered until the other side has seen them; to forget one shortens a lease."""


@dataclass(slots=True)
class Link:
    """A connection, dialled (`address` set) or accepted."""

    conn_id: int
    address: str = ""
    peer: Incarnation | None = None
    state_at_dial: QuorumState | None = None
    """What we knew when we dialled: a refused call proves the end of nobody who came later."""
    dialled_at: float = NEVER
    ip_address: str = ""
    """The IP address that answered, where we dialled."""
    last_received_at: float = NEVER
    acked_sent_at: float = NEVER
    """When the newest of our messages that the other side has seen was sent."""
    leader_lease_until: float = NEVER
    """Until when the other side, if it leads, counted on a quorum that follows it."""
    last_sent_seq: int = 0
    last_received_seq: int = 0
    unacked: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=MAX_UNACKED))

    def next_header(self, now: float, generation: int, lease_s: float) -> Header:
        """Number the next message to be sent."""
        self.last_sent_seq += 1
        self.unacked.append((self.last_sent_seq, now))
        return Header(self.last_sent_seq, self.last_received_seq, generation, lease_s)

    def inherit_lease(self, broken: Link) -> None:
        """Inherit `echoed_at` and `lease_end` from the broken link to the same process."""
        self.acked_sent_at, self.leader_lease_until = broken.acked_sent_at, broken.leader_lease_until

    def record_header(self, header: Header, now: float) -> None:
        """Take in the stamp of a message that arrived."""
        self.last_received_seq = header.seq
        self.last_received_at = now
        while self.unacked and self.unacked[0][0] <= header.ack:
            seq, sent_at = self.unacked.popleft()
            if seq == header.ack:
                self.acked_sent_at = sent_at
        if header.lease_s > 0:
            self.leader_lease_until = max(self.leader_lease_until, self.acked_sent_at + header.lease_s)


MAX_CANDIDATES_NAMED = 5
"""So many candidates are named in one line."""
FORCED_GENERATION_GAP = 1000
"""So many generations may have begun behind a cut, and ended with all who knew of them."""
EMPTY_HEARTBEAT = Heartbeat()


class NodeState:
    """The part of an agent's state that outlives a role."""

    def __init__(
        self,
        settings: Settings,
        incarnation: Incarnation,
        persistent_state: PersistentState | None,
        now: float,
        max_generation: int = 0,
    ) -> None:
        self.settings = settings
        self.incarnation = incarnation
        self.hello_sent = False
        """Others have been told of this life."""
        self.quorum_state = QuorumState(len(settings.candidates))
        self.max_generation = max_generation
        self.now = now
        self.links: dict[int, Link] = {}
        self.effects: list[Effect] = []
        self.join: JoinSpec | None = None
        self.join_since = now
        self.running_view: View | None = None
        self.last_view: View | None = None
        """The newest world whose workers ran here."""
        self.finished_generation = 0
        self.unreachable_reasons: dict[str, str] = {}
        """Why a candidate did not answer the last call, by its address."""
        self.job_failure = ""
        """Why this node wants the job to end for all."""
        self.job_end: JobEnd | None = None
        self.failure_log = FailureLog()
        self.status_outbox = StatusOutbox()
        self.failure_report: FailureReport | None = None
        """What this node has to tell of a worker of its own."""
        self._unsent_digest: StateDigest | None = None
        self.lease_until = NEVER
        # A life before this one may have granted leases that still run.
        self.grace_until = now + settings.node_timeout_s if persistent_state else NEVER
        self.view_current_until = NEVER
        """Until when no world can have begun that we were not asked about: see `nobody_at`."""
        self.unreachable: set[Incarnation] = set()
        self.pending_closes: dict[int, float] = {}
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

    def _restore(self, persistent_state: PersistentState) -> None:
        self.quorum_state = self.quorum_state.merge(persistent_state.quorum_state)
        self.max_generation = max(self.max_generation, persistent_state.max_generation)
        if self.settings.rules.distinguish_incarnations:
            self.quorum_state = self.quorum_state.with_dead([persistent_state.incarnation])
        self.version += 1

    # What is known.

    def merge_quorum_state(self, quorum_state: QuorumState, max_generation: int = 0) -> None:
        """Take over what another knows, whole; new ends of others may hide leases that still run."""
        before = self.quorum_state
        if self.settings.rules.merge_state_with_deaths:
            self.quorum_state = before.merge(quorum_state)
        else:
            self.quorum_state = before.with_dead(quorum_state.dead)
        if self.settings.rules.distinguish_incarnations and self.quorum_state is not before:
            # A life that died before its first write left no trace on our disk, but perhaps in a proposal.
            lives = (
                m for w in self.quorum_state.voting_views for m in w.find_incarnations(self.incarnation.node)
            )
            self.quorum_state = self.quorum_state.with_dead(one for one in lives if one != self.incarnation)
        if self.quorum_state.dead - before.dead:
            self.extend_grace(self.settings.node_timeout_s)
        if self.quorum_state == before:
            self.quorum_state = before  # the same object: others keep what they worked out from it
        max_generation = max(max_generation, quorum_state.newest_generation, self.max_generation)
        if self.quorum_state is not before or max_generation != self.max_generation:
            self.max_generation = max_generation
            self.version += 1

    def set_quorum_state(self, quorum_state: QuorumState) -> None:
        """Replace what is known by something greater, derived from it."""
        if quorum_state != self.quorum_state:
            if quorum_state.dead - self.quorum_state.dead:
                self.extend_grace(self.settings.node_timeout_s)
            self.quorum_state = quorum_state
            self.max_generation = max(self.max_generation, quorum_state.newest_generation)
            self.version += 1

    def drop_all_views(self) -> None:
        """Let go of all worlds: the job has ended in every one of them. Its generations still count."""
        self.quorum_state = QuorumState(
            self.quorum_state.candidate_count, closed_generation=self.max_generation
        )
        self.version += 1

    def record_announced_generation(self, announcement: LeaderAnnouncement) -> None:
        """Note which generations a leader knows of, so that their numbers are not given again."""
        newest = max(announcement.active_generation, announcement.known_generation)
        if newest > self.max_generation:
            self.max_generation = newest
            self.version += 1

    def mark_dead_at(self, address: str, state_at_dial: QuorumState) -> None:
        """Count the member at that address gone, if it can have known nothing that we do not.

        The call was refused: whoever listened there has ended, since an agent listens in one place for all
        its life. The answer may come late, so it counts only for those whom we knew when we dialled. Until
        `current_until` no world can have begun without us, so the dead one knew of none.
        """
        if self.now >= self.view_current_until:
            return
        then = {
            one
            for world in state_at_dial.voting_views
            for one in state_at_dial.live_members(world)
            if one.address == address
        }
        ended = then & self.find_absent_members([self.incarnation])
        if ended:
            self.set_quorum_state(self.quorum_state.with_dead(ended))
            self.emit_event("lost", f"{', '.join(map(str, ended))} died too: nobody listens at {address}")

    def force_quorum(self, generation: int, *, running: bool) -> None:
        """Waive the consent of the worlds up to ``generation``, which an operator asked for.

        The missing members may have begun a later world among themselves before they died. Its generation
        must not be given again, so the next `LEFT_OUT` generations are skipped.
        """
        if running or generation != self.quorum_state.newest_generation:
            why = (
                "a world runs"
                if running
                else f"the newest generation is {self.quorum_state.newest_generation}"
            )
            self.emit_event("quorum-forced", f"force-quorum for generation {generation} is ignored: {why}")
        elif self.quorum_state.forced_generation < generation:
            self.set_quorum_state(replace(self.quorum_state, forced_generation=generation))
            self.max_generation += FORCED_GENERATION_GAP
            self.emit_event(
                "quorum-forced", f"an operator declared the missing members of generation {generation} dead"
            )

    def extend_grace(self, seconds: float) -> None:
        """Worlds of others may go on for so long without our hearing of it."""
        self.grace_until = max(self.grace_until, self.now + seconds)

    def remaining_grace_s(self) -> float:
        """How long worlds in which we had a part may yet run elsewhere."""
        until = max([self.grace_until, *self.pending_closes.values()])
        return max(0.0, until - self.now)

    def find_absent_members(self, present: Iterable[Incarnation]) -> set[Incarnation]:
        """Who may be in a world that runs without the present ones."""
        return {m for w in self.quorum_state.voting_views for m in self.quorum_state.live_members(w)} - set(
            present
        )

    def request_persist(self) -> None:
        """Ask for what is known to be made durable, unless that is under way."""
        if self.version > self.durable_version and self._persisting_version <= self.durable_version:
            self._persisting_version, self._persist_since = self.version, self.now
            self.effects.append(
                Persist(
                    self.version, PersistentState(self.incarnation, self.quorum_state, self.max_generation)
                )
            )

    @property
    def installed_generation(self) -> int:
        """Generation of the newest world that is known to have begun."""
        return self.quorum_state.installed.generation if self.quorum_state.installed else 0

    @property
    def is_disk_stalled(self) -> bool:
        """Whether a write has taken so long that nobody should have to wait for the next one."""
        if self.settings.max_nodes == 1:
            return False
        late = self.now >= self._persist_since + self.settings.node_timeout_s
        return self._persisting_version > self.durable_version and late

    @property
    def disk_stalls_at(self) -> float:
        """When the write under way, if any, will have taken too long."""
        if self._persisting_version <= self.durable_version:
            return float("inf")
        return self._persist_since + self.settings.node_timeout_s

    # Links.

    def dial(self, address: str, ip_address: str = "") -> Link:
        """Ask for a connection; with `host`, at the IP address where the same peer answered before."""
        self._last_conn_id += 1
        link = Link(self._last_conn_id, address, state_at_dial=self.quorum_state, dialled_at=self.now)
        self.links[link.conn_id] = link
        self.effects.append(Connect(link.conn_id, address, ip_address))
        return link

    def send(self, link: Link, message: Message, generation: int = 0, lease_s: float = 0.0) -> None:
        """Queue a message on an open link."""
        self.effects.append(Send(link.conn_id, link.next_header(self.now, generation, lease_s), message))

    def disconnect(self, link: Link) -> None:
        """Close a link of which nothing depends."""
        if self.links.pop(link.conn_id, None):
            self.effects.append(Disconnect(link.conn_id))

    def redirect(self, link: Link, address: str) -> None:
        """Redirect a member; until it disconnects it may treat a refused call as proof that we died.

        So until it disconnects, or a node timeout has passed, we neither acknowledge nor begin a world: it
        may count us dead without knowing of that world.
        """
        self.send(link, Redirect(address))
        self.defer_close(link)

    def defer_close(self, link: Link) -> None:
        """Have nothing more to do with a link, but leave its closing to the other side while that counts."""
        self.pending_closes[link.conn_id] = link.last_received_at + self.settings.node_timeout_s

    def expire_pending_closes(self) -> None:
        """Forget those whose evidence has expired."""
        for conn in [conn for conn, until in self.pending_closes.items() if until <= self.now]:
            del self.pending_closes[conn]
            if conn in self.links:
                self.disconnect(self.links[conn])

    def has_recent_ack(self, link: Link) -> bool:
        """Return whether the peer still follows us.

        It does if less than `lease_s` has passed since we sent the newest message that it acknowledged.
        """
        return self.now < link.acked_sent_at + self.settings.lease_s

    def proves_death(self, link: Link, *, refused: bool) -> bool:
        """Whether the peer on that link is dead, and did nothing that we do not know before it died.

        Only a refused call proves a death: a connection that is reset or not answered may be the network's
        doing, and its peer may run on.
        """
        return refused and self.has_recent_ack(link)

    def compute_view_current_until(self, link: Link) -> float:
        """Return the time until which no world can have started without this node.

        The leader on `link` had a quorum of followers until its lease ended (`Former.lease_until`). Followers
        of a dead leader wait one node timeout for the members that they know; they never wait for spares.
        Count from sending: the leader's message may have been queued here.
        """
        if any(world.rank(self.incarnation) is None for world in self.quorum_state.voting_views):
            return NEVER
        return min(link.leader_lease_until, link.acked_sent_at + self.settings.lease_s)

    def make_hello(self) -> Hello:
        """Tell all that we are."""
        self.hello_sent = True
        running = self.running_view.generation if self.running_view else 0
        settings = self.settings
        return Hello(
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

    def start_workers(self, view: View, message: InstallView, lease_until: float) -> None:
        """Start workers."""
        rank = view.rank(self.incarnation)
        if rank is None:
            return
        self.running_view, self.join, self.finished_generation, self.lease_until = view, None, 0, lease_until
        self.last_view = view
        self.failure_report = None
        self.effects.append(
            StartWorkers(
                view.generation,
                rank,
                view.members,
                message.store_address,
                message.workers_per_node,
                message.newest_step,
                bound_failures(message.failures),
            )
        )

    def record_failure_report(self, incarnation: Incarnation, report: FailureReport) -> None:
        """Note what a node tells of the newest world; of an older one nobody asks any more."""
        begun = self.quorum_state.installed
        if begun and report.generation == begun.generation and incarnation in begun.members:
            self.failure_log.record(report.generation, replace(report.failure, node=incarnation.node))

    def queue_digest(self, state_digest: StateDigest) -> None:
        """Keep what the next heartbeat is to tell of this node's state.

        A digest takes its time: one of an earlier world may be ready when the next one runs.
        """
        world, kept = self.running_view or self.last_view, self._unsent_digest
        if world is None or state_digest.generation != world.generation:
            return
        if (
            kept is None
            or kept.generation != state_digest.generation
            or choose_common_step(state_digest.step, kept.step) == state_digest.step
        ):
            self._unsent_digest = state_digest

    def take_digest(self) -> StateDigest | None:
        """Return what is to be told of this node's state, once."""
        told, self._unsent_digest = self._unsent_digest, None
        return told

    def make_heartbeat_reply(
        self, follower: Incarnation, view: View | None, present: Collection[Incarnation]
    ) -> Heartbeat:
        """Answer a follower's heartbeat; the deputy is told what this leader has to tell."""
        told = (
            self.status_outbox.take(follower)
            if follower == find_deputy(view, self.incarnation, present)
            else None
        )
        return Heartbeat(None, told) if told else EMPTY_HEARTBEAT

    def record_lost_member(self, incarnation: Incarnation, reason: str) -> None:
        """Note that a member of the newest world is lost, or was asked to leave by a signal."""
        begun = self.quorum_state.installed
        if begun and incarnation in begun.members:
            self.failure_log.record(
                begun.generation,
                make_node_failure(incarnation.node, reason, announced=reason.startswith("left (SIG")),
            )

    def make_job_end(
        self, present: set[Incarnation], finished_generations: Mapping[Incarnation, int]
    ) -> JobEnd:
        """Say how the job ended. ``here`` hear of it; ``finished`` tells where workers succeeded last."""
        newest = self.quorum_state.installed
        # Not with somebody silent, nor while workers run: those who do not hear this may go on.
        settled = not self.find_absent_members(present | {self.incarnation}) and not self.job_failure
        generation, members = (newest.generation, newest.members) if newest else (0, ())
        missing = [
            str(one)
            for one in members
            if one != self.incarnation and finished_generations.get(one) != generation
        ]
        told = self.failure_log.get_failures(generation)
        return JobEnd(generation, self.job_failure, settled, tuple(missing[:MAX_CANDIDATES_NAMED]), told)

    def stop_workers(self, reason: str, *, immediately: bool = False) -> None:
        """End the running world on this node, if there is one."""
        if self.running_view is None:
            return
        kind = KillWorkers if immediately else RestartWorkers
        self.effects.append(kind(self.running_view.generation, reason))
        self.running_view = None
        self.lease_until = NEVER

    def format_absent_candidates(self, present: Iterable[Incarnation]) -> str:
        """Name the candidates that are not among these, with what came of calling them."""
        here = {one.candidate_index for one in present}
        missing = [
            address
            + (f" ({self.unreachable_reasons[address]})" if address in self.unreachable_reasons else "")
            for place, address in enumerate(self.settings.candidates)
            if place not in here
        ]
        more = (
            f" and {len(missing) - MAX_CANDIDATES_NAMED} more" if len(missing) > MAX_CANDIDATES_NAMED else ""
        )
        return ", ".join(missing[:MAX_CANDIDATES_NAMED]) + more

    def start_new_incarnation(self) -> None:
        """Become somebody new: others count us gone."""
        old = self.incarnation
        self.stop_workers(f"{old.node} was counted gone while it lived")
        self.incarnation = old.next_incarnation()
        self.hello_sent = False
        self.set_quorum_state(self.quorum_state.with_dead([old]))
        self.version += 1

    def emit_event(self, kind: str, text: str) -> None:
        """Add a fact to the event log."""
        self.effects.append(EmitEvent(kind, text))
