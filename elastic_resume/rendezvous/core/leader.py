"""The leader's role: admit followers, notice losses, end views, and settle the end of the job.

`view_change` decides when a view is proposed and installed, `divergence` compares replicas. `Admission`
decides who may follow. `LeaderDiscovery` calls nodes that do not follow, so that newcomers find the job and
two leaders learn of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from elastic_resume.rendezvous.core import messages
from elastic_resume.rendezvous.core.divergence import DivergenceDetector
from elastic_resume.rendezvous.core.events import DeliverPeerStatus
from elastic_resume.rendezvous.core.peers import NEVER, Link, Peer, PeerTable
from elastic_resume.rendezvous.core.quorum import Incarnation, View
from elastic_resume.rendezvous.core.state import MAX_CANDIDATES_NAMED, NodeState
from elastic_resume.rendezvous.core.status import find_deputy
from elastic_resume.rendezvous.core.view_change import PendingWelcome, ViewChange

MAX_PARALLEL_CALLS = 16
"""A job that lost 500 of 1,000 nodes must not dial 500 addresses every round."""
EMPTY_HEARTBEAT = messages.Heartbeat()


class Admission:
    """Decides which nodes may follow: settings must agree, names be unique, former processes be dead."""

    def __init__(self, state: NodeState, peers: PeerTable, remove_peer: Callable[[Peer, str], None]) -> None:
        """`remove_peer` is called for a follower whose node is back as a new process."""
        self.state = state
        self.peers = peers
        self.remove_peer = remove_peer

    def check_hello(self, hello: messages.Hello) -> messages.Refused | None:
        """Merge what the node knows; return why it may not join, or None."""
        state = self.state
        mismatch = self._find_setting_mismatch(hello)
        if mismatch:
            return messages.Refused(mismatch, is_permanent=True)
        before = state.quorum_state
        state.merge_quorum_state(hello.quorum_state, hello.max_generation)
        if state.quorum_state != before:
            self._mark_former_incarnations_dead()
        state.extend_grace(hello.remaining_grace_s)
        if hello.sender in state.quorum_state.dead:
            return messages.Refused("dead")
        if self._is_name_taken(hello):
            return messages.Refused(
                f"another live agent is called {hello.sender.node}: give one of them a different name with "
                "ELASTIC_RESUME_NODE_NAME"
            )
        return None

    def _find_setting_mismatch(self, hello: messages.Hello) -> str:
        """Name a setting that must be equal on all nodes and is not; empty if there is none."""
        settings = self.state.settings
        if hello.node_timeout_s != settings.node_timeout_s:
            return (
                f"--node-timeout is {hello.node_timeout_s:g} s on this node and "
                f"{settings.node_timeout_s:g} s at the leader: give all nodes the same"
            )
        if (hello.min_nodes, hello.max_nodes) != (settings.min_nodes, settings.max_nodes):
            return (
                f"--nnodes is {hello.min_nodes}:{hello.max_nodes} on this node and "
                f"{settings.min_nodes}:{settings.max_nodes} at the leader: give all nodes the same"
            )
        own_count, count = self.state.quorum_state.candidate_count, hello.quorum_state.candidate_count
        if count != own_count:
            return (
                f"--rdzv-endpoint lists {count} nodes on this node and {own_count} at the leader: "
                "give all the same list"
            )
        return ""

    def _mark_former_incarnations_dead(self) -> None:
        """Mark former processes of the followers' nodes dead in the views that were just merged.

        A follower without a recent acknowledgement, or known dead, may itself be the former process.
        """
        state = self.state
        live = {
            peer.incarnation.node: peer.incarnation
            for peer in self.peers
            if state.has_recent_ack(peer.link) and peer.incarnation not in state.quorum_state.dead
        }
        former = [
            member for member in state.find_absent_members([]) if live.get(member.node, member) != member
        ]
        if former:
            state.mark_former_dead(former)

    def _is_name_taken(self, hello: messages.Hello) -> bool:
        """Return whether a live agent has the sender's name; else mark its former processes dead."""
        state, sender = self.state, hello.sender
        if sender.node == state.incarnation.node:
            return True
        views = state.quorum_state.voting_views
        former = {known for view in views for known in view.find_incarnations(sender.node)} - {sender}
        follower = self.peers.by_node.get(sender.node)
        if follower and follower.incarnation != sender:
            former.add(follower.incarnation)
        if not former:
            return False
        for incarnation in former:
            peer = self.peers.by_incarnation.get(incarnation)
            if peer and peer.disconnected_at is None and incarnation not in hello.quorum_state.dead:
                return True
        state.mark_former_dead(former)
        for peer in [self.peers.by_incarnation.get(incarnation) for incarnation in former]:
            if peer:
                self.remove_peer(peer, f"{sender} is back as a new process")
        return False


