"""Whom a leader takes in: settings that must agree, names that must be unique, former lives that are gone."""

from __future__ import annotations

from collections.abc import Callable

from elastic_resume.rendezvous.body import Body
from elastic_resume.rendezvous.messages import Hello, Refused
from elastic_resume.rendezvous.quorum import Incarnation, Knowledge
from elastic_resume.rendezvous.roster import Part, Roster


class Gate:
    """The gate of one leader."""

    def __init__(self, body: Body, roster: Roster, lose: Callable[[Part, str], None]) -> None:
        """``lose`` is called for followers whose node is back as a new process."""
        self.body = body
        self.roster = roster
        self.lose = lose
        self._indexed: Knowledge | None = None
        self._lives: dict[str, set[Incarnation]] = {}

    def check(self, hello: Hello) -> Refused | None:
        """Take over what the other knows; return why it may not join, or None."""
        body = self.body
        at_odds = self._at_odds(hello)
        if at_odds:
            return Refused(at_odds, final=True)
        before = body.known
        body.learn(hello.knowledge, hello.seen)
        if body.known != before:
            self._count_former_lives()
        body.grace(hello.others_s)
        if hello.who in body.known.gone:
            return Refused("gone")
        if self._name_taken(hello):
            return Refused(f"another live agent is called {hello.who.node}: give one another --node-name")
        return None

    def _at_odds(self, hello: Hello) -> str:
        """Say which setting that safety rests on differs between us; empty when none does."""
        ours, theirs = self.body.settings.node_timeout_s, hello.node_timeout_s
        if theirs != ours:
            return (
                f"--node-timeout is {theirs:g} s there and {ours:g} s at the leader: give all nodes the same"
            )
        settings = self.body.settings
        shape, said = (settings.min_nodes, settings.max_nodes), (hello.min_nodes, hello.max_nodes)
        if said != shape:
            ours_and_theirs = f"{said[0]}:{said[1]} here and {shape[0]}:{shape[1]} there"
            return f"--nnodes is {ours_and_theirs}: give all nodes the same"
        count, told = self.body.known.candidates, hello.knowledge.candidates
        if told != count:
            return (
                f"--rdzv-endpoint lists {told} nodes there and {count} at the leader: give all the same list"
            )
        return ""

    def _count_former_lives(self) -> None:
        """Count former lives of those who follow us gone, in whatever world we just heard of.

        A follower that was not heard lately, or is known gone, may itself be the former life.
        """
        body = self.body
        lives = {
            part.who.node: part.who
            for part in self.roster
            if body.is_fresh(part.link) and part.who not in body.known.gone
        }
        members = {m for w in body.known.worlds for m in body.known.alive(w)}
        former = [one for one in members if lives.get(one.node, one) != one]
        if former and body.settings.rules.incarnations:
            body.believe(body.known.with_gone(former))

    def _name_taken(self, hello: Hello) -> bool:
        """Count the former lives of a node gone when it is back as a new process; refuse a namesake."""
        body, who = self.body, hello.who
        if who.node == body.me.node:
            return True
        former = {one for one in self._lives_of(who.node) if one != who}
        for one in former:
            part = self.roster.parts.get(one)
            if part and part.lost_at is None and one not in hello.knowledge.gone:
                return True
        if body.settings.rules.incarnations:
            body.believe(body.known.with_gone(former))
        for one in former & set(self.roster.parts):
            self.lose(self.roster.parts[one], f"{who} is back as a new process")
        return False

    def _lives_of(self, node: str) -> set[Incarnation]:
        """Every incarnation of a node that we have heard of."""
        if self._indexed is not self.body.known:
            self._indexed = self.body.known
            self._lives = {}
            for world in self._indexed.worlds:
                for member in world.members:
                    self._lives.setdefault(member.node, set()).add(member)
        part = self.roster.named(node)
        return self._lives.get(node, set()) | ({part.who} if part else set())
