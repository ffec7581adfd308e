"""Serve one agent's own status over TCP, for commands such as ``elastic-resume status``.

A client proves that it holds the status key (`protocol.derive_status_key`), reads one line of JSON, and the
connection is closed. The state machine gets no event from such clients.

Clients must not slow down heartbeats. At most `ConnectionLimits.max_status_clients` are connected, and the
oldest is disconnected first. A separate thread renders the replies.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from elastic_resume.policy.reasons import JoinObstacle
from elastic_resume.policy.wording import describe
from elastic_resume.rendezvous.core.follower import Follower
from elastic_resume.rendezvous.core.interface import StopReason
from elastic_resume.rendezvous.core.leader import Leader
from elastic_resume.rendezvous.core.node import RendezvousNode
from elastic_resume.rendezvous.core.world import Incarnation, View
from elastic_resume.rendezvous.net import protocol
from elastic_resume.rendezvous.net.connection import Connection, ConnectionLimits

MAX_REPLY_BYTES = 4 << 20  # a leader names 10,000 nodes in less
_READ_BYTES = 1 << 16


# ---- the status ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RendezvousStatus:
    """The rendezvous as one agent knows it. Only a leader knows all nodes."""

    incarnation: Incarnation
    is_leader: bool = False
    leader: Incarnation | None = None
    """None while no leader is known."""
    view: View | None = None
    """The running view."""
    generation: int = 0
    """Of the newest decided view."""
    others: tuple[Incarnation, ...] = ()
    """Present nodes outside the running view, known to a leader; all present nodes without a view."""
    missing: tuple[str, ...] = ()
    """Absent members of the newest view, known to a leader without a running view."""
    waiting_reason: str = ""
    """Why no view is running."""
    end_reason: str = ""
    """Why this agent has left the job."""
    preparing: tuple[str, ...] = ()
    """Those of `others` whose workers take long to start, known to a leader."""


def build_status(node: RendezvousNode) -> RendezvousStatus:
    """Return the status of an agent without changing it."""
    state, role = node.state, node.role
    if isinstance(role, Leader):
        members = role.active_view.members if role.active_view else ()
        statuses = role.view_change.list_statuses()
        present = set(statuses)
        absent = () if role.active_view else set(state.view.members) - present
        return RendezvousStatus(
            state.incarnation,
            is_leader=True,
            leader=state.incarnation,
            view=role.active_view,
            generation=state.view.generation,
            others=tuple(sorted(present - set(members), key=lambda other: other.node)),
            preparing=tuple(sorted(node.node for node, status in statuses.items() if status.is_preparing)),
            missing=tuple(sorted(member.node for member in absent)),
            waiting_reason="" if role.active_view else _describe(role.explain_wait()),
            end_reason=_describe(node.end_reason),
        )
    return RendezvousStatus(
        state.incarnation,
        leader=role.leader if isinstance(role, Follower) else None,
        view=state.running_view,
        generation=state.view.generation,
        waiting_reason=_describe(role.explain_wait()) if state.status.join else "",
        end_reason=_describe(node.end_reason),
    )


def _describe(reason: JoinObstacle | StopReason | None) -> str:
    return describe(reason) if reason else ""


# ---- the server ----------------------------------------------------------------------------------------


class StatusServer:
    """Replies to the status clients of one agent."""

    def __init__(
        self, limits: ConnectionLimits, render_status: Callable[[RendezvousStatus], bytes] | None
    ) -> None:
        """``render_status`` returns the line of JSON; without it each client gets an error."""
        self._limits = limits
        self._render_status = render_status or _render_unavailable
        self._clients: dict[Connection, tuple[asyncio.Task[None], asyncio.TimerHandle]] = {}
        self._executor: ThreadPoolExecutor | None = None

    def add(self, connection: Connection, get_status: Callable[[], RendezvousStatus]) -> None:
        """Reply to an authenticated client."""
        while len(self._clients) >= self._limits.max_status_clients:
            oldest = next(iter(self._clients))
            oldest.abort()
            self.remove(oldest)
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._limits.handshake_timeout_s, connection.abort)
        self._clients[connection] = (loop.create_task(self._reply(connection, get_status)), timer)

    def remove(self, connection: Connection) -> None:
        """Forget a connection that is closed."""
        if connection in self._clients:
            task, timer = self._clients.pop(connection)
            task.cancel()
            timer.cancel()

    async def close(self) -> None:
        """Disconnect all clients."""
        tasks = [task for task, _ in self._clients.values()]
        for connection in list(self._clients):
            connection.abort()
            self.remove(connection)
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._executor is not None:
            self._executor.shutdown(wait=False)

    async def _reply(self, connection: Connection, get_status: Callable[[], RendezvousStatus]) -> None:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "elastic-resume-status")
        try:
            line = await asyncio.get_running_loop().run_in_executor(
                self._executor, self._render_status, get_status()
            )
        except Exception as error:  # noqa: BLE001  a defect here must cost this reply only
            line = json.dumps({"error": f"an internal error of elastic_resume: {error!r:.500}"}).encode()
        connection.send_line(line + b"\n")
        connection.close()


def _render_unavailable(_: RendezvousStatus) -> bytes:
    return json.dumps({"error": "this agent has no status to show"}).encode()


# ---- the client ----------------------------------------------------------------------------------------


def query_agent(address: str, run_id: str, status_key: bytes, *, timeout_s: float = 5.0) -> bytes:
    """Ask the agent at ``host:port`` for its status line, with ``timeout_s`` for each answer.

    Raises:
        ProtocolError: it is not an agent of that job, does not accept the key, or closed the connection.
        OSError: it cannot be reached, or did not reply in time.
        ValueError: ``address`` is not an address.

    """
    host, _, port = address.rpartition(":")
    handshake = protocol.dial(status_key, run_id, secrets.token_hex(32), status_only=True)
    reader = protocol.LineReader()
    with socket.create_connection((host.strip("[]"), int(port)), timeout_s) as connection:
        connection.sendall(next(handshake))
        try:
            while True:
                connection.sendall(handshake.send(_receive_line(connection, reader, timeout_s)))
        except StopIteration as stop:
            result: protocol.HandshakeResult = stop.value
        connection.sendall(result.final_line)
        reader.max_line_bytes = MAX_REPLY_BYTES
        return result.verifier.verify(_receive_line(connection, reader, timeout_s))


def _receive_line(connection: socket.socket, reader: protocol.LineReader, timeout_s: float) -> bytes:
    """Return the next line. The time is for all of it: a peer may send a byte now and then."""
    deadline = time.monotonic() + timeout_s
    line = next(reader.feed(b""), None)
    while line is None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(left_s)
        data = connection.recv(_READ_BYTES)
        if not data:
            raise protocol.ProtocolError(
                "it closed the connection: it belongs to another job, or another program listens there"
            )
        line = next(reader.feed(data), None)
    return line
