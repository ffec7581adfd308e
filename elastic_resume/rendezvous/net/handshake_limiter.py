"""Those who have connected and proved nothing yet: how many may wait, and what is told of those sent away.

A flood of strangers must neither lock members out nor fill the log. When too many are unproven, the oldest
goes that has not even greeted, then the oldest that has: a member greets as soon as it is connected, and its
handshake is over within a round trip. Of those sent away one line is told, then one for all of the next ten
seconds; the pauses grow while it goes on, since a probe that knocks every second does so for months.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from elastic_resume.rendezvous.net.connection import Connection
from elastic_resume.units import format_count

MAX_NAMED_HOSTS = 5
"""So many hosts are named in one line."""
MAX_PAUSE_FACTOR = 64


@dataclass(frozen=True)
class ConnectionLimits:
    """What others may make this process spend."""

    max_connections: int = 16_384  # members of the largest job, with room for calls
    max_unauthenticated: int = (
        2048  # connections that have not finished the handshake: all of a large job, when its leader dies
    )
    handshake_timeout_s: float = 5.0  # all of it
    max_queued_bytes: int = 64 * 1024 * 1024  # queued to a peer that does not read
    idle_timeout_s: float = 30.0  # a peer that holds the token and never says anything
    max_status_clients: int = 32  # who look how the job stands, at one time
    log_interval_s: float = 10.0  # between two log lines about strangers


class HandshakeLimiter:
    """The unproven connections of one agent."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._waiting: dict[Connection, None] = {}

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def add(self, connection: Connection) -> None:
        """Let one more wait; send another away if they are too many."""
        self._waiting[connection] = None
        if len(self._waiting) > self._max_waiting:
            silent = (one for one in self._waiting if not one.has_greeted and one is not connection)
            oldest = next(silent, next(iter(self._waiting)))
            oldest.drop(f"more than {self._max_waiting} connections have proved nothing yet")

    def remove(self, connection: Connection) -> None:
        """It waits no more."""
        self._waiting.pop(connection, None)


class LogThrottle:
    """Tells of strangers, seldom."""

    def __init__(
        self,
        pause_s: float,
        log: Callable[[str], None],
        call_later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        """``call_later`` calls a function after so many seconds."""
        self._first_pause_s = self._pause_s = pause_s
        self._log = log
        self._call_later = call_later
        self._is_pausing = False
        self._suppressed = 0
        self._suppressed_by_host: dict[str, tuple[int, str]] = {}

    def add(self, peer: str, reason: str) -> None:
        """Tell it now, or with others later. ``peer`` is host:port."""
        if not self._is_pausing:
            self._log(f"{peer}: {reason}")
            self._start_pause()
            return
        self._suppressed += 1
        host = peer.rpartition(":")[0]
        if host in self._suppressed_by_host or len(self._suppressed_by_host) < MAX_NAMED_HOSTS:
            self._suppressed_by_host[host] = (self._suppressed_by_host.get(host, (0, ""))[0] + 1, reason)

    def _start_pause(self) -> None:
        self._is_pausing = True
        self._call_later(self._pause_s, self._log_summary)

    def _log_summary(self) -> None:
        self._is_pausing = False
        if not self._suppressed:
            self._pause_s = self._first_pause_s
            return
        named = "; ".join(
            f"{host} ({format_count(count, 'time')}, last: {what})"
            for host, (count, what) in self._suppressed_by_host.items()
        )
        others = self._suppressed - sum(count for count, _ in self._suppressed_by_host.values())
        rest = f"; other hosts ({format_count(others, 'time')})" if others else ""
        self._log(f"{self._suppressed} more in the last {self._pause_s:g} s: {named}{rest}")
        self._suppressed = 0
        self._suppressed_by_host.clear()
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_FACTOR * self._first_pause_s)
        self._start_pause()
