"""Who follows a leader, and what each of them is doing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from elastic_resume.rendezvous.core.messages import JoinSpec
from elastic_resume.rendezvous.core.quorum import Incarnation, View
from elastic_resume.rendezvous.core.state import Link


@dataclass(slots=True)
class Peer:
    """One follower, as its leader knows it."""

    incarnation: Incarnation
    link: Link
    join: JoinSpec | None = None
    running_generation: int = 0
    finished_generation: int = 0
    disconnected_at: float | None = None
    """When its link broke; it is called at its address until it answers, is dead, or is given up."""

    @property
    def has_stopped_workers(self) -> bool:
        """Its workers are stopped: it has joined, or has nothing left to do."""
        return self.join is not None or (self.finished_generation > 0 and self.running_generation == 0)


class PeerTable:
    """The followers of a leader by incarnation; those whose link broke are kept until that is settled."""

    def __init__(self) -> None:
        self.by_incarnation: dict[Incarnation, Peer] = {}
        self.disconnected: dict[Incarnation, Peer] = {}
        self.by_node: dict[str, Peer] = {}

    def __iter__(self) -> Iterator[Peer]:
        """All followers, the broken ones too."""
        return iter(list(self.by_incarnation.values()))

    def find_by_link(self, link: Link) -> Peer | None:
        """Return the follower that speaks on that link."""
        part = self.by_incarnation.get(link.peer) if link.peer else None
        return part if part and part.link is link else None

    def find_by_node(self, node: str) -> Peer | None:
        """Return the follower on the node of that name."""
        return self.by_node.get(node)

    def add(self, peer: Peer) -> None:
        """Take one in."""
        self.by_incarnation[peer.incarnation] = peer
        self.by_node[peer.incarnation.node] = peer

    def remove(self, incarnation: Incarnation) -> Peer | None:
        """Let one go."""
        self.disconnected.pop(incarnation, None)
        part = self.by_incarnation.pop(incarnation, None)
        if part and self.by_node.get(incarnation.node) is part:
            del self.by_node[incarnation.node]
        return part

    def mark_disconnected(self, peer: Peer, now: float) -> None:
        """Remember that its link broke."""
        peer.disconnected_at = now
        self.disconnected[peer.incarnation] = peer

    def mark_reconnected(self, peer: Peer, link: Link) -> None:
        """Its link was made again."""
        link.inherit_lease(peer.link)
        peer.link, peer.disconnected_at = link, None
        self.disconnected.pop(peer.incarnation, None)

    def addresses(self) -> set[str]:
        """Where the followers listen."""
        return {part.incarnation.address for part in self.by_incarnation.values()}


def rank_members(
    views: tuple[View, ...], joins: dict[Incarnation, JoinSpec], max_members: int
) -> tuple[Incarnation, ...]:
    """Put those who joined in rank order: survivors as they were, then newcomers by the scheduler's order.

    `worlds` are the newest begun and later proposals, of which one may have begun. Beyond `limit` are spares.
    """
    survivors = dict.fromkeys(one for world in views for one in world.members if one in joins)
    newcomers = [one for one in joins if one not in survivors]
    newcomers.sort(key=lambda one: (joins[one].scheduler_order, one.node, one.incarnation_id))
    return tuple([*survivors, *newcomers][:max_members])
