"""Those who have connected and proved nothing yet: how many may wait, and what is told of those sent away.

A flood of strangers must neither lock members out nor fill the log. When too many are unproven, the oldest
goes that has not even greeted, then the oldest that has: a member greets as soon as it is connected, and its
handshake is over within a round trip. Of those sent away one line is told, then one for all of the next ten
seconds; the pauses grow while it goes on, since a probe that knocks every second does so for months.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from elastic_resume.rendezvous.net.connection import Channel
from elastic_resume.units import amount

NAMED = 5
"""So many hosts are named in one line."""
LONGEST_PAUSE = 64


@dataclass(frozen=True)
class Limits:
    """What others may make this process spend."""

    connections: int = 16_384  # members of the largest job, with room for calls
    unproven: int = (
        2048  # connections that have not finished the handshake: all of a large job, when its leader dies
    )
    handshake_s: float = 5.0  # all of it
    backlog_bytes: int = 64 * 1024 * 1024  # queued to a peer that does not read
    mute_s: float = 30.0  # a peer that holds the token and never says anything
    lookers: int = 32  # who look how the job stands, at one time
    notice_s: float = 10.0  # between two log lines about strangers


class Door:
    """The unproven connections of one agent."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: dict[Channel, None] = {}

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def enter(self, channel: Channel) -> None:
        """Let one more wait; send another away if they are too many."""
        self._waiting[channel] = None
        if len(self._waiting) > self._limit:
            silent = (one for one in self._waiting if not one.greeted and one is not channel)
            oldest = next(silent, next(iter(self._waiting)))
            oldest.drop(f"more than {self._limit} connections have proved nothing yet")

    def leave(self, channel: Channel) -> None:
        """It waits no more."""
        self._waiting.pop(channel, None)


class Notices:
    """Tells of strangers, seldom."""

    def __init__(
        self,
        pause_s: float,
        tell: Callable[[str], None],
        call_later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        """``call_later`` calls a function after so many seconds."""
        self._first_pause_s = self._pause_s = pause_s
        self._tell = tell
        self._call_later = call_later
        self._pausing = False
        self._count = 0
        self._hosts: dict[str, tuple[int, str]] = {}

    def note(self, peer: str, what: str) -> None:
        """Tell it now, or with others later. ``peer`` is host:port."""
        if not self._pausing:
            self._tell(f"{peer}: {what}")
            self._pause()
            return
        self._count += 1
        host = peer.rpartition(":")[0]
        if host in self._hosts or len(self._hosts) < NAMED:
            self._hosts[host] = (self._hosts.get(host, (0, ""))[0] + 1, what)

    def _pause(self) -> None:
        self._pausing = True
        self._call_later(self._pause_s, self._sum_up)

    def _sum_up(self) -> None:
        self._pausing = False
        if not self._count:
            self._pause_s = self._first_pause_s
            return
        named = "; ".join(
            f"{host} ({amount(count, 'time')}, last: {what})" for host, (count, what) in self._hosts.items()
        )
        others = self._count - sum(count for count, _ in self._hosts.values())
        rest = f"; other hosts ({amount(others, 'time')})" if others else ""
        self._tell(f"{self._count} more in the last {self._pause_s:g} s: {named}{rest}")
        self._count = 0
        self._hosts.clear()
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE * self._first_pause_s)
        self._pause()
