"""Being the leader: taking members in, noticing losses, restarting worlds and settling the end of the job.

How a world forms is `forming`'s; who else leads is `calling`'s.

Whom a leader takes in: settings that must agree, names that must be unique, former lives that are gone.

A leader's calls to those who may not know it, and the settling of two who lead.

Every few seconds a leader calls at the candidates' addresses and at members of the last worlds that are not
its followers, and tells whoever answers who leads. So newcomers find the job even when no candidate is left
in it, and two leaders learn of each other: the one with the lesser claim (`messages.Claim.weight`) steps
down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from elastic_resume.rendezvous.core.divergence import DivergenceDetector
from elastic_resume.rendezvous.core.events import DeliverPeerStatus
from elastic_resume.rendezvous.core.messages import (
    EndView,
    FailJob,
    FailureReport,
    ForceQuorumRequest,
    Header,
    Heartbeat,
    Hello,
    JoinRequest,
    LeaderAnnouncement,
    LeaveNotice,
    Message,
    NodeFinished,
    ProposalAck,
    Redirect,
    Refused,
    WaitReason,
    Welcome,
)
from elastic_resume.rendezvous.core.peers import Peer, PeerTable
from elastic_resume.rendezvous.core.quorum import Incarnation, QuorumState, View
from elastic_resume.rendezvous.core.state import NEVER, Link, NodeState
from elastic_resume.rendezvous.core.view_change import ViewChange


class Admission:
    """The gate of one leader."""

    def __init__(self, state: NodeState, peers: PeerTable, remove_peer: Callable[[Peer, str], None]) -> None:
        """``lose`` is called for followers whose node is back as a new process."""
        self.state = state
        self.peers = peers
        self.remove_peer = remove_peer
        self._indexed_state: QuorumState | None = None
        self._incarnations_by_node: dict[str, set[Incarnation]] = {}

    def check_hello(self, hello: Hello) -> Refused | None:
        """Take over what the other knows; return why it may not join, or None."""
        body = self.state
        at_odds = self._find_setting_mismatch(hello)
        if at_odds:
            return Refused(at_odds, is_permanent=True)
        before = body.quorum_state
        body.merge_quorum_state(hello.quorum_state, hello.max_generation)
        if body.quorum_state != before:
            self._mark_former_incarnations_dead()
        body.extend_grace(hello.remaining_grace_s)
        if hello.sender in body.quorum_state.dead:
            return Refused("dead")
        if self._is_name_taken(hello):
            return Refused(f"another live agent is called {hello.sender.node}: give one another --node-name")
        return None

    def _find_setting_mismatch(self, hello: Hello) -> str:
        """Say which setting that safety rests on differs between us; empty when none does."""
        ours, theirs = self.state.settings.node_timeout_s, hello.node_timeout_s
        if theirs != ours:
            return (
                f"--node-timeout is {theirs:g} s there and {ours:g} s at the leader: give all nodes the same"
            )
        settings = self.state.settings
        shape, said = (settings.min_nodes, settings.max_nodes), (hello.min_nodes, hello.max_nodes)
        if said != shape:
            ours_and_theirs = f"{said[0]}:{said[1]} here and {shape[0]}:{shape[1]} there"
            return f"--nnodes is {ours_and_theirs}: give all nodes the same"
        count, told = self.state.quorum_state.candidate_count, hello.quorum_state.candidate_count
        if told != count:
            return (
                f"--rdzv-endpoint lists {told} nodes there and {count} at the leader: give all the same list"
            )
        return ""

    def _mark_former_incarnations_dead(self) -> None:
        """Count former lives of those who follow us gone, in whatever world we just heard of.

        A follower that was not heard lately, or is known gone, may itself be the former life.
        """
        body = self.state
        lives = {
            part.incarnation.node: part.incarnation
            for part in self.peers
            if body.has_recent_ack(part.link) and part.incarnation not in body.quorum_state.dead
        }
        members = {m for w in body.quorum_state.voting_views for m in body.quorum_state.live_members(w)}
        former = [one for one in members if lives.get(one.node, one) != one]
        if former and body.settings.rules.distinguish_incarnations:
            body.set_quorum_state(body.quorum_state.with_dead(former))

    def _is_name_taken(self, hello: Hello) -> bool:
        """Count the former lives of a node gone when it is back as a new process; refuse a namesake."""
        body, who = self.state, hello.sender
        if who.node == body.incarnation.node:
            return True
        former = {one for one in self._find_incarnations(who.node) if one != who}
        for one in former:
            part = self.peers.by_incarnation.get(one)
            if part and part.disconnected_at is None and one not in hello.quorum_state.dead:
                return True
        if body.settings.rules.distinguish_incarnations:
            body.set_quorum_state(body.quorum_state.with_dead(former))
        for one in former & set(self.peers.by_incarnation):
            self.remove_peer(self.peers.by_incarnation[one], f"{who} is back as a new process")
        return False

    def _find_incarnations(self, node: str) -> set[Incarnation]:
        """Every incarnation of a node that we have heard of."""
        if self._indexed_state is not self.state.quorum_state:
            self._indexed_state = self.state.quorum_state
            self._incarnations_by_node = {}
            for world in self._indexed_state.voting_views:
                for member in world.members:
                    self._incarnations_by_node.setdefault(member.node, set()).add(member)
        part = self.peers.find_by_node(node)
        return self._incarnations_by_node.get(node, set()) | ({part.incarnation} if part else set())


MAX_PARALLEL_CALLS = 16
"""A job of a thousand nodes that lost half of them does not dial five hundred addresses every two seconds."""


class LeaderDiscovery:
    """The calls of one leader."""

    def __init__(
        self,
        state: NodeState,
        make_announcement: Callable[[], LeaderAnnouncement],
        list_follower_addresses: Callable[[], set[str]],
    ) -> None:
        self.state = state
        self.make_announcement = make_announcement
        self.list_follower_addresses = list_follower_addresses
        self.next_round_at = state.now
        self.pending_calls: dict[int, float] = {}
        self._calls_by_address: dict[str, int] = {}
        """The number of the call at an address."""
        self._next_target = 0

    def list_targets(self) -> list[str]:
        """Addresses at which somebody may be who does not know that we lead."""
        known = self.state.quorum_state
        members = [m.address for w in known.voting_views for m in known.live_members(w)]
        own = self.list_follower_addresses() | {self.state.incarnation.address}
        return [one for one in dict.fromkeys([*self.state.settings.candidates, *members]) if one not in own]

    def advance(self) -> None:
        """Make the calls that are due and end those that were not answered."""
        body = self.state
        while self.pending_calls and body.now >= self._first_timeout_at():
            self.end_call(next(iter(self.pending_calls)))
        if body.now < self.next_round_at:
            return
        self.next_round_at = body.now + body.settings.announce_interval_s
        targets = self.list_targets()
        if len(targets) > MAX_PARALLEL_CALLS:
            start = self._next_target % len(targets)
            targets = (targets[start:] + targets[:start])[:MAX_PARALLEL_CALLS]
            self._next_target += MAX_PARALLEL_CALLS
        for address in targets:
            self.call(address)

    def call(self, address: str) -> None:
        """Call one address, unless a call there is under way."""
        if address not in self._calls_by_address:
            conn = self.state.dial(address).conn_id
            self.pending_calls[conn], self._calls_by_address[address] = self.state.now, conn

    def probe(self, addresses: Iterable[str]) -> None:
        """Probe addresses round-robin, at most `CALLS_AT_ONCE` at a time.

        A switch failure breaks many links at once.
        """
        turn = list(addresses)
        room = MAX_PARALLEL_CALLS - sum(address in self._calls_by_address for address in turn)
        start = self._next_target % len(turn)
        for address in [one for one in turn[start:] + turn[:start] if one not in self._calls_by_address][
            : max(0, room)
        ]:
            self.call(address)
            self._next_target += 1

    def forget_call(self, link: Link) -> None:
        """Forget a call that has ended."""
        self.pending_calls.pop(link.conn_id, None)
        if self._calls_by_address.get(link.address) == link.conn_id:
            del self._calls_by_address[link.address]

    def handle_connected(self, link: Link) -> None:
        """Tell who leads."""
        if link.conn_id in self.pending_calls:
            self.state.send(link, self.make_announcement())

    def handle_redirect(self, link: Link, message: Message) -> None:
        """Follow a redirect to the other leader; its claim is for the leader to weigh."""
        if link.conn_id in self.pending_calls and isinstance(message, Redirect):
            self.end_call(link.conn_id)
            if message.address not in {"", self.state.incarnation.address} | self.list_follower_addresses():
                self.call(message.address)

    def handle_leave_notice(self, link: Link, sender: Incarnation, message: LeaveNotice) -> bool:
        """One that we called wants to be counted gone: it cannot take part, and nobody should wait for it."""
        body = self.state
        self.end_call(link.conn_id)
        if sender.address != link.address:
            return False
        body.merge_quorum_state(message.quorum_state)
        if sender not in body.find_absent_members([]):
            return False
        body.set_quorum_state(body.quorum_state.with_dead([sender]))
        body.emit_event("lost", f"{sender} takes no part ({message.reason})")
        return True

    def end_call(self, conn_id: int) -> None:
        """End one call."""
        link = self.state.links.get(conn_id)
        if link:
            self.forget_call(link)
            self.state.disconnect(link)
        self.pending_calls.pop(conn_id, None)

    def close(self) -> None:
        """End all calls."""
        for conn in list(self.pending_calls):
            self.end_call(conn)

    def next_deadline(self) -> float:
        """When to look again."""
        return min(self.next_round_at, self._first_timeout_at()) if self.pending_calls else self.next_round_at

    def _first_timeout_at(self) -> float:
        """When the call that was made first has waited long enough: they are kept in that order."""
        return next(iter(self.pending_calls.values())) + self.state.settings.dial_timeout_s


class Leader:
    """The role of the agent that leads. It is a member too, without a link to itself."""

    def __init__(self, state: NodeState, waiting_peers: dict[int, Hello]) -> None:
        self.state = state
        self.peers = PeerTable()
        self.view: View | None = None
        self.has_stepped_down = False
        self.new_leader_address = ""
        self.view_change = ViewChange(state, self.peers)
        self.discovery = LeaderDiscovery(state, self.make_announcement, self.peers.addresses)
        self.divergence = DivergenceDetector(state, self.peers, self._send)
        self.next_scan_at = state.now
        self.lease_until = NEVER
        self.finished_generation = 0
        """The newest generation in which a node has finished."""
        self.admission = Admission(state, self.peers, self._remove_replaced_peer)
        self.pending_welcomes: dict[int, tuple[Hello, bool]] = {}
        """Who was welcomed on a connection and has not answered there, and whether it was told to go on."""
        self.unresponsive: set[Incarnation] = set()
        """Who did not answer its last welcome: nobody waits for it again."""
        self.next_probe_at = state.now
        state.emit_event("leading", f"{state.incarnation} leads")
        for conn, hello in waiting_peers.items():
            if conn in state.links:
                self._handle_hello(state.links[conn], hello)

    # What the others hear.

    def make_announcement(self) -> LeaderAnnouncement:
        """Say how much weight our lead has."""
        body, begun = self.state, self.state.quorum_state.installed
        active = self.view.generation if self.view and self.lease_until > body.now else 0
        rank = begun.rank(body.incarnation) if begun else None
        seats = len(begun.members) if begun else 0
        return LeaderAnnouncement(
            body.incarnation, active, body.quorum_state.newest_generation, seats if rank is None else rank
        )

    def _send(self, peer: Peer, message: Message) -> None:
        body = self.state
        if self.view is None:
            body.send(peer.link, message)
            return
        left = max(0.0, min(body.settings.lease_s, self.lease_until - body.now))
        body.send(peer.link, message, self.view.generation, left)

    def _broadcast(self, message: Message) -> None:
        for part in self.peers:
            if part.disconnected_at is None:
                self._send(part, message)
        for conn in self.pending_welcomes:
            self.state.send(self.state.links[conn], message)

    # What the leader hears.

    def handle_message(self, link: Link, header: Header, message: Message) -> None:
        """Take in a message."""
        del header
        if isinstance(message, Hello):
            self._handle_hello(link, message)
        elif isinstance(message, LeaderAnnouncement):
            self._handle_announcement(link, message)
        elif isinstance(message, Redirect):
            self.discovery.handle_redirect(link, message)
        elif (
            isinstance(message, LeaveNotice)
            and message.sender
            and link.conn_id in self.discovery.pending_calls
        ):
            if self.discovery.handle_leave_notice(link, message.sender, message):
                self.view_change.reevaluate()
        else:
            if link.conn_id in self.pending_welcomes:
                self._admit(link)
            part = self.peers.find_by_link(link)
            if part and part.disconnected_at is None:
                self._handle_follower_message(part, message)

    def _handle_follower_message(self, peer: Peer, message: Message) -> None:
        body = self.state
        if isinstance(message, Heartbeat):
            self._send(
                peer, body.make_heartbeat_reply(peer.incarnation, self.view, self.peers.by_incarnation)
            )
            self.divergence.add_digest(peer.incarnation, message.state_digest)
            if message.status_update:
                body.effects.append(
                    DeliverPeerStatus(peer.incarnation, message.status_update, body.installed_generation)
                )
        elif isinstance(message, JoinRequest):
            self._handle_join_request(peer, message)
        elif isinstance(message, ProposalAck):
            self.view_change.handle_ack(peer.incarnation, message.generation)
        elif isinstance(message, NodeFinished):
            peer.finished_generation, peer.running_generation = message.generation, 0
            self.finished_generation = max(self.finished_generation, message.generation)
            self.view_change.reevaluate()
        elif isinstance(message, FailureReport):
            body.record_failure_report(peer.incarnation, message)
        elif isinstance(message, FailJob):
            body.job_failure = message.reason
        elif isinstance(message, ForceQuorumRequest):
            body.force_quorum(message.generation, running=self.view is not None)
        elif isinstance(message, LeaveNotice):
            body.merge_quorum_state(message.quorum_state)
            self._remove_peer(peer, f"{peer.incarnation} left ({message.reason})", dead=True)

    def _handle_join_request(self, peer: Peer, message: JoinRequest) -> None:
        peer.join, peer.running_generation = message.join, 0
        if self.view and peer.incarnation in self.view.members:
            self.end_view(f"the workers of {peer.incarnation} stopped")
        self.view_change.handle_join(peer.incarnation, self.view)

    def _handle_hello(self, link: Link, hello: Hello) -> None:
        refused = self.admission.check_hello(hello)
        link.peer = hello.sender
        if refused:
            self.state.send(link, refused)
        else:
            self._send_welcome(link, hello)
        newest = self.state.quorum_state.installed
        if self.view and newest and newest.generation > self.view.generation:
            self.end_view(f"generation {newest.generation} has begun elsewhere")

    def _send_welcome(self, link: Link, hello: Hello) -> None:
        """Send Welcome. The node counts as a follower after its first reply.

        The reply proves that the link works both ways. A one-way link would otherwise delay every world:
        forming waits for the first reply once, and not long.
        """
        body, part = self.state, self.peers.by_incarnation.get(hello.sender)
        if part and part.link is not link and part.disconnected_at is None:
            body.disconnect(part.link)
            self._mark_disconnected(part)
        resumed = bool(
            self.view and part and hello.running_generation == part.running_generation == self.view.generation
        )
        self.pending_welcomes[link.conn_id] = hello, resumed
        if hello.sender not in self.unresponsive:
            self.view_change.reply_deadlines[link.conn_id] = body.now + body.settings.dial_timeout_s
        body.send(link, Welcome(body.incarnation, body.quorum_state, resumed))

    def _admit(self, link: Link) -> None:
        """Count a node that has answered our welcome among the followers."""
        hello, resumed = self.pending_welcomes.pop(link.conn_id)
        self.view_change.reply_deadlines.pop(link.conn_id, None)
        self.view_change.reevaluate()
        body, who = self.state, hello.sender
        self.unresponsive.discard(who)
        refused = self.admission.check_hello(hello)
        if refused:
            body.send(link, refused)
            return
        body.unreachable.discard(who)
        part = self.peers.by_incarnation.get(who)
        if part:
            self.peers.mark_reconnected(part, link)
        else:
            part = Peer(who, link)
            self.peers.add(part)
        part.join, part.finished_generation = hello.join, hello.finished_generation
        self.finished_generation = max(self.finished_generation, hello.finished_generation)
        if not (resumed and self.view and self.view.generation == hello.running_generation):
            ran, part.running_generation = part.running_generation, hello.running_generation
            if resumed:  # its world ended while our welcome was under way
                self._send(
                    part,
                    EndView(
                        hello.running_generation,
                        f"generation {hello.running_generation} ended while this node was reconnecting",
                        body.quorum_state,
                    ),
                )
            # Of our world, and neither in it nor through: its workers failed, or it never heard of it.
            idle = self.view and not hello.finished_generation and (ran == self.view.generation or hello.join)
            if idle and self.view and who in self.view.members:
                self.end_view(f"the workers of {who} stopped")
        self.divergence.resend_divergence(part)
        if self.view is None and self.view_change.reported_reason:
            self._send(part, WaitReason(self.view_change.reported_reason))
        if part.join:
            self.view_change.handle_join(who, self.view)
        self.view_change.reevaluate()

    def _handle_announcement(self, link: Link, announcement: LeaderAnnouncement) -> None:
        self.state.record_announced_generation(announcement)
        own = self.make_announcement()
        if announcement.leader == self.state.incarnation:
            self.discovery.end_call(link.conn_id)
        elif announcement.priority > own.priority:
            self.new_leader_address = announcement.leader.address
        elif link.conn_id in self.discovery.pending_calls:
            self.discovery.end_call(link.conn_id)
        else:
            self.state.send(link, own)

    def handle_connected(self, link: Link) -> None:
        """One of our calls was answered."""
        self.discovery.handle_connected(link)

    def handle_disconnected(self, link: Link, *, refused: bool) -> None:
        """A follower's link broke, or a call failed: only a refused call proves a death."""
        self.discovery.forget_call(link)
        if link.conn_id in self.pending_welcomes:
            self._handle_missing_reply(link)
        part = self.peers.find_by_link(link)
        if part and part.disconnected_at is None:
            self._mark_disconnected(part)
        elif refused:
            for one in list(self.peers.disconnected.values()):
                if one.incarnation.address == link.address and link.dialled_at >= (
                    one.disconnected_at or 0.0
                ):
                    self._remove_peer(
                        one, f"{one.incarnation} died", dead=self.state.proves_death(one.link, refused=True)
                    )

    def _mark_disconnected(self, peer: Peer) -> None:
        self.peers.mark_disconnected(peer, self.state.now)
        self.view_change.handle_disconnected(peer.incarnation)
        self.next_probe_at = self.state.now

    def _remove_peer(self, peer: Peer, reason: str, *, dead: bool) -> None:
        body = self.state
        self.peers.remove(peer.incarnation)
        if dead:
            body.set_quorum_state(body.quorum_state.with_dead([peer.incarnation]))
        else:
            body.unreachable.add(peer.incarnation)
        if peer.link.conn_id in body.links:
            body.disconnect(peer.link)
        body.emit_event("lost", reason)
        body.record_lost_member(peer.incarnation, reason.removeprefix(f"{peer.incarnation} "))
        self.view_change.handle_disconnected(peer.incarnation)
        world = self.view
        if world is None or peer.incarnation not in world.members:
            return
        runs = body.running_view or any(one.running_generation == world.generation for one in self.peers)
        if not self.has_finished_node() or (peer.finished_generation != world.generation and runs):
            # Those who still run would wait for it in their next collective.
            self.end_view(reason)

    def _remove_replaced_peer(self, peer: Peer, reason: str) -> None:
        self._remove_peer(peer, reason, dead=True)

    def has_finished_node(self) -> bool:
        """Whether a node of the newest world is through: the others have no more than their end to reach."""
        newest = self.state.quorum_state.installed
        return newest is not None and newest.generation in {
            self.finished_generation,
            self.state.finished_generation,
        }

    # What the leader does.

    def end_view(self, reason: str, *, immediately: bool = False) -> None:
        """End the running world; those who were in it join again."""
        world = self.view
        if world is None:
            return
        message = EndView(
            world.generation, reason, self.state.quorum_state
        )  # one, so it is put into words once
        for part in self.peers:
            if part.running_generation == world.generation and part.disconnected_at is None:
                self._send(part, message)
        self.view, self.lease_until = None, NEVER
        self.divergence.reset()
        self.state.stop_workers(reason, immediately=immediately)
        self.view_change.started_at = self.state.now
        self.view_change.reevaluate()
        self.state.emit_event("restart", f"generation {world.generation} is over: {reason}")

    def advance(self) -> None:
        """Fence ourselves before anything else; then look for losses, and for a world to form."""
        body = self.state
        if self.new_leader_address or (self.view is None and body.is_disk_stalled):
            self._step_down()
            return
        if self.view:
            self._extend_join_timeout()
            self._renew_lease()
            if body.now >= self.lease_until:
                self.end_view("the leader has lost its quorum", immediately=True)
        if body.now >= self.next_scan_at:
            self.next_scan_at = body.now + body.settings.heartbeat_interval_s / 2
            self._remove_unreachable_peers()
            self.divergence.add_digest(body.incarnation, body.take_digest())
        unequal = self.divergence.advance()
        if unequal and not self.has_finished_node():
            self.end_view(unequal)
        self._probe_disconnected()
        self.discovery.advance()
        if body.job_failure or self._is_job_finished():
            self._end_job()
            return
        if self.view is None:
            self._advance_view_change()
            self._broadcast_wait_reason()
        elif body.now >= self.view_change.scale_up_at:
            self.view_change.scale_up_at = float("inf")
            if not self.has_finished_node():
                self.end_view("newcomers are here")

    def _extend_join_timeout(self) -> None:
        """A world that runs without this node is no reason to give up waiting: a spare waits for long."""
        if self.state.join:
            self.state.join_since = self.state.now

    def _broadcast_wait_reason(self) -> None:
        reason = self.view_change.take_wait_reason() if self.view is None else ""
        if reason:
            self.state.emit_event("waiting", reason)
            self._broadcast(WaitReason(reason))

    def _renew_lease(self, *, force: bool = False) -> None:
        """Count how long enough of our members surely still follow us; that bounds every lease we grant."""
        body = self.state
        if self.view is None or not (force or body.now >= self.next_scan_at):
            return
        self.lease_until = self.view_change.compute_lease_until()
        if self.view.rank(body.incarnation) is not None and body.running_view:
            body.lease_until = self.lease_until

    def _remove_unreachable_peers(self) -> None:
        body = self.state
        for part in self.peers:
            if body.now >= part.link.last_received_at + body.settings.node_timeout_s:
                what = "is silent" if part.disconnected_at is None else "cannot be reached"
                self._remove_peer(part, f"{part.incarnation} {what}", dead=False)
        for link in [body.links[conn] for conn in self.pending_welcomes]:
            if body.now >= link.last_received_at + body.settings.node_timeout_s:
                self._handle_missing_reply(link)
                body.disconnect(link)

    def _handle_missing_reply(self, link: Link) -> None:
        """Record that the node ignored a Welcome; forming waits for it only once."""
        hello, _ = self.pending_welcomes.pop(link.conn_id)
        self.unresponsive.add(hello.sender)
        self.view_change.reply_deadlines.pop(link.conn_id, None)
        self.view_change.reevaluate()

    def _probe_disconnected(self) -> None:
        """Probe members with broken links. A live member also calls us; a refused call proves a death."""
        body = self.state
        if not self.peers.disconnected or body.now < self.next_probe_at:
            return
        self.next_probe_at = body.now + body.settings.probe_interval_s
        self.discovery.probe(part.incarnation.address for part in self.peers.disconnected.values())

    def _advance_view_change(self) -> None:
        begun = self.view_change.advance()
        if begun is None:
            return
        body = self.state
        world, message = begun
        body.set_quorum_state(body.quorum_state.with_installed(world))
        self.view = world
        self.view_change.handle_view_installed(world)
        self.divergence.handle_view_installed(world)
        self._renew_lease(force=True)
        members = frozenset(world.members)
        for part in self.peers:
            if part.incarnation in members:
                part.join, part.running_generation, part.finished_generation = None, world.generation, 0
            self._send(part, message)
        body.start_workers(world, message, self.lease_until)

    def _is_job_finished(self) -> bool:
        """Whether some have finished and nobody who could is left."""
        body, newest = self.state, self.state.quorum_state.installed
        if newest is None or self.view_change.pending:
            return False
        if not self.has_finished_node():
            return self._are_all_present_finished()
        if body.incarnation in newest.members and body.finished_generation != newest.generation:
            return False
        present = {part.incarnation for part in self.peers} | {body.incarnation}
        if any(
            p.incarnation in newest.members and p.finished_generation != newest.generation for p in self.peers
        ):
            return False
        absent = body.find_absent_members(present) - body.unreachable
        return not absent or body.now >= self.view_change.started_at + body.settings.node_timeout_s

    def _are_all_present_finished(self) -> bool:
        """Whether all who are here have finished, and the newest world was of others, who have been lost.

        A node that was cut off while the others finished goes on alone; should it die, nobody waits for it.
        """
        body, newest = self.state, self.state.quorum_state.installed
        present = {part.incarnation for part in self.peers} | {body.incarnation}
        through = body.finished_generation and all(
            part.finished_generation and not part.join for part in self.peers
        )
        if not through or body.join or newest is None or present.intersection(newest.members):
            return False
        return (
            not self.peers.disconnected
            and body.now >= self.view_change.started_at + body.settings.node_timeout_s
        )

    def _end_job(self) -> None:
        here = {part.incarnation for part in self.peers if part.disconnected_at is None}
        self.state.job_end = self.state.make_job_end(
            here, {part.incarnation: part.finished_generation for part in self.peers}
        )
        self._broadcast(self.state.job_end)

    def _step_down(self) -> None:
        body = self.state
        if self.view or body.now < self.view_change.started_at + body.settings.node_timeout_s:
            body.extend_grace(
                body.settings.node_timeout_s
            )  # who does not hear this may run until its lease ends
        why = (
            f"{self.new_leader_address} leads"
            if self.new_leader_address
            else "the leader's disk takes no writes"
        )
        self.has_stepped_down = True
        self.end_view(why, immediately=True)
        self.view_change.abort(why)
        for part in self.peers:
            if part.disconnected_at is None:
                body.redirect(part.link, self.new_leader_address)
            else:
                body.defer_close(part.link)
        for conn in self.pending_welcomes:
            body.send(body.links[conn], Redirect(self.new_leader_address))
        body.emit_event("step-down", f"{body.incarnation} leads no more: {why}")

    def close(self) -> None:
        """End what only a leader does."""
        self.discovery.close()

    def handle_join_requested(self) -> None:
        """Our own node's workers are stopped."""
        if self.view and self.view.rank(self.state.incarnation) is not None:
            self.end_view("the workers of the leader stopped")
        self.view_change.handle_join(self.state.incarnation, self.view)

    def handle_workers_finished(self) -> None:
        """Our own node's workers have succeeded."""
        self.view_change.reevaluate()

    def leave(self, reason: str) -> None:
        """Say goodbye to all: they turn to another leader at once."""
        self.view_change.abort("the leader leaves")
        self._broadcast(LeaveNotice(reason, self.state.quorum_state))

    def next_deadline(self) -> float:
        """When to look again."""
        body = self.state
        waits = [self.next_scan_at, self.discovery.next_deadline()]
        if self.peers.disconnected:
            waits.append(self.next_probe_at)
        if self.view:
            waits += [self.lease_until, self.view_change.scale_up_at]
        else:
            waits += [self.view_change.next_deadline(), body.disk_stalls_at]
        return min(waits)

    def explain_wait(self) -> str:
        """One clause for the error after the join timeout."""
        return self.view_change.wait_reason
