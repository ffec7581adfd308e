"""Looking for the leader, and finding out that it is us.

An agent calls the others in an order that all share: the members of the newest world by rank, then the
candidates in their order. One that is asked and does not lead says who does, or that it is looking too. An
agent leads when everybody before it in that order has failed to answer. Two may come to that conclusion;
`calling` settles it. Nothing here can make two worlds: that is `quorum`'s.
"""

from __future__ import annotations

import itertools
from enum import Enum

from elastic_resume.rendezvous.core.messages import (
    Header,
    Hello,
    JobEnd,
    LeaderAnnouncement,
    LeaveNotice,
    Message,
    Redirect,
    Refused,
    Welcome,
)
from elastic_resume.rendezvous.core.quorum import Incarnation, QuorumState
from elastic_resume.rendezvous.core.state import Link, NodeState

ROUND_PAUSE_S = 0.3
"""Between two rounds of calls."""
MAX_ROUND_NODE_TIMEOUTS = 3
"""A round in which some send us to and fro ends after so many node timeouts."""
RETRY_DELAY_S = 0.1
"""Before a leader that did not answer is called once more, and then who named it: it will have noticed."""


class SearchResult(Enum):
    """What became of the search."""

    SEARCHING = "searching"
    LEAD = "lead"
    FOLLOW = "follow"
    REFUSED = "refused"