class LeaderDiscovery:
    """Announces the leader to candidates and members that do not follow it."""

    def __init__(
        self,
        state: NodeState,
        make_announcement: Callable[[], messages.LeaderAnnouncement],
        list_follower_addresses: Callable[[], set[str]],
    ) -> None:
        self.state = state
        self.make_announcement = make_announcement
        self.list_follower_addresses = list_follower_addresses
        self.next_round_at = state.now
        self.pending_calls: dict[int, Link] = {}
        """Unanswered calls by connection, the oldest first."""
        self._next_target = 0

    def list_targets(self) -> list[str]:
        """Return the addresses of nodes that may not know the leader."""
        known = self.state.quorum_state
        members = [member.address for view in known.voting_views for member in known.live_members(view)]
        own = self.list_follower_addresses() | {self.state.incarnation.address}
        return [
            address
            for address in dict.fromkeys([*self.state.settings.candidates, *members])
            if address not in own
        ]

    def advance(self) -> None:
        """End the calls that timed out and make those that are due."""
        state = self.state
        while self.pending_calls and state.now >= self._first_timeout_at():
            self.end_call(next(iter(self.pending_calls)))
        if state.now < self.next_round_at:
            return
        self.next_round_at = state.now + state.settings.announce_interval_s
        targets = self.list_targets()
        if len(targets) > MAX_PARALLEL_CALLS:
            start = self._next_target % len(targets)
            targets = (targets[start:] + targets[:start])[:MAX_PARALLEL_CALLS]
            self._next_target += MAX_PARALLEL_CALLS
        for address in targets:
            self.call(address)

    def call(self, address: str) -> None:
        """Call an address, unless a call to it is in progress."""
        if not self._is_calling(address):
            link = self.state.dial(address)
            self.pending_calls[link.conn_id] = link

    def _is_calling(self, address: str) -> bool:
        return any(link.address == address for link in self.pending_calls.values())

    def probe(self, addresses: Iterable[str]) -> None:
        """Call addresses round-robin, at most `MAX_PARALLEL_CALLS` at a time.

        A switch failure breaks many links at once.
        """
        targets = list(addresses)
        start = self._next_target % len(targets)
        due = [target for target in targets[start:] + targets[:start] if not self._is_calling(target)]
        in_progress = len(targets) - len(due)
        for address in due[: max(0, MAX_PARALLEL_CALLS - in_progress)]:
            self.call(address)
            self._next_target += 1

    def handle_connected(self, link: Link) -> None:
        """Send the announcement on a call that was answered."""
        if link.conn_id in self.pending_calls:
            self.state.send(link, self.make_announcement())

    def handle_redirect(self, link: Link, message: messages.Redirect) -> None:
        """Call the other leader, whose address a node gave."""
        if link.conn_id in self.pending_calls:
            self.end_call(link.conn_id)
            if message.address not in {"", self.state.incarnation.address} | self.list_follower_addresses():
                self.call(message.address)

    def handle_leave_notice(self, link: Link, sender: Incarnation, message: messages.LeaveNotice) -> bool:
        """Mark a called node dead that does not take part; return whether a view may depend on that."""
        state = self.state
        self.end_call(link.conn_id)
        if sender.address != link.address:
            return False
        state.merge_quorum_state(message.quorum_state)
        if sender not in state.find_absent_members([]):
            return False
        state.set_quorum_state(state.quorum_state.with_dead([sender]))
        state.emit_event("lost", f"{sender} does not take part ({message.reason})")
        return True

    def end_call(self, conn_id: int) -> None:
        """End one call."""
        link = self.pending_calls.pop(conn_id, None)
        if link:
            self.state.disconnect(link)

    def close(self) -> None:
        """End all calls."""
        for conn_id in list(self.pending_calls):
            self.end_call(conn_id)

    def next_deadline(self) -> float:
        """Return when to advance next."""
        return min(self.next_round_at, self._first_timeout_at()) if self.pending_calls else self.next_round_at

    def _first_timeout_at(self) -> float:
        return next(iter(self.pending_calls.values())).dialled_at + self.state.settings.dial_timeout_s


