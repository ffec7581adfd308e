"""Search for the leader, or find that this node has to lead.

A searcher dials the members of the newest view by rank, then the candidates of the settings in their order.
Every node uses this order. A node that does not lead answers with the leader's address, or that it is
searching too. A searcher leads when no node before it in this order has answered. Two nodes may conclude that
at once: then `leader_announcer` makes one of them step down.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import ClassVar

from elastic_resume.policy.reasons import (
    DirectoryCopied,
    JoinObstacle,
    NameTaken,
    NodeRefused,
    NoLeader,
    OtherJob,
    OwnObstacle,
    SettingDiffers,
)
from elastic_resume.rendezvous.core import messages
from elastic_resume.rendezvous.core.interface import EndMembership, Leave
from elastic_resume.rendezvous.core.peers import Link
from elastic_resume.rendezvous.core.state import Follow, Handlers, Lead, NodeState, Role
from elastic_resume.rendezvous.core.world import JobEnd

ROUND_PAUSE_S = 0.3
"""Between two rounds of calls."""
PATIENCE_CALLS = 5
"""A node leads although others of higher priority may answer, after the time of so many unanswered calls."""
MAX_DEFERRED_TERMS = 4
"""After terms without a quorum a node waits at most so many times longer."""
PATIENCE_PER_RANK_S = 0.02
"""So much more for each rank, so that not all lead at once: see `Searcher.lead_anyway_at`."""
RETRY_DELAY_S = 0.1
"""Before a second call to a leader that did not answer, or to the node that named it."""


class Searcher(Role):
    """The role of a node that knows no leader. It tries `first_address` first."""

    def __init__(self, state: NodeState, first_address: str = "") -> None:
        super().__init__(state)
        self.named_leader = first_address if first_address != state.incarnation.address else ""
        """The leader that another one has named, until it does not answer."""
        self.is_successor = first_address == state.incarnation.address
        """The leader that leaves has named this node."""
        self.waiting_peers: dict[int, messages.Hello] = {}
        """Nodes that asked this one and wait for the result, by connection."""
        self.refusal: NodeRefused | None = None
        self.pending_calls: dict[int, float] = {}
        """When each unanswered call was made, by connection."""
        self.redirect_waits: set[int] = set()
        """Connections to nodes that search too and will redirect this one."""
        self.failed_addresses: set[str] = set()
        self.called_addresses: set[str] = set()
        self.remaining_addresses: list[str] = []
        rank = state.view.rank(state.incarnation)
        place = len(state.view.members) + (state.incarnation.candidate_index or 0) if rank is None else rank
        turns = 1 + min(state.terms_without_quorum, MAX_DEFERRED_TERMS)
        self.lead_anyway_at = (
            state.now + turns * PATIENCE_CALLS * state.settings.dial_timeout_s + PATIENCE_PER_RANK_S * place
        )
        """When this node leads without an answer of all before it: a hundred of them may have lost power, and
        some may follow a leader that this node cannot reach. After a term without a quorum it waits longer.
        """
        self.stale_redirect_senders: set[str] = set()
        """Nodes that redirected this one to a leader that did not answer."""
        self.redirected_by: dict[str, str] = {}
        self.retry_at: dict[str, float] = {}
        """When to call an address again: it was called too early, or named a leader that did not answer."""
        self.next_call_at = state.now
        self._start_round(first_address)

    def _start_round(self, first_address: str = "") -> None:
        state = self.state
        if self._may_lead() and not self._defers():
            targets = list(self._iterate_earlier())
        else:
            # Also those that have ended: their next processes may listen there.
            targets = [*(member.address for member in state.view.members), *state.settings.candidates]
        self.failed_addresses.clear()
        self.redirected_by.clear()
        self.retry_at.clear()
        self.called_addresses = {state.incarnation.address}
        self.remaining_addresses = [
            address for address in dict.fromkeys(targets) if address not in self.called_addresses
        ]
        self._call(first_address)
        # The leader that this node has just left would answer as soon as the one that was named.
        self.next_call_at = state.now + (state.settings.dial_stagger_s if self.pending_calls else 0.0)

    # The search order.

    def _may_lead(self) -> bool:
        return self.state.incarnation.candidate_index is not None or self.state.acceptor.is_voter

    def _iterate_earlier(self) -> Iterator[str]:
        """Yield the addresses of the nodes that lead before this one, if it may lead."""
        state, view = self.state, self.state.view
        rank = view.rank(state.incarnation)  # None for a restarted member too: all precede it
        for member in islice(view.members, rank):
            if member not in state.contacts.ended and member not in state.unreachable:
                yield member.address
        if rank is None:
            yield from state.settings.candidates[: state.incarnation.candidate_index]

    # Messages.

    def handle_message(self, link: Link, message: messages.Message) -> None:
        """Handle one message; answers count on calls of this node only."""
        is_called = link.conn_id in self.pending_calls or link.conn_id in self.redirect_waits
        if not self.dispatch(self._HANDLERS, link, message) and is_called:
            self.dispatch(self._ANSWER_HANDLERS, link, message)

    def _handle_hello(self, link: Link, hello: messages.Hello) -> None:
        self.state.contacts.mark_former_ended(hello.sender)
        link.peer = hello.sender
        if not self.named_leader and (self.state.is_leaving or self._defers()):
            # It will not lead: nobody shall wait for it, nor a former follower dial on.
            self.waiting_peers.pop(link.conn_id, None)
            self.state.send(link, messages.Redirect())
            self._drop_call(link)
            return
        self.waiting_peers[link.conn_id] = hello
        self.state.send(link, messages.Redirect(self.named_leader))

    def _handle_welcome(self, link: Link, welcome: messages.Welcome) -> None:
        self.state.end_role(Follow(link, welcome, self.waiting_peers))

    def _handle_announcement(self, _: Link, message: messages.LeaderAnnouncement) -> None:
        """Call the leader that announced itself, if this process has counted its boot on disk.

        It may be the one that this node has left for the named leader, whose answer is due.
        """
        unanswered = self.pending_calls.keys() - self.redirect_waits
        if self.named_leader in {self.state.links[conn_id].address for conn_id in unanswered}:
            return
        if self.state.acceptor.durable_version and not self.state.is_disk_stalled:
            self._call_again(message.leader.address)  # it may have led nobody when it was called before

    def _handle_redirect(self, link: Link, message: messages.Redirect) -> None:
        address = message.address
        if address == self.state.incarnation.address:
            self._drop_call(link)
            self.failed_addresses.add(link.address)  # it does not lead, but waits for this node to do so
            return
        if not address:
            self.redirect_waits.add(link.conn_id)
            self.pending_calls.setdefault(link.conn_id, self.state.now)
            return
        self._drop_call(link)
        if self._is_calling(address):
            return  # the second of two calls to one leader would replace the first
        self.redirected_by[address] = link.address
        if address in self.called_addresses:
            self.retry_at[address] = self.state.now + RETRY_DELAY_S
        else:
            self._call(address)

    def _handle_refusal(self, link: Link, message: messages.Refused) -> None:
        state, refusal = self.state, message.refusal
        is_copy = isinstance(refusal, DirectoryCopied) and refusal.is_certain
        if is_copy or (isinstance(refusal, NameTaken) and refusal.is_alive):
            state.acceptor.note_twin()
        is_other_job = isinstance(refusal, OtherJob) and refusal.is_running
        is_permanent = is_copy or is_other_job or isinstance(refusal, SettingDiffers)
        former, self.refusal = self.refusal, NodeRefused(link.address, refusal)
        if self.refusal != former and not is_permanent:
            state.emit_event("refused", self.refusal)
        if is_permanent:
            state.end_role(EndMembership(self.refusal))
        self._drop_call(link)

    def _send_away_waiting_peers(self, *_: object) -> None:
        """Let the nodes that wait for this one look for another leader, because this one leaves."""
        for conn_id in self.waiting_peers:
            self._drop_call(self.state.links[conn_id])
        self.waiting_peers.clear()

    # Calls.

    def _call(self, address: str) -> None:
        if address and address not in self.called_addresses:
            self.called_addresses.add(address)
            self.pending_calls[self.state.dial(address).conn_id] = self.state.now

    def _call_again(self, address: str) -> None:
        """Call an address, also one that was called in this round, unless its answer is awaited."""
        if address != self.state.incarnation.address and not self._is_calling(address):
            self.called_addresses.discard(address)
            self.failed_addresses.discard(address)
            self._call(address)

    def _is_calling(self, address: str) -> bool:
        return any(self.state.links[conn_id].address == address for conn_id in self.pending_calls)

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

    def handle_disconnected(self, link: Link) -> None:
        """Note a failed call, or a waiting node that went away."""
        self.waiting_peers.pop(link.conn_id, None)
        self.redirect_waits.discard(link.conn_id)
        if self.pending_calls.pop(link.conn_id, None) is not None:
            self._record_failed_call(link.address)
            self.next_call_at = self.state.now

    def _record_failed_call(self, address: str) -> None:
        self.failed_addresses.add(address)
        self.named_leader = "" if address == self.named_leader else self.named_leader
        sender = self.redirected_by.pop(address, "")
        if sender in self.stale_redirect_senders:
            self.failed_addresses.add(sender)  # it can reach that leader, and this node cannot
        elif sender:
            self.stale_redirect_senders.add(sender)
            self.retry_at[sender] = self.state.now + RETRY_DELAY_S

    def advance(self) -> None:
        """End calls that timed out, make the next one, and lead if no other node can."""
        state = self.state
        if not state.acceptor.durable_version:
            return  # this process has not counted its boot yet
        if state.is_disk_stalled:
            # The leader and all its followers would wait for acknowledgements that never come.
            self._drop_all_calls()
            self._start_round()
            self.next_call_at = state.now + state.settings.heartbeat_interval_s
            return
        self._end_timed_out_calls()
        if state.next_role:
            return
        if self._may_lead() and state.acceptor.is_durable and not state.is_leaving and self._leads_now():
            state.end_role(Lead(self.waiting_peers))
            return
        for address in [address for address, at in self.retry_at.items() if at <= state.now]:
            del self.retry_at[address]
            self._call_again(address)
        if state.now >= self.next_call_at:
            self._call_next()

    def _leads_now(self) -> bool:
        """Return whether no node before this one answers, or it has waited long enough for them."""
        if self.is_successor or self.state.now >= self.lead_anyway_at:
            return True
        # A leader that refuses this node would make it step down at once.
        is_refused = self.refusal and not isinstance(self.refusal.refusal, OtherJob)
        if self._defers() or is_refused or self.pending_calls.keys() - self.redirect_waits:
            return False
        answered_nothing = {*self.failed_addresses, self.state.incarnation.address}
        return all(address in answered_nothing for address in self._iterate_earlier())

    def _defers(self) -> bool:
        return self.state.terms_without_quorum > 0 and self.state.now < self.lead_anyway_at

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
        if not (self.pending_calls or self.retry_at):
            self._drop_all_calls()
            self._start_round()
            self.next_call_at = state.now + ROUND_PAUSE_S
        else:
            self.next_call_at = state.now + settings.dial_timeout_s

    def next_deadline(self) -> float:
        """Return when to advance next."""
        if not self.state.acceptor.durable_version:
            return float("inf")
        timeouts = [since + self.state.settings.dial_timeout_s for since in self.pending_calls.values()]
        patience = [self.lead_anyway_at] if self.state.now < self.lead_anyway_at else []
        return min([self.next_call_at, *patience, *timeouts, *self.retry_at.values()])

    def close(self) -> None:
        """End all calls but the one that was answered."""
        answered = self.state.next_role.link if isinstance(self.state.next_role, Follow) else None
        for conn_id in {*self.pending_calls, *self.redirect_waits}:
            if conn_id in self.state.links and self.state.links[conn_id] is not answered:
                self.state.disconnect(self.state.links[conn_id])

    def explain_wait(self) -> JoinObstacle:
        """Return why this node has found no leader."""
        if self.state.is_disk_stalled:
            return OwnObstacle.OWN_DISK_STUCK
        return self.refusal or NoLeader(self.state.find_absent_candidates([self.state.incarnation]))

    _HANDLERS: ClassVar[Handlers] = {
        messages.Hello: _handle_hello,
        messages.LeaderAnnouncement: _handle_announcement,
    }
    _ANSWER_HANDLERS: ClassVar[Handlers] = {
        messages.Welcome: _handle_welcome,
        messages.Redirect: _handle_redirect,
        messages.Refused: _handle_refusal,
        JobEnd: lambda self, _, end: self.state.learn_end(end),
    }
    _OWN_HANDLERS: ClassVar[Handlers] = {Leave: _send_away_waiting_peers}