class Candidate:
    """The role of an agent that knows no leader. `hint` is an address to try first."""

    def __init__(
        self, state: NodeState, first_address: str = "", waiting_peers: dict[int, Hello] | None = None
    ) -> None:
        self.state = state
        self.started_at = state.now
        self.waiting_peers: dict[int, Hello] = waiting_peers or {}
        self.result = SearchResult.SEARCHING
        self.link: Link | None = None
        self.welcome: Welcome | None = None
        self.refusal_reason = ""
        self.pending_calls: dict[int, float] = {}
        self.redirect_waits: set[int] = set()
        self.failed_addresses: set[str] = set()
        self.called_addresses: set[str] = set()
        self.remaining_addresses: list[str] = []
        self.round_started_at = state.now
        self.redirected_by: dict[str, str] = {}
        self.retry_at: dict[str, float] = {}
        """Whom to ask once more, and when: called too early, or named somebody who did not answer."""
        self.next_call_at = state.now
        self._priority_inputs: tuple[QuorumState | None, Incarnation, int] = (None, state.incarnation, 0)
        self._higher_priority: list[str] | None = None
        self._start_round(first_address)

    def _start_round(self, first_address: str = "") -> None:
        body = self.state
        elders = self.find_higher_priority()
        wanted = elders
        if wanted is None:
            wanted = [m.address for m in self._list_known_members()] + list(body.settings.candidates)
        self.failed_addresses.clear()
        self.round_started_at = body.now
        self.redirected_by.clear()
        self.retry_at.clear()
        self.called_addresses = {body.incarnation.address}
        self.remaining_addresses = [one for one in dict.fromkeys(wanted) if one not in self.called_addresses]
        self.next_call_at = body.now
        self._call(first_address)

    def _list_known_members(self) -> list[Incarnation]:
        known = self.state.quorum_state
        alive = [known.live_members(world) for world in known.voting_views]
        return list(alive[0] if len(alive) == 1 else dict.fromkeys(itertools.chain(*alive)))

    def find_higher_priority(self) -> list[str] | None:
        """Addresses of those who would lead before us; None where we may not lead at all."""
        body = self.state
        basis = (body.quorum_state, body.incarnation, len(body.unreachable))
        if basis[0] is not self._priority_inputs[0] or basis[1:] != self._priority_inputs[1:]:
            self._priority_inputs, self._higher_priority = basis, self._compute_higher_priority()
        return self._higher_priority

    def _compute_higher_priority(self) -> list[str] | None:
        body = self.state
        members = self._list_known_members()
        for rank, member in enumerate(members):
            if member.incarnation_id == body.incarnation.incarnation_id and member == body.incarnation:
                return [
                    m.address for m in members[:rank] if not body.unreachable or m not in body.unreachable
                ]
        place = body.incarnation.candidate_index
        if place is None and not self._may_lead_by_force():
            return None
        living = [m.address for m in members if m not in body.unreachable]
        return living + list(body.settings.candidates[:place])

    def _may_lead_by_force(self) -> bool:
        """Whether an operator declared the others dead, and this node was in the last world."""
        begun = self.state.quorum_state.installed
        named = begun is not None and any(m.node == self.state.incarnation.node for m in begun.members)
        return bool(self.state.quorum_state.forced_generation) and named

    def handle_message(self, link: Link, header: Header, message: Message) -> None:
        """Take in a message; a claim tells us where to ask."""
        del header
        if isinstance(message, Hello):
            self.waiting_peers[link.conn_id] = message
            link.peer = message.sender
            self.state.send(link, Redirect())
        elif isinstance(message, LeaderAnnouncement):
            self._handle_announcement(link, message)
        elif link.conn_id not in self.pending_calls and link.conn_id not in self.redirect_waits:
            return
        elif isinstance(message, Welcome):
            self.result, self.link, self.welcome = SearchResult.FOLLOW, link, message
        elif isinstance(message, Redirect):
            self._handle_redirect(link, message.address)
        elif isinstance(message, Refused):
            self._handle_refusal(link, message)
        elif isinstance(message, JobEnd):
            self.state.job_end = message

    def _handle_announcement(self, link: Link, message: LeaderAnnouncement) -> None:
        """Ask the one who leads; unless we could only hold everybody up."""
        body = self.state
        body.record_announced_generation(message)
        if not body.is_disk_stalled:
            self._call(message.leader.address)
            return
        body.send(link, LeaveNotice("its disk takes no writes", body.quorum_state, body.incarnation))
        if body.hello_sent or body.incarnation in body.find_absent_members([]):
            body.start_new_incarnation()  # others may know of a world with this life that we have not heard of

    def _handle_redirect(self, link: Link, address: str) -> None:
        if not address or address == self.state.incarnation.address:
            self.redirect_waits.add(link.conn_id)
            self.pending_calls.setdefault(link.conn_id, self.state.now)
            return
        self._drop_call(link)
        if any(self.state.links[conn].address == address for conn in self.pending_calls):
            return  # two calls at once to one leader would take each other's place
        self.redirected_by[address] = link.address
        if address in self.called_addresses:
            self.retry_at[address] = self.state.now + RETRY_DELAY_S
        else:
            self._call(address)

    def _handle_refusal(self, link: Link, message: Refused) -> None:
        body, reason = self.state, message.reason
        if reason == "dead":
            body.emit_event(
                "new-incarnation", f"{link.address} counts this agent gone; it comes back as a new one"
            )
            body.start_new_incarnation()
            for conn in {*self.pending_calls, *self.redirect_waits} - {link.conn_id}:
                self._drop_call(body.links[conn])  # an answer to them would be to the one that was
            body.send(link, body.make_hello())
            self.pending_calls[link.conn_id] = body.now
            return
        told, self.refusal_reason = self.refusal_reason, f"{link.address} refuses this node: {reason}"
        if self.refusal_reason != told and not message.is_permanent:
            body.emit_event("refused", self.refusal_reason)
        if message.is_permanent:
            self.result = SearchResult.REFUSED
        self._drop_call(link)

    def _call(self, address: str) -> None:
        if address and address not in self.called_addresses:
            self.called_addresses.add(address)
            self.pending_calls[self.state.dial(address).conn_id] = self.state.now

    def _drop_call(self, link: Link) -> None:
        self.pending_calls.pop(link.conn_id, None)
        self.redirect_waits.discard(link.conn_id)
        self.state.disconnect(link)

    def handle_connected(self, link: Link) -> None:
        """Introduce ourselves."""
        if link.conn_id in self.pending_calls:
            self.state.send(link, self.state.make_hello())

    def handle_disconnected(self, link: Link, *, refused: bool) -> None:
        """A call failed, or a waiter went away."""
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
        """Give up on calls that took too long, make the next one, lead if nobody else would."""
        body = self.state
        if body.is_disk_stalled:
            # Whoever leads would wait for our acknowledgement with everybody else, again and again.
            self._pause_search()
            return
        for conn, since in list(self.pending_calls.items()):
            if body.now >= since + body.settings.dial_timeout_s:
                link = body.links[conn]
                self._record_failed_call(link.address)
                if conn in self.redirect_waits:
                    del self.pending_calls[conn]
                else:
                    self._drop_call(link)
        elders = self.find_higher_priority()
        if self.result is not SearchResult.SEARCHING or body.job_end:
            return
        asking = self.pending_calls.keys() - self.redirect_waits
        alone = elders is not None and all(
            one in self.failed_addresses or one == body.incarnation.address for one in elders
        )
        if alone and not asking:
            self.result = SearchResult.LEAD
            return
        for address in [one for one, at in self.retry_at.items() if at <= body.now]:
            del self.retry_at[address]
            if not any(body.links[conn].address == address for conn in self.pending_calls):
                self.called_addresses.discard(address)
                self.failed_addresses.discard(address)
                self._call(address)
        if body.now >= self.next_call_at:
            self._call_next()

    def _call_next(self) -> None:
        body = self.state
        while self.remaining_addresses and self.remaining_addresses[0] in self.called_addresses:
            self.remaining_addresses.pop(0)
        if self.remaining_addresses:
            self._call(self.remaining_addresses.pop(0))
            self.next_call_at = (
                body.now
                + body.settings.dial_stagger_s
                + body.settings.crowd_delay_s * len(self.pending_calls)
            )
        elif (
            body.now >= self.round_started_at + MAX_ROUND_NODE_TIMEOUTS * body.settings.node_timeout_s
            or not (self.pending_calls or self.retry_at)
        ):
            for conn in {*self.pending_calls, *self.redirect_waits}:
                self._drop_call(body.links[conn])
            self._start_round()
            self.next_call_at = body.now + ROUND_PAUSE_S
        else:
            self.next_call_at = body.now + body.settings.dial_timeout_s

    def _pause_search(self) -> None:
        body = self.state
        for conn in {*self.pending_calls, *self.redirect_waits}:
            self._drop_call(body.links[conn])
        self._start_round()
        self.next_call_at = body.now + body.settings.heartbeat_interval_s

    def next_deadline(self) -> float:
        """When to look again."""
        waits = [since + self.state.settings.dial_timeout_s for since in self.pending_calls.values()]
        return min([self.next_call_at, *waits, *self.retry_at.values()])

    def close(self) -> None:
        """End all calls but the one that was answered."""
        for conn in {*self.pending_calls, *self.redirect_waits}:
            if conn in self.state.links and (self.link is None or conn != self.link.conn_id):
                self.state.disconnect(self.state.links[conn])

    def explain_wait(self) -> str:
        """One clause for the error after the join timeout."""
        asked = self.state.format_absent_candidates([self.state.incarnation])
        if self.state.is_disk_stalled:
            return "this node's disk takes no writes"
        return self.refusal_reason or f"no leader answers at {asked} nor at any member of the last world"
