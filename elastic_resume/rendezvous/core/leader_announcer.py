"""Announce a leader to candidates and members that do not follow it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from elastic_resume.rendezvous.core import messages
from elastic_resume.rendezvous.core.peers import Link
from elastic_resume.rendezvous.core.state import NodeState

MAX_PARALLEL_CALLS = 16
"""A job that lost 500 of 1,000 nodes must not dial 500 addresses every round."""


class LeaderAnnouncer:
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
        """Return the addresses of nodes that may not know the leader, also of processes that have ended.

        Their next processes may listen there, and lead.
        """
        members = [member.address for member in self.state.view.members]
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
