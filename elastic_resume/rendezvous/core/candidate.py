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
    Claim,
    Goodbye,
    Hello,
    JobEnd,
    Message,
    Redirect,
    Refused,
    Stamp,
    Welcome,
)
from elastic_resume.rendezvous.core.quorum import Incarnation, Knowledge
from elastic_resume.rendezvous.core.state import Body, Link

PAUSE_S = 0.3
"""Between two rounds of calls."""
ROUND_TIMEOUTS = 3
"""A round in which some send us to and fro ends after so many node timeouts."""
AGAIN_S = 0.1
"""Before a leader that did not answer is called once more, and then who named it: it will have noticed."""


class Verdict(Enum):
    """What became of the search."""

    SEARCHING = "searching"
    LEAD = "lead"
    FOLLOW = "follow"
    REFUSED = "refused"


class Seeker:
    """The role of an agent that knows no leader. `hint` is an address to try first."""

    def __init__(self, body: Body, hint: str = "", waiters: dict[int, Hello] | None = None) -> None:
        self.body = body
        self.since = body.now
        self.waiters: dict[int, Hello] = waiters or {}
        self.verdict = Verdict.SEARCHING
        self.link: Link | None = None
        self.welcome: Welcome | None = None
        self.refusal = ""
        self.calls: dict[int, float] = {}
        self.patient: set[int] = set()
        self.failed: set[str] = set()
        self.called: set[str] = set()
        self.targets: list[str] = []
        self.round_at = body.now
        self.sent_by: dict[str, str] = {}
        self.again: dict[str, float] = {}
        """Whom to ask once more, and when: called too early, or named somebody who did not answer."""
        self.next_at = body.now
        self._basis: tuple[Knowledge | None, Incarnation, int] = (None, body.me, 0)
        self._elders: list[str] | None = None
        self._new_round(hint)

    def _new_round(self, hint: str = "") -> None:
        body = self.body
        elders = self.elders()
        wanted = elders
        if wanted is None:
            wanted = [m.address for m in self._members()] + list(body.settings.candidates)
        self.failed.clear()
        self.round_at = body.now
        self.sent_by.clear()
        self.again.clear()
        self.called = {body.me.address}
        self.targets = [one for one in dict.fromkeys(wanted) if one not in self.called]
        self.next_at = body.now
        self._call_now(hint)

    def _members(self) -> list[Incarnation]:
        known = self.body.known
        alive = [known.alive(world) for world in known.worlds]
        return list(alive[0] if len(alive) == 1 else dict.fromkeys(itertools.chain(*alive)))

    def elders(self) -> list[str] | None:
        """Addresses of those who would lead before us; None where we may not lead at all."""
        body = self.body
        basis = (body.known, body.me, len(body.silent))
        if basis[0] is not self._basis[0] or basis[1:] != self._basis[1:]:
            self._basis, self._elders = basis, self._find_elders()
        return self._elders

    def _find_elders(self) -> list[str] | None:
        body = self.body
        members = self._members()
        for rank, member in enumerate(members):
            if member.life == body.me.life and member == body.me:
                return [m.address for m in members[:rank] if not body.silent or m not in body.silent]
        place = body.me.candidate
        if place is None and not self._may_stand_in():
            return None
        living = [m.address for m in members if m not in body.silent]
        return living + list(body.settings.candidates[:place])

    def _may_stand_in(self) -> bool:
        """Whether an operator declared the others dead, and this node was in the last world."""
        begun = self.body.known.begun
        named = begun is not None and any(m.node == self.body.me.node for m in begun.members)
        return bool(self.body.known.forced) and named

    def answer(self, link: Link, stamp: Stamp, message: Message) -> None:
        """Take in a message; a claim tells us where to ask."""
        del stamp
        if isinstance(message, Hello):
            self.waiters[link.conn] = message
            link.who = message.who
            self.body.send(link, Redirect())
        elif isinstance(message, Claim):
            self._claimed(link, message)
        elif link.conn not in self.calls and link.conn not in self.patient:
            return
        elif isinstance(message, Welcome):
            self.verdict, self.link, self.welcome = Verdict.FOLLOW, link, message
        elif isinstance(message, Redirect):
            self._redirected(link, message.address)
        elif isinstance(message, Refused):
            self._refused(link, message)
        elif isinstance(message, JobEnd):
            self.body.ended = message

    def _claimed(self, link: Link, message: Claim) -> None:
        """Ask the one who leads; unless we could only hold everybody up."""
        body = self.body
        body.hear_claim(message)
        if not body.disk_is_late:
            self._call_now(message.who.address)
            return
        body.send(link, Goodbye("its disk takes no writes", body.known, body.me))
        if body.introduced or body.me in body.rivals([]):
            body.reborn()  # others may know of a world with this life that we have not heard of

    def _redirected(self, link: Link, address: str) -> None:
        if not address or address == self.body.me.address:
            self.patient.add(link.conn)
            self.calls.setdefault(link.conn, self.body.now)
            return
        self._forget(link)
        if any(self.body.links[conn].address == address for conn in self.calls):
            return  # two calls at once to one leader would take each other's place
        self.sent_by[address] = link.address
        if address in self.called:
            self.again[address] = self.body.now + AGAIN_S
        else:
            self._call_now(address)

    def _refused(self, link: Link, message: Refused) -> None:
        body, reason = self.body, message.reason
        if reason == "gone":
            body.log("reborn", f"{link.address} counts this agent gone; it comes back as a new one")
            body.reborn()
            for conn in {*self.calls, *self.patient} - {link.conn}:
                self._forget(body.links[conn])  # an answer to them would be to the one that was
            body.send(link, body.hello())
            self.calls[link.conn] = body.now
            return
        told, self.refusal = self.refusal, f"{link.address} refuses this node: {reason}"
        if self.refusal != told and not message.final:
            body.log("refused", self.refusal)
        if message.final:
            self.verdict = Verdict.REFUSED
        self._forget(link)

    def _call_now(self, address: str) -> None:
        if address and address not in self.called:
            self.called.add(address)
            self.calls[self.body.dial(address).conn] = self.body.now

    def _forget(self, link: Link) -> None:
        self.calls.pop(link.conn, None)
        self.patient.discard(link.conn)
        self.body.hang_up(link)

    def connected(self, link: Link) -> None:
        """Introduce ourselves."""
        if link.conn in self.calls:
            self.body.send(link, self.body.hello())

    def lost(self, link: Link, *, refused: bool) -> None:
        """A call failed, or a waiter went away."""
        del refused
        self.waiters.pop(link.conn, None)
        self.patient.discard(link.conn)
        if self.calls.pop(link.conn, None) is not None:
            self._failed(link.address)
            self.next_at = self.body.now

    def _failed(self, address: str) -> None:
        self.failed.add(address)
        sender = self.sent_by.pop(address, "")
        if sender:
            self.again[sender] = self.body.now + AGAIN_S

    def advance(self) -> None:
        """Give up on calls that took too long, make the next one, lead if nobody else would."""
        body = self.body
        if body.disk_is_late:
            # Whoever leads would wait for our acknowledgement with everybody else, again and again.
            self._pause_search()
            return
        for conn, since in list(self.calls.items()):
            if body.now >= since + body.settings.dial_s:
                link = body.links[conn]
                self._failed(link.address)
                if conn in self.patient:
                    del self.calls[conn]
                else:
                    self._forget(link)
        elders = self.elders()
        if self.verdict is not Verdict.SEARCHING or body.ended:
            return
        asking = self.calls.keys() - self.patient
        alone = elders is not None and all(one in self.failed or one == body.me.address for one in elders)
        if alone and not asking:
            self.verdict = Verdict.LEAD
            return
        for address in [one for one, at in self.again.items() if at <= body.now]:
            del self.again[address]
            if not any(body.links[conn].address == address for conn in self.calls):
                self.called.discard(address)
                self.failed.discard(address)
                self._call_now(address)
        if body.now >= self.next_at:
            self._next_call()

    def _next_call(self) -> None:
        body = self.body
        while self.targets and self.targets[0] in self.called:
            self.targets.pop(0)
        if self.targets:
            self._call_now(self.targets.pop(0))
            self.next_at = body.now + body.settings.stagger_s + body.settings.crowd_s * len(self.calls)
        elif body.now >= self.round_at + ROUND_TIMEOUTS * body.settings.node_timeout_s or not (
            self.calls or self.again
        ):
            for conn in {*self.calls, *self.patient}:
                self._forget(body.links[conn])
            self._new_round()
            self.next_at = body.now + PAUSE_S
        else:
            self.next_at = body.now + body.settings.dial_s

    def _pause_search(self) -> None:
        body = self.body
        for conn in {*self.calls, *self.patient}:
            self._forget(body.links[conn])
        self._new_round()
        self.next_at = body.now + body.settings.beat_s

    def deadline(self) -> float:
        """When to look again."""
        waits = [since + self.body.settings.dial_s for since in self.calls.values()]
        return min([self.next_at, *waits, *self.again.values()])

    def retire(self) -> None:
        """End all calls but the one that was answered."""
        for conn in {*self.calls, *self.patient}:
            if conn in self.body.links and (self.link is None or conn != self.link.conn):
                self.body.hang_up(self.body.links[conn])

    def why_waiting(self) -> str:
        """One clause for the error after the join timeout."""
        asked = self.body.not_here([self.body.me])
        if self.body.disk_is_late:
            return "this node's disk takes no writes"
        return self.refusal or f"no leader answers at {asked} nor at any member of the last world"