class Leader:
    """The role of a node that leads. It is a member too, without a link to itself."""

    def __init__(self, state: NodeState, waiting_peers: dict[int, messages.Hello]) -> None:
        self.state = state
        self.peers = PeerTable()
        self.view: View | None = None
        self.has_stepped_down = False
        self.new_leader_address = ""
        self.pending_welcomes: dict[int, PendingWelcome] = {}
        """Nodes that were welcomed on a connection and have not replied on it."""
        self.unresponsive: set[Incarnation] = set()
        """Nodes that did not reply to their last welcome; no view waits for them again."""
        self.view_change = ViewChange(state, self.peers, self.pending_welcomes)
        self.discovery = LeaderDiscovery(state, self.make_announcement, self.peers.addresses)
        self.divergence = DivergenceDetector(state, self.peers, self._send)
        self.admission = Admission(state, self.peers, partial(self._remove_peer, dead=True))
        self.next_scan_at = state.now
        self.next_probe_at = state.now
        self.lease_until = NEVER
        self.finished_generation = 0
        """The newest generation in which a node has finished."""
        state.emit_event("leading", f"{state.incarnation} leads")
        for conn_id, hello in waiting_peers.items():
            if conn_id in state.links:
                self._handle_hello(state.links[conn_id], hello)

    # Sending.

    def make_announcement(self) -> messages.LeaderAnnouncement:
        """Return an announcement of this leader with its priority."""
        state, installed = self.state, self.state.quorum_state.installed
        active = self.view.generation if self.view and self.lease_until > state.now else 0
        rank = installed.rank(state.incarnation) if installed else None
        if rank is None:
            rank = len(installed.members) if installed else 0
        return messages.LeaderAnnouncement(
            state.incarnation, active, state.quorum_state.newest_generation, rank
        )

    def _send(self, peer: Peer, message: messages.Message) -> None:
        state = self.state
        if self.view is None:
            state.send(peer.link, message)
            return
        lease_s = max(0.0, min(state.settings.lease_s, self.lease_until - state.now))
        state.send(peer.link, message, self.view.generation, lease_s)

    def _broadcast(self, message: messages.Message) -> None:
        for peer in self.peers:
            if peer.disconnected_at is None:
                self._send(peer, message)
        for conn_id in self.pending_welcomes:
            self.state.send(self.state.links[conn_id], message)

    # Receiving.

    def handle_message(self, link: Link, header: messages.Header, message: messages.Message) -> None:
        """Handle one message."""
        del header
        if isinstance(message, messages.Hello):
            self._handle_hello(link, message)
        elif isinstance(message, messages.LeaderAnnouncement):
            self._handle_announcement(link, message)
        elif isinstance(message, messages.Redirect):
            self.discovery.handle_redirect(link, message)
        elif (
            isinstance(message, messages.LeaveNotice)
            and message.sender
            and link.conn_id in self.discovery.pending_calls
        ):
            if self.discovery.handle_leave_notice(link, message.sender, message):
                self.view_change.reevaluate()
        else:
            if link.conn_id in self.pending_welcomes:
                self._admit(link)
            peer = self.peers.find_by_link(link)
            if peer and peer.disconnected_at is None:
                self._handle_follower_message(peer, message)

    def _handle_follower_message(self, peer: Peer, message: messages.Message) -> None:
        state = self.state
        if isinstance(message, messages.Heartbeat):
            self._handle_heartbeat(peer, message)
        elif isinstance(message, messages.JoinRequest):
            peer.join, peer.running_generation = message.join, 0
            if self.view and peer.incarnation in self.view.members:
                self.end_view(f"the workers of {peer.incarnation} stopped")
            self.view_change.handle_join(peer.incarnation, message.join, self.view)
        elif isinstance(message, messages.ImportsFinished):
            if peer.join:
                peer.join = replace(peer.join, is_importing=False)
                self.view_change.handle_imports_finished(peer.incarnation, self.view)
        elif isinstance(message, messages.ProposalAck):
            self.view_change.handle_ack(peer.incarnation, message.generation)
        elif isinstance(message, messages.NodeFinished):
            peer.finished_generation, peer.running_generation = message.generation, 0
            self.finished_generation = max(self.finished_generation, message.generation)
            self.view_change.reevaluate()
        elif isinstance(message, messages.FailureReport):
            state.record_failure_report(peer.incarnation, message)
        elif isinstance(message, messages.FailJob):
            state.job_failure = message.reason
        elif isinstance(message, messages.ForceQuorumRequest):
            state.force_quorum(message.generation, running=self.view is not None)
        elif isinstance(message, messages.LeaveNotice):
            state.merge_quorum_state(message.quorum_state)
            self._remove_peer(peer, f"{peer.incarnation} left ({message.reason})", dead=True)

    def _handle_heartbeat(self, peer: Peer, message: messages.Heartbeat) -> None:
        state = self.state
        update = None
        if peer.incarnation == find_deputy(self.view, state.incarnation, self.peers.by_incarnation):
            update = state.status_outbox.take(peer.incarnation)
        self._send(peer, messages.Heartbeat(None, update) if update else EMPTY_HEARTBEAT)
        self.divergence.add_digest(peer.incarnation, message.state_digest)
        if message.status_update:
            state.effects.append(
                DeliverPeerStatus(peer.incarnation, message.status_update, state.installed_generation)
            )

    def _handle_hello(self, link: Link, hello: messages.Hello) -> None:
        refused = self.admission.check_hello(hello)
        link.peer = hello.sender
        if refused:
            self.state.send(link, refused)
        else:
            self._send_welcome(link, hello)
        newest = self.state.quorum_state.installed
        if self.view and newest and newest.generation > self.view.generation:
            self.end_view(f"generation {newest.generation} was started elsewhere")

    def _send_welcome(self, link: Link, hello: messages.Hello) -> None:
        """Welcome a node; its first reply makes it a follower and proves that the link works both ways.

        Over a one-way link it would otherwise delay every view. A view change waits once for that reply.
        """
        state, peer = self.state, self.peers.by_incarnation.get(hello.sender)
        if peer and peer.link is not link and peer.disconnected_at is None:
            state.disconnect(peer.link)
            self._mark_disconnected(peer)
        resumed = bool(
            self.view and peer and hello.running_generation == peer.running_generation == self.view.generation
        )
        is_responsive = hello.sender not in self.unresponsive
        reply_until = state.now + state.settings.dial_timeout_s if is_responsive else NEVER
        self.pending_welcomes[link.conn_id] = PendingWelcome(hello, resumed, reply_until)
        state.send(link, messages.Welcome(state.incarnation, state.quorum_state, resumed))

    def _admit(self, link: Link) -> None:
        """Add a node that has replied to its welcome to the followers."""
        welcome = self.pending_welcomes.pop(link.conn_id)
        self.view_change.reevaluate()
        state, hello, sender = self.state, welcome.hello, welcome.hello.sender
        self.unresponsive.discard(sender)
        refused = self.admission.check_hello(hello)
        if refused:
            state.send(link, refused)
            return
        state.unreachable.discard(sender)
        peer = self.peers.by_incarnation.get(sender)
        if peer:
            self.peers.mark_reconnected(peer, link)
        else:
            peer = Peer(sender, link)
            self.peers.add(peer)
        peer.join, peer.finished_generation = hello.join, hello.finished_generation
        self.finished_generation = max(self.finished_generation, hello.finished_generation)
        if not (welcome.resumed and self.view and self.view.generation == hello.running_generation):
            former_generation, peer.running_generation = peer.running_generation, hello.running_generation
            if welcome.resumed:
                reason = f"generation {hello.running_generation} ended while this node was reconnecting"
                self._send(peer, messages.EndView(hello.running_generation, reason, state.quorum_state))
            # Neither running nor finished: its workers failed, or it never received InstallView.
            idle = (
                self.view
                and not hello.finished_generation
                and (former_generation == self.view.generation or hello.join)
            )
            if idle and self.view and sender in self.view.members:
                self.end_view(f"the workers of {sender} stopped")
        self.divergence.resend_divergence(peer)
        if self.view is None and self.view_change.reported_reason:
            self._send(peer, messages.WaitReason(self.view_change.reported_reason))
        if peer.join:
            self.view_change.handle_join(sender, peer.join, self.view)
        self.view_change.reevaluate()

    def _handle_announcement(self, link: Link, announcement: messages.LeaderAnnouncement) -> None:
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
        """Announce this leader on a call that was answered."""
        self.discovery.handle_connected(link)

    def handle_disconnected(self, link: Link, *, refused: bool) -> None:
        """Handle a broken link or a failed call; only a refused call proves a death."""
        self.discovery.pending_calls.pop(link.conn_id, None)
        if link.conn_id in self.pending_welcomes:
            self._handle_missing_reply(link)
        peer = self.peers.find_by_link(link)
        if peer and peer.disconnected_at is None:
            self._mark_disconnected(peer)
        elif refused:
            for absent in list(self.peers.disconnected.values()):
                if absent.incarnation.address == link.address and link.dialled_at >= (
                    absent.disconnected_at or 0.0
                ):
                    dead = self.state.proves_death(absent.link, refused=True)
                    self._remove_peer(absent, f"{absent.incarnation} died", dead=dead)

    def _mark_disconnected(self, peer: Peer) -> None:
        self.peers.mark_disconnected(peer, self.state.now)
        self.view_change.handle_disconnected(peer.incarnation)
        self.next_probe_at = self.state.now

    def _remove_peer(self, peer: Peer, reason: str, *, dead: bool) -> None:
        state = self.state
        self.peers.remove(peer.incarnation)
        if dead:
            state.set_quorum_state(state.quorum_state.with_dead([peer.incarnation]))
        else:
            state.unreachable.add(peer.incarnation)
        if peer.link.conn_id in state.links:
            state.disconnect(peer.link)
        state.emit_event("lost", reason)
        state.record_lost_member(peer.incarnation, reason.removeprefix(f"{peer.incarnation} "))
        self.view_change.handle_disconnected(peer.incarnation)
        view = self.view
        if view is None or peer.incarnation not in view.members:
            return
        runs = state.running_view or any(
            follower.running_generation == view.generation for follower in self.peers
        )
        if not self.has_finished_node() or (peer.finished_generation != view.generation and runs):
            # The remaining workers would wait for the lost ones in their next collective.
            self.end_view(reason)

    def has_finished_node(self) -> bool:
        """Return whether a node of the newest view has finished; then no other view is needed."""
        newest = self.state.quorum_state.installed
        return newest is not None and newest.generation in {
            self.finished_generation,
            self.state.finished_generation,
        }

    # Acting.

    def end_view(self, reason: str, *, immediately: bool = False) -> None:
        """End the running view; its members join again."""
        view = self.view
        if view is None:
            return
        message = messages.EndView(
            view.generation, reason, self.state.quorum_state
        )  # shared, so that it is encoded once
        for peer in self.peers:
            if peer.running_generation == view.generation and peer.disconnected_at is None:
                self._send(peer, message)
        self.view, self.lease_until = None, NEVER
        self.divergence.reset()
        self.state.stop_workers(reason, immediately=immediately)
        self.view_change.started_at = self.state.now
        self.view_change.reevaluate()
        self.state.emit_event("restart", f"generation {view.generation} is over: {reason}")

    def advance(self) -> None:
        """Check the own lease first; then look for losses, the end of the job, and the next view."""
        state = self.state
        if self.new_leader_address or (self.view is None and state.is_disk_stalled):
            self._step_down()
            return
        if self.view:
            if state.join:  # a spare may wait for as long as a view runs without it
                state.join_since = state.now
            self._renew_lease()
            if state.now >= self.lease_until:
                self.end_view("the leader has lost its quorum", immediately=True)
        if state.now >= self.next_scan_at:
            self.next_scan_at = state.now + state.settings.heartbeat_interval_s / 2
            self._remove_unreachable_peers()
            self.divergence.add_digest(state.incarnation, state.take_digest())
        divergence = self.divergence.advance()
        if divergence and not self.has_finished_node():
            self.end_view(divergence)
        self._probe_disconnected()
        self.discovery.advance()
        if state.job_failure or self._is_job_finished():
            self._end_job()
            return
        if self.view is None:
            self._advance_view_change()
            self._broadcast_wait_reason()
        elif state.now >= self.view_change.scale_up_at:
            self.view_change.scale_up_at = float("inf")
            if not self.has_finished_node():
                self.end_view("newcomers are here")

    def _broadcast_wait_reason(self) -> None:
        reason = self.view_change.take_wait_reason() if self.view is None else ""
        if reason:
            self.state.emit_event("waiting", reason)
            self._broadcast(messages.WaitReason(reason))

    def _renew_lease(self, *, force: bool = False) -> None:
        """Compute for how long a quorum surely follows; no lease that is granted lasts longer."""
        state = self.state
        if self.view is None or not (force or state.now >= self.next_scan_at):
            return
        self.lease_until = self.view_change.compute_lease_until()
        if self.view.rank(state.incarnation) is not None and state.running_view:
            state.lease_until = self.lease_until

    def _remove_unreachable_peers(self) -> None:
        state = self.state
        for peer in self.peers:
            if state.now >= peer.link.last_received_at + state.settings.node_timeout_s:
                self._remove_peer(peer, f"{peer.incarnation} is unreachable", dead=False)
        for link in [state.links[conn_id] for conn_id in self.pending_welcomes]:
            if state.now >= link.last_received_at + state.settings.node_timeout_s:
                self._handle_missing_reply(link)
                state.disconnect(link)

    def _handle_missing_reply(self, link: Link) -> None:
        """Note that a node did not reply to its welcome, so no view waits for it again."""
        self.unresponsive.add(self.pending_welcomes.pop(link.conn_id).hello.sender)
        self.view_change.reevaluate()

    def _probe_disconnected(self) -> None:
        """Dial followers whose links broke. A live one also dials this node; a refusal proves a death."""
        state = self.state
        if not self.peers.disconnected or state.now < self.next_probe_at:
            return
        self.next_probe_at = state.now + state.settings.probe_interval_s
        self.discovery.probe(peer.incarnation.address for peer in self.peers.disconnected.values())

    def _advance_view_change(self) -> None:
        installed = self.view_change.advance()
        if installed is None:
            return
        state = self.state
        view, message = installed
        state.set_quorum_state(state.quorum_state.with_installed(view))
        self.view = view
        self.view_change.handle_view_installed(view)
        self.divergence.handle_view_installed(view)
        self._renew_lease(force=True)
        members = frozenset(view.members)
        for peer in self.peers:
            if peer.incarnation in members:
                peer.join, peer.running_generation, peer.finished_generation = None, view.generation, 0
            self._send(peer, message)
        state.start_workers(view, message, self.lease_until)

    def _is_job_finished(self) -> bool:
        """Return whether every present node has finished and no absent one is worth waiting for.

        A partition may leave nodes that finished an earlier view. For them the job ends when all members of
        the newest view are lost, even if none of those finished.
        """
        state, newest = self.state, self.state.quorum_state.installed
        if newest is None or self.view_change.pending:
            return False
        # This runs for every message. Nearly always the first member has not finished, so look no further.
        if not all(self._has_finished_or_is_absent(member, newest.generation) for member in newest.members):
            return False
        finished = {peer.incarnation: peer.finished_generation for peer in self.peers}
        finished[state.incarnation] = state.finished_generation
        timed_out = state.now >= self.view_change.started_at + state.settings.node_timeout_s
        if self.has_finished_node():
            return timed_out or not state.find_absent_members(finished) - state.unreachable
        wants_view = state.join or self.peers.disconnected or any(peer.join for peer in self.peers)
        return timed_out and all(finished.values()) and not wants_view

    def _has_finished_or_is_absent(self, member: Incarnation, generation: int) -> bool:
        if member == self.state.incarnation:
            return self.state.finished_generation == generation
        peer = self.peers.by_incarnation.get(member)
        return peer is None or peer.finished_generation == generation

    def _end_job(self) -> None:
        connected = {peer.incarnation for peer in self.peers if peer.disconnected_at is None}
        self.state.job_end = self._make_job_end(connected)
        self._broadcast(self.state.job_end)

    def _make_job_end(self, connected: set[Incarnation]) -> messages.JobEnd:
        """Describe the end of the job; it is final if no node outside `connected` can still run workers."""
        state, newest = self.state, self.state.quorum_state.installed
        absent = state.find_absent_members(connected | {state.incarnation})
        is_final = not absent and not state.job_failure
        generation, members = (newest.generation, newest.members) if newest else (0, ())
        finished = {peer.incarnation for peer in self.peers if peer.finished_generation == generation}
        unfinished = [str(member) for member in members if member not in finished | {state.incarnation}]
        return messages.JobEnd(
            generation,
            state.job_failure,
            is_final,
            tuple(unfinished[:MAX_CANDIDATES_NAMED]),
            state.failure_log.get_failures(generation),
        )

    def _step_down(self) -> None:
        state, timeout_s = self.state, self.state.settings.node_timeout_s
        if self.view or state.now < self.view_change.started_at + timeout_s:
            state.extend_grace(timeout_s)  # followers that miss the redirect run until their leases expire
        reason = (
            f"{self.new_leader_address} leads"
            if self.new_leader_address
            else "the leader's disk does not complete writes"
        )
        self.has_stepped_down = True
        self.end_view(reason, immediately=True)
        self.view_change.abort(reason)
        for peer in self.peers:
            if peer.disconnected_at is None:
                state.redirect(peer.link, self.new_leader_address)
            else:
                state.defer_close(peer.link)
        for conn_id in self.pending_welcomes:
            state.send(state.links[conn_id], messages.Redirect(self.new_leader_address))
        state.emit_event("step-down", f"{state.incarnation} steps down: {reason}")

    def close(self) -> None:
        """End the calls to nodes that do not follow."""
        self.discovery.close()

    def handle_join_requested(self) -> None:
        """Count this node's own workers as stopped and the node as joined."""
        if self.view and self.view.rank(self.state.incarnation) is not None:
            self.end_view("the workers of the leader stopped")
        if self.state.join:
            self.view_change.handle_join(self.state.incarnation, self.state.join, self.view)

    def handle_imports_finished(self) -> None:
        """Let the running view end for this node, which has joined too late for it."""
        self.view_change.handle_imports_finished(self.state.incarnation, self.view)

    def handle_workers_finished(self) -> None:
        """Check for the next view, since this node's own workers have finished."""
        self.view_change.reevaluate()

    def leave(self, reason: str) -> None:
        """Send all followers a leave notice; they look for another leader at once."""
        self.view_change.abort("the leader leaves")
        self._broadcast(messages.LeaveNotice(reason, self.state.quorum_state))

    def next_deadline(self) -> float:
        """Return when to advance next."""
        state = self.state
        deadlines = [self.next_scan_at, self.discovery.next_deadline()]
        if self.peers.disconnected:
            deadlines.append(self.next_probe_at)
        if self.view:
            deadlines += [self.lease_until, self.view_change.scale_up_at]
        else:
            deadlines += [self.view_change.next_deadline(), state.disk_stalls_at]
        return min(deadlines)

    def explain_wait(self) -> str:
        """Return one clause for the error after the join timeout."""
        return self.view_change.wait_reason
