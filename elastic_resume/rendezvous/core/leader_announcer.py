"""Announce a leader to candidates and members that do not follow it."""

from __future__ import annotations

from collections.abc import Callable

from elastic_resume.rendezvous.core import messages
from elastic_resume.rendezvous.core.peers import Link, PeerTable
from elastic_resume.rendezvous.core.state import NodeState

MAX_PARALLEL_CALLS = 16
"""A job that lost 500 of 1,000 nodes must not dial 500 addresses every round."""


class LeaderAnnouncer:
    """Announces the leader to candidates and members that do not follow it."""

    def __init__(
        self, state: NodeState, peers: PeerTable, make_announcement: Callable[[], messages.LeaderAnnouncement]
    ) -> None:
        self.state = state
        self.peers = peers
        self.make_announcement = make_announcement
        self.next_round_at = state.now
        self.pending_calls: dict[int, Link] = {}
        """Unanswered calls by connection, the oldest first."""
        self._next_target = 0

    def advance(self) -> None:
        """End the calls that timed out, and call those that may not know the leader when a round is due.

        They may be processes that have ended: their next processes may listen there, and lead.
        """
        state = self.state
        while self.pending_calls and state.now >= self._first_timeout_at():
            self.end_call(next(iter(self.pending_calls)))
        if state.now >= self.next_round_at:
            self.next_round_at = state.now + state.settings.announce_interval_s
            members = [member.address for member in state.view.members]
            followers = self._list_follower_addresses()
            targets = dict.fromkeys([*state.settings.candidates, *members])
            self.call([address for address in targets if address not in followers])

    def _list_follower_addresses(self) -> set[str]:
        return {node.address for node in (self.state.incarnation, *self.peers.by_incarnation)}

    def call(self, addresses: list[str]) -> None:
        """Call addresses round-robin, at most `MAX_PARALLEL_CALLS` at a time.

        A switch failure breaks many links at once.
        """
        calling = {link.address for link in self.pending_calls.values()}
        start = self._next_target % max(1, len(addresses))
        due = [address for address in addresses[start:] + addresses[:start] if address not in calling]
        for address in due[: max(0, MAX_PARALLEL_CALLS - (len(addresses) - len(due)))]:
            link = self.state.dial(address)
            self.pending_calls[link.conn_id] = link
            self._next_target += 1

    def handle_connected(self, link: Link) -> None:
        """Send the announcement on a call that was answered."""
        if link.conn_id in self.pending_calls:
            self.state.send(link, self.make_announcement())

    def handle_redirect(self, link: Link, message: messages.Redirect) -> None:
        """Call the other leader, whose address a node gave."""
        if link.conn_id in self.pending_calls:
            self.end_call(link.conn_id)
            if message.address not in {"", *self._list_follower_addresses()}:
                self.call([message.address])

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
