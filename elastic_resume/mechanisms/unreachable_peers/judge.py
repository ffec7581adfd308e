"""Decide which nodes no view may have both of, from the nodes that each one cannot reach."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_resume.mechanisms.mechanism import decode_body
from elastic_resume.policy.reasons import NodesUnreachable, name_nodes
from elastic_resume.rendezvous.facts import Fact, Judge, Judgment, Scope, Topic

MAX_REPORTED_PEERS = 64


@dataclass(frozen=True, slots=True)
class UnreachablePeers:
    """The nodes that a node cannot reach; none: it reaches all of them again."""

    nodes: tuple[str, ...]


class PeerJudge(Judge):
    """Keeps what each node has reported last.

    It ends a view if one of its members cannot reach another. A node that is left out remains a follower, and
    joins once it reports that it reaches all.
    """

    def __init__(self, scope: Scope) -> None:
        del scope
        self._unreachable: dict[str, frozenset[str]] = {}
        self._generation = 0
        self._members: frozenset[str] = frozenset()

    def start_view(self, generation: int, members: tuple[str, ...]) -> None:
        """Forget what members have reported of each other: their workers try again."""
        self._generation, self._members = generation, frozenset(members)
        for node in self._unreachable.keys() & self._members:
            self._unreachable[node] -= self._members

    def add(self, node: str, fact: Fact, now: float) -> None:
        """Keep the newest report of a node."""
        del now
        nodes = frozenset(decode_body(UnreachablePeers, fact.body).nodes[:MAX_REPORTED_PEERS])
        if node in self._members and fact.generation != self._generation:
            nodes -= self._members  # from before this generation began
        self._unreachable[node] = nodes

    def remove(self, node: str) -> None:
        """Forget what a lost node has reported."""
        self._unreachable.pop(node, None)

    def judge(self, now: float) -> Judgment:
        """Return the pairs, and why the view ends if it has one of them."""
        del now
        apart = {frozenset((node, other)) for node, others in self._unreachable.items() for other in others}
        for node in sorted(self._members & self._unreachable.keys()):
            if self._unreachable[node] & self._members:
                reason = NodesUnreachable(node, name_nodes(self._unreachable[node]))
                return Judgment(apart=frozenset(apart), view_end=reason)
        return Judgment(apart=frozenset(apart))


UNREACHABLE = Topic("unreachable", PeerJudge, is_of_job=True)
