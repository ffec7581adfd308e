"""Track the connections to other nodes, and the leader's table of its followers.

A `Link` is one connection as this node sees it. It numbers messages and remembers when each was sent, because
a lease counts from the sending of the newest message that the other side acknowledged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from elastic_resume.rendezvous.core.messages import NO_STATUS, Header, Workers, WorkersStatus
from elastic_resume.rendezvous.core.world import Incarnation, View

NEVER = float("-inf")
MAX_UNACKED = 64
"""Messages remembered until they are acknowledged. Forgetting one only shortens a lease."""


@dataclass(slots=True)
class Link:
    """A connection, dialled (`address` set) or accepted."""

    conn_id: int
    address: str = ""
    peer: Incarnation | None = None
    view_at_dial: View | None = None
    """The newest view when this node dialled. A refusal proves nothing about processes that started later."""
    dialled_at: float = NEVER
    ip_address: str = ""
    """The peer's IP address, once connected."""
    refusing_ips: frozenset[str] = frozenset()
    """The IP addresses that refused the call."""
    last_received_at: float = NEVER
    acked_sent_at: float = NEVER
    """When this node sent the newest message that the other side has acknowledged."""
    is_open: bool = True
    ended_in_contact: bool = False
    """The peer's process has ended within `lease_s` of the newest acknowledged message."""
    generation: int = 0
    """The generation in the peer's newest message: see `Header`."""
    last_sent_seq: int = 0
    last_received_seq: int = 0
    unacked: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=MAX_UNACKED))

    def proves_end(self, ip_address: str) -> bool:
        """Return whether this refused call proves that the process has ended that was at `ip_address`.

        A name may lead to another machine by now, whose refusal proves nothing.
        """
        host = self.address.rpartition(":")[0].strip("[]")
        return not ip_address or not self.refusing_ips.isdisjoint({ip_address, host})

    def next_header(self, now: float, generation: int) -> Header:
        """Number the next message to be sent."""
        self.last_sent_seq += 1
        self.unacked.append((self.last_sent_seq, now))
        return Header(self.last_sent_seq, self.last_received_seq, generation)

    def record_header(self, header: Header, now: float) -> None:
        """Note the acknowledgement in a received header."""
        self.last_received_seq, self.generation = header.seq, header.generation
        self.last_received_at = now
        while self.unacked and self.unacked[0][0] <= header.ack:
            seq, sent_at = self.unacked.popleft()
            if seq == header.ack:
                self.acked_sent_at = sent_at


@dataclass(slots=True)
class Peer:
    """One follower, as its leader knows it."""

    incarnation: Incarnation
    link: Link
    status: WorkersStatus = NO_STATUS
    is_twin: bool = False
    """See `interface.PersistentState`."""
    disconnected_at: float | None = None
    """When its link broke. The leader dials it until it answers, is dead, or is given up."""

    @property
    def is_leaving(self) -> bool:
        """Whether it waits for a view without it."""
        return self.status.workers is Workers.LEAVING


class PeerTable:
    """The followers of a leader. A follower whose link broke stays until it is back or lost."""

    def __init__(self) -> None:
        self.by_incarnation: dict[Incarnation, Peer] = {}
        self.disconnected: dict[Incarnation, Peer] = {}
        self.by_node: dict[str, Peer] = {}

    def __iter__(self) -> Iterator[Peer]:
        """Iterate over a copy of all followers, the disconnected ones included."""
        return iter(list(self.by_incarnation.values()))

    def find_by_link(self, link: Link) -> Peer | None:
        """Return the follower that uses this link."""
        peer = self.by_incarnation.get(link.peer) if link.peer else None
        return peer if peer and peer.link is link else None

    def add(self, peer: Peer) -> None:
        """Add a follower."""
        self.by_incarnation[peer.incarnation] = peer
        self.by_node[peer.incarnation.node] = peer

    def remove(self, incarnation: Incarnation) -> None:
        """Remove a follower."""
        self.disconnected.pop(incarnation, None)
        peer = self.by_incarnation.pop(incarnation, None)
        if peer and self.by_node.get(incarnation.node) is peer:
            del self.by_node[incarnation.node]

    def mark_disconnected(self, peer: Peer, now: float) -> None:
        """Note that a follower's link broke."""
        peer.disconnected_at = now
        self.disconnected[peer.incarnation] = peer

    def mark_reconnected(self, peer: Peer, link: Link) -> None:
        """Give a follower its new link."""
        link.acked_sent_at = peer.link.acked_sent_at
        peer.link, peer.disconnected_at = link, None
        self.disconnected.pop(peer.incarnation, None)
