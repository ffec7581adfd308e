"""A leader's calls to those who may not know it, and the settling of two who lead.

Every few seconds a leader calls at the candidates' addresses and at members of the last worlds that are not
its followers, and tells whoever answers who leads. So newcomers find the job even when no candidate is left
in it, and two leaders learn of each other: the one with the lesser claim (`messages.Claim.weight`) steps
down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from elastic_resume.rendezvous.body import Body
from elastic_resume.rendezvous.link import Link
from elastic_resume.rendezvous.messages import Claim, Goodbye, Message, Redirect
from elastic_resume.rendezvous.quorum import Incarnation

CALLS_AT_ONCE = 16
"""A job of a thousand nodes that lost half of them does not dial five hundred addresses every two seconds."""


class Caller:
    """The calls of one leader."""

    def __init__(self, body: Body, claim: Callable[[], Claim], known: Callable[[], set[str]]) -> None:
        self.body = body
        self.claim = claim
        self.known = known
        self.next_at = body.now
        self.calls: dict[int, float] = {}
        self._busy: dict[str, int] = {}
        """The number of the call at an address."""
        self._turn = 0

    def targets(self) -> list[str]:
        """Addresses at which somebody may be who does not know that we lead."""
        known = self.body.known
        members = [m.address for w in known.worlds for m in known.alive(w)]
        own = self.known() | {self.body.me.address}
        return [one for one in dict.fromkeys([*self.body.settings.candidates, *members]) if one not in own]

    def advance(self) -> None:
        """Make the calls that are due and end those that were not answered."""
        body = self.body
        while self.calls and body.now >= self._first_due():
            self.end(next(iter(self.calls)))
        if body.now < self.next_at:
            return
        self.next_at = body.now + body.settings.claim_s
        targets = self.targets()
        if len(targets) > CALLS_AT_ONCE:
            start = self._turn % len(targets)
            targets = (targets[start:] + targets[:start])[:CALLS_AT_ONCE]
            self._turn += CALLS_AT_ONCE
        for address in targets:
            self.call(address)

    def call(self, address: str) -> None:
        """Call one address, unless a call there is under way."""
        if address not in self._busy:
            conn = self.body.dial(address).conn
            self.calls[conn], self._busy[address] = self.body.now, conn

    def probe(self, addresses: Iterable[str]) -> None:
        """Probe addresses round-robin, at most `CALLS_AT_ONCE` at a time.

        A switch failure breaks many links at once.
        """
        turn = list(addresses)
        room = CALLS_AT_ONCE - sum(address in self._busy for address in turn)
        start = self._turn % len(turn)
        for address in [one for one in turn[start:] + turn[:start] if one not in self._busy][: max(0, room)]:
            self.call(address)
            self._turn += 1

    def over(self, link: Link) -> None:
        """Forget a call that has ended."""
        self.calls.pop(link.conn, None)
        if self._busy.get(link.address) == link.conn:
            del self._busy[link.address]

    def connected(self, link: Link) -> None:
        """Tell who leads."""
        if link.conn in self.calls:
            self.body.send(link, self.claim())

    def answer(self, link: Link, message: Message) -> None:
        """Follow a redirect to the other leader; its claim is for the leader to weigh."""
        if link.conn in self.calls and isinstance(message, Redirect):
            self.end(link.conn)
            if message.address not in {"", self.body.me.address} | self.known():
                self.call(message.address)

    def parted(self, link: Link, who: Incarnation, message: Goodbye) -> bool:
        """One that we called wants to be counted gone: it cannot take part, and nobody should wait for it."""
        body = self.body
        self.end(link.conn)
        if who.address != link.address:
            return False
        body.learn(message.knowledge)
        if who not in body.rivals([]):
            return False
        body.believe(body.known.with_gone([who]))
        body.log("lost", f"{who} takes no part ({message.reason})")
        return True

    def end(self, conn: int) -> None:
        """End one call."""
        link = self.body.links.get(conn)
        if link:
            self.over(link)
            self.body.hang_up(link)
        self.calls.pop(conn, None)

    def retire(self) -> None:
        """End all calls."""
        for conn in list(self.calls):
            self.end(conn)

    def deadline(self) -> float:
        """When to look again."""
        return min(self.next_at, self._first_due()) if self.calls else self.next_at

    def _first_due(self) -> float:
        """When the call that was made first has waited long enough: they are kept in that order."""
        return next(iter(self.calls.values())) + self.body.settings.dial_s
