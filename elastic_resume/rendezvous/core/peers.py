"""Who follows a leader, and what each of them is doing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from elastic_resume.rendezvous.core.messages import Join
from elastic_resume.rendezvous.core.quorum import Incarnation, World
from elastic_resume.rendezvous.core.state import Link


@dataclass(slots=True)
class Part:
    """One follower, as its leader knows it."""

    who: Incarnation
    link: Link
    join: Join | None = None
    running: int = 0
    finished: int = 0
    lost_at: float | None = None
    """When its link broke; it is called at its address until it answers, is dead, or is given up."""

    @property
    def settled(self) -> bool:
        """Its workers are stopped: it has joined, or has nothing left to do."""
        return self.join is not None or (self.finished > 0 and self.running == 0)


class Roster:
    """The followers of a leader by incarnation; those whose link broke are kept until that is settled."""

    def __init__(self) -> None:
        self.parts: dict[Incarnation, Part] = {}
        self.broken: dict[Incarnation, Part] = {}
        self.nodes: dict[str, Part] = {}

    def __iter__(self) -> Iterator[Part]:
        """All followers, the broken ones too."""
        return iter(list(self.parts.values()))

    def of(self, link: Link) -> Part | None:
        """Return the follower that speaks on that link."""
        part = self.parts.get(link.who) if link.who else None
        return part if part and part.link is link else None

    def named(self, node: str) -> Part | None:
        """Return the follower on the node of that name."""
        return self.nodes.get(node)

    def add(self, part: Part) -> None:
        """Take one in."""
        self.parts[part.who] = part
        self.nodes[part.who.node] = part

    def drop(self, who: Incarnation) -> Part | None:
        """Let one go."""
        self.broken.pop(who, None)
        part = self.parts.pop(who, None)
        if part and self.nodes.get(who.node) is part:
            del self.nodes[who.node]
        return part

    def mark_broken(self, part: Part, now: float) -> None:
        """Remember that its link broke."""
        part.lost_at = now
        self.broken[part.who] = part

    def mend(self, part: Part, link: Link) -> None:
        """Its link was made again."""
        link.succeed(part.link)
        part.link, part.lost_at = link, None
        self.broken.pop(part.who, None)

    def addresses(self) -> set[str]:
        """Where the followers listen."""
        return {part.who.address for part in self.parts.values()}


def rank_members(
    worlds: tuple[World, ...], joins: dict[Incarnation, Join], limit: int
) -> tuple[Incarnation, ...]:
    """Put those who joined in rank order: survivors as they were, then newcomers by the scheduler's order.

    `worlds` are the newest begun and later proposals, of which one may have begun. Beyond `limit` are spares.
    """
    survivors = dict.fromkeys(one for world in worlds for one in world.members if one in joins)
    newcomers = [one for one in joins if one not in survivors]
    newcomers.sort(key=lambda one: (joins[one].order, one.node, one.life))
    return tuple([*survivors, *newcomers][:limit])
