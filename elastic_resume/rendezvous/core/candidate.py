"""The candidate's role: find the leader, or find out that this node has to lead.

A candidate dials the members of the newest view by rank, then the configured candidates in their order. Every
node uses this order. A node that does not lead answers with the leader's address, or that it is searching
too. A candidate leads when every node before it has failed to answer. Two nodes may conclude that at once;
`leader.LeaderDiscovery` settles it, and the quorum rules keep them from forming two views.
"""

from __future__ import annotations

import itertools
from enum import Enum

from elastic_resume.rendezvous.core import messages
from elastic_resume.rendezvous.core.peers import Link
from elastic_resume.rendezvous.core.quorum import Incarnation, QuorumState
from elastic_resume.rendezvous.core.state import NodeState

ROUND_PAUSE_S = 0.3
"""Between two rounds of calls."""
MAX_ROUND_NODE_TIMEOUTS = 3
"""A round ends after so many node timeouts, even if nodes keep redirecting this one."""
RETRY_DELAY_S = 0.1
"""Before a second call to a leader that did not answer, or to the node that named it."""


class SearchResult(Enum):
    """The result of the search."""

    SEARCHING = "searching"
    LEAD = "lead"
    FOLLOW = "follow"
    REFUSED = "refused"


class Candidate:
    """The role of a node that knows no leader. It tries `first_address` first."""

    def __init__(self, state: NodeState, first_address: str = "") -> None:
        self.state = state
        self.started_at = state.now
        self.waiting_peers: dict[int, messages.Hello] = {}
        """Nodes that asked this one and wait for the result, by connection."""
        self.result = SearchResult.SEARCHING
        self.link: Link | None = None
        self.welcome: messages.Welcome | None = None
        self.refusal_reason = ""
        self.pending_calls: dict[int, float] = {}
        """When each unanswered call was made, by connection."""
        self.redirect_waits: set[int] = set()
        """Connections to nodes that search too and will redirect this one."""
        self.failed_addresses: set[str] = set()
        self.called_addresses: set[str] = set()
        self.remaining_addresses: list[str] = []
        self.round_started_at = state.now
        self.redirected_by: dict[str, str] = {}
        self.retry_at: dict[str, float] = {}
        """When to call an address again: it was called too early, or named a leader that did not answer."""
        self.next_call_at = state.now
        self._priority_inputs: tuple[QuorumState | None, Incarnation, int] = (None, state.incarnation, 0)
        self._higher_priority: list[str] | None = None
        self._start_round(first_address)

    def _start_round(self, first_address: str = "") -> None:
        state = self.state
        targets = self.find_higher_priority()
        if targets is None:
            members = [member.address for member in self._list_known_members()]
            targets = members + list(state.settings.candidates)
        self.failed_addresses.clear()
        self.round_started_at = state.now
        self.redirected_by.clear()
        self.retry_at.clear()
        self.called_addresses = {state.incarnation.address}
        self.remaining_addresses = [
            address for address in dict.fromkeys(targets) if address not in self.called_addresses
        ]
        self.next_call_at = state.now
        self._call(first_address)

    # Priority.

    def _list_known_members(self) -> list[Incarnation]:
        known = self.state.quorum_state
        live = [known.live_members(view) for view in known.voting_views]
        return list(live[0] if len(live) == 1 else dict.fromkeys(itertools.chain(*live)))

    def find_higher_priority(self) -> list[str] | None:
        """Return the addresses of nodes that lead before this one; None if this node may not lead."""
        state = self.state
        inputs = (state.quorum_state, state.incarnation, len(state.unreachable))
        if inputs[0] is not self._priority_inputs[0] or inputs[1:] != self._priority_inputs[1:]:
            self._priority_inputs, self._higher_priority = inputs, self._compute_higher_priority()
        return self._higher_priority

    def _compute_higher_priority(self) -> list[str] | None:
        state = self.state
        members = self._list_known_members()
        for rank, member in enumerate(members):
            # Comparing the id first is faster with 1,000 members.
            if member.incarnation_id == state.incarnation.incarnation_id and member == state.incarnation:
                return [
                    other.address
                    for other in members[:rank]
                    if not state.unreachable or other not in state.unreachable
                ]
        index = state.incarnation.candidate_index
        if index is None and not self._may_lead_by_force():
            return None
        reachable = [member.address for member in members if member not in state.unreachable]
        return reachable + list(state.settings.candidates[:index])

    def _may_lead_by_force(self) -> bool:
        """Return whether an operator forced a quorum and this node was in the last view."""
        installed = self.state.quorum_state.installed
        was_member = installed is not None and any(
            member.node == self.state.incarnation.node for member in installed.members
        )
        return bool(self.state.quorum_state.forced_generation) and was_member

    # Messages.

    def handle_message(self, link: Link, header: messages.Header, message: messages.Message) -> None:
        """Handle one message."""
        del header
        if isinstance(message, messages.Hello):
            self.waiting_peers[link.conn_id] = message
            link.peer = message.sender
            self.state.send(link, messages.Redirect())
        elif isinstance(message, messages.LeaderAnnouncement):
            self._handle_announcement(link, message)
        elif link.conn_id not in self.pending_calls and link.conn_id not in self.redirect_waits:
            return
        elif isinstance(message, messages.Welcome):
            self.result, self.link, self.welcome = SearchResult.FOLLOW, link, message
        elif isinstance(message, messages.Redirect):
            self._handle_redirect(link, message.address)
        elif isinstance(message, messages.Refused):
            self._handle_refusal(link, message)
        elif isinstance(message, messages.JobEnd):
            self.state.job_end = message

    def _handle_announcement(self, link: Link, message: messages.LeaderAnnouncement) -> None:
        """Call the leader that announced itself, unless this node's stuck disk would only delay it."""
        state = self.state
        state.record_announced_generation(message)
        if not state.is_disk_stalled:
            self._call(message.leader.address)
            return
        notice = messages.LeaveNotice(
            "its disk does not complete writes", state.quorum_state, state.incarnation
        )
        state.send(link, notice)
        if state.hello_sent or state.incarnation in state.find_absent_members([]):
            # Other nodes may know a view with this incarnation that this node does not know.
            state.start_new_incarnation()

    def _handle_redirect(self, link: Link, address: str) -> None:
        if not address or address == self.state.incarnation.address:
            self.redirect_waits.add(link.conn_id)
            self.pending_calls.setdefault(link.conn_id, self.state.now)
            return
        self._drop_call(link)
        if any(self.state.links[conn_id].address == address for conn_id in self.pending_calls):
            return  # the second of two calls to one leader would replace the first
        self.redirected_by[address] = link.address
        if address in self.called_addresses:
            self.retry_at[address] = self.state.now + RETRY_DELAY_S
        else:
            self._call(address)

    def _handle_refusal(self, link: Link, message: messages.Refused) -> None:
        state = self.state
        if message.reason == "dead":
            state.emit_event(
                "new-incarnation", f"{link.address} counts this node as dead; it joins as a new incarnation"
            )
            state.start_new_incarnation()
            for conn_id in {*self.pending_calls, *self.redirect_waits} - {link.conn_id}:
                self._drop_call(state.links[conn_id])  # the answer would concern the former incarnation
            state.send(link, state.make_hello())
            self.pending_calls[link.conn_id] = state.now
            return
        last_reason = self.refusal_reason
        self.refusal_reason = f"{link.address} refuses this node: {message.reason}"
        if self.refusal_reason != last_reason and not message.is_permanent:
            state.emit_event("refused", self.refusal_reason)
        if message.is_permanent:
            self.result = SearchResult.REFUSED
        self._drop_call(link)

    # Calls.

    def _call(self, address: str) -> None:
        if address and address not in self.called_addresses:
            self.called_addresses.add(address)
            self.pending_calls[self.state.dial(address).conn_id] = self.state.now

    def _drop_call(self, link: Link) -> None:
        self.pending_calls.pop(link.conn_id, None)
        self.redirect_waits.discard(link.conn_id)
        self.state.disconnect(link)

    def _drop_all_calls(self) -> None:
        for conn_id in {*self.pending_calls, *self.redirect_waits}:
            self._drop_call(self.state.links[conn_id])

    def handle_connected(self, link: Link) -> None:
        """Introduce this node on a call that was answered."""
        if link.conn_id in self.pending_calls:
            self.state.send(link, self.state.make_hello())

    def handle_disconnected(self, link: Link, *, refused: bool) -> None:
        """Note a failed call, or a waiting node that went away."""
        del refused
        self.waiting_peers.pop(link.conn_id, None)
        self.redirect_waits.discard(link.conn_id)
        if self.pending_calls.pop(link.conn_id, None) is not None:
            self._record_failed_call(link.address)
            self.next_call_at = self.state.now

    def _record_failed_call(self, address: str) -> None:
        self.failed_addresses.add(address)
        sender = self.redirected_by.pop(address, "")
        if sender:
            self.retry_at[sender] = self.state.now + RETRY_DELAY_S

    def advance(self) -> None:
        """End calls that timed out, make the next one, and lead if no other node can."""
        state = self.state
        if state.is_disk_stalled:
            # The leader and all its followers would wait for acknowledgements that never come.
            self._drop_all_calls()
            self._start_round()
            self.next_call_at = state.now + state.settings.heartbeat_interval_s
            return
        self._end_timed_out_calls()
        if self.result is not SearchResult.SEARCHING or state.job_end:
            return
        higher_priority = self.find_higher_priority()
        is_first = higher_priority is not None and all(
            address in self.failed_addresses or address == state.incarnation.address
            for address in higher_priority
        )
        if is_first and not self.pending_calls.keys() - self.redirect_waits:
            self.result = SearchResult.LEAD
            return
        for address in [address for address, at in self.retry_at.items() if at <= state.now]:
            del self.retry_at[address]
            if not any(state.links[conn_id].address == address for conn_id in self.pending_calls):
                self.called_addresses.discard(address)
                self.failed_addresses.discard(address)
                self._call(address)
        if state.now >= self.next_call_at:
            self._call_next()

    def _end_timed_out_calls(self) -> None:
        state = self.state
        for conn_id, since in list(self.pending_calls.items()):
            if state.now >= since + state.settings.dial_timeout_s:
                link = state.links[conn_id]
                self._record_failed_call(link.address)
                if conn_id in self.redirect_waits:
                    del self.pending_calls[conn_id]
                else:
                    self._drop_call(link)

    def _call_next(self) -> None:
        state, settings = self.state, self.state.settings
        while self.remaining_addresses and self.remaining_addresses[0] in self.called_addresses:
            self.remaining_addresses.pop(0)
        if self.remaining_addresses:
            self._call(self.remaining_addresses.pop(0))
            crowd_s = settings.crowd_delay_s * len(self.pending_calls)
            self.next_call_at = state.now + settings.dial_stagger_s + crowd_s
            return
        round_until = self.round_started_at + MAX_ROUND_NODE_TIMEOUTS * settings.node_timeout_s
        if state.now >= round_until or not (self.pending_calls or self.retry_at):
            self._drop_all_calls()
            self._start_round()
            self.next_call_at = state.now + ROUND_PAUSE_S
        else:
            self.next_call_at = state.now + settings.dial_timeout_s

    def next_deadline(self) -> float:
        """Return when to advance next."""
        timeouts = [since + self.state.settings.dial_timeout_s for since in self.pending_calls.values()]
        return min([self.next_call_at, *timeouts, *self.retry_at.values()])

    def close(self) -> None:
        """End all calls but the one that was answered."""
        for conn_id in {*self.pending_calls, *self.redirect_waits}:
            if conn_id in self.state.links and (self.link is None or conn_id != self.link.conn_id):
                self.state.disconnect(self.state.links[conn_id])

    def explain_wait(self) -> str:
        """Return one clause for the error after the join timeout."""
        if self.state.is_disk_stalled:
            return "this node's disk does not complete writes"
        addresses = self.state.format_absent_candidates([self.state.incarnation])
        return (
            self.refusal_reason
            or f"no leader answers at {addresses} nor at any member of the last generation"
        )
